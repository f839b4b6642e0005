"""``weightd install-units``: the files that make the daemon a systemd service of this node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from weightd.core.errors import ConfigError

NEXT = """next:
  systemd-sysusers                    # makes the user
  systemd-tmpfiles --create           # makes /etc/weightd and /etc/credstore
  write /etc/weightd/weightd.toml     # docs/configuration.md
  systemctl daemon-reload
  systemctl enable --now weightd"""


def install_units(
    prefix: Annotated[Path, typer.Option(help="Root below which the files are written.")] = Path("/"),
    user: Annotated[str, typer.Option(help="User that runs the daemon.")] = "weightd",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the files, write nothing.")] = False,
) -> None:
    """Write the systemd unit of this installation, its user and its folders; replaces what it wrote before."""
    from weightd.daemon.service.unit_files import obstacles, own_command, own_places, unit_files

    command = own_command()
    places = own_places(command)
    made = unit_files(command, user, places)
    for obstacle in obstacles(places, user):
        typer.echo(f"warning: {obstacle}", err=True)
    for file in made:
        target = prefix / file.path
        if dry_run:
            typer.echo(f"# ---- {target}\n{file.text}")
        else:
            _write(target, file.text)
            typer.echo(f"wrote {target}")
    if not dry_run:
        typer.echo(NEXT)


def _write(target: Path, text: str) -> None:
    """Write a file that everybody may read, whole or not at all."""
    fresh = target.with_name(f".{target.name}.new")
    try:
        target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        fresh.write_text(text, encoding="utf-8")
        fresh.chmod(0o644)
        os.replace(fresh, target)
    except OSError as error:
        why = f"cannot be written: {error.strerror or error}"
        raise ConfigError("--prefix", str(target), why, "command line") from None
    finally:
        fresh.unlink(missing_ok=True)
