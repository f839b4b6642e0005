"""A hook's end of the descriptor socket; blocking, every call with a deadline."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from typing import TYPE_CHECKING, Self

from weightd.core.errors import error_from_wire
from weightd.core.wire.faults import PeerProtocolError
from weightd.core.wire.messages import PROTOCOL
from weightd.link.faults import DaemonAbsent, HookDeadline, PeerGone
from weightd.link.fd_messages import (
    Accepted,
    Answer,
    Bind,
    Datagram,
    Denied,
    Offer,
    PoolKey,
    Pools,
    Request,
    Take,
    close_all,
    decode_answer,
    receive_datagram,
    send_datagram,
)
from weightd.link.memory import Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from weightd.core.units import RunName

__all__ = ["FdChannel", "PoolKey"]

_RETRY_S = 0.05
"""Between two tries to connect: a daemon that is starting is found within a blink, at 20 system calls a second."""

MAX_POOLS = 65_536
"""Most pools of one answer: 512 trainer ranks with 3 slots of 8 regions are 12,288."""


class FdChannel:
    """The connection of one hook to its daemon's descriptor socket.

    Not for use by two threads at once.  After an error of the socket or a deadline
    the channel is closed: a late answer can then not be taken for that of another question.
    """

    def __init__(self, sock: socket.socket, path: str) -> None:
        self._sock: socket.socket | None = sock
        self._path = path

    @classmethod
    def connect(
        cls,
        path: str,
        run: RunName,
        session: int,
        deadline_at: float,
        connected: Callable[[Self], None] | None = None,
    ) -> Self:
        """Connect, and bind the connection to the hook's session.

        Args:
            path: The daemon's ``fd.sock``.
            run: The hook's run.
            session: As the daemon's ``Welcome`` told it.
            deadline_at: On the clock of ``time.monotonic``.
            connected: Gets the channel before the daemon has answered, so that another thread can ``abandon`` it.

        Raises:
            DaemonAbsent: Nobody listens there, until the deadline.
            HookDeadline: The daemon did not answer.
            PeerGone: It closed the connection.
            WeightdError: Why it refuses, as it says itself.
        """
        channel = cls(_connected(path, deadline_at), path)
        try:
            if connected is not None:
                connected(channel)
            channel._expect_accepted(Bind(PROTOCOL, run, session), (), "binding the descriptor socket", deadline_at)
        except BaseException:
            channel.close()
            raise
        return channel

    def offer(self, key: PoolKey, pool: Pool, deadline_at: float) -> None:
        """Offer a pool to the daemon; returns once it has accepted it.

        Raises:
            MemoryRefused: The daemon found that it is not what it claims.
            HookDeadline: No answer in time.
            PeerGone: The daemon closed the connection.
            WeightdError: Why it refuses, as it says itself.
        """
        self._expect_accepted(Offer(key, pool.nbytes), (pool.fd,), f"offering {key}", deadline_at)

    def take(self, plan_digest: str, deadline_at: float) -> dict[PoolKey, Pool]:
        """Get every pool that a rank plan copies from, checked and mapped read-only.

        The caller owns them.  An error leaves none of them open.

        Args:
            plan_digest: The rank plan, as the goal names it.
            deadline_at: On the clock of ``time.monotonic``.

        Raises:
            MemoryRefused: One of them is not what the daemon says.
            HookDeadline: No answer in time.
            PeerGone: The daemon closed the connection.
            WeightdError: Why it refuses, as it says itself.
        """
        doing = "taking the pools of a plan"
        taken: dict[PoolKey, Pool] = {}
        try:
            self._send(Take(plan_digest), (), doing, deadline_at)
            while self._take_some(taken, doing, deadline_at):
                pass
        except BaseException:
            for pool in taken.values():
                pool.close()
            raise
        return taken

    def fileno(self) -> int:
        """Return the descriptor to poll: readable between two calls means that the daemon has ended.

        Raises:
            ValueError: The channel is closed.
        """
        if self._sock is None:
            raise ValueError("the descriptor channel is closed")
        return self._sock.fileno()

    def alive(self) -> bool:
        """Say whether the daemon's end is open; asks the kernel and never blocks."""
        if self._sock is None:
            return False
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        return not poll.poll(0)

    def abandon(self) -> None:
        """End the wait of the thread that uses the channel, with ``PeerGone``; another thread may call this."""
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):  # it has just been closed
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, by which the daemon learns that the hook has ended; harmless when done twice."""
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take_some(self, taken: dict[PoolKey, Pool], doing: str, deadline_at: float) -> bool:
        """Receive one datagram of pools; say whether more follow."""
        answer, fds = self._receive(doing, deadline_at)
        if not isinstance(answer, Pools):
            raise self._refusal(answer, doing)
        unmapped = list(fds)
        try:
            for head in answer.pools:
                self._check_key(head.key, taken)
                # adopt() owns the descriptor whatever comes of it.
                taken[head.key] = Pool.adopt(unmapped.pop(0), head.nbytes, name=head.name)
        except BaseException:
            close_all(unmapped)
            self.close()  # further datagrams of this answer are on their way
            raise
        return answer.more

    def _check_key(self, key: PoolKey, taken: dict[PoolKey, Pool]) -> None:
        """Refuse an answer that names a pool twice or never ends."""
        if key in taken or len(taken) >= MAX_POOLS:
            what = f"{key} comes twice" if key in taken else f"more than {MAX_POOLS:,} pools"
            raise PeerProtocolError(self._who, what, "$.pools", 0)

    def _expect_accepted(self, message: Request, fds: Sequence[int], doing: str, deadline_at: float) -> None:
        self._send(message, fds, doing, deadline_at)
        answer, strays = self._receive(doing, deadline_at)
        if not isinstance(answer, Accepted):
            close_all(strays)
            raise self._refusal(answer, doing)

    def _refusal(self, answer: Answer, doing: str) -> Exception:
        """Return the error of an answer that is not the one that was due."""
        if isinstance(answer, Denied):
            return error_from_wire(answer.error)
        self.close()
        return PeerProtocolError(self._who, f"{type(answer).__name__} while {doing}", "", 0)

    def _send(self, message: Request, fds: Sequence[int], doing: str, deadline_at: float) -> None:
        sock = self._ready(doing)
        begun = time.monotonic()
        try:
            sock.settimeout(max(deadline_at - begun, 0.001))
            send_datagram(sock, message, fds)
        except OSError as error:
            raise self._broken(error, doing, begun, deadline_at) from error

    def _receive(self, doing: str, deadline_at: float) -> tuple[Answer, list[int]]:
        sock = self._ready(doing)
        begun = time.monotonic()
        try:
            sock.settimeout(max(deadline_at - begun, 0.001))
            datagram: Datagram | None = receive_datagram(sock, self._who)
        except OSError as error:
            raise self._broken(error, doing, begun, deadline_at) from error
        except PeerProtocolError:
            self.close()
            raise
        if datagram is None:
            self.close()
            raise PeerGone(self._who, doing, "it closed the connection")
        try:
            return decode_answer(datagram, self._who), datagram.fds
        except PeerProtocolError:
            self.close()
            raise

    def _ready(self, doing: str) -> socket.socket:
        if self._sock is None:
            raise PeerGone(self._who, doing, "the descriptor channel is closed")
        return self._sock

    def _broken(self, error: OSError, doing: str, begun: float, deadline_at: float) -> HookDeadline | PeerGone:
        """Close the channel and return what its socket's error means."""
        self.close()
        if isinstance(error, TimeoutError):
            return HookDeadline(self._who, doing, time.monotonic() - begun, max(0.0, deadline_at - begun))
        return PeerGone(self._who, doing, error.strerror or str(error))

    @property
    def _who(self) -> str:
        return f"the daemon at {self._path}"


def _connected(path: str, deadline_at: float) -> socket.socket:
    """Connect to a unix socket, trying again until the deadline: the daemon may be starting."""
    begun = time.monotonic()
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(max(deadline_at - time.monotonic(), 0.001))
            sock.connect(path)
        except OSError as error:
            sock.close()
            now = time.monotonic()
            if now + _RETRY_S >= deadline_at:
                raise DaemonAbsent(path, now - begun, error.strerror or str(error)) from error
            time.sleep(_RETRY_S)
        except BaseException:
            sock.close()
            raise
        else:
            return sock
