"""A rank plan turned into pairs of views, built once, and run once per version.

What a version costs is one pass of ``destination[...] = source`` over pairs that
exist already: nothing is mapped, allocated or first touched then.  Pairs are built
for every slot of every source, because a version names the slots that hold it.

numpy's assignment releases the interpreter lock while it copies and stays within
1.1 of what ``memcpy`` can do; its cost for a small copy is a quarter of a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weightd.core.layout.columns import Int64
from weightd.core.plan.node_plan import COPY_DIMS, Copies

Bytes = NDArray[np.uint8]
"""A flat stretch of memory, shape (nbytes,)."""

View = NDArray[np.generic]
"""A strided view of some ``Bytes`` in elements that carry the bytes unchanged."""

Pair = tuple[View, View]
"""Destination and source of one strided copy, of equal shape and element type."""

BLOCK_BYTES = 64 << 20
"""A pass looks up after about this many bytes, to report progress or to stop: 6 ms at 10 GB/s."""

_CARRIERS: dict[int, np.dtype[np.generic]] = {n: np.dtype(f"u{n}") for n in (1, 2, 4, 8)}


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive pairs of about ``BLOCK_BYTES``."""

    pairs: tuple[Pair, ...]
    nbytes: int


def merged(copies: Copies) -> Copies:
    """Return the copies with dimensions merged that are contiguous on both sides.

    Dimensions of extent 1 go first, so that the varying ones are the last of each row;
    what is contiguous altogether ends as one dimension.
    """
    extent = copies.extent.copy()
    strides = (copies.source_stride.copy(), copies.target_stride.copy())
    for _ in range(COPY_DIMS - 1):
        for outer in range(COPY_DIMS - 2, -1, -1):
            _merge(extent, strides, outer)
    source_stride, target_stride = strides
    return Copies(
        source=copies.source,
        source_offset=copies.source_offset,
        source_stride=source_stride,
        target=copies.target,
        target_offset=copies.target_offset,
        target_stride=target_stride,
        extent=extent,
        itemsize=copies.itemsize,
    )


def _merge(extent: Int64, strides: tuple[Int64, Int64], outer: int) -> None:
    """Merge dimension ``outer`` into the next one where that is one dimension on both sides; in place."""
    inner = outer + 1
    dense = np.ones(extent.shape[0], np.bool_)
    for stride in strides:
        dense &= stride[:, outer] == stride[:, inner] * extent[:, inner]
    single = extent[:, inner] == 1
    rows = np.flatnonzero(dense | single | (extent[:, outer] == 1))
    for stride in strides:
        stride[rows, inner] = np.where(single[rows], stride[rows, outer], stride[rows, inner])
        stride[rows[:, None], np.arange(1, inner)] = stride[rows[:, None], np.arange(outer)]
        stride[rows, 0] = 0
    extent[rows, inner] *= extent[rows, outer]
    extent[rows[:, None], np.arange(1, inner)] = extent[rows[:, None], np.arange(outer)]
    extent[rows, 0] = 1


def views(
    memory: Sequence[Bytes], which: Int64, offset: Int64, stride: Int64, extent: Int64, itemsize: Int64
) -> list[View]:
    """Return one view per row, in carrier elements, without dimensions of extent 1.

    Args:
        memory: Stretches that ``which`` points into.
        which: Row of ``memory``, shape (C,).
        offset: Bytes, shape (C,).
        stride: Bytes, shape (C, 3).
        extent: Elements, shape (C, 3).
        itemsize: Bytes of one element: 1, 2, 4 or 8, shape (C,).

    Raises:
        ValueError: A row reaches outside of its memory.
    """
    made: list[View] = []
    columns = zip(which.tolist(), offset.tolist(), stride.tolist(), extent.tolist(), itemsize.tolist(), strict=True)
    for row, first, steps, counts, size in columns:
        varying = [d for d in range(COPY_DIMS) if counts[d] != 1] or [COPY_DIMS - 1]
        shape = tuple(counts[d] for d in varying)
        # numpy checks that the view lies inside of its buffer, so a wrong plan cannot write elsewhere.
        view: View = np.ndarray(shape, _CARRIERS[size], memory[row].data, first, tuple(steps[d] for d in varying))
        made.append(view)
    return made


class CopyPlan:
    """The pairs of one rank plan, for every slot of every source.

    Attributes:
        nbytes: Bytes of one pass.
    """

    def __init__(self, copies: Copies, targets: Sequence[Bytes], pools: Mapping[tuple[int, int], Bytes]) -> None:
        """Build all pairs.

        Args:
            copies: Rows of the rank plan.
            targets: The target layout's buffers, in its order.
            pools: Memory of each (row of the plan's sources, slot), without its header page.

        Raises:
            ValueError: A row reaches outside of its pool or of its target.
        """
        flat = merged(copies)
        self.nbytes = int(copies.nbytes.sum())
        self._blocks: dict[tuple[int, int], tuple[Block, ...]] = {}
        slots: dict[int, list[int]] = {}
        for row, slot in pools:
            slots.setdefault(row, []).append(slot)
        for row in np.unique(flat.source).tolist():
            mine = np.flatnonzero(flat.source == row)
            geometry = flat.extent[mine], flat.itemsize[mine]
            to = views(targets, flat.target[mine], flat.target_offset[mine], flat.target_stride[mine], *geometry)
            here = np.zeros(len(mine), np.int64)
            for slot in slots.get(row, []):
                memory = [pools[row, slot]]
                of = views(memory, here, flat.source_offset[mine], flat.source_stride[mine], *geometry)
                self._blocks[row, slot] = tuple(_blocks(zip(to, of, strict=True)))
        self._rows = tuple(np.unique(flat.source).tolist())

    def run(self, slots: Mapping[int, int], look_up: Callable[[int], bool] | None = None) -> int:
        """Copy everything once and return the bytes copied.

        Args:
            slots: Slot to read, by row of the plan's sources.
            look_up: Called with the bytes so far after each block; True ends the pass early.

        Raises:
            KeyError: (row, slot) was not among the pools.
        """
        done = 0
        for row in self._rows:
            for block in self._blocks[row, slots[row]]:
                done += run_pairs(block.pairs)
                if look_up is not None and look_up(done):
                    return done
        return done


def run_pairs(pairs: Iterable[Pair]) -> int:
    """Copy each source into its destination and return the bytes of the destinations that were written."""
    done = 0
    for destination, source in pairs:
        destination[...] = source
        done += destination.nbytes
    return done


def _blocks(pairs: Iterable[Pair]) -> Iterable[Block]:
    held: list[Pair] = []
    nbytes = 0
    for pair in pairs:
        held.append(pair)
        nbytes += pair[0].nbytes
        if nbytes >= BLOCK_BYTES:
            yield Block(tuple(held), nbytes)
            held, nbytes = [], 0
    if held:
        yield Block(tuple(held), nbytes)
