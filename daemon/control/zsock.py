"""A ZeroMQ socket for anyio, on asyncio and trio alike.

ZeroMQ offers one descriptor for all events of a socket, and it works like an
edge: it fires once and says nothing of what is still queued.  Five rules, each
found by an experiment that hung or starved, make that safe:

1. Try first, wait only when the socket says EAGAIN, and read EVENTS again after every wake.
2. Whoever reads EVENTS, or sends or receives, swallows the edge that another task may be waiting
   for; so it wakes that task if its flag is set.
3. Only one task may wait on the descriptor.  It leads; the others wait for an event that the
   leader, or rule 2, sets.
4. A busy socket never has to wait, so it yields every few operations, *before* it touches the
   socket: a cancelled receive then loses no message.
5. One owner: a socket belongs to one event loop thread, and is closed there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import anyio
import anyio.lowlevel
import zmq

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

FAIR_OPERATIONS = 64
"""Operations between two checkpoints: at 5 microseconds each, others wait a third of a millisecond at most."""


class ZSocket:
    """Wraps a ``zmq.Socket``; options, bind and connect are done on ``raw``.

    Attributes:
        raw: The wrapped socket.
    """

    def __init__(self, raw: zmq.Socket[bytes]) -> None:
        self.raw = raw
        self._fd: int = raw.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._leader: anyio.CancelScope | None = None
        self._followers: anyio.Event | None = None
        self._waiting = {int(zmq.POLLIN): 0, int(zmq.POLLOUT): 0}
        self._since_checkpoint = 0
        self.closed = False

    async def receive(self) -> list[zmq.Frame]:
        """Return the frames of the next message; a cancelled call takes none.

        Raises:
            anyio.ClosedResourceError: The socket was closed, before or while waiting.
        """
        await self._be_fair()
        while True:
            self._check_open()
            try:
                frames = self.raw.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                await self._until(zmq.POLLIN)
            else:
                # No await from here to the return, or a cancelled task would lose the message.
                self._look_again()
                return frames

    async def send(self, frames: Sequence[bytes]) -> None:
        """Send a message, waiting for room.

        Not for a ROUTER: its POLLOUT speaks of any of its peers, so waiting for the one that is
        full would spin.  There, ``send_nowait`` and a bound of one's own.

        Raises:
            anyio.ClosedResourceError: The socket was closed, before or while waiting.
        """
        await self._be_fair()
        while True:
            try:
                self.send_nowait(frames)
            except zmq.Again:
                await self._until(zmq.POLLOUT)
            else:
                return

    def send_nowait(self, frames: Sequence[bytes]) -> None:
        """Send a message if there is room.

        Raises:
            zmq.Again: There is none.
            zmq.ZMQError: EHOSTUNREACH of a ROUTER with ROUTER_MANDATORY: the peer is not connected.
            anyio.ClosedResourceError: The socket was closed.
        """
        self._check_open()
        self.raw.send_multipart(frames, zmq.NOBLOCK)
        self._look_again()

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket and wake whoever waits for it; harmless when done twice.

        Args:
            linger_ms: How long the context's end may wait for messages that are still queued.
        """
        if self.closed:
            return
        self.closed = True
        self._wake()
        self.raw.close(linger_ms)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _be_fair(self) -> None:
        """Yield now and then (rule 4)."""
        self._since_checkpoint += 1
        if self._since_checkpoint >= FAIR_OPERATIONS:
            self._since_checkpoint = 0
            await anyio.lowlevel.checkpoint()

    async def _until(self, flag: int) -> None:
        """Wait until EVENTS has ``flag`` (rules 1 and 3)."""
        while not self._events(but=flag) & flag:
            self._waiting[flag] += 1
            try:
                if self._leader is None:
                    await self._lead()
                else:
                    if self._followers is None:
                        self._followers = anyio.Event()
                    await self._followers.wait()
            finally:
                self._waiting[flag] -= 1
            self._check_open()

    async def _lead(self) -> None:
        """Wait on the descriptor for all tasks."""
        with anyio.CancelScope() as scope:
            self._leader = scope
            try:
                await anyio.wait_readable(self._fd)
            finally:
                self._leader = None
                self._wake_followers()  # one of them must look, and take the lead

    def _events(self, but: int = 0) -> int:
        """Read EVENTS, and wake whoever waits for a flag that is set (rule 2), save ``but``, which the caller sees."""
        events = int(self.raw.getsockopt(zmq.EVENTS))
        if any(tasks and events & flag & ~but for flag, tasks in self._waiting.items()):
            self._wake()
        return events

    def _look_again(self) -> None:
        """After an operation: somebody may be waiting for the edge that it swallowed (rule 2)."""
        if self._leader is not None or self._followers is not None:
            self._events()

    def _wake(self) -> None:
        self._wake_followers()
        if self._leader is not None:
            self._leader.cancel()  # it stays the leader until it has really left the descriptor

    def _wake_followers(self) -> None:
        followers, self._followers = self._followers, None
        if followers is not None:
            followers.set()

    def _check_open(self) -> None:
        if self.closed:
            raise anyio.ClosedResourceError
