"""The unit files of this installation: those of ``systemd/``, with the program and the user of the daemon here."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from weightd.core.errors import ConfigError

HOMES = (Path("/home"), Path("/root"), Path("/run/user"))
"""What ``ProtectHome=yes`` hides from the daemon: systemd.exec(5)."""

PRIVATE = (Path("/tmp"), Path("/var/tmp"))  # noqa: S108 - what PrivateTmp=yes hides
"""What ``PrivateTmp=yes`` hides."""

ELSEWHERE = "install weightd where everybody can read it, for instance in /opt/weightd"
"""What to do about a place that the daemon's user cannot reach."""

_USER = re.compile(r"[a-z_][a-z0-9_-]{0,30}\Z")
"""Names that every tool takes: systemd.exec(5), "User/Group Name Syntax", in its strict form."""

_TARGETS = {
    "weightd.service": "etc/systemd/system/weightd.service",
    "gpu.conf": "etc/systemd/system/weightd.service.d/gpu.conf.example",
    "weightd.sysusers": "etc/sysusers.d/weightd.conf",
    "weightd.tmpfiles": "etc/tmpfiles.d/weightd.conf",
}
"""Where each file goes.  systemd reads only drop-ins that end in .conf, so the example is none until it is renamed."""


@dataclass(frozen=True, slots=True)
class UnitFile:
    """A file to install.

    Attributes:
        path: Where, below the root of the file system.
        text: What it holds.
    """

    path: str
    text: str


def own_command() -> tuple[str, ...]:
    """Return what starts this installation's ``weightd``: its script, or its interpreter where there is no script."""
    script = Path(sys.executable).with_name("weightd")
    return (str(script),) if os.access(script, os.X_OK) else (sys.executable, "-m", "weightd.daemon.cli")


def own_places(command: Sequence[str]) -> tuple[Path, ...]:
    """Return the files that the service's user has to reach: the command, the interpreter behind it, the code."""
    code = Path(str(files("weightd.daemon").joinpath("__init__.py")))
    found = (Path(command[0]), Path(sys.executable).resolve(), code.resolve())
    return tuple(dict.fromkeys(found))


def unit_files(command: Sequence[str], user: str, places: Iterable[Path] = ()) -> tuple[UnitFile, ...]:
    """Return all files to install.

    Args:
        command: Program and first arguments that start ``weightd``.
        user: Who runs the daemon.
        places: Files that it has to read; below a home, the unit lets it see homes.

    Raises:
        ConfigError: No user has such a name.
    """
    if not _USER.match(user):
        why = "is no user's name: lower-case letters, digits, - and _, at most 31, no digit first"
        raise ConfigError("--user", user, why, "command line")
    changes = {
        "ExecStart=/usr/local/bin/weightd ": f"ExecStart={' '.join(map(_quoted, command))} ",
        "User=weightd\n": f"User={user}\n",
        "u weightd ": f"u {user} ",
    }
    if any(_below(place, HOMES) for place in places):
        changes["ProtectHome=yes\n"] = "ProtectHome=read-only\n"
    return tuple(UnitFile(target, _changed(_shipped(name), changes)) for name, target in _TARGETS.items())


def obstacles(places: Iterable[Path], user: str) -> list[str]:
    """Return what keeps a user from starting the daemon, as far as plain permissions and the unit say."""
    found: list[str] = []
    for place in places:
        if _below(place, PRIVATE):
            found.append(f"{place}: PrivateTmp= of the unit hides it; {ELSEWHERE}")
            continue
        closed = next((p for p in reversed(place.parents) if p.exists() and not p.stat().st_mode & stat.S_IXOTH), None)
        if closed is not None:
            mode = f"{stat.S_IMODE(closed.stat().st_mode):04o}"
            found.append(f"{closed}: mode {mode} may keep user {user} from {place}; {ELSEWHERE}")
    return found


def _shipped(name: str) -> str:
    return files("weightd.daemon.service").joinpath("units", name).read_text(encoding="utf-8")


def _changed(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        text = text.replace(old, new)
    return text


def _quoted(word: str) -> str:
    """Return a word as systemd.service(5) reads it back: % begins a specifier, blanks and quotes end a word."""
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text}"' if re.search(r"[\s\"'\\;]", word) else text


def _below(place: Path, folders: Iterable[Path]) -> bool:
    return any(place.is_relative_to(folder) for folder in folders)
