"""Lays what a node fetches into its landing, and cuts it into buckets.

A bucket is a stretch of the landing without a gap, all of it from one node: the
bytes of its rows are the bytes that cross the wire, so that planned, sent and
received can be compared without an allowance.  Elements lie at multiples of
their size because larger ones come first, and a bucket that begins with a new
cell begins at a multiple of 64, a cache line, so that two receiving threads
never write to one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from weightd.core.layout.columns import Int64
from weightd.core.plan.copies import concatenated, take
from weightd.core.plan.lower import fuse
from weightd.core.plan.node_plan import Bucket, Copies

if TYPE_CHECKING:
    from weightd.core.units import NodeId

ALIGN = 64
"""Bytes: a cache line; also what wide copies and most network adapters prefer."""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """The landing of a node.

    Attributes:
        buckets: All buckets, by index.
        gather: Rows that fill them.
        cell_offset: First byte of each cell in the landing, shape (cells,).
        nbytes: Length of the landing.
    """

    buckets: tuple[Bucket, ...]
    gather: Copies
    cell_offset: Int64
    nbytes: int


def pack_buckets(rows: Copies, cell: Int64, home: Int64, nodes: tuple[NodeId, ...], limit_bytes: int) -> Packed:
    """Return the landing for rows that are dense in the target and follow each other in it.

    Args:
        rows: Lowered rows in landing order; their target offsets are not looked at.
        cell: Cell of each row, ascending from 0; rows of one cell follow each other without a gap, shape (C,).
        home: Position in ``nodes`` of the node that sends each row; equal ones next to each other, shape (C,).
        nodes: Nodes that send.
        limit_bytes: Largest bucket; at least the size of one element.
    """
    if not len(rows):
        return Packed((), rows, np.zeros(0, np.int64), 0)
    rows, origin = split(rows, limit_bytes)
    cell, home = cell[origin], home[origin]
    nbytes = rows.nbytes
    ends = np.cumsum(nbytes)
    edges = [*np.flatnonzero(np.diff(home, prepend=-1)).tolist(), len(rows)]
    offset: Int64 = np.zeros(len(rows), np.int64)
    bucket_of: Int64 = np.zeros(len(rows), np.int64)
    spans: list[tuple[int, int, int]] = []
    cursor = begin = 0
    for edge in edges[1:]:
        while begin < edge:
            before = int(ends[begin] - nbytes[begin])
            end = min(int(np.searchsorted(ends, before + limit_bytes, side="right")), edge)
            if begin == 0 or cell[begin] != cell[begin - 1]:
                cursor = -(-cursor // ALIGN) * ALIGN
            offset[begin:end] = cursor + ends[begin:end] - nbytes[begin:end] - before
            bucket_of[begin:end] = len(spans)
            length = int(ends[end - 1]) - before
            spans.append((cursor, length, int(home[begin])))
            cursor, begin = cursor + length, end
    first_rows = np.flatnonzero(np.diff(cell, prepend=-1))
    gather = fuse(replace(rows, target_offset=offset), bucket_of)
    # A bucket's rows lie inside its stretch, so a row's place says which bucket it belongs to.
    starts = np.array([s for s, _, _ in spans], np.int64)
    counted = np.bincount(np.searchsorted(starts, gather.target_offset, side="right") - 1, minlength=len(spans))
    bounds = [0, *np.cumsum(counted).tolist()]
    buckets = tuple(Bucket(i, nodes[h], s, n, bounds[i], bounds[i + 1]) for i, (s, n, h) in enumerate(spans))
    return Packed(buckets, gather, offset[first_rows], cursor)


def split(rows: Copies, limit_bytes: int) -> tuple[Copies, Int64]:
    """Cut rows that exceed the limit, outermost dimension first; return them with the row each comes from."""
    large = np.flatnonzero(rows.nbytes > limit_bytes)
    if not len(large):
        return rows, np.arange(len(rows))
    parts: list[Copies] = []
    origins: list[Int64] = []
    begin = 0
    for row in large.tolist():
        parts.append(take(rows, slice(begin, row)))
        origins.append(np.arange(begin, row))
        chunks = _chunks(take(rows, slice(row, row + 1)), limit_bytes)
        parts.append(chunks)
        origins.append(np.full(len(chunks), row))
        begin = row + 1
    parts.append(take(rows, slice(begin, None)))
    origins.append(np.arange(begin, len(rows)))
    joined = concatenated(parts)
    return joined, np.concatenate(origins)


def _chunks(row: Copies, limit_bytes: int) -> Copies:
    """Cut one row into rows of at most the limit, in the order of the target."""
    d, inner = 0, int(row.itemsize[0])
    for d in range(row.extent.shape[1]):
        inner = int(np.prod(row.extent[0, d + 1 :])) * int(row.itemsize[0])
        if inner <= limit_bytes:
            break
        index = np.arange(int(row.extent[0, d]))
        row = _indexed(row, d, index, np.ones_like(index))
    per = limit_bytes // inner
    index = np.arange(0, int(row.extent[0, d]), per)
    return _indexed(row, d, index, np.minimum(per, int(row.extent[0, d]) - index))


def _indexed(rows: Copies, d: int, index: Int64, extent: Int64) -> Copies:
    """Return for each row its stretches along a dimension, in order."""
    n, k = len(rows), len(index)
    every = np.repeat(np.arange(n), k)
    at = np.tile(index, n)
    cut = take(rows, every)
    extents = cut.extent.copy()
    extents[:, d] = np.tile(extent, n)
    return replace(
        cut,
        source_offset=cut.source_offset + at * cut.source_stride[:, d],
        target_offset=cut.target_offset + at * cut.target_stride[:, d],
        extent=extents,
    )
