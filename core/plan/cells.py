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
    """The classes of one dimension, those that continue each other next to each other.

    Attributes:
        start: Smallest member, shape (C,).
        extent: Number of members, shape (C,).
        pitch: Distance of neighbouring members, also where there is one, shape (C,).
        dense: Whether all classes are stretches of neighbouring numbers; they then ascend.
    """

    start: Int64
    extent: Int64
    pitch: Int64
    dense: bool

    def index(self, start: int, extent: int, step: int) -> Index:
        """Return the classes that make up one of the progressions the axis was made of."""
        end = start + (extent - 1) * step + 1
        if self.dense:
            return slice(int(np.searchsorted(self.start, start)), int(np.searchsorted(self.start, end)))
        inside = (self.start >= start) & (self.start < end) & ((self.start - start) % step == 0)
        return np.flatnonzero(inside)

    def continues(self, place: int) -> bool:
        """Say whether a class and the one before it are one progression together."""
        before = place - 1
        follows = self.start[place] == self.start[before] + self.extent[before] * self.pitch[before]
        return bool(follows and self.pitch[place] == self.pitch[before])


def axis_of(start: Int64, extent: Int64, step: Int64) -> Axis:
    """Return the classes of the progressions ``start + step * i``, i below ``extent``.

    >>> a = axis_of(np.array([0, 0]), np.array([6, 3]), np.array([1, 2]))  # 0..5, and 0, 2, 4
    >>> a.start.tolist(), a.extent.tolist(), a.pitch.tolist()
    ([5, 0, 1], [1, 3, 2], [1, 2, 2])
    """
    step = np.where(extent == 1, 1, step)
    end = start + (extent - 1) * step + 1
    cuts = np.unique(np.concatenate([start, end]))
    low, high = cuts[:-1], cuts[1:]
    common = lcm(*(int(k) for k in np.unique(step)))
    if common == 1:
        return Axis(low, high - low, np.ones_like(low), True)
    stepped = step > 1
    # Whether a progression with a step runs through the stretch between two cuts: only there remainders matter.
    mixed = ((start[stepped] <= low[:, None]) & (end[stepped] > low[:, None])).any(axis=1)
    plain = ~mixed
    starts, extents, pitches = [low[plain]], [(high - low)[plain]], [np.ones_like(low[plain])]
    for a, b in zip(low[mixed].tolist(), high[mixed].tolist(), strict=True):
        first = np.arange(a, min(a + common, b), dtype=np.int64)
        starts.append(first)
        extents.append((b - 1 - first) // common + 1)
        pitches.append(np.full_like(first, common))
    first, count, pitch = np.concatenate(starts), np.concatenate(extents), np.concatenate(pitches)
    order = np.lexsort((first, first % pitch, pitch))
    return Axis(first[order], count[order], pitch[order], False)


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
        index = []
        for a in self.axes:
            classes = np.flatnonzero(mask.reshape(mask.shape[0], -1).any(axis=1))
            lowest = classes[np.argmin(a.start[classes])]
            index.append(int(a.start[lowest]))
            mask = mask[lowest]
        return tuple(index)

    def boxes(self, label: NDArray[np.int64], limit: int) -> tuple[list[CellBox], int]:
        """Cut each set of equally labelled cells into boxes; cells labelled 0 are left out.

        Args:
            label: One number per cell.
            limit: Number of boxes to list at most.

        Returns:
            The boxes in the order of their first cells, and how many more single cells were left.
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
            while ends[d] < label.shape[d] and self.axes[d].continues(ends[d]):
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
            members = int(a.extent[c:e].sum())
            start.append(int(a.start[c]))
            extent.append(members)
            step.append(int(a.pitch[c]) if members > 1 else 1)
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
