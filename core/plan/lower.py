"""Turns boxes of any dimension into copies of at most three, as few and as plain as possible.

A dimension of extent 1 is dropped, and neighbouring dimensions that advance
together on both sides become one; what is contiguous on both sides is then a
single run of bytes.  Runs that continue each other are joined, so that head,
middle and tail of a flat range are one memcpy again.  Nothing is ever lowered
to runs that are not contiguous anyway: the column cut of a large model has a
thousand million of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from weightd.core.layout.intersect import Overlaps
from weightd.core.layout.moves import coalesce
from weightd.core.plan.copies import take
from weightd.core.plan.node_plan import COPY_DIMS, Copies

if TYPE_CHECKING:
    from weightd.core.layout.columns import Int64


def lower(copies: Copies) -> tuple[Copies, Int64]:
    """Return the same copies in at most three dimensions, and the row that each comes from.

    Args:
        copies: Rows of any width; dimensions may come in any order.

    Returns:
        Rows in the order given, those of one row next to each other and ascending in the target; dimensions by
        falling stride of the target.

    >>> row = np.zeros(1, np.int64)
    >>> column = lambda *values: np.array([values])
    >>> c = Copies(row, row, column(12, 6, 2), row, row, column(24, 6, 2), column(4, 2, 3), row + 2)
    >>> lowered, _ = lower(c)  # the last two dimensions advance together: 6 elements in a row
    >>> lowered.extent.tolist(), lowered.source_stride.tolist(), lowered.target_stride.tolist()
    ([[1, 4, 6]], [[0, 12, 2]], [[0, 24, 2]])
    """
    extent, source_stride, target_stride = _coalesced(copies)
    width = extent.shape[1]
    rows = np.arange(len(copies))
    source_offset, target_offset = copies.source_offset, copies.target_offset
    for d in range(width - COPY_DIMS):  # rarely any: every index of the outer dimensions becomes a row
        count = extent[:, d]
        if (count == 1).all():
            continue
        repeated = np.repeat(np.arange(len(rows)), count)
        index = np.arange(len(repeated)) - np.repeat(np.cumsum(count) - count, count)
        source_offset = source_offset[repeated] + index * source_stride[repeated, d]
        target_offset = target_offset[repeated] + index * target_stride[repeated, d]
        rows, extent = rows[repeated], extent[repeated]
        source_stride, target_stride = source_stride[repeated], target_stride[repeated]
    inner = slice(width - COPY_DIMS, None)
    lowered = Copies(
        copies.source[rows],
        source_offset,
        np.ascontiguousarray(source_stride[:, inner]),
        copies.target[rows],
        target_offset,
        np.ascontiguousarray(target_stride[:, inner]),
        np.ascontiguousarray(extent[:, inner]),
        copies.itemsize[rows],
    )
    return lowered, rows


def fuse(copies: Copies, group: Int64 | None = None) -> Copies:
    """Join contiguous copies that continue each other on both sides.

    Args:
        copies: Rows of ``lower``.
        group: Only rows of one group are joined, shape (C,); one group by default.

    Returns:
        Rows sorted by group, source and place in the target.
    """
    if not len(copies):
        return copies
    kind = np.zeros(len(copies), np.int64) if group is None else group
    order = np.lexsort((copies.target_offset, copies.target, copies.source, kind))
    c, kind = take(copies, order), kind[order]
    plain = (c.extent[:, :-1] == 1).all(axis=1) & (
        (c.extent[:, -1] == 1) | ((c.source_stride[:, -1] == c.itemsize) & (c.target_stride[:, -1] == c.itemsize))
    )
    nbytes = c.nbytes
    glued = np.zeros(len(c), np.bool_)
    glued[1:] = plain[1:] & plain[:-1]
    for same in (kind, c.source, c.target, c.itemsize):
        glued[1:] &= same[1:] == same[:-1]
    for offset in (c.source_offset, c.target_offset):
        glued[1:] &= offset[1:] == (offset + nbytes)[:-1]
    heads = np.flatnonzero(~glued)
    joined = take(c, heads)
    extent = joined.extent.copy()
    total = np.add.reduceat(c.extent[:, -1], heads)
    extent[:, -1] = np.where(plain[heads], total, extent[:, -1])
    source_stride, target_stride = joined.source_stride.copy(), joined.target_stride.copy()
    run = plain[heads] & (extent[:, -1] > 1)  # single elements that were joined have a stride now
    source_stride[run, -1] = target_stride[run, -1] = joined.itemsize[run]
    return Copies(
        joined.source,
        joined.source_offset,
        source_stride,
        joined.target,
        joined.target_offset,
        target_stride,
        extent,
        joined.itemsize,
    )


def _coalesced(copies: Copies) -> tuple[Int64, Int64, Int64]:
    """Return extent, source stride and target stride of joined dimensions, as many as any row needs and at least 3."""
    rows = np.arange(len(copies))
    # Joining compares strides with each other, so that bytes do as well as the elements of an intersection.
    moves = coalesce(
        Overlaps(
            source=rows,
            target=rows,
            start=copies.extent,
            extent=copies.extent,
            step=copies.extent,
            source_offset=copies.source_offset,
            source_stride=np.where(copies.extent > 1, copies.source_stride, 0),
            target_offset=copies.target_offset,
            target_stride=np.where(copies.extent > 1, copies.target_stride, 0),
        )
    )
    varying = int((moves.extent > 1).sum(axis=1).max(initial=0))
    width = max(varying, COPY_DIMS)
    return (
        _fitted(moves.extent, width, 1),
        _fitted(moves.source_stride, width, 0),
        _fitted(moves.target_stride, width, 0),
    )


def _fitted(column: Int64, width: int, fill: int) -> Int64:
    """Return a column of ``width`` dimensions; those that vary stand at the right."""
    padded = np.pad(column, ((0, 0), (max(width - column.shape[1], 0), 0)), constant_values=fill)
    return padded[:, padded.shape[1] - width :]
