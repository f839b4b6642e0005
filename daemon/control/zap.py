"""Who may connect: the handler that libzmq asks during every handshake (ZAP, RFC 27).

One handler serves the whole context.  On ``ipc`` libzmq passes the kernel's word
on the other process (uid, pid), on ``tcp`` the CURVE public key that the peer has
proved to own.  The answer is attached to every message as ``User-Id``, so that a
message is judged by who sent it, not by what it says.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, Self

import anyio
import zmq
from zmq.utils import z85

from weightd.daemon.control.zsock import ZSocket

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from weightd.core.units import NodeId

log = logging.getLogger("weightd.zap")

ENDPOINT = "inproc://zeromq.zap.01"
"""Where libzmq looks for the handler of a context."""

_VERSION = b"1.0"
_REQUEST_FRAMES = 6
"""Frames before the credentials: version, request, domain, address, routing id, mechanism."""


class Process(NamedTuple):
    """A process on this host, by the kernel's word."""

    uid: int
    pid: int


class ZapGate:
    """Answers for the domains that it was given; whatever belongs to no domain is refused.

    Open it before the sockets that it guards, and run ``serve`` in a task.

    Attributes:
        refused: Handshakes refused, by reason, for the metrics.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self._socket: ZSocket | None = None
        self._uids: dict[str, frozenset[int]] = {}
        self._nodes: dict[str, dict[bytes, NodeId]] = {}
        self.refused: Counter[str] = Counter()

    def admit_users(self, domain: str, uids: frozenset[int]) -> None:
        """Let processes of these users connect to the ipc sockets of a domain."""
        self._uids[domain] = uids

    def admit_nodes(self, domain: str, public_keys: Mapping[NodeId, str]) -> None:
        """Let the owners of these CURVE keys (Z85) connect to the tcp sockets of a domain."""
        self._nodes[domain] = {z85.decode(key): node for node, key in public_keys.items()}

    def __enter__(self) -> Self:
        """Open the handler's socket."""
        raw = self._context.socket(zmq.REP)
        raw.bind(ENDPOINT)
        self._socket = ZSocket(raw)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def serve(self) -> None:
        """Answer until cancelled or closed."""
        sock = self._socket
        if sock is None:
            raise RuntimeError("the gate is not open: use it as a context manager")
        while True:
            try:
                request = [frame.bytes for frame in await sock.receive()]
            except anyio.ClosedResourceError:
                return
            sock.send_nowait(self._answer(request))

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """Return the reply to one handshake."""
        if len(request) < _REQUEST_FRAMES or request[0] != _VERSION:
            return [_VERSION, request[1] if len(request) > 1 else b"", b"500", b"not ZAP 1.0", b"", b""]
        user, refusal = self._judge(request)
        if user is None:
            self.refused[refusal] += 1
            log.warning(
                "refused a handshake",
                extra={"facts": {"reason": refusal, "domain": request[2].decode("ascii", "replace")}},
            )
            return [_VERSION, request[1], b"400", refusal.encode(), b"", b""]
        return [_VERSION, request[1], b"200", b"", user.encode(), b""]

    def _judge(self, request: list[bytes]) -> tuple[str | None, str]:
        """Return the ``User-Id`` of who may connect, or None and why not."""
        domain, address, mechanism, credentials = (
            request[2].decode("ascii", "replace"),
            request[3],
            request[5],
            request[6:],
        )
        if mechanism == b"NULL" and domain in self._uids:
            process = _process(address.decode("ascii", "replace"))
            if process is None:
                return None, "no credentials"
            allowed = process.uid in self._uids[domain]
            return (f"{process.uid}:{process.pid}", "") if allowed else (None, "uid")
        if mechanism == b"CURVE" and domain in self._nodes and len(credentials) == 1:
            node = self._nodes[domain].get(credentials[0])
            return (node, "") if node is not None else (None, "unknown key")
        return None, "domain"


def process_of(user: str) -> Process:
    """Return the process behind a ``User-Id`` that the gate gave on ipc."""
    uid, pid = user.split(":")
    return Process(int(uid), int(pid))


def _process(address: str) -> Process | None:
    """Read libzmq's address of an ipc peer: ``localhost:UID:GID:PID``."""
    parts = address.split(":")
    if len(parts) != 4 or not (parts[1].isdecimal() and parts[3].isdecimal()):
        return None
    return Process(int(parts[1]), int(parts[3]))
