"""The oracle of the layout algebra: every element by itself, from numpy's own index arrays.

It shares no code with the operations.  A piece is unrolled into one row
(tensor, row-major index in its shape, buffer, buffer element) per element.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

Rows = NDArray[np.int64]
"""One row per element: tensor, flat index, buffer, buffer element."""


def numbered(shape: Sequence[int]) -> NDArray[np.int64]:
    """Return the array whose elements are their own row-major numbers."""
    count = 1
    for n in shape:
        count *= n
    return np.arange(count).reshape(shape)


def elements(pieces: Any, shape: Sequence[int]) -> Rows:
    """Unroll pieces (anything with the columns of a layout) of tensors that all have this shape."""
    found = [np.zeros((0, 4), np.int64)]
    for row in range(len(pieces.tensor)):
        index, place = [], np.array(pieces.offset[row])
        for d in range(len(shape)):
            i = np.arange(pieces.extent[row, d])
            index.append(pieces.start[row, d] + pieces.step[row, d] * i)
            place = np.add.outer(place, pieces.stride[row, d] * i)
        numbers = numbered(shape)[np.ix_(*index)] if index else numbered(shape)
        flat = np.stack([np.broadcast_to(numbers, place.shape).ravel(), place.ravel()], axis=1)
        who = np.broadcast_to([pieces.tensor[row], pieces.buffer[row]], (len(flat), 2))
        found.append(np.stack([who[:, 0], flat[:, 0], who[:, 1], flat[:, 1]], axis=1))
    return np.concatenate(found)


def renumbered(rows: Rows, numbers: NDArray[np.int64]) -> Rows:
    """Give each element the number that its own stands at in ``numbers``; elements not there are left out."""
    place = {int(number): at for at, number in enumerate(numbers.ravel())}
    kept = [[t, place[int(e)], b, s] for t, e, b, s in rows if int(e) in place]
    return np.array(kept, np.int64).reshape(-1, 4)


def listed(rows: Rows) -> list[list[int]]:
    """Return the elements in one order, for comparison; doubles stay."""
    return sorted(rows.tolist())
