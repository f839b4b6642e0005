"""Fetches buckets over raw TCP streams, straight into the landing's mapping.

Each stream is a thread: it takes the next bucket of the job, asks for one more ahead,
receives into place, and compares digests.  The first error of any stream ends all of
them, and is the one that is raised.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import xxhash

from weightd.core.errors import WeightdError, WireError, error_from_wire
from weightd.core.wire.codec import unpack
from weightd.core.wire.faults import (
    DigestMismatch,
    PeerLost,
    PeerProtocolError,
    TicketRefused,
    TransferCancelled,
    TransferDeadline,
)
from weightd.daemon.bulk.port import FetchJob, FetchResult, Stop
from weightd.daemon.bulk.tcp_frames import (
    ASK,
    CONNECT_S,
    DATA,
    DONE,
    FAIL,
    HEAD,
    MAX_ERROR_BYTES,
    REQUEST,
    TAIL,
    Ended,
    Overdue,
    Patience,
    Stopped,
    Stream,
    greet,
    shut,
)
from weightd.daemon.workers import working

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightd.core.plan.node_plan import Bucket

AHEAD = 2
"""Buckets asked for at once on a stream: the sender packs the next one while this one is on its way."""

TRIES = 2
"""Times that a bucket is asked for until its digest is right: a flipped bit is rare, two are no accident."""


class TcpBulkClient:
    """Fetches over TCP (``port.BulkClient``)."""

    def fetch(self, job: FetchJob, stop: Stop, on_bucket: Callable[[Bucket], None]) -> FetchResult:
        """Fetch all buckets of a job; blocks until all are there or it failed.

        Args:
            job: What and from whom.
            stop: Ends it early.
            on_bucket: Told each bucket that landed and was checked, one at a time, from worker threads.

        Raises:
            PeerLost: A stream ended early, or could not be connected.
            DigestMismatch: A bucket arrived wrong twice.
            StaleSource: The sender does not hold the version any more.
            TransferDeadline: Bytes did not come in time.
            TicketRefused: The sender does not know the ticket.
            TransferCancelled: ``stop`` was set.
            PeerProtocolError: The sender does not keep to the protocol.
        """
        return _Fetch(job, stop, on_bucket).run()


@dataclass
class _Fetch:
    """One fetch while it runs."""

    job: FetchJob
    stop: Stop
    on_bucket: Callable[[Bucket], None]
    waiting: deque[Bucket] = field(init=False)
    own_stop: Stop = field(default_factory=Stop)
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: bool = False
    error: WeightdError | None = None
    done_buckets: int = 0
    done_nbytes: int = 0
    wire_nbytes: int = 0
    tries: Counter[int] = field(default_factory=Counter)

    def run(self) -> FetchResult:
        begun = time.monotonic()
        self.waiting = deque(self.job.buckets)
        self.stop.on_set(self.own_stop.set)
        streams: list[Stream] = []
        try:
            # All are connected before the first asks: a ticket ends when the last of its streams does.
            for _ in range(min(self.job.streams, len(self.job.buckets))):
                streams.append(self._connect())  # noqa: PERF401 - closed where one fails
            self._receive_all(streams)
        finally:
            for stream in streams:
                stream.sock.close()
        if self.error is not None:
            raise self.error
        repeated = sum(n - 1 for n in self.tries.values())
        return FetchResult(self.done_nbytes, self.wire_nbytes, repeated, time.monotonic() - begun)

    def _receive_all(self, streams: list[Stream]) -> None:
        """Run every stream in a thread, the last of them in this one."""
        threads = [
            threading.Thread(target=self._receive_on, args=(s,), name="bulk-fetch", daemon=True) for s in streams[:-1]
        ]
        for thread in threads:
            thread.start()
        if streams:
            self._receive_on(streams[-1])
        for thread in threads:
            thread.join()

    def _connect(self) -> Stream:
        """Return a stream that the sender has admitted."""
        job = self.job
        begun = time.monotonic()
        sock = socket.socket(socket.AF_INET6 if ":" in job.host else socket.AF_INET, socket.SOCK_STREAM)
        self.own_stop.on_set(partial(shut, sock))
        try:
            return self._introduce(sock)
        except BaseException as error:
            sock.close()
            if isinstance(error, TimeoutError):
                limit_s = max(0.0, min(CONNECT_S, job.deadline_at - begun))
                raise self._late("connecting", -1, Overdue(time.monotonic() - begun, limit_s, "fetch_s")) from error
            if isinstance(error, Overdue):
                raise self._late("the proof of the ticket", -1, error) from error
            if isinstance(error, OSError | Ended | Stopped):
                raise self._lost(error) from error
            raise

    def _introduce(self, sock: socket.socket) -> Stream:
        """Connect, prove the ticket, and return the stream."""
        job = self.job
        if self._ended():
            raise Stopped
        sock.settimeout(max(0.001, min(CONNECT_S, job.deadline_at - time.monotonic())))
        sock.connect((job.host, job.port))
        limits = (job.deadline_at, job.fetch_s, "fetch_s", self._ended)
        if not greet(Stream(sock, Patience(CONNECT_S, "CONNECT_S", *limits)), job.ticket, job.token):
            raise TicketRefused(job.sender, job.ticket, "it is unknown, used up, expired, or has another secret")
        return Stream(sock, Patience(job.stall_s, "fetch_stall_s", *limits))

    def _receive_on(self, stream: Stream) -> None:
        """Receive buckets on one stream until none is left or the fetch is over."""
        with working(f"fetching from node {self.job.sender}"):
            self._receive_until_over(stream)

    def _receive_until_over(self, stream: Stream) -> None:
        asked: deque[Bucket] = deque()
        try:
            while True:
                while len(asked) < AHEAD and (bucket := self._next()) is not None:
                    stream.send(REQUEST.pack(ASK, bucket.index))
                    asked.append(bucket)
                if not asked:
                    return
                self._receive_bucket(stream, asked[0])
                asked.popleft()
        except WeightdError as error:
            self._fail(error)
        except Overdue as late:
            self._fail(self._late("the next byte", self._at(asked), late))
        except (Ended, Stopped) as end:
            self._fail(self._lost(end))

    def _receive_bucket(self, stream: Stream, bucket: Bucket) -> None:
        """Receive one bucket into place and compare its digest."""
        job = self.job
        kind, index, nbytes = HEAD.unpack(stream.receive(HEAD.size))
        self._check_form(kind in (DATA, FAIL) and index == bucket.index, kind, index, bucket)
        if kind == FAIL:
            raise self._told(stream, nbytes)
        self._check_form(nbytes == bucket.nbytes, kind, index, bucket)
        target = job.landing.data[bucket.landing_offset : bucket.landing_offset + bucket.nbytes]
        digest = xxhash.xxh3_128()
        stream.receive_into(target, digest)
        kind, index, nbytes, sent = TAIL.unpack(stream.receive(TAIL.size))
        self._check_form(kind in (DONE, FAIL) and index == bucket.index, kind, index, bucket)
        if kind == FAIL:
            raise self._told(stream, nbytes)
        self._judge(bucket, sent, digest.digest())

    def _judge(self, bucket: Bucket, sent: bytes, received: bytes) -> None:
        """Count a bucket that is right, ask again for one that is not."""
        job = self.job
        with self.lock:
            self.wire_nbytes += bucket.nbytes
            self.tries[bucket.index] += 1
            if sent == received:
                if not self.over:
                    self.done_buckets += 1
                    self.done_nbytes += bucket.nbytes
                    self.on_bucket(bucket)
                return
            if self.tries[bucket.index] < TRIES:
                self.waiting.appendleft(bucket)
                return
        raise DigestMismatch(
            bucket.index, job.of, str(job.key), job.sender, job.receiver, sent.hex(), received.hex(), bucket.nbytes
        )

    def _next(self) -> Bucket | None:
        with self.lock:
            return self.waiting.popleft() if self.waiting and not self.over else None

    def _ended(self) -> bool:
        return self.own_stop.is_set

    def _fail(self, error: WeightdError) -> None:
        """Note the first error and end the other streams."""
        with self.lock:
            if self.over:
                return
            self.over, self.error = True, error
        self.own_stop.set()

    def _check_form(self, right: bool, kind: bytes, index: int, bucket: Bucket) -> None:
        if not right:
            what = f"{kind!r} {index} where bucket {bucket.index} of {bucket.nbytes:,} bytes was due"
            raise PeerProtocolError(f"node {self.job.sender}", what, "", HEAD.size)

    def _told(self, stream: Stream, nbytes: int) -> WeightdError:
        """Return the error that the sender tells."""
        who = f"node {self.job.sender}"
        if nbytes > MAX_ERROR_BYTES:
            return PeerProtocolError(who, f"an error larger than {MAX_ERROR_BYTES:,} bytes", "", nbytes)
        return error_from_wire(unpack(stream.receive(nbytes), WireError, MAX_ERROR_BYTES, who))

    def _lost(self, end: BaseException) -> PeerLost | TransferCancelled:
        job = self.job
        if self.stop.is_set:
            return TransferCancelled(job.sender, str(job.key))
        total = sum(b.nbytes for b in job.buckets)
        why = end.strerror or str(end) if isinstance(end, OSError) else str(end)
        done = (self.done_buckets, len(job.buckets), self.done_nbytes, total)
        return PeerLost(job.sender, job.receiver, str(job.key), *done, why)

    def _late(self, doing: str, bucket: int, late: Overdue) -> TransferDeadline:
        job = self.job
        waits = (late.waited_s, late.limit_s, late.setting)
        return TransferDeadline(job.sender, job.receiver, str(job.key), bucket, doing, *waits)

    def _at(self, asked: deque[Bucket]) -> int:
        """Return the first bucket that is not there, for a text."""
        return asked[0].index if asked else -1
