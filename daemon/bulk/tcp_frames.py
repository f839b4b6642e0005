"""The bytes of a bulk stream, and sockets that are waited on with a deadline.

A stream begins with a proof of the ticket's secret, in both directions::

    receiver → sender   Greeting   magic, ticket, nonce
    sender → receiver   challenge  32 bytes
    receiver → sender   proof      HMAC-SHA256(token, "receiver" · greeting · challenge)
    sender → receiver   verdict    HMAC-SHA256(token, "sender" · greeting · challenge), or 32 zeros

Then the receiver asks for buckets by number, and for each of them gets::

    head      "DATA", bucket, nbytes                       16 bytes
    payload                                                nbytes
    tail      "DONE", bucket, 0, xxh3_128 of the payload   32 bytes

    or        "FAIL", bucket, nbytes, 0  in place of head or tail, and an error of ``nbytes``

The digest comes last, so that sender and receiver compute it while the bytes are in
their caches, and so that a source that changed meanwhile can still be called void.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from weightd.daemon.workers import goes_on

if TYPE_CHECKING:
    from collections.abc import Callable

MAGIC = b"WDBULK\x00\x01"
GREETING = struct.Struct("!8sQ16s")
NONCE_BYTES = 16
CHALLENGE_BYTES = 32
PROOF_BYTES = 32
REFUSED = bytes(PROOF_BYTES)
REQUEST = struct.Struct("!4sI")
ASK = b"WANT"
HEAD = struct.Struct("!4sIQ")
TAIL = struct.Struct("!4sIQ16s")
DATA, DONE, FAIL = b"DATA", b"DONE", b"FAIL"

MAX_ERROR_BYTES = 64 << 10
"""Largest error text on a stream."""

STEP_BYTES = 4 << 20
"""Bytes between two looks at the clock and the stop flag; hashed while they are in the cache."""

POLL_S = 0.25
"""Longest single wait of a socket: how late a deadline may be noticed.  A stop closes the socket at once."""

CONNECT_S = 5.0
"""For a connection and its proof: three round trips."""


class Ended(Exception):
    """The other side closed the stream, or the network did."""


class Overdue(Exception):
    """A wait took longer than its limit."""

    def __init__(self, waited_s: float, limit_s: float, setting: str) -> None:
        super().__init__(waited_s, limit_s, setting)
        self.waited_s, self.limit_s, self.setting = waited_s, limit_s, setting


class Stopped(Exception):
    """This side was told to stop."""


class Trailer(NamedTuple):
    """What follows a payload."""

    kind: bytes
    bucket: int
    nbytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the waits of a stream may take.

    Attributes:
        stall_s: For the next byte.
        stall_setting: Name of that limit.
        deadline_at: For all of it, on the clock of ``time.monotonic``.
        total_s: The limit that ``deadline_at`` follows from.
        total_setting: Name of that limit.
        stopped: Whether this side was told to stop.
    """

    stall_s: float
    stall_setting: str
    deadline_at: float
    total_s: float
    total_setting: str
    stopped: Callable[[], bool]

    def check(self, since: float) -> None:
        """Raise if a wait that began at ``since`` has taken too long, or was told to stop."""
        goes_on()  # comes by at every step and every poll: the thread is not stuck, whatever its peer does
        now = time.monotonic()
        if self.stopped():
            raise Stopped
        if now >= self.deadline_at:
            raise Overdue(self.total_s + now - self.deadline_at, self.total_s, self.total_setting)
        if now - since >= self.stall_s:
            raise Overdue(now - since, self.stall_s, self.stall_setting)


class Stream:
    """A connected socket whose every wait is bounded."""

    def __init__(self, sock: socket.socket, patience: Patience) -> None:
        sock.settimeout(None)
        limit = struct.pack("ll", int(POLL_S), int(POLL_S % 1 * 1_000_000))
        # Timeouts of the kernel, not of Python: a blocking read of 4 MiB is then one system call, not dozens.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.patience = patience

    def receive_into(self, target: memoryview, digest: xxhash.xxh3_128 | None = None) -> None:
        """Fill ``target``, and add its bytes to a digest.

        Raises:
            Ended: The stream ended first.
            Overdue: No byte came in time.
            Stopped: This side was told to stop.
        """
        done, since = 0, time.monotonic()
        while done < len(target):
            step = target[done : done + STEP_BYTES]
            try:
                count = self.sock.recv_into(step, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                self.patience.check(since)
                continue
            except OSError as error:
                raise self._ended(error) from error
            if count == 0:
                raise self._ended(None)
            if digest is not None:
                digest.update(step[:count])
            done, since = done + count, time.monotonic()
            self.patience.check(since)

    def receive(self, nbytes: int) -> bytes:
        """Return the next ``nbytes`` bytes; raises as ``receive_into``."""
        target = bytearray(nbytes)
        self.receive_into(memoryview(target))
        return bytes(target)

    def send(self, source: memoryview | bytes, digest: xxhash.xxh3_128 | None = None) -> None:
        """Send all of ``source``, and add its bytes to a digest; raises as ``receive_into``."""
        view = memoryview(source)
        for first in range(0, len(view), STEP_BYTES):
            step = view[first : first + STEP_BYTES]
            if digest is not None:
                digest.update(step)
            self._send_step(step)

    def _send_step(self, step: memoryview) -> None:
        since = time.monotonic()
        while len(step):
            try:
                count = self.sock.send(step, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self.patience.check(since)
                continue
            except OSError as error:
                raise self._ended(error) from error
            step, since = step[count:], time.monotonic()
            self.patience.check(since)

    def _ended(self, error: OSError | None) -> Ended | Stopped:
        if self.patience.stopped():
            return Stopped()  # our own stop closed it
        return Ended("the stream was closed" if error is None else error.strerror or str(error))


def proof(token: bytes, role: bytes, greeting: bytes, challenge: bytes) -> bytes:
    """Return what only a holder of the ticket's secret can say on this one stream."""
    return hmac.new(token, role + greeting + challenge, hashlib.sha256).digest()


def greet(stream: Stream, ticket: int, token: bytes) -> bool:
    """Prove the ticket to the sender and have it prove itself; False where it refuses.

    Raises:
        Ended, Overdue, Stopped: As for ``Stream``.
    """
    greeting = GREETING.pack(MAGIC, ticket, secrets.token_bytes(NONCE_BYTES))
    stream.send(greeting)
    challenge = stream.receive(CHALLENGE_BYTES)
    stream.send(proof(token, b"receiver", greeting, challenge))
    verdict = stream.receive(PROOF_BYTES)
    return hmac.compare_digest(verdict, proof(token, b"sender", greeting, challenge))


def shut(sock: socket.socket) -> None:
    """End both directions: whoever waits on the socket, in any thread, returns at once."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is not connected any more
        return
