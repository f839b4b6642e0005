"""Operations on pieces that yield pieces: what is done to a tensor, done to its description.

Each function says in its first line which array operation it describes.  The
pieces of any number of tensors go through one call, as long as the dimension
means the same for all of them; ``dim`` counts from 0 and is never negative.

Closed: every result is a list of boxes again.  Where one box becomes many, the
docstring says how many.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from weightd.core.layout.boxes import Pieces, join, tidy, widened
from weightd.core.layout.faults import BadColumns, NotDescribable
from weightd.core.layout.intersect import intersect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightd.core.layout.boxes import Mask
    from weightd.core.layout.columns import Int64

MAX_PIECES = 1 << 24
"""Pieces that one operation may make; 70,000 tensors flat over 500 ranks are 200,000 a rank."""


def narrow(pieces: Pieces, dim: int, low: int | Int64, high: int | Int64) -> Pieces:
    """Return the parts with index in ``[low, high)`` along ``dim``, still of the whole tensor.

    Follow with ``embed(..., dim, -low)`` to describe the narrowed tensor instead.

    Args:
        pieces: Pieces of tensors that have dimension ``dim``.
        dim: The dimension.
        low: First index, one for all pieces or one per piece.
        high: One past the last index, likewise.

    Returns:
        At most as many pieces; those with nothing inside are gone.

    >>> from weightd.core.layout.boxes import box
    >>> p = narrow(box((5, 3)), 0, 3, 9)
    >>> p.start.tolist(), p.extent.tolist(), p.offset.tolist()
    ([[3, 0]], [[2, 3]], [9])
    """
    first, step = pieces.start[:, dim], pieces.step[:, dim]
    begin = np.maximum(0, -((first - low) // step))
    end = np.minimum(pieces.extent[:, dim], -((first - high) // step))
    result = _with_dim(
        replace(pieces, offset=pieces.offset + begin * pieces.stride[:, dim]),
        dim,
        first + begin * step,
        np.maximum(end - begin, 1),
        step,
        pieces.stride[:, dim],
    )
    return tidy(result.take(np.flatnonzero(end > begin)))


def embed(pieces: Pieces, dim: int, at: int | Int64) -> Pieces:
    """Return the pieces as part of a larger tensor, in which theirs begins at ``at`` along ``dim``.

    >>> from weightd.core.layout.boxes import box
    >>> embed(box((5, 3)), 0, 7).start.tolist()
    [[7, 0]]
    """
    start = pieces.start.copy()
    start[:, dim] += at
    return replace(pieces, start=start)


def concatenate(parts: Sequence[Pieces], sizes: Sequence[int], dim: int) -> Pieces:
    """Return the pieces of ``concatenate(tensors, dim)``.

    Args:
        parts: The pieces of each tensor; all get the tensor numbers they bring.
        sizes: Length of each tensor along ``dim``, in elements.
        dim: The dimension.

    Raises:
        BadColumns: ``parts`` and ``sizes`` differ in length.

    >>> from weightd.core.layout.boxes import box
    >>> concatenate([box((5,)), box((4,))], [5, 4], 0).start.tolist()
    [[0], [5]]
    """
    if len(parts) != len(sizes):
        raise BadColumns("sizes", f"{len(sizes)} sizes for {len(parts)} tensors")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return join([embed(part, dim, at) for part, at in zip(parts, starts, strict=True)])


def transpose(pieces: Pieces, order: Sequence[int]) -> Pieces:
    """Return the pieces of ``tensor.transpose(order)``.

    Args:
        pieces: Any pieces.
        order: Dimension of the given tensors at each place of the result, as in numpy.

    Raises:
        BadColumns: ``order`` is no order of all dimensions.

    >>> from weightd.core.layout.boxes import box
    >>> transpose(box((5, 3)), (1, 0)).stride.tolist()
    [[1, 3]]
    """
    if sorted(order) != list(range(pieces.ndim)):
        raise BadColumns("order", f"{tuple(order)} is no order of {pieces.ndim} dimensions")
    places = np.array(order, np.int64)
    return replace(
        pieces,
        start=pieces.start[:, places],
        extent=pieces.extent[:, places],
        step=pieces.step[:, places],
        stride=pieces.stride[:, places],
    )


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
        BadColumns: ``inner`` is not positive.

    >>> from weightd.core.layout.boxes import box
    >>> p = split_dim(box((7,), start=(2,)), 0, 3)  # 2 | 3 4 5 | 6 7 8
    >>> p.start.tolist(), p.extent.tolist()
    ([[0, 2], [1, 0]], [[1, 1], [2, 3]])
    """
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
        NotDescribable: More pieces arise than an operation may make.

    >>> from weightd.core.layout.boxes import box
    >>> merge_dims(box((2, 3), start=(1, 0)), 0, 3).extent.tolist()
    [[6]]
    >>> merge_dims(box((2, 2), start=(1, 0)), 0, 3).start.tolist()
    [[3], [6]]
    """
    pieces = tidy(pieces)
    fewer_rows = pieces.extent[:, dim] <= pieces.extent[:, dim + 1]
    pieces = _unrolled(pieces, dim, _uneven(pieces, dim, inner) & fewer_rows, "merge_dims")
    pieces = _unrolled(pieces, dim + 1, _uneven(pieces, dim, inner), "merge_dims")
    columns = pieces.extent[:, dim + 1]
    by_row = columns == 1
    merged = _with_dim(
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


def compose(outer: Pieces, inner: Pieces, local_shape: Sequence[int] | Int64) -> Pieces:
    """Return where the pieces of a shard lie in the whole tensor: a cut of what another cut left.

    ``outer`` says which part of the tensor the shard is: its buffer is the shard
    as a contiguous row-major array of ``local_shape`` (whether or not such an
    array exists).  ``inner`` says where the elements of the shard lie in memory.
    An element of the shard that ``outer`` does not mention is padding, and gone.

    Args:
        outer: The shard's pieces of the whole tensor.
        inner: The memory's pieces of the shard, with the tensor numbers of ``outer``.
        local_shape: Shape of the shard, one for all or one per piece of ``outer``, (N,) or (P, N).

    Returns:
        Pieces of the whole tensor in the memory of ``inner``, ordered by piece of ``inner``.

    Raises:
        NotDescribable: A piece of ``outer`` is no box of the shard; transpose or split it first.

    >>> from weightd.core.layout.boxes import box
    >>> from weightd.core.layout.flat import flat_range
    >>> rank1 = box((4, 3), start=(5, 0))         # TP: rows 5 to 8 of (9, 3)
    >>> p = compose(rank1, flat_range((4, 3), 0, 7), (4, 3))  # ZeRO-3: its first 7 elements
    >>> p.start.tolist(), p.extent.tolist()
    ([[5, 0], [7, 0]], [[2, 3], [1, 1]])
    """
    outer, inner = tidy(outer), tidy(widened(inner, outer.ndim))
    if inner.ndim != outer.ndim:
        raise BadColumns("inner", f"the shard has {outer.ndim} dimensions, its pieces {inner.ndim}")
    local = _box_of_shard(outer, np.broadcast_to(np.asarray(local_shape, np.int64), outer.start.shape))
    common = intersect(local, inner)
    whole, box = outer.take(common.source), local.take(common.source)
    hops = (common.start - box.start) // box.step
    return tidy(
        Pieces(
            tensor=whole.tensor,
            start=whole.start + hops * whole.step,
            extent=common.extent,
            step=np.where(common.extent > 1, common.step // box.step * whole.step, 1),
            buffer=inner.buffer[common.target],
            offset=common.target_offset,
            stride=common.target_stride,
        )
    )


def _box_of_shard(outer: Pieces, shape: Int64) -> Pieces:
    """Return the pieces as boxes of the shard itself, shape (P, N) each, by undoing row-major order."""
    stride = np.ones_like(shape)
    for d in range(outer.ndim - 2, -1, -1):
        stride[:, d] = stride[:, d + 1] * np.maximum(shape[:, d + 1], 1)
    start = outer.offset[:, None] // stride % np.maximum(shape, 1)
    step = np.where(outer.extent > 1, outer.stride // stride, 1)
    fits = (outer.extent == 1) | (step * stride == outer.stride)
    fits &= (step >= 1) & (start + (outer.extent - 1) * step < shape)
    bad = np.flatnonzero(~fits.all(axis=1) | ((start * stride).sum(axis=1) != outer.offset))
    if bad.size:
        row = bad[0]
        raise NotDescribable(
            "compose",
            f"piece {row} of the outer cut (offset {outer.offset[row]}, extent {tuple(outer.extent[row].tolist())}, "
            f"stride {tuple(outer.stride[row].tolist())}) is no box of a shard of shape {tuple(shape[row].tolist())}",
        )
    return replace(outer, start=start, step=step)


def _of_dim(pieces: Pieces, dim: int) -> tuple[Int64, Int64, Int64, Int64]:
    return pieces.start[:, dim], pieces.extent[:, dim], pieces.step[:, dim], pieces.stride[:, dim]


def _with_dim(pieces: Pieces, dim: int, start: Int64, extent: Int64, step: Int64, stride: Int64) -> Pieces:
    """Return the pieces with other columns for one dimension."""
    columns = {"start": start, "extent": extent, "step": step, "stride": stride}
    changed = {name: getattr(pieces, name).copy() for name in columns}
    for name, column in columns.items():
        changed[name][:, dim] = column
    return replace(pieces, **changed)


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
    return tidy(_with_dim(pieces, dim, start + number * step, alone, step, stride))


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
        _with_dim(
            replace(pieces, offset=pieces.offset + number * stride),
            dim,
            start + number * step,
            -((number - extent) // columns),
            step * columns,
            stride * columns,
        )
    )
