"""The verdict on one tensor: which elements are covered, ambiguous, missing and unused.

Thousands of tensors of a model are cut alike, so a verdict is given once per
*way of cutting* (the boxes of both sides and the declared rows) and holds for
every tensor cut that way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from weightd.core.layout.columns import Int64, RowRange
from weightd.core.plan.cells import Grid, grid_of
from weightd.core.plan.violations import Region

if TYPE_CHECKING:
    from collections.abc import Sequence

REGIONS_LISTED = 64
"""Regions that a violation lists; one lost rank of a flat partition makes at most five."""

BoolGrid = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Cuts:
    """Different boxes of one tensor, as columns of shape (K, N)."""

    start: Int64
    extent: Int64
    step: Int64

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """What a way of cutting a tensor amounts to, in elements.

    Attributes:
        owned: Different elements that the source owns.
        needed: Different elements that targets need.
        used: Those that are both; ``needed = used + missing``.
        missing: Needed and not owned.
        declared: Owned, not needed, and declared unused.
        unused: Owned, not needed and not declared; ``owned = used + declared + unused``.
        ambiguous: Owned by several boxes, unless declared unused and not needed.
    """

    owned: int
    needed: int
    used: int
    missing: int
    declared: int
    unused: int
    ambiguous: int
    _grid: Grid
    _missing: BoolGrid
    _unused: BoolGrid
    _ambiguous: BoolGrid

    def missing_regions(self) -> tuple[tuple[int, ...], tuple[Region, ...], int]:
        """Return the first missing index, boxes of what is missing, and the number of cells not listed."""
        return _regions(self._grid, self._missing)

    def unused_regions(self) -> tuple[tuple[int, ...], tuple[Region, ...], int]:
        """As ``missing_regions``, of what is unused."""
        return _regions(self._grid, self._unused)

    def ambiguous_regions(self) -> tuple[tuple[int, ...], tuple[Region, ...], int]:
        """As ``missing_regions``, of what is ambiguous."""
        return _regions(self._grid, self._ambiguous)

    def touching(self, cuts: Cuts, what: str) -> list[int]:
        """Return the rows of boxes that hold an element that is ``missing``, ``unused`` or ``ambiguous``."""
        mask = {"missing": self._missing, "unused": self._unused, "ambiguous": self._ambiguous}[what]
        return [
            row
            for row in range(len(cuts))
            if mask[self._grid.index(cuts.start[row], cuts.extent[row], cuts.step[row])].any()
        ]


def _regions(grid: Grid, mask: BoolGrid) -> tuple[tuple[int, ...], tuple[Region, ...], int]:
    boxes, left_out = grid.boxes(mask.astype(np.int64), REGIONS_LISTED)
    return grid.first(mask), tuple(Region(b.start, b.extent, b.step) for b in boxes), left_out


def judge(owned: Cuts, needed: Cuts, shape: tuple[int, ...], unused: Sequence[RowRange], all_unused: bool) -> Verdict:
    """Return the verdict on a tensor.

    Args:
        owned: The different boxes of the source.
        needed: The different boxes of the targets, as wide as ``owned``.
        shape: Shape of the tensor on the source's side.
        unused: Rows declared unused.
        all_unused: Whether the whole tensor is declared unused.

    >>> from weightd.core.layout.boxes import box
    >>> cuts = lambda b: Cuts(b.start, b.extent, b.step)
    >>> v = judge(cuts(box((3, 2))), cuts(box((4, 2), start=(1, 0))), (5, 2), (), False)
    >>> v.owned, v.needed, v.used, v.missing, v.unused, v.missing_regions()[0]
    (6, 8, 4, 4, 2, (3, 0))
    """
    width = owned.start.shape[1]
    rows = [] if all_unused or not shape else [(r.start, r.end - r.start) for r in unused]
    extra = len(rows)
    start: Int64 = np.zeros((extra, width), np.int64)
    extent: Int64 = np.ones((extra, width), np.int64)
    for i, (first, count) in enumerate(rows):
        start[i, 0], extent[i] = first, [count, *shape[1:], *[1] * (width - len(shape))]
    grid = grid_of(
        np.concatenate([owned.start, needed.start, start]),
        np.concatenate([owned.extent, needed.extent, extent]),
        np.concatenate([owned.step, needed.step, np.ones_like(start)]),
    )
    owners: NDArray[np.int32] = np.zeros(grid.shape, np.int32)
    for i in range(len(owned)):
        owners[grid.index(owned.start[i], owned.extent[i], owned.step[i])] += 1
    wanted: BoolGrid = np.zeros(grid.shape, np.bool_)
    for i in range(len(needed)):
        wanted[grid.index(needed.start[i], needed.extent[i], needed.step[i])] = True
    excused: BoolGrid = np.full(grid.shape, all_unused, np.bool_)
    for i in range(extra):
        excused[grid.index(start[i], extent[i], np.ones(width, np.int64))] = True
    held = owners > 0
    missing = np.asarray(wanted & ~held)
    idle = held & ~wanted
    unclaimed = np.asarray(idle & ~excused)
    ambiguous = np.asarray((owners > 1) & (wanted | ~excused))
    return Verdict(
        owned=grid.count(held),
        needed=grid.count(wanted),
        used=grid.count(wanted & held),
        missing=grid.count(missing),
        declared=grid.count(idle & excused),
        unused=grid.count(unclaimed),
        ambiguous=grid.count(ambiguous),
        _grid=grid,
        _missing=missing,
        _unused=unclaimed,
        _ambiguous=ambiguous,
    )
