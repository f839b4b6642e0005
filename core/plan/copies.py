"""Rows of copies as a value: taken, put together, and in the fixed order of their columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from weightd.core.plan.node_plan import COPY_DIMS, Copies

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightd.core.layout.columns import Int64

NARROW = ("source", "source_offset", "target", "target_offset", "itemsize")
"""Columns of one number a row."""

WIDE = ("source_stride", "target_stride", "extent")
"""Columns of one number a dimension."""


def columns_of(copies: Copies) -> tuple[Int64, ...]:
    """Return the columns in the fixed order of digests and messages: narrow ones, then wide ones."""
    return tuple(getattr(copies, name) for name in (*NARROW, *WIDE))


def no_copies(width: int = COPY_DIMS) -> Copies:
    """Return zero copies of a number of dimensions."""
    row: Int64 = np.zeros(0, np.int64)
    wide: Int64 = np.zeros((0, width), np.int64)
    return Copies(row, row, wide, row, row, wide, wide, row)


def take(copies: Copies, rows: Int64 | slice) -> Copies:
    """Return the copies at ``rows``, in that order."""
    return Copies(**{name: getattr(copies, name)[rows] for name in (*NARROW, *WIDE)})


def concatenated(parts: Sequence[Copies]) -> Copies:
    """Return the rows of all parts, at least one; they have the same width."""
    return Copies(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in (*NARROW, *WIDE)})
