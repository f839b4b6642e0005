"""A service manager that only listens: a datagram socket, and what came on it."""

from __future__ import annotations

import select
import socket
import time
from pathlib import Path

from weightd.daemon.service.notify import Notifier


class Manager:
    """Hears what a daemon tells its service manager."""

    def __init__(self, address: str, watchdog_s: float | None = None) -> None:
        self.address = address
        self.watchdog_s = watchdog_s
        self.heard: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address[0] == "@" else address)
        self._socket.setblocking(False)

    @classmethod
    def at(cls, folder: Path, watchdog_s: float | None = None) -> Manager:
        return cls(str(folder / "notify"), watchdog_s)

    @property
    def environ(self) -> dict[str, str]:
        """What a daemon's environment has to hold; no WATCHDOG_PID, since its pid is not known yet."""
        usec = {} if self.watchdog_s is None else {"WATCHDOG_USEC": str(round(self.watchdog_s * 1_000_000))}
        return {"NOTIFY_SOCKET": self.address, **usec}

    @property
    def notifier(self) -> Notifier:
        return Notifier(self.address, self.watchdog_s)

    def listen(self) -> list[str]:
        """Take what has come, without waiting, and return all messages so far."""
        while True:
            try:
                self.heard.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                return self.heard

    def wait_for(self, line: str, limit_s: float = 20.0, after: int = 0) -> int:
        """Wait for a message with this line behind the first ``after`` ones; return how many there are up to it."""
        end = time.monotonic() + limit_s
        while True:
            for number, message in enumerate(self.listen()[after:], after + 1):
                if line in message.split("\n"):
                    return number
            left = end - time.monotonic()
            assert left > 0, f"no {line!r} within {limit_s} s; heard {self.heard}"
            select.select([self._socket], [], [], left)

    def quiet_for(self, line: str, quiet_s: float) -> bool:
        """Whether no message with this line comes for that long, from now on."""
        after = len(self.listen())
        end = time.monotonic() + quiet_s
        while (left := end - time.monotonic()) > 0:
            select.select([self._socket], [], [], left)
            if any(line in message.split("\n") for message in self.listen()[after:]):
                return False
        return True

    def close(self) -> None:
        self._socket.close()
