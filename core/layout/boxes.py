"""Pieces without their tables: the one value that the algebra takes and returns.

``Pieces`` are the columns of a layout; a ``Layout`` is pieces plus the tables
that say which tensors and buffers the rows point to.  All of the algebra works
on columns, so that one call serves a single tensor and 70,000 of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from weightd.core.layout.faults import BadColumns

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from weightd.core.layout.columns import Int64, Layout

Mask = NDArray[np.bool_]
"""True for the rows that are meant."""


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Boxes of tensors and where they lie in buffers, P rows of N dimensions.

    Element ``start + step * i`` of the tensor is element ``offset + sum(i * stride)`` of the buffer.

    Attributes:
        tensor: Which tensor, shape (P,).
        start: First index per dimension, shape (P, N).
        extent: Number of indices per dimension, at least 1, shape (P, N).
        step: Distance of neighbouring indices, at least 1, shape (P, N).
        buffer: Which buffer, shape (P,).
        offset: Buffer element where the piece begins, shape (P,).
        stride: Buffer elements between neighbouring indices, shape (P, N).
    """

    tensor: Int64
    start: Int64
    extent: Int64
    step: Int64
    buffer: Int64
    offset: Int64
    stride: Int64

    def __len__(self) -> int:
        return int(self.tensor.shape[0])

    @property
    def ndim(self) -> int:
        """Width N of the columns."""
        return int(self.start.shape[1])

    @property
    def numel(self) -> Int64:
        """Elements of each piece, shape (P,)."""
        product: Int64 = np.prod(self.extent, axis=1, dtype=np.int64)
        return product

    def take(self, rows: Int64 | Mask) -> Pieces:
        """Return the pieces at ``rows`` (numbers or a mask), in that order."""
        return Pieces(
            self.tensor[rows],
            self.start[rows],
            self.extent[rows],
            self.step[rows],
            self.buffer[rows],
            self.offset[rows],
            self.stride[rows],
        )


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous row-major array.

    >>> row_major((5, 4, 3))
    (12, 3, 1)
    """
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    return tuple(strides)


def no_pieces(ndim: int) -> Pieces:
    """Return zero pieces of ``ndim`` dimensions: what an empty shard is."""
    row: Int64 = np.zeros(0, np.int64)
    wide: Int64 = np.zeros((0, ndim), np.int64)
    return Pieces(row, wide, wide, wide, row, row, wide)


def box(
    extent: Sequence[int],
    start: Sequence[int] | None = None,
    step: Sequence[int] | None = None,
    offset: int = 0,
    stride: Sequence[int] | None = None,
) -> Pieces:
    """Return one piece, or none where an extent is 0.

    Args:
        extent: Number of indices per dimension; ``()`` for a 0-d tensor.
        start: First index per dimension; zeros by default.
        step: Distance of neighbouring indices; ones by default.
        offset: Buffer element where it begins.
        stride: Buffer elements between neighbouring indices; contiguous row-major by default.

    Returns:
        Pieces of tensor 0 and buffer 0 (see ``placed``).

    Raises:
        BadColumns: The arguments differ in length.

    >>> box((2, 3), start=(5, 0)).stride.tolist()
    [[3, 1]]
    >>> len(box((0, 3))), len(box(()))
    (0, 1)
    """
    n = len(extent)
    if 0 in extent:
        return no_pieces(n)
    columns = {
        "start": [0] * n if start is None else start,
        "step": [1] * n if step is None else step,
        "stride": row_major(extent) if stride is None else stride,
    }
    for name, values in columns.items():
        if len(values) != n:
            raise BadColumns(name, f"{len(values)} numbers for {n} dimensions")
    wide = {name: np.array(values, np.int64).reshape(1, n) for name, values in columns.items()}
    zero: Int64 = np.zeros(1, np.int64)
    return tidy(
        Pieces(
            zero,
            wide["start"],
            np.array(extent, np.int64).reshape(1, n),
            wide["step"],
            zero,
            np.array([offset], np.int64),
            wide["stride"],
        )
    )


def placed(pieces: Pieces, tensor: int | Int64 | None = None, buffer: int | Int64 | None = None) -> Pieces:
    """Return the pieces with other rows for their tensors and buffers.

    >>> placed(box((2,)), tensor=7).tensor.tolist()
    [7]
    """
    shape = pieces.tensor.shape
    return replace(
        pieces,
        tensor=pieces.tensor if tensor is None else np.broadcast_to(np.asarray(tensor, np.int64), shape),
        buffer=pieces.buffer if buffer is None else np.broadcast_to(np.asarray(buffer, np.int64), shape),
    )


def moved(pieces: Pieces, by: int | Int64) -> Pieces:
    """Return the pieces ``by`` elements further into their buffers."""
    return replace(pieces, offset=pieces.offset + np.asarray(by, np.int64))


def join(parts: Iterable[Pieces], ndim: int = 0) -> Pieces:
    """Return all pieces of ``parts``, in order, as wide as the widest of them and ``ndim``.

    >>> both = join([box((2,)), box((3, 4))])
    >>> both.extent.tolist()
    [[2, 1], [3, 4]]
    """
    given = list(parts)
    width = max([ndim, *(p.ndim for p in given)])
    wide = [widened(p, width) for p in given] or [no_pieces(width)]
    return Pieces(
        np.concatenate([p.tensor for p in wide]),
        np.concatenate([p.start for p in wide]),
        np.concatenate([p.extent for p in wide]),
        np.concatenate([p.step for p in wide]),
        np.concatenate([p.buffer for p in wide]),
        np.concatenate([p.offset for p in wide]),
        np.concatenate([p.stride for p in wide]),
    )


def widened(pieces: Pieces, ndim: int) -> Pieces:
    """Return the pieces with columns padded at the right to ``ndim`` dimensions."""
    missing = ndim - pieces.ndim
    if missing <= 0:
        return pieces

    def padded(column: Int64, fill: int) -> Int64:
        return np.pad(column, ((0, 0), (0, missing)), constant_values=fill)

    return replace(
        pieces,
        start=padded(pieces.start, 0),
        extent=padded(pieces.extent, 1),
        step=padded(pieces.step, 1),
        stride=padded(pieces.stride, 0),
    )


def tidy(pieces: Pieces) -> Pieces:
    """Return the pieces with step 1 and stride 0 where the extent is 1.

    There neither means anything, and two descriptions of the same memory must
    not differ in it: their digests are compared.

    >>> tidy(box((1, 3), stride=(99, 1))).stride.tolist()
    [[0, 1]]
    """
    one = pieces.extent == 1
    return replace(pieces, step=np.where(one, 1, pieces.step), stride=np.where(one, 0, pieces.stride))


def check_dim(pieces: Pieces, dim: int, dims: int = 1) -> None:
    """Refuse a dimension, or several from ``dim`` on, that the pieces do not have.

    Raises:
        BadColumns: They do not; a negative number would silently mean another one.
    """
    if not 0 <= dim <= pieces.ndim - dims:
        raise BadColumns("dim", f"{dims} from number {dim} of {pieces.ndim} dimensions")


def with_dim(pieces: Pieces, dim: int, start: Int64, extent: Int64, step: Int64, stride: Int64) -> Pieces:
    """Return the pieces with other columns for one dimension."""
    columns = {"start": start, "extent": extent, "step": step, "stride": stride}
    changed = {name: getattr(pieces, name).copy() for name in columns}
    for name, column in columns.items():
        changed[name][:, dim] = column
    return replace(pieces, **changed)


def pieces_of(layout: Layout) -> Pieces:
    """Return the columns of a layout, sharing its memory."""
    return Pieces(layout.tensor, layout.start, layout.extent, layout.step, layout.buffer, layout.offset, layout.stride)
