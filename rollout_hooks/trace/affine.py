"""A strided view of row-major memory, as boxes of the array that the memory is.

Any chain of slices, transposes and reshapes of an array is one view: an offset and, per dimension, an extent and a
stride.  Layouts speak of boxes instead.  A view is one box nearly always, several where a dimension runs over the
end of a row, or where two dimensions run along the same one (heads that are interleaved).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from weightd.core.layout.boxes import Pieces, no_pieces, row_major
from weightd.core.layout.faults import NotDescribable

MAX_BOXES = 1 << 20
"""Boxes that one view may become; interleaved heads of the largest models are some hundreds."""


class View(NamedTuple):
    """A strided view, in elements of the memory it lies in."""

    offset: int
    extent: tuple[int, ...]
    stride: tuple[int, ...]


class Row(NamedTuple):
    """One box of an array, and where its elements lie on the other side; the columns of ``Pieces``, as a row."""

    start: tuple[int, ...]
    extent: tuple[int, ...]
    step: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]


class _Dim(NamedTuple):
    extent: int
    here: int
    there: int


class _Job(NamedTuple):
    here: int
    there: int
    dims: tuple[_Dim, ...]


def boxes(shape: Sequence[int], view: View, other: View) -> list[Row]:
    """Return a view of a row-major array of ``shape`` as boxes of it.

    Args:
        shape: The array's shape.
        view: Which elements; all of them inside of the array.
        other: Where the same elements lie on the other side, with the extents of ``view``.

    Raises:
        NotDescribable: The view is more than ``MAX_BOXES`` boxes.

    >>> row, = boxes((4, 3), View(3, (3, 2), (1, 3)), View(0, (3, 2), (2, 1)))  # x[1:3].T, made contiguous
    >>> row.start, row.extent, row.stride
    ((1, 0), (2, 3), (1, 2))
    >>> [r.start for r in boxes((4, 3), View(2, (5,), (1,)), View(0, (5,), (1,)))]  # flat: 2 | 3 4 5 | 6
    [(0, 2), (1, 0), (2, 0)]
    """
    if 0 in view.extent:
        return []
    dims = tuple(_Dim(n, a, b) for n, a, b in zip(view.extent, view.stride, other.stride, strict=True) if n > 1)
    base, jobs, found = row_major(shape), [_Job(view.offset, other.offset, dims)], list[Row]()
    while jobs:
        job = jobs.pop()
        smaller = _smaller(shape, base, job)
        if smaller is None:
            found.append(_row(shape, base, job))
        elif len(found) + len(jobs) + len(smaller) > MAX_BOXES:
            raise NotDescribable("trace", f"a view {view} of an array {tuple(shape)} is more than {MAX_BOXES} boxes")
        else:
            jobs.extend(reversed(smaller))
    return found


def pieces_of_rows(rows: Sequence[Row], origins: Iterable[int], ndim: int) -> Pieces:
    """Return boxes of tensor 0 as columns, with ``origins`` as their buffers."""
    if not rows:
        return no_pieces(ndim)
    wide = (len(rows), ndim)
    return Pieces(
        np.zeros(len(rows), np.int64),
        np.array([r.start for r in rows], np.int64).reshape(wide),
        np.array([r.extent for r in rows], np.int64).reshape(wide),
        np.array([r.step for r in rows], np.int64).reshape(wide),
        np.array(list(origins), np.int64),
        np.array([r.offset for r in rows], np.int64),
        np.array([r.stride for r in rows], np.int64).reshape(wide),
    )


def dense_shape(extent: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a row-major array that a view is a box of, from the view's first element on.

    Strides that do not divide each other are of no such array; then the memory counts as one row.

    >>> dense_shape((3, 4), (1, 3)), dense_shape((4, 3), (6, 2))
    ((4, 3), (4, 3, 2))
    """
    dims = sorted(((s, n) for n, s in zip(extent, stride, strict=True) if n > 1), reverse=True)
    if not dims:
        return (1,)
    span = 1 + sum((n - 1) * s for s, n in dims)
    shape = [dims[0][1]]
    for (outer, _), (inner, n) in pairwise(dims):
        if inner < 1 or outer % inner or outer // inner < n:
            return (span,)
        shape.append(outer // inner)
    return (*shape, dims[-1][0]) if dims[-1][0] > 1 else tuple(shape)


def _smaller(shape: Sequence[int], base: Sequence[int], job: _Job) -> list[_Job] | None:
    """Return what a job is split into, or None if it is one box."""
    axes: dict[int, list[int]] = {}
    for d, dim in enumerate(job.dims):
        axis = next((a for a, s in enumerate(base) if shape[a] > 1 and 0 < s <= dim.here), None)
        if axis is None or dim.here % base[axis]:
            return _unrolled(job, d)
        axes.setdefault(axis, []).append(d)
    for axis, dims in axes.items():
        if len(dims) > 1:
            merged = _merged(job, dims)
            return [merged] if merged else _unrolled(job, min(dims, key=lambda d: job.dims[d].extent))
        dim = job.dims[dims[0]]
        hop, digit = dim.here // base[axis], job.here // base[axis] % shape[axis]
        if digit + hop * (dim.extent - 1) >= shape[axis]:
            return _by_rows(job, dims[0], shape[axis], hop, digit)
    return None


def _row(shape: Sequence[int], base: Sequence[int], job: _Job) -> Row:
    n = len(shape)
    extent, step, stride = [1] * n, [1] * n, [0] * n
    for dim in job.dims:
        axis = next(a for a, s in enumerate(base) if shape[a] > 1 and s <= dim.here)
        extent[axis], step[axis], stride[axis] = dim.extent, dim.here // base[axis], dim.there
    start = tuple(job.here // s % k for s, k in zip(base, shape, strict=True))
    return Row(start, tuple(extent), tuple(step), job.there, tuple(stride))


def _unrolled(job: _Job, d: int) -> list[_Job]:
    """Return one job for each index along dimension ``d``."""
    dim, rest = job.dims[d], job.dims[:d] + job.dims[d + 1 :]
    if dim.extent > MAX_BOXES:
        raise NotDescribable("trace", f"a dimension of {dim.extent} elements falls apart into as many boxes")
    return [_Job(job.here + i * dim.here, job.there + i * dim.there, rest) for i in range(dim.extent)]


def _merged(job: _Job, dims: Sequence[int]) -> _Job | None:
    """Return the job with two of its dimensions as one, if they are evenly spaced on both sides."""
    for i in dims:
        for j in dims:
            outer, inner = job.dims[i], job.dims[j]
            if i != j and (outer.here, outer.there) == (inner.extent * inner.here, inner.extent * inner.there):
                rest = tuple(dim for d, dim in enumerate(job.dims) if d not in (i, j))
                return _Job(job.here, job.there, (*rest, _Dim(outer.extent * inner.extent, inner.here, inner.there)))
    return None


def _by_rows(job: _Job, d: int, length: int, hop: int, digit: int) -> list[_Job]:
    """Return head, whole rows and tail of a dimension that runs over the end of a row of ``length``."""
    if length % hop:
        return _unrolled(job, d)
    dim, rest, per_row = job.dims[d], job.dims[:d] + job.dims[d + 1 :], length // hop
    first = digit // hop
    head = min(dim.extent, per_row - first) if first else 0
    rows = (dim.extent - head) // per_row
    tail = dim.extent - head - rows * per_row
    parts: list[tuple[int, tuple[_Dim, ...]]] = [
        (0, (_Dim(head, dim.here, dim.there),) if head else ()),
        (
            head,
            (_Dim(rows, per_row * dim.here, per_row * dim.there), _Dim(per_row, dim.here, dim.there)) if rows else (),
        ),
        (head + rows * per_row, (_Dim(tail, dim.here, dim.there),) if tail else ()),
    ]
    return [
        _Job(job.here + at * dim.here, job.there + at * dim.there, (*rest, *(p for p in part if p.extent > 1)))
        for at, part in parts
        if part
    ]
