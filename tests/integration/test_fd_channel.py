"""The descriptor socket with real processes: what is refused, what outlives its owner, who notices an end."""

import errno
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from anyio.from_thread import start_blocking_portal

from weightd.core.errors import ConfigError, WeightdError, error_from_wire
from weightd.core.units import RunName
from weightd.core.wire.faults import PeerProtocolError, ProtocolMismatch
from weightd.core.wire.limits import DATAGRAM_FDS
from weightd.daemon.fd_server import FdServer
from weightd.link.faults import DaemonAbsent, HookDeadline, MemoryRefused, PeerGone
from weightd.link.fd_messages import Bind, Denied, Offer, decode_answer, receive_datagram, send_datagram
from weightd.link.fds import FdChannel, PoolKey
from weightd.link.memory import Pool

pytestmark = pytest.mark.processes

RUN = RunName("grpo-7")
KEY = PoolKey(3, 0, 1)


@dataclass
class Shelf:
    """A daemon's part: adopts what is offered, hands it out again, notes who comes and goes."""

    pools: dict[PoolKey, Pool] = field(default_factory=dict)
    bound: dict[int, tuple[int, int]] = field(default_factory=dict)
    closed: list[int] = field(default_factory=list)

    def on_bind(self, run: RunName, session: int, pid: int, uid: int) -> None:
        if run != RUN:
            raise PeerProtocolError(f"pid {pid}", f"no session of run {run}", "$.run", 0)
        self.bound[session] = (pid, uid)

    async def on_offer(self, session: int, key: PoolKey, fd: int, nbytes: int) -> None:
        self.pools[key] = Pool.adopt(fd, nbytes, name=str(key))

    async def on_take(self, session: int, plan_digest: str) -> Mapping[PoolKey, Pool]:
        return self.pools

    def on_closed(self, session: int) -> None:
        self.closed.append(session)


@contextmanager
def serving(
    path: Path, shelf: Shelf, backend: str = "asyncio", allowed: frozenset[int] | None = None
) -> Iterator[FdServer]:
    with (
        start_blocking_portal(backend) as portal,
        portal.wrap_async_context_manager(FdServer(path, shelf, allowed)) as server,
    ):
        task = portal.start_task_soon(server.serve)
        try:
            yield server
        finally:
            task.cancel()
            for pool in shelf.pools.values():
                pool.close()


@pytest.fixture(params=["asyncio", "trio"])
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf()
    with serving(tmp_path / "fd.sock", shelf, request.param):
        yield shelf


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "fd.sock")


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


OWNER = """
import sys, time
from weightd.link.fds import FdChannel, PoolKey
from weightd.link.memory import Pool

pool = Pool.create("trainer 3", 10_000)
pool.bump()
pool.payload[:] = 7
pool.bump()
channel = FdChannel.connect(sys.argv[1], "grpo-7", 42, time.monotonic() + 10)
channel.offer(PoolKey(3, 0, 1), pool, time.monotonic() + 10)
print("offered", pool.fd, flush=True)
sys.stdin.read()
"""


@contextmanager
def owner(path: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline().startswith("offered")
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def test_a_killed_owner_is_noticed_at_once_and_its_bytes_stay_readable(shelf: Shelf, path: str) -> None:
    with owner(path) as process:
        assert {42: (process.pid, os.getuid())} == shelf.bound

        process.send_signal(signal.SIGKILL)
        process.wait()

        assert until(lambda: shelf.closed == [42], 2.0)
        assert np.all(shelf.pools[KEY].payload == 7)
        assert 2 == shelf.pools[KEY].generation
        with FdChannel.connect(path, RUN, 43, soon()) as reader:
            taken = reader.take("", soon())
        assert [KEY] == list(taken)
        assert np.all(taken[KEY].payload == 7)
        taken[KEY].close()


def test_the_owner_cannot_shorten_what_it_offered(shelf: Shelf, path: str) -> None:
    with Pool.create("mine", 5000) as pool, FdChannel.connect(path, RUN, 1, soon()) as channel:
        channel.offer(KEY, pool, soon())

        with pytest.raises(PermissionError) as refused:
            os.ftruncate(pool.fd, 4096)

        assert errno.EPERM == refused.value.errno


def test_a_hook_notices_that_its_daemon_ended(tmp_path: Path, path: str) -> None:
    shelf = Shelf()
    with serving(tmp_path / "fd.sock", shelf):
        channel = FdChannel.connect(path, RUN, 1, soon())
        assert channel.alive()

    assert not channel.alive()
    assert [channel.fileno()] == select.select([channel.fileno()], [], [], 0)[0]
    with pytest.raises(PeerGone):
        channel.take("", soon())
    channel.close()


class Claim:
    """Stands for a pool towards ``offer``: any descriptor with any claimed size."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd, self.nbytes = fd, nbytes


@pytest.mark.parametrize(
    "sealed, size, claimed, why",
    [
        (False, 8192, 8192, "not sealed"),
        (True, 4096, 8192, "size is not the claimed one"),
        (True, 8192, 4096, "size is not the claimed one"),
        (True, 8192, 8192, "no header of weightd"),
    ],
)
def test_a_descriptor_that_could_harm_a_reader_is_refused(
    shelf: Shelf, path: str, sealed: bool, size: int, claimed: int, why: str
) -> None:
    fd = memfd(size, sealed=sealed)
    held = descriptors()
    with FdChannel.connect(path, RUN, 1, soon()) as channel, pytest.raises(MemoryRefused, match=why):
        channel.offer(KEY, Claim(fd, claimed), soon())  # type: ignore[arg-type]
    os.close(fd)

    assert {} == shelf.pools
    assert until(lambda: descriptors() <= held - 1)


def test_a_pipe_is_no_memory(shelf: Shelf, path: str) -> None:
    reading, writing = os.pipe()
    with FdChannel.connect(path, RUN, 1, soon()) as channel, pytest.raises(MemoryRefused, match="no memfd"):
        channel.offer(KEY, Claim(reading, 8192), soon())  # type: ignore[arg-type]
    os.close(reading)
    os.close(writing)


def test_an_empty_pool_passes(shelf: Shelf, path: str) -> None:
    with Pool.create("nothing", 0) as pool, FdChannel.connect(path, RUN, 1, soon()) as channel:
        channel.offer(KEY, pool, soon())
        taken = channel.take("", soon())

    assert 0 == taken[KEY].payload_nbytes
    taken[KEY].close()


def test_more_pools_than_fit_one_message_are_taken(shelf: Shelf, path: str) -> None:
    count = 2 * DATAGRAM_FDS + 1
    with FdChannel.connect(path, RUN, 1, soon()) as channel:
        for region in range(count):
            with Pool.create("mine", region) as pool:
                channel.offer(PoolKey(0, 0, region), pool, soon())

        taken = channel.take("", soon())

    assert [PoolKey(0, 0, region) for region in range(count)] == list(taken)
    assert list(range(count)) == [pool.payload_nbytes for pool in taken.values()]
    assert not any(pool.writable for pool in taken.values())
    for pool in taken.values():
        pool.close()


def test_taken_pools_cannot_be_written(shelf: Shelf, path: str) -> None:
    with Pool.create("mine", 10) as pool, FdChannel.connect(path, RUN, 1, soon()) as channel:
        channel.offer(KEY, pool, soon())
        with channel.take("", soon())[KEY] as taken, pytest.raises(ValueError, match="read-only"):
            taken.payload[0] = 1


def test_a_stranger_run_is_denied_with_the_daemons_words(shelf: Shelf, path: str) -> None:
    with pytest.raises(PeerProtocolError, match="no session of run other"):
        FdChannel.connect(path, RunName("other"), 1, soon())

    assert [] == shelf.closed


def test_another_user_is_refused(tmp_path: Path, path: str) -> None:
    with serving(tmp_path / "fd.sock", Shelf(), allowed=frozenset({12345})) as server:
        with pytest.raises(PeerGone):
            FdChannel.connect(path, RUN, 1, soon())

        assert 1 == server.refused["uid"]


def test_a_socket_left_by_a_killed_daemon_is_replaced_and_a_living_ones_is_not(tmp_path: Path, path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(path)
    with serving(tmp_path / "fd.sock", Shelf()):
        FdChannel.connect(path, RUN, 1, soon()).close()

        with pytest.raises(ConfigError, match="another daemon listens there"), serving(Path(path), Shelf()):
            pass
        FdChannel.connect(path, RUN, 2, soon()).close()
    assert not Path(path).exists()


def test_a_file_in_the_place_of_the_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "fd.sock").write_text("precious")

    with pytest.raises(ConfigError, match="is no socket"), serving(tmp_path / "fd.sock", Shelf()):
        pass

    assert "precious" == (tmp_path / "fd.sock").read_text()


def test_a_path_too_long_is_a_setting_to_correct(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot listen"), serving(tmp_path / ("x" * 120), Shelf()):
        pass


def test_without_a_daemon_the_socket_is_named(path: str) -> None:
    begun = time.monotonic()
    with pytest.raises(DaemonAbsent) as absent:
        FdChannel.connect(path, RUN, 1, soon(0.2))

    assert path == absent.value.path
    assert time.monotonic() - begun < 2


def test_a_silent_daemon_meets_the_deadline(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        with pytest.raises(HookDeadline) as late:
            FdChannel.connect(path, RUN, 1, soon(0.2))

    assert late.value.waited_s == pytest.approx(0.2, abs=0.15)


@contextmanager
def raw(path: str, *, bind: bool = True) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(5)
        sock.connect(path)
        if bind:
            send_datagram(sock, Bind(1, RUN, 9))
            assert receive_datagram(sock, "daemon") is not None
        yield sock


def answer_error(sock: socket.socket) -> WeightdError:
    datagram = receive_datagram(sock, "daemon")
    assert datagram is not None
    answer = decode_answer(datagram, "daemon")
    assert isinstance(answer, Denied)
    return error_from_wire(answer.error)


def test_another_protocol_is_denied_with_both_numbers(shelf: Shelf, path: str) -> None:
    with raw(path, bind=False) as sock:
        send_datagram(sock, Bind(2, RUN, 9))

        error = answer_error(sock)

    assert isinstance(error, ProtocolMismatch)
    assert (2, 1) == (error.theirs, error.ours)


@pytest.mark.parametrize("message", [b"\xc1", b"\x80", b"x" * 20_000], ids=["garbage", "empty map", "oversize"])
def test_a_malformed_datagram_ends_its_connection_alone(shelf: Shelf, path: str, message: bytes) -> None:
    with FdChannel.connect(path, RUN, 1, soon()) as other, raw(path) as sock:
        sock.send(message)

        assert b"" == sock.recv(100)
        assert until(lambda: shelf.closed == [9])
        assert other.alive()


def test_stray_descriptors_are_closed(shelf: Shelf, path: str) -> None:
    fd = memfd(8192, sealed=True)
    held = descriptors()
    with raw(path) as sock:
        send_datagram(sock, Offer(KEY, 8192), [fd, fd])  # one too many

        assert b"" == sock.recv(100)
    with raw(path) as sock:
        send_datagram(sock, Offer(KEY, 8192), [fd] * (DATAGRAM_FDS + 1))  # more than there is room for

        assert b"" == sock.recv(100)
    os.close(fd)

    assert until(lambda: descriptors() <= held - 1)


def memfd(nbytes: int, *, sealed: bool) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
