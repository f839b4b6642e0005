"""The daemon's side of the descriptor socket: one task per hook, checked credentials, no blocking call."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Protocol, Self

import anyio
import anyio.to_thread

from weightd.core.errors import WeightdError
from weightd.core.wire.faults import PeerProtocolError, ProtocolMismatch
from weightd.core.wire.limits import DATAGRAM_FDS
from weightd.core.wire.messages import PROTOCOL
from weightd.daemon.unix_sockets import Credentials, accept, credentials, listen, remove_stale
from weightd.link.fd_messages import (
    Accepted,
    Answer,
    Bind,
    Datagram,
    Denied,
    Offer,
    PoolHead,
    PoolKey,
    Pools,
    Request,
    Take,
    close_all,
    decode_request,
    receive_datagram,
    send_datagram,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

    from weightd.core.units import RunName
    from weightd.link.memory import Pool

log = logging.getLogger("weightd.fds")

MAX_CONNECTIONS = 2048
"""Open connections: twice the hooks a daemon takes on, for those that are reconnecting."""

BIND_S = 10.0
"""For a new connection to say which hook it is; it is held by nobody's session until then."""

REMOVE_S = 1.0
"""For the socket's file to be removed at the end; a file that stays is removed by the next start."""

ANSWER_S = 10.0
"""For a hook to take an answer in; it asks one thing at a time, so its buffer is empty unless it is frozen."""


class FdApp(Protocol):
    """What the descriptor socket asks of the daemon; a WeightdError that is raised is told to the hook.

    Nothing here may block the loop: mapping a pool belongs in a worker thread.
    """

    def on_bind(self, run: RunName, session: int, pid: int, uid: int) -> None:
        """Accept a hook's connection.

        Raises:
            WeightdError: No such session of that run, or it is another process's.
        """

    async def on_offer(self, session: int, key: PoolKey, fd: int, nbytes: int) -> None:
        """Take over a descriptor; it is the app's from here on, also where this raises.

        Raises:
            WeightdError: It is not what was announced, or not what it claims.
        """

    async def on_take(self, session: int, plan_digest: str) -> Mapping[PoolKey, Pool]:
        """Return the pools that a rank plan copies from.  They stay the app's.

        Raises:
            WeightdError: The hook has no such plan (any more).
        """
        raise NotImplementedError

    def on_closed(self, session: int) -> None:
        """Note that the hook closed its connection, or ended."""


class FdServer:
    """Listens on ``fd.sock``.  Use as an async context manager, and run ``serve`` in a task.

    Attributes:
        refused: Refusals by reason, for the metrics.
    """

    def __init__(self, path: Path, app: FdApp, allowed_uids: frozenset[int] | None = None, mode: int = 0o600) -> None:
        """Describe the server; nothing is opened yet.

        Args:
            path: Where to listen.
            app: Who decides.
            allowed_uids: Users whose processes may connect; None: this process's own and root.
            mode: Permissions of the socket file.
        """
        self._path = path
        self._app = app
        self._allowed = allowed_uids if allowed_uids is not None else frozenset({os.getuid(), 0})
        self._mode = mode
        self._listener: socket.socket | None = None
        self._connections = 0
        self.refused: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        """Open the socket.

        Raises:
            ConfigError: The path cannot be listened on, or another daemon does.
        """
        await anyio.to_thread.run_sync(remove_stale, self._path, socket.SOCK_SEQPACKET)
        self._listener = listen(self._path, self._mode)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the socket and remove its file."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            with anyio.move_on_after(REMOVE_S, shield=True):
                await anyio.to_thread.run_sync(partial(self._path.unlink, missing_ok=True))

    async def serve(self) -> None:
        """Serve until cancelled; then every connection is closed, which the hooks notice at once."""
        listener = self._listener
        if listener is None:
            raise RuntimeError("the descriptor socket is not open: use the server in `async with`")
        async with anyio.create_task_group() as tasks:
            while True:
                sock = await accept(listener)
                if self._connections >= MAX_CONNECTIONS:
                    self._refuse("connections", sock)
                else:
                    self._connections += 1
                    tasks.start_soon(self._converse, sock)

    async def _converse(self, sock: socket.socket) -> None:
        """Serve one connection to its end."""
        session: int | None = None
        try:
            peer = credentials(sock)
            if peer.uid not in self._allowed:
                self._refuse("uid", sock)
                log.warning("refused a connection", extra={"facts": {"peer": str(peer)}})
                return
            with anyio.move_on_after(BIND_S):
                session = await self._bind(sock, peer)
            if session is not None:
                await self._answer_all(sock, session, str(peer))
        except PeerProtocolError as error:
            self.refused["protocol"] += 1
            log.warning("closed a connection", extra={"facts": {"error": str(error)}})
        except OSError as error:  # the hook ended while it was written to
            log.info("lost a connection", extra={"facts": {"session": session, "error": str(error)}})
        finally:
            sock.close()
            self._connections -= 1
            if session is not None:
                self._app.on_closed(session)

    async def _bind(self, sock: socket.socket, peer: Credentials) -> int | None:
        """Return the session that a new connection belongs to, or None where it was denied or left."""
        request = await self._next(sock, str(peer))
        if request is None:
            return None
        message, fds = request
        if not isinstance(message, Bind):
            close_all(fds)
            raise PeerProtocolError(str(peer), f"{type(message).__name__} before Bind", "", 0)
        try:
            if message.protocol != PROTOCOL:
                await self._deny(sock, ProtocolMismatch(str(peer), message.protocol, PROTOCOL))
                return None
            self._app.on_bind(message.run, message.session, peer.pid, peer.uid)
        except WeightdError as error:
            await self._deny(sock, error)
            return None
        try:
            await _send(sock, Accepted())
        except BaseException:
            self._app.on_closed(message.session)
            raise
        return message.session

    async def _answer_all(self, sock: socket.socket, session: int, who: str) -> None:
        """Answer one request after the other until the hook ends."""
        while (request := await self._next(sock, who)) is not None:
            message, fds = request
            try:
                match message:
                    case Offer(key, nbytes):
                        await self._app.on_offer(session, key, fds[0], nbytes)
                        await _send(sock, Accepted())
                    case Take(plan_digest):
                        await _send_pools(sock, await self._app.on_take(session, plan_digest))
                    case Bind():
                        await self._deny(sock, PeerProtocolError(who, "a second Bind", "$.type", 0))
            except WeightdError as error:
                await self._deny(sock, error)

    async def _next(self, sock: socket.socket, who: str) -> tuple[Request, list[int]] | None:
        """Return the next request with its descriptors, or None at the end."""
        while True:
            try:
                datagram: Datagram | None = receive_datagram(sock, who)
            except BlockingIOError:
                await anyio.wait_readable(sock)
            except ConnectionResetError:
                return None
            else:
                return None if datagram is None else (decode_request(datagram, who), datagram.fds)

    async def _deny(self, sock: socket.socket, error: WeightdError) -> None:
        self.refused[error.code] += 1
        await _send(sock, Denied(error.to_wire()))

    def _refuse(self, reason: str, sock: socket.socket) -> None:
        self.refused[reason] += 1
        sock.close()


async def _send_pools(sock: socket.socket, pools: Mapping[PoolKey, Pool]) -> None:
    """Send the descriptors of pools, a datagram for each ``DATAGRAM_FDS`` of them."""
    items = sorted(pools.items())
    for first in range(0, max(1, len(items)), DATAGRAM_FDS):
        batch = items[first : first + DATAGRAM_FDS]
        heads = tuple(PoolHead(key, pool.nbytes, str(key)) for key, pool in batch)
        more = first + DATAGRAM_FDS < len(items)
        await _send(sock, Pools(heads, more), [pool.fd for _, pool in batch])


async def _send(sock: socket.socket, answer: Answer, fds: list[int] | None = None) -> None:
    """Send one answer within ``ANSWER_S``; a hook that takes none in that long loses its connection."""
    with anyio.move_on_after(ANSWER_S):
        while True:
            try:
                send_datagram(sock, answer, fds or [])
            except BlockingIOError:
                await anyio.wait_writable(sock)
            else:
                return
    raise OSError(errno.ETIMEDOUT, f"took no answer in for {ANSWER_S:.0f} s")
