"""The messages of the descriptor socket, and how one of them travels with its descriptors.

A unix socket of kind SEQPACKET: one datagram is one message, whole or not at
all, and descriptors belong to exactly the message they came with.  The hook
asks, the daemon answers, one at a time::

    Bind(run, session)            → Accepted | Denied          first, once
    Offer(key, nbytes) + 1 fd     → Accepted | Denied
    Take(plan_digest)             → Pools(keys, more) + fds …  | Denied

The connection stays open for the life of the hook: its end is how either side
learns at once that the other has ended.
"""

from __future__ import annotations

import array
import os
import socket
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
from msgspec import Meta

from weightd.core.errors import WireError
from weightd.core.units import RunName
from weightd.core.wire.codec import pack, unpack
from weightd.core.wire.faults import PeerProtocolError
from weightd.core.wire.limits import DATAGRAM_BYTES, DATAGRAM_FDS
from weightd.core.wire.messages import Count, Digest, Name

if TYPE_CHECKING:
    from collections.abc import Sequence

LANDING = -1
"""Owner of the node's landing in a ``PoolKey``; trainer ranks count from 0."""


class PoolKey(NamedTuple):
    """Which pool of a node: a trainer rank's region in one of its slots, or a half of the landing.

    Attributes:
        owner: Trainer rank, or ``LANDING``.
        slot: The rank's slot, or the half of the landing.
        region: The region of the slot; 0 for the landing.
    """

    owner: int
    slot: int
    region: int

    def __str__(self) -> str:
        if self.owner == LANDING:
            return f"landing half {self.slot}"
        return f"trainer {self.owner} slot {self.slot} region {self.region}"


class Bind(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Ties the connection to the hook that the daemon welcomed as ``session``."""

    protocol: Count
    run: Annotated[RunName, Meta(min_length=1, max_length=255)]
    session: Count


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """A pool of this trainer rank; its descriptor comes along.  ``nbytes`` is the whole memfd."""

    key: PoolKey
    nbytes: Count


class Take(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Asks for every pool that the rank plan of this digest copies from."""

    plan_digest: Digest


class Accepted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """It was done."""


class Denied(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """It was not, and why."""

    error: WireError


class PoolHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One pool of a ``Pools`` message; its descriptor has the same position."""

    key: PoolKey
    nbytes: Count
    name: Name


class Pools(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Descriptors of pools; ``more`` datagrams of them follow."""

    pools: tuple[PoolHead, ...]
    more: bool


Request = Bind | Offer | Take
Answer = Accepted | Denied | Pools

_FD = array.array("i")
_ROOM = socket.CMSG_SPACE(DATAGRAM_FDS * _FD.itemsize)
"""Space for the descriptors of one message.  With more of them the kernel closes the rest and says so."""


class Datagram(NamedTuple):
    """A received datagram: its bytes and the descriptors that came with it, owned by the receiver."""

    data: bytes
    fds: list[int]


def send_datagram(sock: socket.socket, message: Request | Answer, fds: Sequence[int] = ()) -> None:
    """Send one message; its descriptors are duplicated into the other process.

    Raises:
        LocalProtocolError: The message is too large or not well formed.
        OSError: As the socket says; a socket without a timeout that is not ready raises BlockingIOError.
    """
    data = pack(message, DATAGRAM_BYTES)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], ancillary)


def receive_datagram(sock: socket.socket, who: str) -> Datagram | None:
    """Receive one message, not yet decoded, or None where the other side has ended.

    Raises:
        PeerProtocolError: It was larger than ``DATAGRAM_BYTES`` or brought more than ``DATAGRAM_FDS``
            descriptors; those that arrived are closed.
        OSError: As the socket says.
    """
    data, ancillary, flags, _ = sock.recvmsg(DATAGRAM_BYTES, _ROOM, socket.MSG_CMSG_CLOEXEC)
    fds = _descriptors(ancillary)
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close_all(fds)
        if flags & socket.MSG_CTRUNC:
            what = f"more than {DATAGRAM_FDS} descriptors in one message, or no room for them in this process"
        else:
            what = f"a datagram larger than {DATAGRAM_BYTES:,} bytes"
        raise PeerProtocolError(who, what, "", len(data))
    if not data:
        close_all(fds)
        return None
    return Datagram(data, fds)


def decode_request(datagram: Datagram, who: str) -> Request:
    """Return what a hook asks; only an ``Offer`` brings a descriptor, exactly one.

    Raises:
        PeerProtocolError: It is no request, or has another number of descriptors; they are closed.
    """
    try:
        message: Request = unpack(datagram.data, Request, DATAGRAM_BYTES, who)
    except PeerProtocolError:
        close_all(datagram.fds)
        raise
    _check_count(datagram, 1 if isinstance(message, Offer) else 0, who, message)
    return message


def decode_answer(datagram: Datagram, who: str) -> Answer:
    """Return what the daemon answers; only ``Pools`` brings descriptors, one a pool.

    Raises:
        PeerProtocolError: It is no answer, or has another number of descriptors; they are closed.
    """
    try:
        message: Answer = unpack(datagram.data, Answer, DATAGRAM_BYTES, who)
    except PeerProtocolError:
        close_all(datagram.fds)
        raise
    _check_count(datagram, len(message.pools) if isinstance(message, Pools) else 0, who, message)
    return message


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors that are not going to be used."""
    for fd in fds:
        os.close(fd)


def _check_count(datagram: Datagram, due: int, who: str, message: Request | Answer) -> None:
    if len(datagram.fds) == due:
        return
    close_all(datagram.fds)
    what = f"{type(message).__name__} with {len(datagram.fds)} descriptors, {due} are due"
    raise PeerProtocolError(who, what, "", len(datagram.data))


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors of a message's control data."""
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)
