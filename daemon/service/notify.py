"""The protocol of sd_notify(3): datagrams of ``NAME=value`` lines to the socket that the service manager names.

Plain datagrams and no library: the protocol has been stable since 2010.  A socket
for each message, as a manager may be replaced by a new one while the daemon runs.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Notifier:
    """Sends to the service manager that started this process.

    Attributes:
        address: Path of its socket; one that begins with ``@`` is an abstract one.
        watchdog_s: It wants to hear from this process at least so often; None: it does not watch.
    """

    address: str
    watchdog_s: float | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str], pid: int | None = None) -> Notifier | None:
        """Return the notifier that an environment asks for; None where no manager waits.

        Args:
            environ: The process's environment.
            pid: The process's id; None: this one's.  A watchdog that is meant for another process is none.
        """
        address = environ.get("NOTIFY_SOCKET", "")
        if address[:1] not in ("/", "@"):  # anything else is not for a process on this host
            return None
        meant_for = environ.get("WATCHDOG_PID", "")
        mine = not meant_for or meant_for == str(os.getpid() if pid is None else pid)
        usec = environ.get("WATCHDOG_USEC", "")
        watched = mine and usec.isdecimal() and int(usec) > 0
        return cls(address, int(usec) / 1_000_000 if watched else None)

    def send(self, *lines: str) -> bool:
        """Send lines as one message, without waiting; say whether there was room.

        Raises:
            OSError: Nobody listens there any more, or this process may not send.
        """
        to = "\0" + self.address[1:] if self.address[0] == "@" else self.address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            try:
                sock.sendto("\n".join(lines).encode(), to)
            except BlockingIOError:
                return False
        return True
