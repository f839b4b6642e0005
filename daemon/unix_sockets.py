"""Unix sockets of the daemon: listened on without a wider moment, accepted without blocking, told who is there."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import stat
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from weightd.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

log = logging.getLogger("weightd.fds")

BACKLOG = 256
"""Connections waiting to be accepted: all ranks of a large node start in the same second."""

_CREDENTIALS = struct.Struct("3i")
"""``struct ucred``: pid, uid, gid."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who is at the other end, by the kernel's word at the time it connected."""

    pid: int
    uid: int

    def __str__(self) -> str:
        return f"pid {self.pid} (uid {self.uid})"


@contextlib.contextmanager
def narrow_umask(mode: int) -> Iterator[None]:
    """Give files made within at most the permissions ``mode``: a socket must not be wider even for a moment.

    The mask is the process's: no other thread may make files meanwhile, so daemons bind before they start any.
    """
    previous = os.umask(0o777 & ~mode)
    try:
        yield
    finally:
        os.umask(previous)


async def accept(listener: socket.socket) -> socket.socket:
    """Return the next connection."""
    while True:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            await anyio.wait_readable(listener)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):
                raise
            # Out of descriptors: the connection stays in the backlog, and trying at once would spin.
            log.warning("cannot accept", extra={"facts": {"error": str(error)}})
            await anyio.sleep(0.1)
        else:
            sock.setblocking(False)
            return sock


def listen(path: Path, mode: int) -> socket.socket:
    """Return a listening SEQPACKET socket at ``path``; ``remove_stale`` made the place free.

    Raises:
        ConfigError: The path cannot be listened on.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with narrow_umask(mode):
            sock.bind(str(path))
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ConfigError("runtime_dir", str(path), f"cannot listen: {error.strerror or error}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def remove_stale(path: Path, kind: int = socket.SOCK_STREAM) -> None:
    """Remove the socket file of a daemon that has ended.

    Args:
        path: The file; harmless if it is not there.
        kind: Of the socket; ZeroMQ's are streams.

    Raises:
        ConfigError: A daemon answers there, or the file is no socket.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError("runtime_dir", str(path), "is there and is no socket")
    if _answered(path, kind):
        raise ConfigError("runtime_dir", str(path), "another daemon listens there")
    path.unlink(missing_ok=True)


def _answered(path: Path, kind: int) -> bool:
    """Say whether somebody listens at a socket file."""
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # its backlog is full
            return True
        except ConnectionRefusedError:
            return False
    return True


def credentials(sock: socket.socket) -> Credentials:
    """Return who is at the other end of a connected unix socket."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Credentials(pid, uid)
