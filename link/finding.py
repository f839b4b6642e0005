"""Where this node's daemon is, and what to say when it is not."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NamedTuple

ENVIRONMENT = "WEIGHTD_SOCKET"
"""Names the control socket, or the runtime directory that holds it."""

RUNTIME_DIRECTORY = Path("/run/weightd")
"""systemd's ``RuntimeDirectory=weightd``; also what is bind-mounted into a container."""

CONTROL_SOCKET = "control.sock"
FD_SOCKET = "fd.sock"

_TRY_S = 1.0
"""For one attempt to connect when the reason of a failure is looked for; a local connect takes microseconds."""


class DaemonPaths(NamedTuple):
    """The daemon's two sockets, side by side."""

    control: str
    descriptors: str

    @property
    def endpoint(self) -> str:
        """The control socket as ZeroMQ names it."""
        return f"ipc://{self.control}"


def daemon_paths(given: str | os.PathLike[str] | None = None) -> DaemonPaths:
    """Return where the daemon's sockets are to be.

    Args:
        given: Path of the control socket or of its directory; by default ``WEIGHTD_SOCKET``, else the
            runtime directory of the service.
    """
    named = given if given is not None else os.environ.get(ENVIRONMENT) or RUNTIME_DIRECTORY
    path = Path(named).absolute()
    # os.path, because pathlib raises where this user may not look.
    if os.path.isdir(path) or (not os.path.exists(path) and path.suffix != ".sock"):
        path /= CONTROL_SOCKET
    return DaemonPaths(str(path), str(path.with_name(FD_SOCKET)))


def why_silent(path: str, greetings: int) -> str:
    """Return why nobody answers at a control socket, as far as the file system and one connect can tell.

    Args:
        path: The socket.
        greetings: Hellos that were handed to it since it was last heard.
    """
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        parent = Path(path).parent
        return "there is no such socket" if parent.is_dir() else f"there is no directory {parent}"
    except OSError as error:
        return f"user {os.getuid()} may not look at it: {error.strerror}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_TRY_S)
        try:
            probe.connect(path)
        except OSError as error:
            return f"connecting to it fails: {error.strerror or error}"
    if not greetings:
        return "it accepts connections and takes no greeting"
    return f"it accepts connections and answered none of {greetings} greetings"
