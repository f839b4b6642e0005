"""Overlaps as strided moves of few dimensions: what a copy routine is given.

A move is never lowered to contiguous runs: a column cut of a large matrix would
be a thousand million of them.  It is folded instead, dimensions that lie
one after another on both sides becoming one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from weightd.core.layout.faults import NotDescribable

if TYPE_CHECKING:
    from weightd.core.layout.columns import Int64
    from weightd.core.layout.intersect import Overlaps

COPY_DIMS = 3
"""Dimensions of one copy: what CUDA's strided copies and NIXL's blocks reach."""

MAX_MOVES = 1 << 24
"""Moves that unrolling may make; the plan of a 1T model for one rank has 57,600."""


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Strided moves of elements, R rows of D dimensions.

    Varying dimensions stand at the right, in falling order of their target
    stride; unused ones at the left have extent 1 and stride 0.

    Attributes:
        overlap: Row of the overlaps that each came from, shape (R,).
        extent: Elements, shape (R, D).
        source_offset: First element in the source's buffer, shape (R,).
        source_stride: Elements, shape (R, D).
        target_offset: First element in the target's buffer, shape (R,).
        target_stride: Elements, shape (R, D).
    """

    overlap: Int64
    extent: Int64
    source_offset: Int64
    source_stride: Int64
    target_offset: Int64
    target_stride: Int64

    def __len__(self) -> int:
        return int(self.overlap.shape[0])


def coalesce(overlaps: Overlaps) -> Moves:
    """Return one move per overlap, without unit dimensions and with neighbouring dimensions joined.

    Two dimensions join where one step of the outer is all of the inner, on both
    sides.  Dimensions are ordered by the target's strides first, so that a matrix
    that both sides store transposed is one run as well.

    Args:
        overlaps: M overlaps of N dimensions.

    Returns:
        M moves of N dimensions, most of them unused.

    >>> from weightd.core.layout.boxes import box
    >>> from weightd.core.layout.intersect import intersect
    >>> rows = coalesce(intersect(box((5, 3)), box((4, 3), start=(3, 0))))
    >>> rows.extent.tolist()  # two whole rows are one run
    [[1, 6]]
    """
    rows = np.arange(len(overlaps))
    order = np.lexsort((-overlaps.source_stride, -overlaps.target_stride), axis=1)
    extent = np.take_along_axis(overlaps.extent, order, axis=1)
    source = np.take_along_axis(overlaps.source_stride, order, axis=1)
    target = np.take_along_axis(overlaps.target_stride, order, axis=1)
    ndim = extent.shape[1]
    out_extent, out_source, out_target = np.ones_like(extent), np.zeros_like(extent), np.zeros_like(extent)
    place = np.full(len(rows), ndim)  # where the innermost dimension not yet full was put
    for d in range(ndim - 1, -1, -1):
        at = np.minimum(place, ndim - 1)
        n = out_extent[rows, at]
        joins = (place < ndim) & (source[:, d] == n * out_source[rows, at]) & (target[:, d] == n * out_target[rows, at])
        varies = extent[:, d] > 1
        grow = np.flatnonzero(varies & joins)
        out_extent[grow, place[grow]] *= extent[grow, d]
        fresh = np.flatnonzero(varies & ~joins)
        place[fresh] -= 1
        out_extent[fresh, place[fresh]] = extent[fresh, d]
        out_source[fresh, place[fresh]] = source[fresh, d]
        out_target[fresh, place[fresh]] = target[fresh, d]
    return Moves(rows, out_extent, overlaps.source_offset, out_source, overlaps.target_offset, out_target)


def to_copy_dims(moves: Moves, dims: int = COPY_DIMS) -> Moves:
    """Return the moves with exactly ``dims`` dimensions.

    Where more of them vary, those of smallest extent become separate rows.

    Args:
        moves: Moves of any number of dimensions.
        dims: Dimensions of the result, at least 1.

    Raises:
        NotDescribable: More rows arise than a plan may have.

    >>> one: Int64 = np.ones((1, 4), np.int64)
    >>> zero: Int64 = np.zeros(1, np.int64)
    >>> four = Moves(zero, one * [2, 3, 4, 5], zero, one * [999, 99, 9, 1], zero, one * [888, 88, 8, 1])
    >>> three = to_copy_dims(four)
    >>> three.extent.tolist(), three.source_offset.tolist()
    ([[3, 4, 5], [3, 4, 5]], [0, 999])
    """
    while True:
        surplus = (moves.extent > 1).sum(axis=1) > dims
        if not surplus.any():
            return _as_wide_as(moves, dims)
        moves = _unroll_smallest(moves, surplus)


def _unroll_smallest(moves: Moves, which: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Moves:
    """Return the moves with the varying dimension of smallest extent unrolled, in the rows of ``which``."""
    varying = np.where(moves.extent > 1, moves.extent, np.iinfo(np.int64).max)
    dim = np.argmin(varying, axis=1)
    rows = np.arange(len(moves))
    times = np.where(which, moves.extent[rows, dim], 1)
    # Bounded one by one first: a sum of hostile extents would leave int64.
    total = int(np.minimum(times, MAX_MOVES + 1).sum())
    if total > MAX_MOVES:
        raise NotDescribable("to_copy_dims", f"{len(moves)} moves would become more than {MAX_MOVES}")
    number = np.arange(total) - np.repeat(np.cumsum(times) - times, times)
    unrolled = np.flatnonzero(which)
    extent, source, target = moves.extent.copy(), moves.source_stride.copy(), moves.target_stride.copy()
    hop_source, hop_target = source[rows, dim], target[rows, dim]
    extent[unrolled, dim[unrolled]] = 1
    source[unrolled, dim[unrolled]] = 0
    target[unrolled, dim[unrolled]] = 0
    again = np.repeat(rows, times)
    return Moves(
        moves.overlap[again],
        extent[again],
        moves.source_offset[again] + number * hop_source[again],
        source[again],
        moves.target_offset[again] + number * hop_target[again],
        target[again],
    )


def _as_wide_as(moves: Moves, dims: int) -> Moves:
    """Return the moves with ``dims`` dimensions, the varying ones at the right; no more of them vary."""
    missing = max(dims - moves.extent.shape[1], 0)
    order = np.argsort(moves.extent > 1, axis=1, kind="stable")

    def fitted(column: Int64, fill: int) -> Int64:
        packed = np.take_along_axis(column, order, axis=1)
        return np.pad(packed, ((0, 0), (missing, 0)), constant_values=fill)[:, packed.shape[1] + missing - dims :]

    return replace(
        moves,
        extent=fitted(moves.extent, 1),
        source_stride=fitted(moves.source_stride, 0),
        target_stride=fitted(moves.target_stride, 0),
    )
