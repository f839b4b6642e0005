"""Bounds of the control sockets, and the options that every one of them has."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

import zmq

from weightd.core.wire.messages import MAX_FRAME_BYTES


class Sent(Enum):
    """What became of a message that was given to a socket.  What did not go is repeated by its owner's next turn."""

    SENT = "sent"
    FULL = "full"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class ControlLimits:
    """Bounds of a control socket.

    Attributes:
        queued: Messages queued for, and from, each peer.  States and goals supersede each other, so a
            longer queue would only hold older ones; a blob's chunks (2 MiB each) come in this many.
        heartbeat_s: Between ZeroMQ's own pings.
        heartbeat_timeout_s: Without an answer to them, until a connection is closed.
        handshake_s: For a new connection to say who it is.
        linger_s: At the end, for goodbyes that are still queued.
        rate: Messages a second of one peer in the long run: ten times what a busy rank reports.
        burst: Messages of one peer at once: the chunks of the largest layout.
    """

    queued: int = 64
    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 5.0
    handshake_s: float = 10.0
    linger_s: float = 1.0
    rate: float = 200.0
    burst: float = 600.0


def set_options(raw: zmq.Socket[bytes], limits: ControlLimits) -> None:
    """Set what every control socket has."""
    raw.setsockopt(zmq.SNDHWM, limits.queued)
    raw.setsockopt(zmq.RCVHWM, limits.queued)
    raw.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    raw.setsockopt(zmq.LINGER, round(1000 * limits.linger_s))
    raw.setsockopt(zmq.HANDSHAKE_IVL, round(1000 * limits.handshake_s))
    # On ipc, too: a frozen process keeps its socket open.
    raw.setsockopt(zmq.HEARTBEAT_IVL, round(1000 * limits.heartbeat_s))
    raw.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(1000 * limits.heartbeat_timeout_s))
    raw.setsockopt(zmq.HEARTBEAT_TTL, round(1000 * limits.heartbeat_timeout_s))


MAX_RATED_PEERS = 8192
"""Peers whose rate is remembered; the longest silent one is forgotten first, and starts anew."""


class RateLimit:
    """A token bucket for each peer: ``burst`` messages at once, ``rate`` a second after that."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def allows(self, peer: bytes, now: float) -> bool:
        """Say whether a message of ``peer`` at ``now`` (seconds, any clock that grows) is within its rate."""
        tokens, at = self._tokens.pop(peer, (self._burst, now))
        tokens = min(self._burst, tokens + (now - at) * self._rate)
        allowed = tokens >= 1.0
        self._tokens[peer] = (tokens - 1.0 if allowed else tokens, now)
        if len(self._tokens) > MAX_RATED_PEERS:
            self._tokens.popitem(last=False)
        return allowed
