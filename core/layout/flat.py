"""Ranges of a tensor's row-major order, which is how ZeRO-3 and flat parameters cut, as boxes.

Elements ``[low, high)`` of an N-d tensor, stored one after another, are at most
2N-1 boxes: N-1 heads that fill up the row of each dimension, one middle of whole
rows, and N-1 tails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from weightd.core.layout.boxes import Pieces, tidy
from weightd.core.layout.faults import BadCut

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightd.core.layout.columns import Int64


def flat_range(shape: Sequence[int], low: int, high: int, offset: int = 0) -> Pieces:
    """Return the pieces of elements ``[low, high)`` of a row-major tensor, stored contiguously.

    Args:
        shape: Shape of the tensor; ``()`` for a 0-d one, whose only range is [0, 1).
        low: First element.
        high: One past the last element; clip it to the tensor first, padding is no piece.
        offset: Buffer element where the range begins.

    Returns:
        At most 2N-1 pieces in storage order; none if the range is empty.

    Raises:
        BadCut: The range leaves the tensor.

    >>> p = flat_range((4, 3), 2, 10)  # row 0 from column 2, rows 1 and 2, row 3 up to column 1
    >>> p.start.tolist(), p.extent.tolist(), p.offset.tolist()
    ([[0, 2], [1, 0], [3, 0]], [[1, 1], [2, 3], [1, 1]], [0, 1, 7])
    """
    one: Int64 = np.ones(1, np.int64)
    return expand_flat(np.array(shape, np.int64).reshape(1, len(shape)), one * low, one * high, one * offset)


def expand_flat(shapes: Int64, low: Int64, high: Int64, offset: Int64) -> Pieces:
    """Return the pieces of one flat range of each of T tensors.

    Args:
        shapes: Shapes padded at the right with 1, shape (T, N).
        low: First element of each range, shape (T,).
        high: One past the last element, shape (T,).
        offset: Buffer element where each range begins, shape (T,).

    Returns:
        Pieces whose ``tensor`` is the row of the range, in order of range and storage;
        ``buffer`` is 0 (see ``boxes.placed``).

    Raises:
        BadCut: A range leaves its tensor.

    >>> both = np.array([[4, 3], [5, 1]])
    >>> p = expand_flat(both, np.array([2, 1]), np.array([10, 3]), np.array([0, 8]))
    >>> p.tensor.tolist(), p.offset.tolist()
    ([0, 0, 0, 1], [0, 1, 7, 8])
    """
    ndim = shapes.shape[1]
    numel = np.prod(shapes, axis=1, dtype=np.int64)
    wrong = np.flatnonzero((high > low) & ((low < 0) | (high > numel)))
    if wrong.size:
        t = wrong[0]
        raise BadCut(int(numel[t]), (int(low[t]), int(high[t])), "this flat range leaves the tensor")
    tensor = np.flatnonzero(high > low)
    shapes, low, high, offset = shapes[tensor], low[tensor], high[tensor], offset[tensor]
    if not ndim:
        zero, wide = np.zeros_like(tensor), np.zeros((len(tensor), 0), np.int64)
        return Pieces(tensor, wide, wide, wide, zero, offset, wide)
    unit = np.ones_like(shapes)  # elements of one index step of each dimension
    for d in range(ndim - 2, -1, -1):
        unit[:, d] = unit[:, d + 1] * shapes[:, d + 1]
    stretches = _stretches(unit, low, high)
    rows = np.concatenate([r for r, _, _, _ in stretches])
    dims = np.concatenate([np.full_like(r, d) for r, d, _, _ in stretches])
    begin = np.concatenate([b for _, _, b, _ in stretches])
    count = np.concatenate([c for _, _, _, c in stretches])
    order = np.lexsort((begin, rows))
    rows, dims, begin, count = rows[order], dims[order], begin[order], count[order]
    place = np.arange(ndim) - dims[:, None]  # negative: one index; 0: a stretch of them; positive: all
    extent = np.where(place < 0, 1, np.where(place == 0, count[:, None], shapes[rows]))
    return tidy(
        Pieces(
            tensor=tensor[rows],
            start=begin[:, None] // unit[rows] % shapes[rows],
            extent=extent,
            step=np.ones_like(extent),
            buffer=np.zeros_like(rows),
            offset=offset[rows] + begin - low[rows],
            stride=unit[rows],
        )
    )


def _stretches(unit: Int64, low: Int64, high: Int64) -> list[tuple[Int64, int, Int64, Int64]]:
    """Return (ranges, dimension, first element, indices along it) of every box, dimension by dimension."""
    ndim = unit.shape[1]
    found = []
    at = low.copy()
    for d in range(ndim - 1, 0, -1):  # heads: fill up the row of dimension d, where the range reaches its end
        row_end = -(-at // unit[:, d - 1]) * unit[:, d - 1]
        here = np.flatnonzero((row_end > at) & (row_end <= high))
        found.append((here, d, at[here], (row_end[here] - at[here]) // unit[here, d]))
        at[here] = row_end[here]
    for d in range(ndim):  # middle and tails: as many whole steps of dimension d as are left
        steps = np.where(at % unit[:, d] == 0, (high - at) // unit[:, d], 0)
        here = np.flatnonzero(steps > 0)
        found.append((here, d, at[here], steps[here]))
        at[here] += steps[here] * unit[here, d]
    return found
