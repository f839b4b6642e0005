"""Pieces of many ranks in one table, and the different boxes among them.

Equal boxes (same tensor, start, extent and step) on several ranks are replicas
of each other: one *box* with several *holders*.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from weightd.core.dtypes import dtype_named
from weightd.core.layout.boxes import Mask, Pieces, join, pieces_of, tidy
from weightd.core.layout.columns import Int64, Layout

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """The different boxes of some tensors with their holders, sorted by tensor and box.

    Attributes:
        pieces: All pieces, those of one box next to each other and by rank; ``tensor`` is the catalog's number,
            ``buffer`` the row in the owning rank's own table of buffers.
        rank: Position of the owning rank, shape (P,).
        first: First row of each box, and P at the end, shape (B + 1,).
    """

    pieces: Pieces
    rank: Int64
    first: Int64

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def representatives(self) -> Pieces:
        """The first piece of each box, B rows."""
        return self.pieces.take(self.first[:-1])

    @property
    def holders(self) -> Int64:
        """Number of pieces that are this box, shape (B,)."""
        return np.diff(self.first)

    def holders_of(self, box: int) -> tuple[int, ...]:
        """Ranks that hold a box, ascending."""
        return tuple(sorted({int(r) for r in self.rank[self.first[box] : self.first[box + 1]]}))


def gather(layouts: Sequence[Layout], numbers: Sequence[Int64], wanted: Mask) -> tuple[Pieces, Int64]:
    """Return all pieces of wanted tensors, and the position of the layout that each is from.

    Args:
        layouts: Layouts of ranks.
        numbers: Per layout, the catalog's number of each row of its table of tensors; negative ones are skipped.
        wanted: Which numbers to take, shape (T,).

    Returns:
        The pieces in the order of the layouts, with the catalog's numbers, and positions of shape (P,).
    """
    parts: list[Pieces] = []
    ranks: list[Int64] = []
    width = max((layout.ndim for layout in layouts), default=0)
    for place, (layout, number) in enumerate(zip(layouts, numbers, strict=True)):
        listed = np.zeros(len(number), np.bool_)
        listed[number >= 0] = wanted[number[number >= 0]]
        if not listed.any():
            continue
        pieces = pieces_of(layout)
        if listed.all():
            tensor = number[pieces.tensor]
        else:
            rows = np.flatnonzero(listed[pieces.tensor])
            pieces = pieces.take(rows)
            tensor = number[pieces.tensor]
        parts.append(
            Pieces(tensor, pieces.start, pieces.extent, pieces.step, pieces.buffer, pieces.offset, pieces.stride)
        )
        ranks.append(np.full(len(pieces), place, np.int64))
    return tidy(join(parts, width)), np.concatenate(ranks) if ranks else np.zeros(0, np.int64)


def into_boxes(pieces: Pieces, rank: Int64) -> Boxes:
    """Return the pieces sorted into different boxes.

    >>> from weightd.core.layout.boxes import box, join
    >>> b = into_boxes(join([box((4,)), box((2,)), box((4,))]), np.array([0, 1, 2]))
    >>> len(b), b.holders_of(1)
    (2, (0, 2))
    """
    columns = [pieces.tensor]
    for wide in (pieces.start, pieces.extent, pieces.step):
        columns.extend(wide[:, d] for d in range(pieces.ndim))
    # Most columns are constant (steps of 1, whole dimensions): sorting by them would be for nothing.
    columns = [c for c in columns if len(c) and (c != c[0]).any()]
    if not columns:
        first = np.array([0, len(pieces)] if len(pieces) else [0], np.int64)
        return Boxes(pieces, rank, first)
    order = np.lexsort(columns[::-1])  # stable: within a box the pieces stay in the order of their ranks
    fresh = np.zeros(len(pieces), np.bool_)
    fresh[0] = True
    for c in columns:
        sorted_column = c[order]
        fresh[1:] |= sorted_column[1:] != sorted_column[:-1]
    first = np.append(np.flatnonzero(fresh), len(pieces)).astype(np.int64)
    return Boxes(pieces.take(order), rank[order], first)


def buffer_columns(layouts: Sequence[Layout], pieces: Pieces, rank: Int64) -> tuple[Int64, Int64, Int64]:
    """Return region, base and length in bytes of the buffer of each piece, each of shape (P,)."""
    starts = np.cumsum([0, *(len(layout.buffers) for layout in layouts)])
    row = starts[rank] + pieces.buffer
    used = np.unique(rank)
    table: Int64 = np.zeros((int(starts[-1]), 3), np.int64)
    for r in used.tolist():
        buffers = layouts[r].buffers
        if buffers:
            table[starts[r] : starts[r + 1]] = [(b.region, b.base, b.nbytes) for b in buffers]
    found = table[row]
    return found[:, 0], found[:, 1], found[:, 2]


def itemsizes(layout: Layout) -> Int64:
    """Return bytes of one element of each buffer, shape (buffers,)."""
    return np.array([dtype_named(b.dtype).nbytes for b in layout.buffers], np.int64)


def needed_nbytes(layout: Layout) -> int:
    """Return the bytes that a rollout rank of this layout needs of a version: all its pieces but those it keeps.

    >>> from weightd.core.layout.build import LayoutBuilder
    >>> needed_nbytes(LayoutBuilder().build())
    0
    """
    canonical = dict(layout.aliases)
    kept = {canonical.get(name, name) for name in layout.kept}
    size = np.array([0 if t.name in kept else dtype_named(t.dtype).nbytes for t in layout.tensors], np.int64)
    return int((np.prod(layout.extent, axis=1, dtype=np.int64) * size[layout.tensor]).sum()) if layout.pieces else 0
