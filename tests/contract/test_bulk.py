"""One suite over the bulk port: right bytes or a named error, on real sockets over loopback."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from weightd.core.errors import WeightdError
from weightd.core.plan.node_plan import Bucket, Copies, FetchPlan, TrainerSource
from weightd.core.units import Attempt, Boot, NodeId, TrainerRank, Version, VersionKey
from weightd.core.wire.faults import (
    DigestMismatch,
    PeerLost,
    StaleSource,
    TicketRefused,
    TransferCancelled,
    TransferDeadline,
)
from weightd.daemon.bulk.gather import Gather, Lease
from weightd.daemon.bulk.port import BulkClient, BulkServer, FetchJob, FetchResult, Grant, Stop, new_token
from weightd.daemon.bulk.tcp import TcpBulkClient
from weightd.daemon.bulk.tcp_frames import CHALLENGE_BYTES, GREETING, HEAD, MAGIC, PROOF_BYTES, REFUSED, TAIL
from weightd.daemon.bulk.tcp_server import TcpBulkServer
from weightd.link.memory import Pool

pytestmark = pytest.mark.net

KEY = VersionKey(Version(42), Attempt(Boot(0xBEEF), 1))
SENDER, RECEIVER = NodeId("node-a"), NodeId("node-b")
SOURCE = TrainerSource(TrainerRank(3), 0)
RUN_NBYTES, ROWS, COLUMNS = 3_000_001, 300, 700
"""A long odd run that is sent in place, and half of the columns of a matrix, which is packed."""


def plan() -> FetchPlan:
    """Bucket 0 is one run, 1 a column cut of 300 x 700 elements of 2 bytes, 2 another node's, 3 one byte."""
    cut = ROWS * COLUMNS // 2 * 2
    buckets = (
        Bucket(0, SENDER, 0, RUN_NBYTES, 0, 1),
        Bucket(1, SENDER, RUN_NBYTES, cut, 1, 2),
        Bucket(2, NodeId("node-c"), RUN_NBYTES + cut, 64, 2, 3),
        Bucket(3, SENDER, RUN_NBYTES + cut + 64, 1, 3, 4),
    )
    rows = [
        # offset, strides, onto, strides there, extent, itemsize
        (100, (0, 0, 1), 0, (0, 0, 1), (1, 1, RUN_NBYTES), 1),
        (4_000_000, (0, 2 * COLUMNS, 2), RUN_NBYTES, (0, COLUMNS, 2), (1, ROWS, COLUMNS // 2), 2),
        (0, (0, 0, 1), RUN_NBYTES + cut, (0, 0, 1), (1, 1, 64), 1),
        (99, (0, 0, 0), RUN_NBYTES + cut + 64, (0, 0, 0), (1, 1, 1), 1),
    ]
    columns = [np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)]
    zeros = np.zeros(len(rows), dtype=np.int64)
    gather = Copies(zeros, columns[0], columns[1], zeros, columns[2], columns[3], columns[4], columns[5])
    return FetchPlan((SOURCE,), buckets, gather, RUN_NBYTES + cut + 65)


@dataclass
class Pair:
    """A sender with a filled pool, and a receiver's landing."""

    server: BulkServer
    client: BulkClient
    pool: Pool
    landing: NDArray[np.uint8]
    fetch_plan: FetchPlan
    readers: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)

    def grant(self, **changes: object) -> Grant:
        gather = Gather(self.fetch_plan, SENDER, {SOURCE: self.pool})
        lease = Lease(gather, KEY, {SOURCE: self.pool.generation})
        grant = Grant(7, new_token(), RECEIVER, lease, time.monotonic() + 30, self.readers.append)
        grant = replace(grant, **changes)  # type: ignore[arg-type]
        self.server.grant(grant)
        return grant

    def job(self, grant: Grant, **changes: object) -> FetchJob:
        mine = [b for b in self.fetch_plan.buckets if b.source_node == SENDER]
        job = FetchJob(
            sender=SENDER,
            receiver=RECEIVER,
            host="127.0.0.1",
            port=self.server.port,
            ticket=grant.ticket,
            token=grant.token,
            key=KEY,
            buckets=mine,
            of=len(self.fetch_plan.buckets),
            landing=self.landing,
            streams=2,
            deadline_at=time.monotonic() + 20,
            fetch_s=20.0,
            stall_s=5.0,
        )
        return replace(job, **changes)  # type: ignore[arg-type]

    def fetch(self, job: FetchJob, stop: Stop | None = None) -> FetchResult:
        return self.client.fetch(job, stop or Stop(), lambda bucket: self.done.append(bucket.index))

    def expected(self) -> NDArray[np.uint8]:
        out = np.zeros(self.fetch_plan.landing_nbytes, dtype=np.uint8)
        out[:RUN_NBYTES] = self.pool.payload[100 : 100 + RUN_NBYTES]
        matrix = self.pool.payload[4_000_000 : 4_000_000 + 2 * ROWS * COLUMNS].reshape(ROWS, 2 * COLUMNS)
        out[RUN_NBYTES : RUN_NBYTES + ROWS * COLUMNS] = matrix[:, :COLUMNS].ravel()
        out[-1] = self.pool.payload[99]
        return out


@pytest.fixture
def pair() -> Iterator[Pair]:
    server, client = TcpBulkServer("127.0.0.1", 0), TcpBulkClient()
    with Pool.create("trainer 3", 5_000_000) as pool:
        pool.bump()
        pool.payload[:] = np.random.default_rng(5).integers(0, 256, pool.payload_nbytes, dtype=np.uint8)
        pool.bump()
        fetch_plan = plan()
        try:
            yield Pair(server, client, pool, np.zeros(fetch_plan.landing_nbytes, dtype=np.uint8), fetch_plan)
        finally:
            server.close()
    # A stream that has ended by itself takes itself off the server's list as its last act: it may still be ending.
    assert until(lambda: not [t for t in threading.enumerate() if t.name.startswith("bulk")])


@contextmanager
def proxy(port: int, change: Callable[[int, bytearray], bool], *, reset: bool = False) -> Iterator[int]:
    """Pass connections on; ``change(bytes passed so far, next bytes)`` may alter what the sender says.

    False ends the connection before those bytes, in order or by a reset.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    socks: list[socket.socket] = [listener]
    threads: list[threading.Thread] = []

    def pump(source: socket.socket, target: socket.socket, altered: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):  # an end by a reset is passed on, too
            while data := bytearray(source.recv(65_536)):
                if altered and not change(passed, data):
                    break
                target.sendall(data)
                passed += len(data)
        with contextlib.suppress(OSError):
            if altered and reset:
                target.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                target.shutdown(socket.SHUT_RD)  # the other pump lets go of it
                target.close()
            else:
                target.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", port))
                socks.extend((near, far))
                for ends in ((near, far, False), (far, near, True)):
                    threads.append(threading.Thread(target=pump, args=ends))
                    threads[-1].start()

    threads.append(threading.Thread(target=accept))
    threads[-1].start()
    try:
        yield listener.getsockname()[1]
    finally:
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in threads:
            thread.join(2)


HANDSHAKE_NBYTES = CHALLENGE_BYTES + PROOF_BYTES
"""What a sender says before the first bucket."""


def flip(times: int) -> Callable[[int, bytearray], bool]:
    """Flip a bit in the middle of bucket 0 of a stream, as often as it comes, but no more than ``times``."""
    middle = HANDSHAKE_NBYTES + HEAD.size + RUN_NBYTES // 2
    places = [middle + n * (HEAD.size + RUN_NBYTES + TAIL.size) for n in range(times)]

    def change(passed: int, data: bytearray) -> bool:
        for place in places:
            if passed <= place < passed + len(data):
                data[place - passed] ^= 1
        return True

    return change


def until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


@pytest.mark.parametrize("streams", [1, 2, 5])
def test_every_bucket_lands_byte_for_byte(pair: Pair, streams: int) -> None:
    job = pair.job(pair.grant(), streams=streams)

    result = pair.fetch(job)

    assert np.array_equal(pair.expected(), pair.landing)
    assert [0, 1, 3] == sorted(pair.done)
    assert (sum(b.nbytes for b in job.buckets), 0) == (result.nbytes, result.repeated)
    assert result.nbytes == result.wire_nbytes


def test_the_sender_tells_how_many_streams_read(pair: Pair) -> None:
    pair.fetch(pair.job(pair.grant(), streams=2))

    assert until(lambda: pair.readers[-1:] == [0])
    assert 2 == max(pair.readers)


def test_a_ticket_serves_one_fetch(pair: Pair) -> None:
    grant = pair.grant()
    pair.fetch(pair.job(grant))
    assert until(lambda: pair.readers[-1:] == [0])

    with pytest.raises(TicketRefused):
        pair.fetch(pair.job(grant))


@pytest.mark.parametrize("change", [{"token": bytes(32)}, {"ticket": 8}], ids=["wrong secret", "unknown ticket"])
def test_without_the_secret_nothing_is_sent(pair: Pair, change: dict[str, object]) -> None:
    job = pair.job(pair.grant(), **change)

    with pytest.raises(TicketRefused, match="no byte was sent"):
        pair.fetch(job)

    assert not pair.landing.any()


def test_the_sender_asks_for_the_secret_itself(pair: Pair) -> None:
    """A receiver that does not care who it speaks to gets no further."""
    grant = pair.grant()
    with socket.create_connection(("127.0.0.1", pair.server.port)) as sock:
        sock.settimeout(5)
        sock.sendall(GREETING.pack(MAGIC, grant.ticket, bytes(16)))
        challenge = sock.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        sock.sendall(bytes(PROOF_BYTES))

        assert REFUSED == sock.recv(PROOF_BYTES, socket.MSG_WAITALL)
        assert b"" == sock.recv(1)
    assert CHALLENGE_BYTES == len(challenge)
    assert [] == pair.readers


def test_a_receiver_asks_for_the_secret_as_well(pair: Pair) -> None:
    """Whoever took the sender's address cannot make a landing of its own bytes."""

    def impostor(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            sock.recv(GREETING.size, socket.MSG_WAITALL)
            sock.sendall(bytes(CHALLENGE_BYTES))
            sock.recv(PROOF_BYTES, socket.MSG_WAITALL)
            sock.sendall(b"w" * PROOF_BYTES)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=impostor, args=(listener,))
        thread.start()
        with pytest.raises(TicketRefused):
            pair.fetch(pair.job(pair.grant(), port=listener.getsockname()[1], streams=1))
        thread.join(5)


def test_an_expired_ticket_is_refused(pair: Pair) -> None:
    grant = pair.grant(expires_at=time.monotonic() + 0.05)
    time.sleep(0.1)

    with pytest.raises(TicketRefused):
        pair.fetch(pair.job(grant))


def test_a_flipped_bit_is_noticed_and_the_bucket_asked_for_again(pair: Pair) -> None:
    job = pair.job(pair.grant(), streams=1, buckets=pair.fetch_plan.buckets[:1])
    with proxy(pair.server.port, flip(times=1)) as port:
        result = pair.fetch(replace(job, port=port))

    assert np.array_equal(pair.expected()[:RUN_NBYTES], pair.landing[:RUN_NBYTES])
    assert (RUN_NBYTES, 2 * RUN_NBYTES, 1) == (result.nbytes, result.wire_nbytes, result.repeated)
    assert [0] == pair.done


def test_a_bit_that_is_flipped_twice_fails_with_both_digests(pair: Pair) -> None:
    job = pair.job(pair.grant(), streams=1, buckets=pair.fetch_plan.buckets[:1])
    with proxy(pair.server.port, flip(times=2)) as port, pytest.raises(DigestMismatch) as wrong:
        pair.fetch(replace(job, port=port))

    error = wrong.value
    assert (0, 4, RUN_NBYTES, SENDER, RECEIVER) == (error.bucket, error.of, error.nbytes, error.sender, error.receiver)
    assert error.sent != error.received
    assert [] == pair.done


@pytest.mark.parametrize("reset, why", [(False, "closed"), (True, "reset")])
def test_a_truncated_stream_names_what_was_there(pair: Pair, reset: bool, why: str) -> None:
    def change(passed: int, data: bytearray) -> bool:
        return passed + len(data) < HANDSHAKE_NBYTES + HEAD.size + RUN_NBYTES // 2

    job = pair.job(pair.grant(), streams=1)
    with proxy(pair.server.port, change, reset=reset) as port, pytest.raises(PeerLost, match=why) as lost:
        pair.fetch(replace(job, port=port))

    assert (0, 3, 0) == (lost.value.done_buckets, lost.value.buckets, lost.value.done_nbytes)
    assert sum(b.nbytes for b in job.buckets) == lost.value.nbytes


@pytest.mark.parametrize("ending", ["close", "revoke"])
def test_a_sender_that_ends_is_lost_at_once(pair: Pair, ending: str) -> None:
    grant = pair.grant()
    ends: dict[str, Callable[[], None]] = {
        "close": pair.server.close,
        "revoke": partial(pair.server.revoke, grant.ticket),
    }
    ended: list[float] = []

    def change(passed: int, _data: bytearray) -> bool:
        if passed > 500_000 and not ended:
            ended.append(time.monotonic())
            ends[ending]()
        return True

    with proxy(pair.server.port, change) as port, pytest.raises(PeerLost):
        pair.fetch(pair.job(grant, port=port, streams=1))

    assert time.monotonic() - ended[0] < 2.0


def test_nobody_listening_is_a_lost_peer(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    with pytest.raises(PeerLost, match="refused"):
        pair.fetch(pair.job(pair.grant(), port=port))


@contextmanager
def stalling(pair: Pair) -> Iterator[int]:
    """Connections that pass the handshake and 1 MB, then nothing for a while."""
    freed = threading.Event()

    def change(passed: int, _data: bytearray) -> bool:
        return passed < 1_000_000 or freed.wait(10)

    with proxy(pair.server.port, change) as port:
        try:
            yield port
        finally:
            freed.set()


def test_a_stall_meets_its_deadline_and_names_the_bucket(pair: Pair) -> None:
    job = pair.job(pair.grant(), streams=1, stall_s=0.5)
    with stalling(pair) as port, pytest.raises(TransferDeadline) as late:
        pair.fetch(replace(job, port=port))

    assert "fetch_stall_s" == late.value.setting
    assert 0.5 == pytest.approx(late.value.waited_s, abs=0.4)
    assert 0 == late.value.bucket


def test_a_slow_fetch_meets_its_own_deadline(pair: Pair) -> None:
    job = pair.job(pair.grant(), streams=1, deadline_at=time.monotonic() + 0.6, fetch_s=0.6)
    with stalling(pair) as port, pytest.raises(TransferDeadline) as late:
        pair.fetch(replace(job, port=port))

    assert "fetch_s" == late.value.setting


def test_a_stop_ends_a_stalled_fetch_at_once(pair: Pair) -> None:
    stop = Stop()
    with stalling(pair) as port:
        threading.Timer(0.2, stop.set).start()
        begun = time.monotonic()
        with pytest.raises(TransferCancelled):
            pair.fetch(pair.job(pair.grant(), port=port), stop)

    assert time.monotonic() - begun < 1.5


def test_a_stop_before_the_start_fetches_nothing(pair: Pair) -> None:
    stop = Stop()
    stop.set()

    with pytest.raises(TransferCancelled):
        pair.fetch(pair.job(pair.grant()), stop)

    assert not pair.landing.any()


def test_a_source_that_was_overwritten_before_is_refused(pair: Pair) -> None:
    grant = pair.grant()
    pair.pool.bump()
    pair.pool.bump()

    with pytest.raises(StaleSource) as stale:
        pair.fetch(pair.job(grant, streams=1))

    assert (2, 4, "trainer 3 region 0") == (stale.value.expected, stale.value.found, stale.value.source)
    assert [] == pair.done
    assert not pair.landing.any()


class OverwrittenMeanwhile(Gather):
    """Views whose trainer begins to write as soon as a bucket is being read."""

    def read(self, index: int, staging: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], bool]:
        found = super().read(index, staging)
        for pool in self._pools.values():
            pool.bump()
        return found


@pytest.mark.parametrize("index", [0, 1], ids=["sent in place", "packed"])
def test_a_source_that_is_overwritten_meanwhile_counts_no_byte(pair: Pair, index: int) -> None:
    gather = OverwrittenMeanwhile(pair.fetch_plan, SENDER, {SOURCE: pair.pool})
    grant = pair.grant(lease=Lease(gather, KEY, {SOURCE: pair.pool.generation}))
    job = pair.job(grant, streams=1, buckets=pair.fetch_plan.buckets[index : index + 1])

    with pytest.raises(StaleSource, match="being written"):
        pair.fetch(job)

    assert [] == pair.done


def test_a_source_that_was_closed_is_stale(pair: Pair) -> None:
    grant = pair.grant()
    pair.pool.close()

    with pytest.raises(StaleSource, match="closed"):
        pair.fetch(pair.job(grant, streams=1))


def test_a_bucket_of_another_node_is_not_served(pair: Pair) -> None:
    job = pair.job(pair.grant(), streams=1, buckets=pair.fetch_plan.buckets[2:3])

    with pytest.raises(WeightdError):
        pair.fetch(job)


def test_a_fetch_of_nothing_needs_no_peer(pair: Pair) -> None:
    result = pair.fetch(pair.job(pair.grant(), port=1, buckets=()))

    assert (0, 0) == (result.nbytes, result.wire_nbytes)


def test_a_stranger_is_told_nothing(pair: Pair) -> None:
    with socket.create_connection(("127.0.0.1", pair.server.port)) as sock:
        sock.settimeout(5)
        sock.sendall(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n")
        try:
            said = sock.recv(100)
        except ConnectionResetError:
            said = b""

    assert b"" == said
