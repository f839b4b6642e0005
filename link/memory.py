"""Sealed shared memory: made once, faulted in once, mapped once by everybody who reads it.

A pool is a memfd.  It lives as long as its last holder and needs no name, so a
killed process leaks nothing and takes nothing away.  Its size is sealed: an
unsealed one could be shortened under a reader, which the kernel answers with
SIGBUS, so whoever receives a descriptor checks seals and size *before* it maps.

A forked child takes no part: its own mapping is dropped, or becomes its own where parameters lie in it (``forks``).

Ordering.  Readers learn of a finished write by a message, never by watching the
generation; the generation only reveals a write that should not have happened.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from typing import TYPE_CHECKING, Self

import numpy as np

from weightd.core.errors import binary_size
from weightd.link.available import available_nbytes
from weightd.link.faults import MemoryExhausted, MemoryRefused
from weightd.link.forks import in_child, replace_mapping
from weightd.link.header import HEADER_BYTES, Description, Header, pool_nbytes

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Size fixed for good, and no further seal: F_SEAL_WRITE from another holder would stop the producer."""

_POPULATE_READ = 22
_POPULATE_WRITE = 23
"""MADV_POPULATE_READ and _WRITE of Linux 5.14; the mmap module of Python 3.11 has no names for them."""

_FAULT_STEP_BYTES = 16 << 20
"""Faulted in at once: some ten milliseconds, which an event loop beside it can wait."""

_BLOCK_BYTES = 512
"""Unit of st_blocks (stat(2)), whatever the file system's own."""

_HINTS = {
    errno.EMFILE: "raise this process's limit of open files (ulimit -n); a mapped pool takes two",
    errno.ENFILE: "raise the host's limit of open files (fs.file-max)",
    errno.ENOSPC: "free memory on this host, or raise the memory limit of its container or service",
    errno.ENOMEM: "free memory on this host, or raise the memory limit of its container or service",
}


class Pool:
    """One sealed memfd and its mapping in this process.

    Made by ``create`` (its producer) or ``adopt`` (whoever got its descriptor).

    Attributes:
        name: For texts: ``trainer 3 slot 0 region 1``.
        fd: The descriptor, owned by the pool.
        nbytes: Size of the whole memfd, header page included.
        payload_nbytes: Size of what it carries.
        writable: Whether this mapping may write.
        inherited: Whether a forked child keeps the bytes, as its own.
    """

    def __init__(self, name: str, fd: int, mapping: mmap.mmap, *, writable: bool, inherited: bool = False) -> None:
        self.name = name
        self.fd = fd
        self.nbytes = len(mapping)
        self.writable = writable
        self.inherited = inherited
        self._mapping: mmap.mmap | None = mapping
        whole = np.frombuffer(mapping, dtype=np.uint8)
        self._header: Header | None = Header(whole)
        self.payload_nbytes = self._header.payload_nbytes
        self._payload: NDArray[np.uint8] | None = whole[HEADER_BYTES : HEADER_BYTES + self.payload_nbytes]
        self._address = int(whole.ctypes.data)
        in_child(self, Pool._leave_to_parent)

    @classmethod
    def create(cls, name: str, payload_nbytes: int, *, reserve: bool = True, inherited: bool = False) -> Self:
        """Make a pool of zeros whose pages are all there.

        Args:
            name: For texts, and for ``/proc/<pid>/maps``.
            payload_nbytes: Bytes that it is to carry; 0 is legal.
            reserve: Whether its pages are taken now.  Without them it costs nothing but its header's page until
                ``reserve()``, and nobody may touch it before.
            inherited: Whether a forked child goes on reading it, and writes pages of its own: memory that tensors
                lie in.  Any other pool is zeros there, and pins no memory.

        Raises:
            MemoryExhausted: The system gives no memory or no descriptor; nothing is left behind.
        """
        nbytes = pool_nbytes(payload_nbytes)
        doing, fd, mapping = "memfd_create", -1, None
        try:
            # Naming any flag drops Python's default of close-on-exec, so it is named as well.
            fd = os.memfd_create(_short(name), os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
            doing = "setting the size"
            os.ftruncate(fd, nbytes)
            doing = "reserving the pages"
            if reserve:
                _take_pages(name, fd, nbytes)
            doing = "mapping"
            mapping = mmap.mmap(fd, nbytes)
            if reserve:
                _fault_in(mapping, writable=True)
            Header(np.frombuffer(mapping, dtype=np.uint8)).initialise(payload_nbytes)
            doing = "sealing"
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except (OSError, MemoryExhausted) as error:
            _drop(fd, mapping)
            if isinstance(error, OSError):
                raise _exhausted(name, nbytes, doing, error) from error
            raise
        return cls(name, fd, mapping, writable=True, inherited=inherited)

    @classmethod
    def adopt(
        cls, fd: int, nbytes: int, *, name: str = "memory", writable: bool = False, populate: bool = True
    ) -> Self:
        """Map a pool that another process made, after checking that it cannot harm a reader.

        Args:
            fd: Its descriptor; owned from here on, and closed if it is refused.
            nbytes: Size of the whole memfd, as its owner claims.
            name: For texts.
            writable: Map it for writing: only for this daemon's own landings after a restart.
            populate: Fault its pages in now, so that no version pays for it; those that its owner reserved.

        Raises:
            MemoryRefused: It is no memfd, lacks a seal, has another size, or no valid header.
            MemoryExhausted: It cannot be mapped.
        """
        mapping = None
        try:
            _check_descriptor(fd, nbytes, name)
            access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=access)
            _check_header(mapping, nbytes, name)
            if populate and _reserved(fd, nbytes):
                _fault_in(mapping, writable=writable)
        except (OSError, MemoryRefused) as error:
            _drop(fd, mapping)
            if isinstance(error, OSError):
                raise _exhausted(name, nbytes, "mapping", error) from error
            raise
        return cls(name, fd, mapping, writable=writable)

    def reserve(self) -> None:
        """Take the pages of a pool that was made without them; harmless when done twice.

        Raises:
            MemoryExhausted: The system does not give them; the pool stays as it is.
        """
        mapping = self._mapping
        if mapping is None or _reserved(self.fd, self.nbytes):
            return
        try:
            _take_pages(self.name, self.fd, self.nbytes)
            _fault_in(mapping, writable=True)
        except OSError as error:
            raise _exhausted(self.name, self.nbytes, "reserving the pages", error) from error

    @property
    def header(self) -> Header:
        """Its first page."""
        header = self._header
        if header is None:
            raise ValueError(f"{self.name} is closed")
        return header

    @property
    def payload(self) -> NDArray[np.uint8]:
        """The bytes it carries; read-only where the pool is."""
        payload = self._payload
        if payload is None:
            raise ValueError(f"{self.name} is closed")
        return payload

    @property
    def generation(self) -> int:
        """Counter of writes in shared memory: odd while one is under way."""
        return self.header.generation

    def bump(self) -> int:
        """Count one in shared memory, before the first byte of a write and after the last."""
        return self.header.bump()

    @property
    def description(self) -> Description:
        """What a landing says it holds."""
        return self.header.description

    @property
    def closed(self) -> bool:
        """Whether the descriptor was given back."""
        return self.fd < 0

    def close(self) -> None:
        """Give the descriptor and the mapping back; harmless when done twice.

        Views of the payload that are still in use keep the mapping alive until they go.
        """
        if self.closed:
            return
        fd, self.fd, mapping = self.fd, -1, self._mapping
        self._payload = self._header = self._mapping = None
        os.close(fd)
        if mapping is not None:
            with contextlib.suppress(BufferError):  # somebody still has a view: the last one unmaps
                mapping.close()

    def _leave_to_parent(self) -> None:
        """Be closed in a child that was just forked; what its views show is no longer the parent's."""
        if not self.closed:
            replace_mapping(self._address, self.nbytes, self.fd if self.inherited else None, writable=self.writable)
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"fd {self.fd}"
        return f"<Pool {self.name!r} {self.payload_nbytes:,} bytes, {state}>"


def _check_descriptor(fd: int, nbytes: int, name: str) -> None:
    """Refuse what must not be mapped."""
    found = -1
    try:
        status = os.fstat(fd)
        found = status.st_size if stat.S_ISREG(status.st_mode) else -1
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        # EINVAL: a file that knows no seals; a socket or a pipe comes here, too.
        raise MemoryRefused(name, nbytes, found, "it is no memfd") from error
    if seals & SEALS != SEALS:
        lacking = [seal for seal in ("SHRINK", "GROW", "SEAL") if not seals & getattr(fcntl, f"F_SEAL_{seal}")]
        raise MemoryRefused(name, nbytes, found, f"it is not sealed: F_SEAL_{', F_SEAL_'.join(lacking)} missing")
    if found != nbytes:
        raise MemoryRefused(name, nbytes, found, "its size is not the claimed one")
    if nbytes < HEADER_BYTES or nbytes % HEADER_BYTES:
        raise MemoryRefused(name, nbytes, found, f"its size is no multiple of {HEADER_BYTES}")


def _check_header(mapping: mmap.mmap, nbytes: int, name: str) -> None:
    """Refuse a mapping whose first page is not that of a pool of its size."""
    fault = Header(np.frombuffer(mapping, dtype=np.uint8)).fault(nbytes)
    if fault:
        raise MemoryRefused(name, nbytes, nbytes, fault)


def _take_pages(name: str, fd: int, nbytes: int) -> None:
    """Reserve every page: here a full file system is an error, at the first touch it would be a SIGBUS."""
    _check_room(name, nbytes)
    os.posix_fallocate(fd, 0, nbytes)


def _reserved(fd: int, nbytes: int) -> bool:
    """Whether every page of a memfd is there; reading one that is not would take it."""
    return os.fstat(fd).st_blocks * _BLOCK_BYTES >= nbytes


def _check_room(name: str, nbytes: int) -> None:
    """Refuse what the host cannot give, before the kernel ends some process for it."""
    room = available_nbytes()
    if room is not None and nbytes > room:
        why = f"{binary_size(room)} are available on this host and in this control group"
        raise MemoryExhausted(name, nbytes, "reserving the pages", why, _HINTS[errno.ENOMEM])


def _drop(fd: int, mapping: mmap.mmap | None) -> None:
    """Give back what an attempt had taken."""
    if mapping is not None:
        with contextlib.suppress(BufferError):  # the error's own frames may hold a view until it is handled
            mapping.close()
    if fd >= 0:
        os.close(fd)


def _fault_in(mapping: mmap.mmap, *, writable: bool) -> None:
    """Have every page in this process's table, so that no copy waits for the kernel."""
    try:
        # The mmap module holds the interpreter's lock for the whole call, a second for each GiB on slow memory:
        # in steps, other threads come by.
        for first in range(0, len(mapping), _FAULT_STEP_BYTES):
            length = min(_FAULT_STEP_BYTES, len(mapping) - first)
            mapping.madvise(_POPULATE_WRITE if writable else _POPULATE_READ, first, length)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: a kernel before 5.14
            raise
        pages = np.frombuffer(mapping, dtype=np.uint8)[::HEADER_BYTES]
        if writable:
            pages |= 0
        else:
            pages.sum()


def _exhausted(name: str, nbytes: int, doing: str, error: OSError) -> MemoryExhausted:
    number = error.errno or 0
    hint = _HINTS.get(number, f"the limits of this process and host ({errno.errorcode.get(number, number)})")
    return MemoryExhausted(name, nbytes, doing, os.strerror(number), hint)


def _short(name: str) -> str:
    """Return a name that memfd_create takes: at most 249 bytes, no zero byte."""
    return "weightd:" + name.encode("ascii", "replace").decode()[:200].replace("\0", "?")
