"""Cuts boxes that overlap into cells that do not, exactly, with steps.

Along one dimension the members of a few arithmetic progressions fall into
*classes*: between two neighbouring ends of progressions, numbers that leave the
same remainder (modulo the common multiple of all steps) are in the same
progressions.  A class is a progression again.  The product of the classes of
all dimensions is a small grid on which every box is a set of whole cells, so
that counting, uniting and subtracting boxes is boolean algebra.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

import numpy as np

from weightd.core.layout.columns import Int64

if TYPE_CHECKING:
    from numpy.typing import NDArray

Index = slice | Int64
"""Which classes of one dimension a progression consists of."""


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """The classes of one dimension, ascending by their smallest member.

    Attributes:
        start: Smallest member, shape (C,).
        extent: Number of members, shape (C,).
        step: Distance of neighbouring members, 1 where there is one, shape (C,).
        dense: Whether each class is a stretch of neighbouring numbers.
        common: Common multiple of all steps.
    """

    start: Int64
    extent: Int64
    step: Int64
    dense: bool
    common: int

    def index(self, start: int, extent: int, step: int) -> Index:
        """Return the classes that make up one of the progressions the axis was made of."""
        end = start + (extent - 1) * step + 1
        if self.dense:
            return slice(int(np.searchsorted(self.start, start)), int(np.searchsorted(self.start, end)))
        inside = (self.start >= start) & (self.start < end) & ((self.start - start) % step == 0)
        return np.flatnonzero(inside)


def axis_of(start: Int64, extent: Int64, step: Int64) -> Axis:
    """Return the classes of the progressions ``start + step * i``, i below ``extent``.

    >>> a = axis_of(np.array([0, 0]), np.array([6, 3]), np.array([1, 2]))  # 0..5, and 0, 2, 4
    >>> a.start.tolist(), a.extent.tolist(), a.step.tolist()
    ([0, 1, 5], [3, 2, 1], [2, 2, 1])
    """
    step = np.where(extent == 1, 1, step)
    cuts = np.unique(np.concatenate([start, start + (extent - 1) * step + 1]))
    common = lcm(*(int(k) for k in np.unique(step))) if len(step) else 1
    if common == 1:
        low, high = cuts[:-1], cuts[1:]
        return Axis(low, high - low, np.ones_like(low), True, 1)
    starts, extents, steps = [], [], []
    for low, high in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        residues = np.arange(low, min(low + common, high), dtype=np.int64)
        counts = (high - 1 - residues) // common + 1
        starts.append(residues)
        extents.append(counts)
        steps.append(np.where(counts > 1, common, 1))
    return Axis(np.concatenate(starts), np.concatenate(extents), np.concatenate(steps), False, common)


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The cells that a set of boxes falls into.  A grid of no dimension has one cell."""

    axes: tuple[Axis, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of classes per dimension."""
        return tuple(len(a.start) for a in self.axes)

    def index(self, start: Int64, extent: Int64, step: Int64) -> tuple[Index, ...]:
        """Return where the cells of one box are; fit for indexing an array of the grid's shape."""
        parts = [
            a.index(int(s), int(e), int(k))
            for a, s, e, k in zip(self.axes, start.tolist(), extent.tolist(), step.tolist(), strict=True)
        ]
        if all(isinstance(p, slice) for p in parts):
            return tuple(parts)
        lists = [np.arange(p.start, p.stop, dtype=np.int64) if isinstance(p, slice) else p for p in parts]
        return np.ix_(*lists)

    def count(self, mask: NDArray[np.bool_]) -> int:
        """Return the number of elements in the cells of ``mask``."""
        total = mask.astype(np.int64)
        for a in reversed(self.axes):
            total = total @ a.extent
        return int(total)

    def first(self, mask: NDArray[np.bool_]) -> tuple[int, ...]:
        """Return the smallest index, in row-major order, of a mask that is not empty."""
        # The smallest member of a cell is the tuple of the smallest members, and classes ascend by theirs.
        cell = np.unravel_index(int(np.argmax(mask)), mask.shape) if mask.ndim else ()
        return tuple(int(a.start[c]) for a, c in zip(self.axes, cell, strict=True))

    def boxes(self, label: NDArray[np.int64], limit: int) -> tuple[list[CellBox], int]:
        """Cut each set of equally labelled cells into boxes; cells labelled 0 are left out.

        Args:
            label: One number per cell.
            limit: Number of boxes to list at most.

        Returns:
            The boxes in row-major order of their first cells, and how many more single cells were left.
        """
        free = np.asarray(label != 0)
        found: list[CellBox] = []
        flat = free.reshape(-1)
        position = 0
        while position < flat.size:
            ahead = int(np.argmax(flat[position:]))
            if not flat[position + ahead]:
                break
            position += ahead
            if len(found) == limit:
                return found, int(np.count_nonzero(flat))
            corner = tuple(int(c) for c in np.unravel_index(position, label.shape)) if label.ndim else ()
            ends = self._grow(label, free, corner)
            window = tuple(slice(c, e) for c, e in zip(corner, ends, strict=True))
            free[window] = False
            found.append(self._box(int(label[corner]), corner, ends))
        return found, 0

    def _grow(self, label: NDArray[np.int64], free: NDArray[np.bool_], corner: tuple[int, ...]) -> list[int]:
        """Return the ends of the largest box of one label that begins at a cell, last dimension first."""
        ends = [c + 1 for c in corner]
        wanted = label[corner]
        for d in reversed(range(len(corner))):
            if not self.axes[d].dense:
                continue
            while ends[d] < label.shape[d]:
                window = tuple(
                    slice(ends[d], ends[d] + 1) if x == d else slice(corner[x], ends[x]) for x in range(len(corner))
                )
                if not (free[window] & (label[window] == wanted)).all():
                    break
                ends[d] += 1
        return ends

    def _box(self, label: int, corner: tuple[int, ...], ends: list[int]) -> CellBox:
        start, extent, step = [], [], []
        for a, c, e in zip(self.axes, corner, ends, strict=True):
            start.append(int(a.start[c]))
            extent.append(int(a.extent[c:e].sum()))
            step.append(int(a.step[c]))
        return CellBox(label, tuple(start), tuple(extent), tuple(step))


@dataclass(frozen=True, slots=True)
class CellBox:
    """Some cells of one label that form a box."""

    label: int
    start: tuple[int, ...]
    extent: tuple[int, ...]
    step: tuple[int, ...]


def grid_of(start: Int64, extent: Int64, step: Int64) -> Grid:
    """Return the grid of boxes given as columns of shape (K, N), K at least 1."""
    return Grid(tuple(axis_of(start[:, d], extent[:, d], step[:, d]) for d in range(start.shape[1])))
