"""Where hooks speak to their daemon: a ROUTER on ``ipc://`` that admits users, frames and rates it knows.

A connection has a routing id that ZeroMQ draws; it changes when a hook connects
again.  So a session is found by what a message says, and answered on the routing
id that its last message came from.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, Self

import anyio
import anyio.to_thread
import zmq

from weightd.core.errors import ConfigError
from weightd.core.wire.codec import decode, encode
from weightd.core.wire.faults import PeerProtocolError, ProtocolError
from weightd.daemon.control.limits import ControlLimits, RateLimit, Sent, set_options
from weightd.daemon.control.zap import Process, ZapGate, process_of
from weightd.daemon.control.zsock import ZSocket
from weightd.daemon.unix_sockets import narrow_umask, remove_stale

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path
    from types import TracebackType

    from weightd.core.wire.messages import Envelope

log = logging.getLogger("weightd.control")

HOOK_DOMAIN = "weightd.hooks"
"""ZAP domain of the hooks' socket."""

_FRAMES = 2
"""Frames of a message as the ROUTER gives it: routing id and envelope."""

RoutingId = bytes


class FromHook(NamedTuple):
    """A message of a hook, with the process it came from by the kernel's word."""

    routing_id: RoutingId
    process: Process
    envelope: Envelope


class HookRouter:
    """Use as an async context manager, inside the gate's; iterate over it in one task, all the time.

    A ROUTER learns that a hook is gone where it receives: if nobody iterates, a full hook that
    ended stays full.

    Attributes:
        refused: Messages that were dropped, by reason, for the metrics.
        unsent: Messages that found their hook full or gone.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        path: Path,
        gate: ZapGate,
        *,
        allowed_uids: frozenset[int] | None = None,
        mode: int = 0o600,
        limits: ControlLimits | None = None,
        on_fault: Callable[[RoutingId, ProtocolError], None] | None = None,
    ) -> None:
        """Describe the router; nothing is opened yet.

        Args:
            context: The daemon's.
            path: Where to listen.
            gate: Checks users at the handshake.
            allowed_uids: Users whose processes may connect; None: this process's own and root.
            mode: Permissions of the socket file.
            limits: Bounds.
            on_fault: Told of each message that is not one, so that its sender can be answered.
        """
        self._context = context
        self._path = path
        self._limits = limits or ControlLimits()
        self._mode = mode
        self._on_fault = on_fault
        self._rates = RateLimit(self._limits.rate, self._limits.burst)
        self._socket: ZSocket | None = None
        self.refused: Counter[str] = Counter()
        self.unsent: Counter[str] = Counter()
        gate.admit_users(HOOK_DOMAIN, allowed_uids if allowed_uids is not None else frozenset({os.getuid(), 0}))

    async def __aenter__(self) -> Self:
        """Open the socket.

        Raises:
            ConfigError: The path cannot be listened on, or another daemon does.
        """
        # libzmq would take the file from a daemon that still listens.
        await anyio.to_thread.run_sync(remove_stale, self._path)
        raw = self._context.socket(zmq.ROUTER)
        try:
            set_options(raw, self._limits)
            raw.setsockopt(zmq.ROUTER_MANDATORY, 1)  # without it, messages to a full peer vanish silently
            raw.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a hook that names itself may come back before its end is seen
            raw.setsockopt(zmq.ZAP_DOMAIN, HOOK_DOMAIN.encode())
            raw.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no gate, no entry
            with narrow_umask(self._mode):
                raw.bind(f"ipc://{self._path}")
        except zmq.ZMQError as error:
            raw.close(0)
            raise ConfigError("runtime_dir", str(self._path), f"cannot listen: {error.strerror}") from error
        self._socket = ZSocket(raw)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._socket is not None:
            self._socket.close(round(1000 * self._limits.linger_s))
            self._socket = None

    def __aiter__(self) -> AsyncIterator[FromHook]:
        return self

    async def __anext__(self) -> FromHook:
        """Return the next message that is one; the others are counted and dropped."""
        while True:
            try:
                frames = await self._open_socket().receive()
            except anyio.ClosedResourceError:
                raise StopAsyncIteration from None
            message = self._accept(frames)
            if message is not None:
                return message

    def send(self, routing_id: RoutingId, envelope: Envelope) -> Sent:
        """Give a message to the socket if there is room; never waits.

        Raises:
            LocalProtocolError: The message is not one.
        """
        frames = [routing_id, encode(envelope)]
        try:
            self._open_socket().send_nowait(frames)
        except zmq.Again:
            outcome = Sent.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            outcome = Sent.GONE
        except anyio.ClosedResourceError:
            outcome = Sent.GONE
        else:
            return Sent.SENT
        self.unsent[outcome.value] += 1
        return outcome

    def _accept(self, frames: list[zmq.Frame]) -> FromHook | None:
        """Return a message, or count why it is none."""
        routing_id = frames[0].bytes
        if not self._rates.allows(routing_id, anyio.current_time()):
            self.refused["rate"] += 1
            return None
        process = process_of(str(frames[-1].get("User-Id")))
        who = f"pid {process.pid} (uid {process.uid})"
        try:
            if len(frames) != _FRAMES:
                self._fault(routing_id, PeerProtocolError(who, f"{len(frames) - 1} frames, 1 is due", "", 0))
                return None
            envelope = decode(frames[1].bytes, who)
        except ProtocolError as error:
            self._fault(routing_id, error)
            return None
        return FromHook(routing_id, process, envelope)

    def _fault(self, routing_id: RoutingId, error: ProtocolError) -> None:
        self.refused[error.code] += 1
        log.warning("dropped a message of a hook", extra={"facts": {"error": str(error)}})
        if self._on_fault is not None:
            self._on_fault(routing_id, error)

    def _open_socket(self) -> ZSocket:
        if self._socket is None:
            raise anyio.ClosedResourceError
        return self._socket
