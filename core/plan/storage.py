"""Whether pieces lie inside their buffers, and whether two of them share memory.

Strided pieces may interleave without touching: the columns of a fused matrix,
gate and up rows in turn.  So spans only say which pairs to look at; the answer
is exact.  Thousands of pairs are alike, and each kind is decided once.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from weightd.core.plan.alike import equal_rows
from weightd.core.plan.holdings import itemsizes
from weightd.core.plan.violations import OutsideBuffer, Region, TargetOverlap

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weightd.core.layout.boxes import Mask, Pieces
    from weightd.core.layout.columns import Int64, Layout

Term = tuple[int, int]
"""A stride and how many steps of it may be taken."""


def outside_faults(layout: Layout, pieces: Pieces, who: str) -> Iterator[OutsideBuffer]:
    """Return the fault of the pieces of one rank that reach beyond their buffers, if any.

    Args:
        layout: Layout of the rank.
        pieces: Its pieces, ``tensor`` being rows of its own table.
        who: The rank, for the report.
    """
    if not len(pieces):
        return
    itemsize = itemsizes(layout)[pieces.buffer]
    nbytes = np.array([b.nbytes for b in layout.buffers], np.int64)[pieces.buffer]
    first, last = _span(pieces)
    outside = np.flatnonzero((first < 0) | ((last + 1) * itemsize > nbytes) | (pieces.stride < 0).any(axis=1))
    if outside.size:
        row = int(outside[0])
        buffer = layout.buffers[int(pieces.buffer[row])]
        yield OutsideBuffer(
            who,
            buffer.name,
            buffer.nbytes,
            layout.tensors[int(pieces.tensor[row])].name,
            region_of(pieces, row, layout),
            int(first[row] * itemsize[row]),
            int((last[row] + 1) * itemsize[row]),
            int(outside.size) - 1,
        )


def overlap_faults(layout: Layout, pieces: Pieces, who: str) -> Iterator[TargetOverlap]:
    """Return the fault of the pieces of one rank that share memory, if any; arguments as ``outside_faults``."""
    pairs = shared_pairs(pieces)
    if pairs:
        one, other = pairs[0]
        yield TargetOverlap(
            who,
            layout.buffers[int(pieces.buffer[one])].name,
            layout.tensors[int(pieces.tensor[one])].name,
            region_of(pieces, one, layout),
            layout.tensors[int(pieces.tensor[other])].name,
            region_of(pieces, other, layout),
            len(pairs) - 1,
        )


def region_of(pieces: Pieces, row: int, layout: Layout) -> Region:
    """Return the box of a piece in as many dimensions as its tensor has."""
    n = len(layout.tensors[int(pieces.tensor[row])].shape)
    start, extent, step = (c[row, :n].tolist() for c in (pieces.start, pieces.extent, pieces.step))
    return Region(tuple(start), tuple(extent), tuple(step))


def shared_pairs(pieces: Pieces) -> list[tuple[int, int]]:
    """Return the pairs of rows that share an element of a buffer; (row, row) where a piece meets itself.

    >>> from weightd.core.layout.boxes import box, join
    >>> columns = [box((4, 2), offset=o, stride=(4, 1)) for o in (0, 2, 1)]  # of a matrix 4 x 4
    >>> shared_pairs(join(columns))
    [(0, 2), (1, 2)]
    """
    found = [(row, row) for row in np.flatnonzero(_folded(pieces)).tolist()]
    one, other = _spans_meet(pieces)
    if len(one):
        kinds = np.column_stack(
            [
                pieces.offset[other] - pieces.offset[one],
                pieces.extent[one],
                pieces.stride[one],
                pieces.extent[other],
                pieces.stride[other],
            ]
        )
        first, kind = equal_rows(kinds)
        shared = np.array([_kind_meets(row, pieces.ndim) for row in kinds[first].tolist()], np.bool_)
        hits = shared[kind]
        found.extend(zip(one[hits].tolist(), other[hits].tolist(), strict=True))
    return sorted(found)


def _span(pieces: Pieces) -> tuple[Int64, Int64]:
    """Return the first and the last element of each piece in its buffer."""
    return pieces.offset, pieces.offset + ((pieces.extent - 1) * pieces.stride).sum(axis=1)


def _spans_meet(pieces: Pieces) -> tuple[Int64, Int64]:
    """Return pairs of different rows whose spans meet in one buffer, the lower row first."""
    if len(pieces) < 2:
        none: Int64 = np.zeros(0, np.int64)
        return none, none
    first, last = _span(pieces)
    order = np.lexsort((first, pieces.buffer))
    buffer, first, last = pieces.buffer[order], first[order], last[order]
    room = int(last.max()) + 1
    _, key = np.unique(buffer, return_inverse=True)  # counted anew, so that the keys below stay small
    key = key.reshape(-1).astype(np.int64) * room
    begin, end = key + first, key + last
    # A later piece meets this one exactly if it begins no later than this one ends.
    reach = np.searchsorted(begin, end, side="right")
    count = np.maximum(reach - np.arange(len(begin)) - 1, 0)
    one = np.repeat(np.arange(len(begin)), count)
    within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    other = one + 1 + within
    a, b = order[one], order[other]
    return np.minimum(a, b), np.maximum(a, b)


def _folded(pieces: Pieces) -> Mask:
    """Say which pieces put two of their own elements in one place."""
    order = np.argsort(pieces.stride, axis=1, kind="stable")
    stride = np.take_along_axis(pieces.stride, order, axis=1)
    extent = np.take_along_axis(pieces.extent, order, axis=1)
    reach = np.cumsum((extent - 1) * stride, axis=1) - (extent - 1) * stride
    nested = ((extent == 1) | (stride > reach)).all(axis=1)
    folded = np.zeros(len(pieces), np.bool_)
    rows = np.flatnonzero(~nested)
    if len(rows):
        kinds = np.column_stack([extent[rows], stride[rows]])
        first, kind = equal_rows(kinds)
        n = pieces.ndim
        folded[rows] = np.array([_folds(k[:n], k[n:]) for k in kinds[first].tolist()], np.bool_)[kind]
    return folded


def _folds(extent: Sequence[int], stride: Sequence[int]) -> bool:
    """Say whether two different indices of one piece have the same place."""
    for d, (n, s) in enumerate(zip(extent, stride, strict=True)):
        # The difference of two indices, d being the first dimension where they differ, there by at least 1.
        if n < 2:
            continue
        terms = [(s, n - 2)] if n > 2 else []
        low = s
        for e, t in zip(extent[d + 1 :], stride[d + 1 :], strict=True):
            if e > 1:
                terms.append((t, 2 * (e - 1)))
                low -= (e - 1) * t
        if _reaches(-low, sorted(terms, reverse=True)):
            return True
    return False


def _kind_meets(kind: Sequence[int], n: int) -> bool:
    """Say whether two pieces of a kind (distance, extents and strides of both) share a place."""
    apart, a_extent, a_stride = kind[0], kind[1 : 1 + n], kind[1 + n : 1 + 2 * n]
    b_extent, b_stride = kind[1 + 2 * n : 1 + 3 * n], kind[1 + 3 * n :]
    # a's place - b's place = 0 asks for sum(a) - sum(b) = apart; counting b from its far end makes all terms positive.
    terms = [(s, e - 1) for e, s in zip(a_extent, a_stride, strict=True) if e > 1]
    target = apart
    for e, s in zip(b_extent, b_stride, strict=True):
        if e > 1:
            terms.append((s, e - 1))
            target += (e - 1) * s
    return _reaches(target, sorted(terms, reverse=True))


def _reaches(target: int, terms: Sequence[Term]) -> bool:
    """Say whether ``target`` is a sum of strides, each taken at most its number of times.

    Terms come with the largest stride first.  Strides of real buffers divide each other or nearly so,
    and then a level has two or three candidates; the greatest common divisor ends most branches at once.

    >>> _reaches(7, [(4, 3), (1, 1)]), _reaches(9, [(4, 3), (1, 1)])
    (False, True)
    """
    if target == 0:
        return True
    if target < 0 or not terms or target > sum(s * n for s, n in terms):
        return False
    if target % gcd(*(s for s, _ in terms)):
        return False
    (stride, times), rest = terms[0], terms[1:]
    if stride == 0:
        return False
    room = sum(s * n for s, n in rest)
    most = min(times, target // stride)
    least = max(0, -(-(target - room) // stride))
    return any(_reaches(target - x * stride, rest) for x in range(most, least - 1, -1))
