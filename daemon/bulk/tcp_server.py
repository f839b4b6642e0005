"""Serves buckets over raw TCP streams: one thread accepts, one thread a stream sends."""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from weightd.core.errors import ConfigError, WeightdError, WireError
from weightd.core.wire.codec import pack
from weightd.core.wire.faults import PeerProtocolError
from weightd.daemon.bulk.port import MAX_TICKET_STREAMS, TOKEN_BYTES, Grant
from weightd.daemon.bulk.tcp_frames import (
    ASK,
    CHALLENGE_BYTES,
    CONNECT_S,
    DATA,
    DONE,
    FAIL,
    GREETING,
    HEAD,
    MAGIC,
    MAX_ERROR_BYTES,
    PROOF_BYTES,
    REFUSED,
    REQUEST,
    TAIL,
    Ended,
    Overdue,
    Patience,
    Stopped,
    Stream,
    proof,
    shut,
)
from weightd.daemon.workers import working

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weightd.daemon.bulk.gather import Lease

log = logging.getLogger("weightd.bulk")

MAX_STREAMS = 256
"""Streams served at once, a thread each: two for each of a hundred nodes that fetch together, and some."""

IDLE_S = 60.0
"""For the next request: a receiver asks ahead, so a silent one is gone or frozen."""

KEPT_STAGING = 8
"""Staging buffers kept for the next streams: memory that was never touched costs ten times a copy into it."""

JOIN_S = 1.0
"""For threads to end once their sockets are closed."""


@dataclass(slots=True)
class _Ticket:
    """A grant and its streams."""

    grant: Grant
    opened: int
    open: dict[socket.socket, None]


class TcpBulkServer:
    """Serves what it is granted to (``port.BulkServer``).

    Attributes:
        sent_nbytes: Payload bytes sent, for the metrics.
        refused: Streams refused, by reason.
    """

    def __init__(self, host: str, port: int, stall_s: float = 30.0) -> None:
        """Listen, and start to accept.

        Args:
            host: Numeric address.
            port: TCP port; 0: any.
            stall_s: For a receiver to take the next byte.

        Raises:
            ConfigError: The address cannot be listened on.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=MAX_STREAMS)
        except OSError as error:
            raise ConfigError("bulk", f"{host}:{port}", f"cannot listen: {error.strerror or error}") from error
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._tickets: dict[int, _Ticket] = {}
        self._streams: dict[socket.socket, threading.Thread] = {}
        self._staging: list[NDArray[np.uint8]] = []
        self._closing = False
        self.sent_nbytes = 0
        self.refused: Counter[str] = Counter()
        self._acceptor = threading.Thread(target=self._accept, name="bulk-accept", daemon=True)
        self._acceptor.start()

    @property
    def port(self) -> int:
        """TCP port that is listened on."""
        port: int = self._listener.getsockname()[1]
        return port

    def grant(self, grant: Grant) -> None:
        """Let the holder of the grant's secret read."""
        now = time.monotonic()
        with self._lock:
            self._tickets[grant.ticket] = _Ticket(grant, 0, {})
            void = [n for n, t in self._tickets.items() if t.grant.expires_at < now and not t.open]
            for number in void:
                del self._tickets[number]

    def revoke(self, ticket: int) -> None:
        """Void a grant and end its streams; harmless when done twice."""
        with self._lock:
            known = self._tickets.pop(ticket, None)
            for sock in list(known.open) if known else ():
                shut(sock)

    def close(self) -> None:
        """End every stream and every thread, within a second."""
        with self._lock:
            self._closing = True
            self._tickets.clear()
            threads = [*self._streams.values(), self._acceptor]
            for sock in self._streams:
                shut(sock)
        shut(self._listener)
        end = time.monotonic() + JOIN_S
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if not self._closing:
                    log.warning("cannot accept", extra={"facts": {"error": str(error)}})
                    time.sleep(0.1)  # out of descriptors: trying at once would spin
                continue
            with working("taking a bulk stream on"):
                self._take_on(sock, f"{address[0]}:{address[1]}")

    def _take_on(self, sock: socket.socket, who: str) -> None:
        """Give a connection a thread, if there is one left for it."""
        with self._lock:
            if self._closing or len(self._streams) >= MAX_STREAMS:
                self.refused["streams"] += 1
                sock.close()
                return
            thread = threading.Thread(target=self._serve, args=(sock, who), name="bulk-send", daemon=True)
            self._streams[sock] = thread
            thread.start()

    def _serve(self, sock: socket.socket, who: str) -> None:
        """Serve one stream to its end; whatever ends it, its receiver learns by its socket."""
        try:
            with working(f"serving a bulk stream of {who}"):
                self._admit_and_answer(sock)
        except (Ended, Stopped) as end:
            log.debug("stream ended", extra={"facts": {"peer": who, "why": str(end)}})
        except Overdue as late:
            log.warning(
                "stream closed", extra={"facts": {"peer": who, "waited_s": late.waited_s, "limit_s": late.limit_s}}
            )
        except (WeightdError, OSError) as error:
            self.refused["protocol"] += isinstance(error, PeerProtocolError)
            log.warning("stream closed", extra={"facts": {"peer": who, "error": str(error)}})
        finally:
            with self._lock:
                self._streams.pop(sock, None)
            sock.close()

    def _admit_and_answer(self, sock: socket.socket) -> None:
        ticket = self._admit(sock)
        if ticket is not None:
            try:
                self._answer_all(sock, ticket.grant)
            finally:
                self._leave(sock, ticket)

    def _admit(self, sock: socket.socket) -> _Ticket | None:
        """Return the ticket that the other side proved to hold, or tell it that it did not."""
        deadline_at = time.monotonic() + CONNECT_S
        patience = Patience(CONNECT_S, "CONNECT_S", deadline_at, CONNECT_S, "CONNECT_S", lambda: self._closing)
        stream = Stream(sock, patience)
        greeting = stream.receive(GREETING.size)
        magic, number, _ = GREETING.unpack(greeting)
        if magic != MAGIC:
            raise PeerProtocolError("a bulk stream", f"begins with {magic!r}", "", len(greeting))
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        stream.send(challenge)
        said = stream.receive(PROOF_BYTES)
        with self._lock:
            ticket = self._tickets.get(number)
            # An unknown ticket is compared like a known one: how long the answer takes tells nothing.
            token = ticket.grant.token if ticket is not None else secrets.token_bytes(TOKEN_BYTES)
            right = hmac.compare_digest(said, proof(token, b"receiver", greeting, challenge))
            valid = ticket is not None and ticket.grant.expires_at > time.monotonic()
            if ticket is not None and right and valid and ticket.opened < MAX_TICKET_STREAMS:
                ticket.opened += 1
                ticket.open[sock] = None
                ticket.grant.on_readers(len(ticket.open))
            else:
                ticket = None
                self.refused["ticket"] += 1
        if ticket is None:
            stream.send(REFUSED)
            return None
        try:
            stream.send(proof(token, b"sender", greeting, challenge))
        except BaseException:
            self._leave(sock, ticket)
            raise
        return ticket

    def _leave(self, sock: socket.socket, ticket: _Ticket) -> None:
        """Take a stream off its ticket, which is used up with the last one."""
        with self._lock:
            ticket.open.pop(sock, None)
            if not ticket.open and self._tickets.get(ticket.grant.ticket) is ticket:
                del self._tickets[ticket.grant.ticket]
            ticket.grant.on_readers(len(ticket.open))

    def _answer_all(self, sock: socket.socket, grant: Grant) -> None:
        """Send one bucket after the other, as they are asked for."""
        total_s = max(0.0, grant.expires_at - time.monotonic())
        limits = (grant.expires_at, total_s, "fetch_s", lambda: self._closing)
        asking = Stream(sock, Patience(IDLE_S, "IDLE_S", *limits))
        sending = Stream(sock, Patience(self._stall_s, "fetch_stall_s", *limits))
        staging = self._take_staging(grant.lease.gather.staging_nbytes)
        try:
            while True:
                word, index = REQUEST.unpack(asking.receive(REQUEST.size))
                if word != ASK or index not in grant.lease.gather.buckets:
                    what = f"{word!r} {index} is no request for a bucket of this ticket"
                    raise PeerProtocolError(f"node {grant.receiver}", what, "", REQUEST.size)
                self._send_bucket(sending, grant.lease, index, staging)
        finally:
            with self._lock:
                if staging.nbytes and len(self._staging) < KEPT_STAGING:
                    self._staging.append(staging)

    def _take_staging(self, nbytes: int) -> NDArray[np.uint8]:
        """Return a buffer of at least ``nbytes``, one that was used before if there is one."""
        with self._lock:
            for i, kept in enumerate(self._staging):
                if kept.nbytes >= nbytes > 0:
                    return self._staging.pop(i)
            if len(self._staging) == KEPT_STAGING:
                self._staging.pop(0)  # all of them are too small
        return np.empty(nbytes, dtype=np.uint8)

    def _send_bucket(self, stream: Stream, lease: Lease, index: int, staging: NDArray[np.uint8]) -> None:
        """Send one bucket, or the error why not; a source that changed on the way voids it."""
        headed = False
        try:
            lease.check(index)
            payload, copied = lease.gather.read(index, staging)
            if copied:
                lease.check(index)  # from here on the bytes are ours
            stream.send(HEAD.pack(DATA, index, payload.nbytes))
            headed = True
            digest = xxhash.xxh3_128()
            stream.send(payload.data, digest)
            if not copied:
                lease.check(index)
        except WeightdError as error:
            log.warning("bucket not sent", extra={"facts": {"bucket": index, "error": str(error)}})
            text = pack(error.to_wire(), MAX_ERROR_BYTES, WireError.__name__)
            form = TAIL.pack(FAIL, index, len(text), bytes(16)) if headed else HEAD.pack(FAIL, index, len(text))
            stream.send(form + text)
            return
        stream.send(TAIL.pack(DONE, index, 0, digest.digest()))
        with self._lock:
            self.sent_nbytes += payload.nbytes
