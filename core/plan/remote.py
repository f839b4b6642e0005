"""What a node lacks, cut so that every byte of it is fetched once.

Several ranks of a node, of one engine or of several, may need equal or partly
overlapping parts of a box that another node holds.  Equal parts are fetched
once; overlapping ones are cut into cells that do not overlap, and each part is
the union of some cells.  Parts are counted in indices of their box, where the
box is dense, so that steps are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weightd.core.layout.columns import Int64
from weightd.core.plan.alike import equal_rows
from weightd.core.plan.cells import CellBox, grid_of


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Parts of boxes, M rows: ``start``, ``extent`` and ``step`` count indices of the box, shape (M, N)."""

    box: Int64
    start: Int64
    extent: Int64
    step: Int64

    def __len__(self) -> int:
        return len(self.box)

    def take(self, rows: Int64) -> Parts:
        """Return the parts at ``rows``, in that order."""
        return Parts(self.box[rows], self.start[rows], self.extent[rows], self.step[rows])

    @property
    def numel(self) -> Int64:
        """Elements of each part, shape (M,)."""
        product: Int64 = np.prod(self.extent, axis=1, dtype=np.int64)
        return product


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Disjoint parts, and which of them each needed part consists of.

    Attributes:
        cells: The cells, sorted by box.
        part: Needed part, shape (U,); with ``cell``, one row per use.
        cell: Cell that it contains, shape (U,).
    """

    cells: Parts
    part: Int64
    cell: Int64


def cut_into_cells(needed: Parts) -> Cells:
    """Return disjoint cells whose union is the union of all parts.

    >>> whole = np.array([[8]]), np.array([[1]])
    >>> parts = Parts(np.zeros(2, np.int64), np.array([[0], [3]]), np.array([[5], [5]]), np.array([[1], [1]]))
    >>> c = cut_into_cells(parts)  # [0, 5) and [3, 8)
    >>> c.cells.start.ravel().tolist(), c.cells.extent.ravel().tolist(), c.part.tolist(), c.cell.tolist()
    ([0, 3, 5], [3, 2, 3], [0, 0, 1, 1], [0, 1, 1, 2])
    """
    distinct, of_part = _distinct(needed)
    first = np.flatnonzero(np.diff(distinct.box, prepend=-1))
    count = np.diff(np.append(first, len(distinct)))
    alone = first[count == 1]
    cells = [distinct.take(alone)]
    uses = [(alone, np.arange(len(alone)))]
    made = len(alone)
    for n in np.unique(count[count > 1]).tolist():
        rows = first[count == n][:, None] + np.arange(n)
        more, part, cell = _cut_alike(distinct, rows)
        cells.append(more)
        uses.append((part, cell + made))
        made += len(more)
    joined = _joined(cells)
    part = np.concatenate([p for p, _ in uses])
    cell = np.concatenate([c for _, c in uses])
    order = np.argsort(joined.box, kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return _for_each(needed, of_part, Cells(joined.take(order), part, place[cell]))


def _distinct(needed: Parts) -> tuple[Parts, Int64]:
    """Return the different parts, sorted by box, and the place of each needed part among them."""
    step = np.where(needed.extent == 1, 1, needed.step)
    rows = np.column_stack([needed.box, needed.start, needed.extent, step])
    varying = [c for c in rows.T[1:] if len(c) and (c != c[0]).any()]
    order = np.lexsort([*varying[::-1], needed.box]) if len(needed) else np.zeros(0, np.int64)
    fresh = np.zeros(len(order), np.bool_)
    fresh[:1] = True
    for c in (needed.box, *varying):
        fresh[1:] |= c[order][1:] != c[order][:-1]
    place = np.empty(len(order), np.int64)
    place[order] = np.cumsum(fresh) - 1
    kept = order[fresh]
    return Parts(needed.box[kept], needed.start[kept], needed.extent[kept], step[kept]), place


def _cut_alike(distinct: Parts, rows: Int64) -> tuple[Parts, Int64, Int64]:
    """Cut boxes that have the same number of parts; those whose parts are equal are cut once.

    Args:
        distinct: All different parts.
        rows: Their rows, one line per box, shape (G, n).

    Returns:
        The cells of all boxes, and the uses as (row of ``distinct``, cell).
    """
    columns = [c[rows].reshape(len(rows), -1) for c in (distinct.start, distinct.extent, distinct.step)]
    kinds, kind = equal_rows(np.hstack(columns))
    found: list[Parts] = []
    parts: list[Int64] = []
    cells: list[Int64] = []
    made = 0
    for k in range(len(kinds)):
        like = np.flatnonzero(kind == k)
        sample = distinct.take(rows[like[0]])
        boxes, uses = _cut(sample)
        g, c = len(like), len(boxes)
        start, extent, step = (
            np.array([getattr(b, name) for b in boxes], np.int64).reshape(c, -1) for name in ("start", "extent", "step")
        )
        box = np.repeat(distinct.box[rows[like, 0]], c)
        found.append(Parts(box, np.tile(start, (g, 1)), np.tile(extent, (g, 1)), np.tile(step, (g, 1))))
        used_part = np.array([p for p, _ in uses], np.int64)
        used_cell = np.array([x for _, x in uses], np.int64)
        parts.append(rows[like][:, used_part].reshape(-1))
        cells.append((made + np.arange(g)[:, None] * c + used_cell).reshape(-1))
        made += g * c
    return _joined(found), np.concatenate(parts), np.concatenate(cells)


def _cut(parts: Parts) -> tuple[list[CellBox], list[tuple[int, int]]]:
    """Cut the parts of one box; return the cells, and pairs (part, cell)."""
    grid = grid_of(parts.start, parts.extent, parts.step)
    members: list[int] = [0]
    label: Int64 = np.zeros(grid.shape, np.int64)
    # A label stands for a set of parts: adding a part to a set gives the next label that is not in use.
    labels = {0: 0}
    for i in range(len(parts)):
        where = grid.index(parts.start[i], parts.extent[i], parts.step[i])
        old = label[where]
        fresh = np.zeros_like(old)
        for before in np.unique(old).tolist():
            union = members[before] | 1 << i
            if union not in labels:
                labels[union] = len(members)
                members.append(union)
            fresh[old == before] = labels[union]
        label[where] = fresh
    boxes, _ = grid.boxes(label, limit=label.size + 1)
    uses = [(i, c) for i in range(len(parts)) for c, b in enumerate(boxes) if members[b.label] >> i & 1]
    return boxes, uses


def _joined(parts: list[Parts]) -> Parts:
    return Parts(
        np.concatenate([p.box for p in parts]),
        np.concatenate([p.start for p in parts]),
        np.concatenate([p.extent for p in parts]),
        np.concatenate([p.step for p in parts]),
    )


def _for_each(needed: Parts, of_part: Int64, cells: Cells) -> Cells:
    """Return the cells with uses of every needed part, where they had uses of the different ones."""
    order = np.lexsort((cells.cell, cells.part))
    part, cell = cells.part[order], cells.cell[order]
    low = np.searchsorted(part, of_part, side="left")
    count = np.searchsorted(part, of_part, side="right") - low
    within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    return Cells(cells.cells, np.repeat(np.arange(len(needed)), count), cell[np.repeat(low, count) + within])
