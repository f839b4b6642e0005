"""Links between daemons: one ROUTER that only receives, one DEALER for each peer that only sends.

Every daemon sends on its own connections, so an answer needs no route back, a
restarted daemon is simply connected to again, and nobody ever connects to an
address that a message brought: the peers are those of the configuration.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

import anyio
import zmq

from weightd.core.errors import ConfigError
from weightd.core.units import NodeId
from weightd.core.wire.codec import decode, encode
from weightd.core.wire.faults import PeerProtocolError, ProtocolError
from weightd.daemon.control.curve import PEER_DOMAIN, CurveKeys, check_exposure
from weightd.daemon.control.limits import ControlLimits, RateLimit, Sent, set_options
from weightd.daemon.control.zsock import ZSocket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from types import TracebackType

    from weightd.core.wire.messages import Envelope
    from weightd.daemon.control.zap import ZapGate

log = logging.getLogger("weightd.control")

_FRAMES = 2
"""Frames of a message as the ROUTER gives it: routing id and envelope."""

RECONNECT_MS = 100
RECONNECT_MAX_MS = 2000
"""A peer that restarts is found again within two seconds; a host that is down costs one packet each of them."""

CONNECT_TIMEOUT_MS = 3000
"""For one try to connect: the kernel's own would let a host that vanished stand in the way for two minutes."""


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a peer listens, and the key that it must prove to own.

    Attributes:
        host: Numeric address.
        port: TCP port.
        public_key: 40 characters of Z85; None where the links are without keys.
    """

    host: str
    port: int
    public_key: str | None = None

    @property
    def endpoint(self) -> str:
        """The address as ZeroMQ writes it."""
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


class FromPeer(NamedTuple):
    """A message of another daemon."""

    node: NodeId
    envelope: Envelope


class PeerLinks:
    """Use as a context manager, inside the gate's; iterate over it in one task.

    With keys, a connection belongs to the node whose key it proved, and its messages must say
    the same.  Without, a message's word is taken, which is why only loopback is listened on then.

    Attributes:
        refused: Messages that were dropped, by reason, for the metrics.
        unsent: Messages that found their peer full or gone.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        listen: PeerAddress,
        peers: Mapping[NodeId, PeerAddress],
        gate: ZapGate,
        *,
        keys: CurveKeys | None = None,
        limits: ControlLimits | None = None,
    ) -> None:
        """Describe the links; nothing is opened yet.

        Args:
            context: The daemon's.
            listen: Where this daemon listens; port 0: any, see ``port``.
            peers: Every other daemon.
            gate: Checks keys at the handshake.
            keys: This daemon's own, or None: loopback only.
            limits: Bounds.

        Raises:
            ConfigError: Keys are needed and lacking, here or for a peer.
        """
        check_exposure(listen.host, keys)
        self._context = context
        self._listen = listen
        self._peers = dict(peers)
        self._keys = keys
        self._limits = limits or ControlLimits()
        self._rates = RateLimit(self._limits.rate, self._limits.burst)
        self._receiver: ZSocket | None = None
        self._senders: dict[NodeId, zmq.Socket[bytes]] = {}
        self.refused: Counter[str] = Counter()
        self.unsent: Counter[str] = Counter()
        if keys is not None:
            gate.admit_nodes(PEER_DOMAIN, {node: _key_of(node, peer) for node, peer in peers.items()})

    def __enter__(self) -> Self:
        """Listen, and begin to connect to every peer.

        Raises:
            ConfigError: The address cannot be listened on.
        """
        try:
            self._receiver = ZSocket(self._bound())
            for node, peer in self._peers.items():
                self._senders[node] = self._connecting(node, peer)
        except BaseException:
            self._close(0)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(round(1000 * self._limits.linger_s))

    @property
    def port(self) -> int:
        """The port that is listened on."""
        if self._receiver is None:
            raise anyio.ClosedResourceError
        return int(self._receiver.raw.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def __aiter__(self) -> AsyncIterator[FromPeer]:
        return self

    async def __anext__(self) -> FromPeer:
        """Return the next message that is one; the others are counted and dropped."""
        while True:
            if self._receiver is None:
                raise StopAsyncIteration
            try:
                frames = await self._receiver.receive()
            except anyio.ClosedResourceError:
                raise StopAsyncIteration from None
            message = self._accept(frames)
            if message is not None:
                return message

    def send(self, node: NodeId, envelope: Envelope) -> Sent:
        """Give a message to a peer's connection if there is one with room; never waits.

        Raises:
            LocalProtocolError: The message is not one.
        """
        sender = self._senders.get(node)
        frame = encode(envelope)
        if sender is None:
            outcome = Sent.GONE
        else:
            try:
                sender.send(frame, zmq.NOBLOCK)
            except zmq.Again:  # of a DEALER that is not connected, too
                outcome = Sent.FULL
            else:
                return Sent.SENT
        self.unsent[outcome.value] += 1
        return outcome

    def _accept(self, frames: list[zmq.Frame]) -> FromPeer | None:
        """Return a message, or count why it is none."""
        if not self._rates.allows(frames[0].bytes, anyio.current_time()):
            self.refused["rate"] += 1
            return None
        proved = frames[-1].get("User-Id") if self._keys is not None else None
        who = f"node {proved}" if proved is not None else "a peer without keys"
        try:
            return self._read(frames, who, None if proved is None else NodeId(str(proved)))
        except ProtocolError as error:
            self.refused[error.code] += 1
            log.warning("dropped a message of a peer", extra={"facts": {"error": str(error)}})
            return None

    def _read(self, frames: list[zmq.Frame], who: str, proved: NodeId | None) -> FromPeer:
        """Return a message whose sender is who it says.

        Raises:
            ProtocolError: It is none, or comes from somebody else.
        """
        if len(frames) != _FRAMES:
            raise PeerProtocolError(who, f"{len(frames) - 1} frames, 1 is due", "", 0)
        frame = frames[1].bytes
        envelope = decode(frame, who)
        node = NodeId(envelope.sender)
        if proved is not None and node != proved:
            raise PeerProtocolError(who, f"it says that it is {node!r}", "$.sender", len(frame))
        if node not in self._peers:
            raise PeerProtocolError(who, f"{node!r} is no configured peer", "$.sender", len(frame))
        return FromPeer(node, envelope)

    def _bound(self) -> zmq.Socket[bytes]:
        raw = self._context.socket(zmq.ROUTER)
        try:
            set_options(raw, self._limits)
            raw.setsockopt(zmq.IPV6, int(":" in self._listen.host))
            if self._keys is not None:
                raw.setsockopt(zmq.CURVE_SERVER, 1)
                raw.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret.encode())
                raw.setsockopt(zmq.ZAP_DOMAIN, PEER_DOMAIN.encode())
                raw.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no gate, no entry
            raw.bind(self._listen.endpoint if self._listen.port else self._listen.endpoint[:-1] + "*")
        except zmq.ZMQError as error:
            raw.close(0)
            raise ConfigError("control", self._listen.endpoint, f"cannot listen: {error.strerror}") from error
        return raw

    def _connecting(self, node: NodeId, peer: PeerAddress) -> zmq.Socket[bytes]:
        raw = self._context.socket(zmq.DEALER)
        set_options(raw, self._limits)
        raw.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a peer that is not there
        raw.setsockopt(zmq.IPV6, int(":" in peer.host))
        raw.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        raw.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        raw.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        if self._keys is not None:
            raw.setsockopt(zmq.CURVE_SERVERKEY, _key_of(node, peer).encode())
            raw.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public.encode())
            raw.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret.encode())
        raw.connect(peer.endpoint)
        return raw

    def _close(self, linger_ms: int) -> None:
        for sender in self._senders.values():
            sender.close(linger_ms)
        self._senders.clear()
        if self._receiver is not None:
            self._receiver.close(0)
            self._receiver = None


def _key_of(node: NodeId, peer: PeerAddress) -> str:
    """Return a peer's public key, which must be configured where keys are used."""
    if peer.public_key is None:
        raise ConfigError(f"peers.{node}.public_key", "", "is missing, and this daemon uses keys")
    return peer.public_key
