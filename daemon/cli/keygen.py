"""``weightd keygen``: a key pair for links between daemons."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def keygen(
    path: Annotated[Path, typer.Argument(help="File for the secret key; must not exist.", show_default=False)],
) -> None:
    """Make a key: the secret goes into a file of mode 0600, the public key is printed for the peers' configuration."""
    from weightd.daemon.control.curve import write_key_file

    typer.echo(write_key_file(path))
