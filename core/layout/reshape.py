"""Reshaping described on pieces: one dimension becomes two, or two become one.

A box of the one index space is seldom a box of the other, so these are the two
operations that make several pieces of one; how many, their docstrings say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from weightd.core.layout.boxes import Pieces, check_dim, join, tidy, with_dim
from weightd.core.layout.faults import BadColumns, NotDescribable

if TYPE_CHECKING:
    from weightd.core.layout.boxes import Mask
    from weightd.core.layout.columns import Int64

MAX_PIECES = 1 << 24
"""Pieces that one operation may make; 70,000 tensors flat over 500 ranks are 200,000 a rank."""


def split_dim(pieces: Pieces, dim: int, inner: int) -> Pieces:
    """Return the pieces after ``dim`` of length n is reshaped to (n / inner, inner).

    A piece becomes at most 3 (head, middle, tail).  If its step neither divides
    ``inner`` nor is a multiple of it, its indices fall into
    ``inner / gcd(step, inner)`` columns, and it becomes one piece for each.

    Args:
        pieces: Any pieces.
        dim: The dimension to split.
        inner: Length of the new inner dimension, at least 1.

    Raises:
        BadColumns: ``inner`` is not positive, or there is no such dimension.
        NotDescribable: More pieces arise than an operation may make.

    >>> from weightd.core.layout.boxes import box
    >>> p = split_dim(box((7,), start=(2,)), 0, 3)  # 2 | 3 4 5 | 6 7 8
    >>> p.start.tolist(), p.extent.tolist()
    ([[0, 2], [1, 0]], [[1, 1], [2, 3]])
    """
    check_dim(pieces, dim)
    if inner < 1:
        raise BadColumns("inner", f"a dimension of length {inner}")
    pieces = _by_columns(tidy(pieces), dim, inner)
    start, extent, step, stride = _of_dim(pieces, dim)
    within_row = inner % step == 0
    per_row: Int64 = np.where(within_row, inner // step, 1)  # indices of the piece that one full row has
    row, first = start // inner, np.where(within_row, start % inner // step, 0)
    hop = np.where(within_row, 1, step // inner)  # rows between neighbouring rows of the piece
    end = first + extent
    single = end <= per_row
    head: Int64 = np.where(single, extent, np.where(first > 0, per_row - first, 0))
    middle: Int64 = (extent - head) // per_row
    tail = extent - head - middle * per_row
    after_head = row + hop * (head > 0)
    column = np.where(within_row, start % step, start % inner)
    nothing = np.zeros_like(head)
    parts: list[tuple[Int64, Int64, Int64, Int64, Int64]] = [
        # (first row, rows, first of the row's indices, indices, done before)
        (row, np.minimum(head, 1), first, head, nothing),
        (after_head, middle, nothing, per_row, head),
        (after_head + hop * middle, np.minimum(tail, 1), nothing, tail, head + middle * per_row),
    ]
    split, origin, done = [], [], []
    for at_row, rows, at, count, before in parts:
        here = np.flatnonzero((rows > 0) & (count > 0))
        split.append(
            _insert_dim(
                replace(pieces, offset=pieces.offset + before * stride),
                dim,
                (at_row, rows, hop, per_row * stride),
                (column + at * np.where(within_row, step, 0), count, np.where(within_row, step, 1), stride),
            ).take(here)
        )
        origin.append(here)
        done.append(before[here])
    return tidy(join(split, pieces.ndim + 1).take(np.lexsort((np.concatenate(done), np.concatenate(origin)))))


def merge_dims(pieces: Pieces, dim: int, inner: int) -> Pieces:
    """Return the pieces after ``dim`` and ``dim + 1`` are reshaped to one dimension.

    A piece stays one where its indices are evenly spaced in the result and in
    memory; otherwise it becomes ``min(rows, columns)`` pieces.  Merging a column
    cut of a large matrix is therefore never what is wanted: keep two dimensions.

    Args:
        pieces: Any pieces.
        dim: The first of the two dimensions.
        inner: Length of the tensor's dimension ``dim + 1``, in elements.

    Raises:
        BadColumns: There are no two such dimensions.
        NotDescribable: More pieces arise than an operation may make.

    >>> from weightd.core.layout.boxes import box
    >>> merge_dims(box((2, 3), start=(1, 0)), 0, 3).extent.tolist()
    [[6]]
    >>> merge_dims(box((2, 2), start=(1, 0)), 0, 3).start.tolist()
    [[3], [6]]
    """
    check_dim(pieces, dim, 2)
    pieces = tidy(pieces)
    fewer_rows = pieces.extent[:, dim] <= pieces.extent[:, dim + 1]
    pieces = _unrolled(pieces, dim, _uneven(pieces, dim, inner) & fewer_rows, "merge_dims")
    pieces = _unrolled(pieces, dim + 1, _uneven(pieces, dim, inner), "merge_dims")
    columns = pieces.extent[:, dim + 1]
    by_row = columns == 1
    merged = with_dim(
        pieces,
        dim + 1,
        pieces.start[:, dim] * inner + pieces.start[:, dim + 1],
        pieces.extent[:, dim] * columns,
        np.where(by_row, pieces.step[:, dim] * inner, pieces.step[:, dim + 1]),
        np.where(by_row, pieces.stride[:, dim], pieces.stride[:, dim + 1]),
    )
    kept = np.delete(np.arange(pieces.ndim), dim)
    return tidy(
        replace(
            merged,
            start=merged.start[:, kept],
            extent=merged.extent[:, kept],
            step=merged.step[:, kept],
            stride=merged.stride[:, kept],
        )
    )


def _of_dim(pieces: Pieces, dim: int) -> tuple[Int64, Int64, Int64, Int64]:
    return pieces.start[:, dim], pieces.extent[:, dim], pieces.step[:, dim], pieces.stride[:, dim]


def _insert_dim(
    pieces: Pieces, dim: int, outer: tuple[Int64, Int64, Int64, Int64], inner: tuple[Int64, Int64, Int64, Int64]
) -> Pieces:
    """Return the pieces with two dimensions (start, extent, step, stride) in place of ``dim``."""
    changed = {}
    for name, a, b in zip(("start", "extent", "step", "stride"), outer, inner, strict=True):
        column = np.insert(getattr(pieces, name), dim, a, axis=1)
        column[:, dim + 1] = b
        changed[name] = column
    return replace(pieces, **changed)


def _uneven(pieces: Pieces, dim: int, inner: int) -> Mask:
    """Say which pieces, with ``dim`` and ``dim + 1`` as one dimension, would not be evenly spaced."""
    rows, columns = pieces.extent[:, dim], pieces.extent[:, dim + 1]
    in_tensor = pieces.step[:, dim] * inner == columns * pieces.step[:, dim + 1]
    in_memory = pieces.stride[:, dim] == columns * pieces.stride[:, dim + 1]
    uneven: Mask = (rows > 1) & (columns > 1) & ~(in_tensor & in_memory)
    return uneven


def _repeated(pieces: Pieces, times: Int64, operation: str) -> tuple[Pieces, Int64]:
    """Return each piece ``times`` times, and the number of each copy among its like."""
    # Bounded one by one first: a sum of hostile extents would leave int64.
    total = int(np.minimum(times, MAX_PIECES + 1).sum())
    if total > MAX_PIECES:
        raise NotDescribable(operation, f"{len(pieces)} pieces would become more than {MAX_PIECES}")
    rows = np.repeat(np.arange(len(pieces)), times)
    return pieces.take(rows), np.arange(total) - np.repeat(np.cumsum(times) - times, times)


def _unrolled(pieces: Pieces, dim: int, which: Mask, operation: str) -> Pieces:
    """Return the pieces with one piece for each index along ``dim``, for the rows of ``which``."""
    if not which.any():
        return pieces
    times = np.where(which, pieces.extent[:, dim], 1)
    pieces, number = _repeated(pieces, times, operation)
    start, extent, step, stride = _of_dim(pieces, dim)
    alone = np.where(np.repeat(which, times), 1, extent)
    pieces = replace(pieces, offset=pieces.offset + number * stride)
    return tidy(with_dim(pieces, dim, start + number * step, alone, step, stride))


def _by_columns(pieces: Pieces, dim: int, inner: int) -> Pieces:
    """Return the pieces such that each step divides ``inner`` or is a multiple of it."""
    start, extent, step, stride = _of_dim(pieces, dim)
    crooked = (extent > 1) & (step % inner != 0) & (inner % step != 0)
    if not crooked.any():
        return pieces
    columns = np.where(crooked, inner // np.gcd(step, inner), 1)
    pieces, number = _repeated(pieces, np.minimum(columns, extent), "split_dim")
    columns = np.repeat(columns, np.minimum(columns, extent))
    start, extent, step, stride = _of_dim(pieces, dim)
    return tidy(
        with_dim(
            replace(pieces, offset=pieces.offset + number * stride),
            dim,
            start + number * step,
            -((number - extent) // columns),
            step * columns,
            stride * columns,
        )
    )
