"""Pages are faulted in step by step: the mmap module holds the interpreter's lock for the whole of each call."""

from __future__ import annotations

import mmap
from typing import cast

import pytest

from weightd.link import memory

MIB = 1 << 20


class Mapping:
    """Notes what it is asked for."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self.asked: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return self._nbytes

    def madvise(self, advice: int, first: int, length: int) -> None:
        self.asked.append((first, length))


@pytest.mark.parametrize("nbytes", [4096, 16 * MIB, 40 * MIB + 4096])
def test_every_page_once_and_no_step_holds_the_lock_for_long(nbytes: int) -> None:
    mapping = Mapping(nbytes)
    memory._fault_in(cast("mmap.mmap", mapping), writable=True)

    ends = [0, *(first + length for first, length in mapping.asked)]
    assert ends == [*(first for first, _ in mapping.asked), nbytes]
    assert max(length for _, length in mapping.asked) <= 16 * MIB
