"""What a forked child keeps of its parent's attachments: nothing that the parent, the daemon or an engine would notice.

A child has no threads of the hook, so it can say nothing; but it inherits descriptors, which would keep the parent's
sockets open after the parent's death, and mappings, through which it would write what others read.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
"""Of Linux; the mmap module has no names for them."""

_FAILED = ctypes.c_void_p(-1).value

_heirs: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def in_child(thing: T, leave: Callable[[T], None]) -> None:
    """Have ``leave(thing)`` called in every child that is forked while ``thing`` lives."""
    _heirs[thing] = leave


def _forked() -> None:
    errors: list[Exception] = []
    for thing, leave in list(_heirs.items()):
        try:
            leave(thing)
        except Exception as error:  # noqa: BLE001  (told below, once the others have left as well)
            errors.append(error)
    if errors:
        raise ExceptionGroup("a forked child still shares what is its parent's", errors)


os.register_at_fork(after_in_child=_forked)


def replace_mapping(address: int, nbytes: int, fd: int | None, *, writable: bool) -> None:
    """Put private memory where this process has a shared mapping; addresses stay valid.

    Args:
        address: Where it begins.
        nbytes: Its size.
        fd: What is read there until this process writes; None for zeros.
        writable: Whether this process may write.

    Raises:
        OSError: The system refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE | (mmap.MAP_ANONYMOUS if fd is None else 0)
    if libc.mmap(address, nbytes, access, flags, -1 if fd is None else fd, 0) == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
