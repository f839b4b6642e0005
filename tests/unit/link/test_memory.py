"""Sealed pools within one process: made, checked, mapped, given back; with errors that name the limit."""

import errno
import fcntl
import mmap
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from tests.fakes.forked import in_child
from weightd.link.faults import MemoryExhausted, MemoryRefused
from weightd.link.header import HEADER_BYTES
from weightd.link.memory import SEALS, Pool


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def nothing_left_open() -> Iterator[None]:
    before = descriptors()
    yield
    assert before == descriptors()


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 1_000_000])
def test_a_pool_is_written_and_read_elsewhere(nbytes: int) -> None:
    with nothing_left_open(), Pool.create("trainer 3", nbytes) as pool:
        pool.bump()
        pool.payload[:] = np.arange(nbytes, dtype=np.uint64).astype(np.uint8)
        pool.bump()
        with Pool.adopt(os.dup(pool.fd), pool.nbytes) as other:
            assert np.array_equal(pool.payload, other.payload)
            assert (nbytes, 2) == (other.payload_nbytes, other.generation)


def test_a_pool_is_sealed_and_closed_on_exec() -> None:
    with Pool.create("trainer 3", 10) as pool:
        assert SEALS == fcntl.fcntl(pool.fd, fcntl.F_GET_SEALS) & SEALS
        assert not os.get_inheritable(pool.fd)
        for nbytes in (0, 2 * pool.nbytes):
            with pytest.raises(PermissionError):
                os.ftruncate(pool.fd, nbytes)


def test_the_payload_begins_at_a_page() -> None:
    with Pool.create("trainer 3", 10) as pool:
        assert 0 == pool.payload.ctypes.data % HEADER_BYTES


def test_every_page_is_there_before_the_first_copy() -> None:
    with Pool.create("trainer 3", 1 << 20) as pool:
        assert pool.nbytes == 512 * os.fstat(pool.fd).st_blocks


def test_a_pool_without_pages_costs_one_until_it_is_reserved() -> None:
    with nothing_left_open(), Pool.create("trainer 3", 1 << 20, reserve=False) as pool:
        assert pages(pool) == 1
        with Pool.adopt(os.dup(pool.fd), pool.nbytes) as other:
            assert (pages(pool), other.payload_nbytes, other.generation) == (1, 1 << 20, 0)
            pool.reserve()
            assert pages(pool) == pool.nbytes // HEADER_BYTES
            pool.payload[:] = 7
            pool.reserve()
            assert other.payload.min() == 7


def pages(pool: Pool) -> int:
    return os.fstat(pool.fd).st_blocks * 512 // HEADER_BYTES


def test_memory_that_is_not_there_when_it_is_reserved_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pool.create("trainer 3", 1 << 20, reserve=False) as pool:
        monkeypatch.setattr("weightd.link.memory.available_nbytes", lambda: 4096)
        with pytest.raises(MemoryExhausted, match=r"4\.0 KiB are available"):
            pool.reserve()

        assert pages(pool) == 1


def test_an_adopted_pool_is_read_only_unless_asked_for() -> None:
    with Pool.create("landing", 10) as pool:
        with Pool.adopt(os.dup(pool.fd), pool.nbytes) as reader:
            with pytest.raises(ValueError, match="read-only"):
                reader.payload[0] = 1
            with pytest.raises(ValueError, match="read-only"):
                reader.bump()
        with Pool.adopt(os.dup(pool.fd), pool.nbytes, writable=True) as writer:
            writer.payload[0] = 7
        assert 7 == pool.payload[0]


def memfd(nbytes: int, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize(
    "seals, missing",
    [
        (0, "F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_SEAL"),
        (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL, "F_SEAL_GROW"),
        (fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL, "F_SEAL_SHRINK"),
        (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW, "F_SEAL_SEAL"),
    ],
)
def test_each_seal_is_needed(seals: int, missing: str) -> None:
    with nothing_left_open(), pytest.raises(MemoryRefused) as refused:
        Pool.adopt(memfd(8192, seals), 8192, name="trainer 3")

    assert f"it is not sealed: {missing} missing" == refused.value.why
    assert "trainer 3" == refused.value.name


@pytest.mark.parametrize(
    "size, claimed, why",
    [
        (8192, 4096, "its size is not the claimed one"),
        (4096, 8192, "its size is not the claimed one"),
        (0, 0, "no multiple of 4096"),
        (5000, 5000, "no multiple of 4096"),
        (8192, 8192, "no header of weightd"),
    ],
)
def test_size_and_header_must_be_right(size: int, claimed: int, why: str) -> None:
    with nothing_left_open(), pytest.raises(MemoryRefused, match=why) as refused:
        Pool.adopt(memfd(size, SEALS), claimed)

    assert (claimed, size) == (refused.value.claimed_nbytes, refused.value.found_nbytes)


def test_nothing_is_mapped_before_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("mapped")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(MemoryRefused):
        Pool.adopt(memfd(8192, 0), 8192)


def test_a_file_is_no_memory(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "file")
    with open(path, "wb") as file:
        file.write(bytes(8192))
    with nothing_left_open(), pytest.raises(MemoryRefused):
        Pool.adopt(os.open(path, os.O_RDWR), 8192)


def test_a_directory_and_a_device_are_no_memory() -> None:
    for path in ("/dev/null", "/"):
        with nothing_left_open(), pytest.raises(MemoryRefused, match="no memfd"):
            Pool.adopt(os.open(path, os.O_RDONLY), 8192)


def test_closing_twice_is_harmless_and_views_outlive_it() -> None:
    with nothing_left_open():
        pool = Pool.create("trainer 3", 10)
        view = pool.payload[2:]
        view[0] = 5
        pool.close()
        pool.close()
        assert pool.closed
        assert 5 == view[0]
        del view
    for access in ("payload", "header", "generation"):
        with pytest.raises(ValueError, match="trainer 3 is closed"):
            getattr(pool, access)


def test_more_memory_than_there_is_is_refused_before_anything_is_reserved() -> None:
    with nothing_left_open(), pytest.raises(MemoryExhausted, match="are available on this host"):
        Pool.create("trainer 3", 1 << 50)


@pytest.mark.parametrize("number, hint", [(errno.ENOSPC, "memory limit"), (errno.ENOMEM, "memory limit")])
def test_a_full_host_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch, number: int, hint: str) -> None:
    def full(*_args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with nothing_left_open(), pytest.raises(MemoryExhausted) as exhausted:
        Pool.create("trainer 3", 10)

    assert ("reserving the pages", os.strerror(number)) == (exhausted.value.doing, exhausted.value.why)
    assert hint in exhausted.value.hint


def test_too_few_descriptors_are_said_with_the_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        with pytest.raises(MemoryExhausted, match="ulimit -n"):
            Pool.create("trainer 3", 10)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))
        with pytest.raises(MemoryExhausted, match="mapping: Too many open files"):
            Pool.create("trainer 3", 10)  # one for the memfd, none for its mapping
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("writable", [True, False])
def test_an_old_kernel_has_every_page_touched(monkeypatch: pytest.MonkeyPatch, writable: bool) -> None:
    class OldKernel(mmap.mmap):
        def madvise(self, *_args: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", OldKernel)
    with Pool.create("trainer 3", 10_000) as pool:
        pool.payload[-1] = 3
        with Pool.adopt(os.dup(pool.fd), pool.nbytes, writable=writable) as other:
            assert 3 == other.payload[-1]


@pytest.mark.parametrize("inherited", [False, True])
def test_what_a_forked_child_writes_stays_in_the_child(inherited: bool) -> None:
    with Pool.create("trainer 3", 10_000, inherited=inherited) as pool:
        view = pool.payload
        view[:] = 7

        def write() -> tuple[bool, int, int]:
            found = int(view.sum())
            view[:] = 9
            return pool.closed, found, int(view.sum())

        assert in_child(write) == (True, 70_000 if inherited else 0, 90_000)
        assert view.sum() == 70_000
        assert not pool.closed


def test_a_forked_child_holds_no_memory_of_a_pool_that_it_only_reads() -> None:
    with Pool.create("trainer 3", 10_000) as pool, Pool.adopt(os.dup(pool.fd), pool.nbytes) as other:
        view, name = other.payload, f"memfd:weightd:{pool.name}"

        def look() -> tuple[bool, int]:
            with open("/proc/self/maps", encoding="ascii") as maps:
                return name in maps.read(), int(view.sum())

        pool.payload[:] = 7
        assert look() == (True, 70_000)
        assert in_child(look) == (False, 0)
