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

from weightd.core.layout.boxes import Pieces, check_dim, join, tidy, widened, with_dim
from weightd.core.layout.faults import BadColumns, NotDescribable
from weightd.core.layout.intersect import intersect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightd.core.layout.columns import Int64


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

    Raises:
        BadColumns: There is no such dimension.

    >>> from weightd.core.layout.boxes import box
    >>> p = narrow(box((5, 3)), 0, 3, 9)
    >>> p.start.tolist(), p.extent.tolist(), p.offset.tolist()
    ([[3, 0]], [[2, 3]], [9])
    """
    check_dim(pieces, dim)
    first, step = pieces.start[:, dim], pieces.step[:, dim]
    begin = np.maximum(0, -((first - low) // step))
    end = np.minimum(pieces.extent[:, dim], -((first - high) // step))
    result = with_dim(
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

    Raises:
        BadColumns: There is no such dimension.

    >>> from weightd.core.layout.boxes import box
    >>> embed(box((5, 3)), 0, 7).start.tolist()
    [[7, 0]]
    """
    check_dim(pieces, dim)
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
