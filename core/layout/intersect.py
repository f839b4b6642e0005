"""Which elements two sides have in common, exactly, and where they lie on each side.

All-pairs is out of the question (70,000 tensors, a million pieces), so the
source is sorted by tensor and start, and each target piece looks only at a
window of it.  Per tensor the window is taken on the dimension with most cuts: a
tensor cut on dimension 1 would otherwise meet all of its pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from weightd.core.layout import progressions
from weightd.core.layout.boxes import Mask, Pieces, tidy, widened
from weightd.core.layout.faults import NotDescribable

if TYPE_CHECKING:
    from weightd.core.layout.columns import Int64

BLOCK_PAIRS = 1 << 18
"""Candidate pairs looked at together: some 100 MiB of columns, whatever the size of the model."""

MAX_PAIRS = 1 << 28
"""Candidates of one intersection; a 1T model for one rollout rank has 57,600."""

_KEY_LIMIT = 1 << 62  # keys stay inside int64


@dataclass(frozen=True, slots=True, eq=False)
class Overlaps:
    """Common boxes of source and target pieces, M rows, sorted by target and then source row.

    Attributes:
        source: Row of the source pieces, shape (M,).
        target: Row of the target pieces, shape (M,).
        start: First common index per dimension of the tensor, shape (M, N).
        extent: Number of common indices, at least 1, shape (M, N).
        step: Distance of neighbouring common indices; 1 where the extent is 1, shape (M, N).
        source_offset: Element of the source's buffer where the box begins, shape (M,).
        source_stride: Source elements between neighbouring common indices; 0 where the extent is 1, shape (M, N).
        target_offset: As ``source_offset``, of the target.
        target_stride: As ``source_stride``, of the target.
    """

    source: Int64
    target: Int64
    start: Int64
    extent: Int64
    step: Int64
    source_offset: Int64
    source_stride: Int64
    target_offset: Int64
    target_stride: Int64

    def __len__(self) -> int:
        return int(self.source.shape[0])

    @property
    def numel(self) -> Int64:
        """Elements of each common box, shape (M,)."""
        product: Int64 = np.prod(self.extent, axis=1, dtype=np.int64)
        return product

    def take(self, rows: Int64 | Mask) -> Overlaps:
        """Return the overlaps at ``rows`` (numbers or a mask), in that order."""
        return Overlaps(*(column[rows] for column in self._columns()))

    def _columns(self) -> tuple[Int64, ...]:
        return (
            self.source,
            self.target,
            self.start,
            self.extent,
            self.step,
            self.source_offset,
            self.source_stride,
            self.target_offset,
            self.target_stride,
        )


def intersect(source: Pieces, target: Pieces) -> Overlaps:
    """Return every pair of a source and a target piece that share elements, with what they share.

    Args:
        source: S pieces; ``tensor`` numbers mean the same on both sides, negative ones match nothing.
        target: T pieces.

    Returns:
        At most one row per pair: two boxes share a box, or nothing.

    Raises:
        NotDescribable: So many pieces overlap that the pairs cannot be listed.

    >>> from weightd.core.layout.boxes import box
    >>> both = intersect(box((5, 3)), box((4, 3), start=(3, 0)))
    >>> both.start.tolist(), both.extent.tolist(), both.source_offset.tolist(), both.target_offset.tolist()
    ([[3, 0]], [[2, 3]], [9], [0])
    """
    width = max(source.ndim, target.ndim)
    source, target = tidy(widened(source, width)), tidy(widened(target, width))
    windows = _Windows(source, target)
    parts = [_common(source, target, s, t) for s, t in windows.blocks()]
    joined = Overlaps(*(np.concatenate(columns) for columns in zip(*(p._columns() for p in parts), strict=True)))
    return joined.take(np.lexsort((joined.source, joined.target)))


class _Windows:
    """For each target piece the stretch of sorted source pieces that may meet it."""

    def __init__(self, source: Pieces, target: Pieces) -> None:
        tensors = np.unique(target.tensor[target.tensor >= 0])
        self._source_rows, source_ids = _numbered(source.tensor, tensors)
        self._target_rows, target_ids = _numbered(target.tensor, tensors)
        source, target = source.take(self._source_rows), target.take(self._target_rows)
        axis = _axis_of_most_cuts(source, source_ids, len(tensors))
        first, last = _interval(source, axis[source_ids])
        t_first, t_last = _interval(target, axis[target_ids])
        first, last, t_first, t_last, room = _positions(first, last, t_first, t_last, len(tensors))
        begin = source_ids * room + first
        order = np.argsort(begin, kind="stable")
        self._source_rows = self._source_rows[order]
        # A running maximum of ends keeps the windows right where source pieces overlap each other.
        ends = np.maximum.accumulate((source_ids * room + last)[order])
        self._low = np.searchsorted(ends, target_ids * room + t_first, side="left")
        high = np.searchsorted(begin[order], target_ids * room + t_last, side="right")
        self._count = np.maximum(high - self._low, 0)
        total = int(self._count.sum())
        if total > MAX_PAIRS:
            raise NotDescribable("intersect", f"{len(source)} and {len(target)} pieces meet in up to {total} pairs")

    def blocks(self) -> list[tuple[Int64, Int64]]:
        """Return the candidate pairs (source rows, target rows) in blocks; at least one, maybe empty."""
        ends = np.cumsum(self._count)
        blocks, begin, done = [], 0, 0
        while True:
            end = max(int(np.searchsorted(ends, done + BLOCK_PAIRS, side="right")), begin + 1)
            count = self._count[begin:end]
            total = int(count.sum())
            within = np.arange(total) - np.repeat(np.cumsum(count) - count, count)
            rows = within + np.repeat(self._low[begin:end], count)
            blocks.append((self._source_rows[rows], np.repeat(self._target_rows[begin:end], count)))
            begin, done = end, done + total
            if begin >= len(self._count):
                return blocks


def _numbered(column: Int64, tensors: Int64) -> tuple[Int64, Int64]:
    """Return the rows whose tensor is in ``tensors``, and its place there."""
    place = np.searchsorted(tensors, column)
    known = np.zeros(len(column), np.bool_)
    inside = place < len(tensors)
    known[inside] = tensors[place[inside]] == column[inside]
    rows = np.flatnonzero(known)
    return rows, place[rows]


def _axis_of_most_cuts(pieces: Pieces, ids: Int64, tensors: int) -> Int64:
    """Return per tensor the dimension with most different starts, shape (tensors,)."""
    cuts: Int64 = np.zeros((tensors, max(pieces.ndim, 1)), np.int64)
    for d in range(pieces.ndim):
        order = np.lexsort((pieces.start[:, d], ids))
        tensor, start = ids[order], pieces.start[order, d]
        fresh = np.ones(len(order), np.bool_)
        fresh[1:] = (tensor[1:] != tensor[:-1]) | (start[1:] != start[:-1])
        cuts[:, d] = np.bincount(tensor[fresh], minlength=tensors)
    axis: Int64 = np.argmax(cuts, axis=1)
    return axis


def _interval(pieces: Pieces, axis: Int64) -> tuple[Int64, Int64]:
    """Return first and last index of each piece along its axis; zeros without dimensions."""
    if not pieces.ndim:
        zero: Int64 = np.zeros(len(pieces), np.int64)
        return zero, zero
    rows = np.arange(len(pieces))
    first = pieces.start[rows, axis]
    return first, first + (pieces.extent[rows, axis] - 1) * pieces.step[rows, axis]


def _positions(
    first: Int64, last: Int64, t_first: Int64, t_last: Int64, tensors: int
) -> tuple[Int64, Int64, Int64, Int64, int]:
    """Return the four as small numbers of the same order, and a number above all of them."""
    room = 1 + max((int(c.max()) for c in (last, t_last) if c.size), default=0)
    if room * max(tensors, 1) < _KEY_LIMIT:
        return first, last, t_first, t_last, room
    values, places = np.unique(np.concatenate([first, last, t_first, t_last]), return_inverse=True)
    s, t = len(first), len(t_first)
    a, b, c, d = np.split(places.reshape(-1).astype(np.int64), [s, 2 * s, 2 * s + t])
    return a, b, c, d, len(values) + 1


def _common(source: Pieces, target: Pieces, s: Int64, t: Int64) -> Overlaps:
    """Return the overlaps among candidate pairs of rows."""
    a, b = source.take(s), target.take(t)
    start, extent, step = progressions.meet(a.start, a.extent, a.step, b.start, b.extent, b.step)
    meets = np.flatnonzero((extent > 0).all(axis=1))
    a, b, start, extent, step = a.take(meets), b.take(meets), start[meets], extent[meets], step[meets]
    many = extent > 1
    return Overlaps(
        source=s[meets],
        target=t[meets],
        start=start,
        extent=extent,
        step=step,
        source_offset=a.offset + ((start - a.start) // a.step * a.stride).sum(axis=1),
        source_stride=np.where(many, step // a.step * a.stride, 0),
        target_offset=b.offset + ((start - b.start) // b.step * b.stride).sum(axis=1),
        target_stride=np.where(many, step // b.step * b.stride, 0),
    )
