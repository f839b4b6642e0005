"""What a node lacks, cut so that every byte of it is fetched once.

Several ranks of a node, of one engine or of several, may need equal or partly
overlapping parts of a box that another node holds.  The union of all parts is
cut into cells, as large as they come: the columns of eight tensor-parallel
ranks are one cell, which its sender reads in one go.  Each part is then read
from the cells that it meets.  Everything is counted in indices of the box,
where the box is dense, so that steps are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from weightd.core.layout.columns import Int64
from weightd.core.layout.progressions import meet
from weightd.core.plan.alike import equal_rows
from weightd.core.plan.cells import grid_of


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
    """Disjoint cells of boxes, and where each needed part is in them.

    Attributes:
        cells: The cells, sorted by box.
        part: Needed part, shape (U,); with ``cell``, one row per use.
        cell: Cell that holds some of it, shape (U,).
        uses: What that is, U rows; the uses of a part are disjoint, and their union is the part.
    """

    cells: Parts
    part: Int64
    cell: Int64
    uses: Parts


def cut_into_cells(needed: Parts) -> Cells:
    """Return disjoint cells whose union is the union of all parts.

    >>> parts = Parts(np.zeros(2, np.int64), np.array([[0], [3]]), np.array([[5], [5]]), np.array([[1], [1]]))
    >>> c = cut_into_cells(parts)  # [0, 5) and [3, 8)
    >>> c.cells.start.ravel().tolist(), c.cells.extent.ravel().tolist(), c.part.tolist(), c.cell.tolist()
    ([0], [8], [0, 1], [0, 0])
    """
    distinct, of_part = _distinct(needed)
    first = np.flatnonzero(np.diff(distinct.box, prepend=-1))
    count = np.diff(np.append(first, len(distinct)))
    alone = first[count == 1]
    found = [Cells(distinct.take(alone), alone, np.arange(len(alone)), distinct.take(alone))]
    for n in np.unique(count[count > 1]).tolist():
        found.extend(_cut_alike(distinct, first[count == n][:, None] + np.arange(n)))
    cells = joined([f.cells for f in found])
    made = np.cumsum([0, *(len(f.cells) for f in found)])
    part = np.concatenate([f.part for f in found])
    cell = np.concatenate([f.cell + m for f, m in zip(found, made, strict=False)])
    order = np.argsort(cells.box, kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return _for_each(of_part, Cells(cells.take(order), part, place[cell], joined([f.uses for f in found])))


def _distinct(needed: Parts) -> tuple[Parts, Int64]:
    """Return the different parts, sorted by box, and the place of each needed part among them."""
    step = np.where(needed.extent == 1, 1, needed.step)
    wide = [c[:, d] for c in (needed.start, needed.extent, step) for d in range(step.shape[1])]
    varying = [c for c in wide if len(c) and (c != c[0]).any()]
    order = np.lexsort([*varying[::-1], needed.box]) if len(needed) else np.zeros(0, np.int64)
    fresh = np.zeros(len(order), np.bool_)
    fresh[:1] = True
    for c in (needed.box, *varying):
        fresh[1:] |= c[order][1:] != c[order][:-1]
    place = np.empty(len(order), np.int64)
    place[order] = np.cumsum(fresh) - 1
    kept = order[fresh]
    return Parts(needed.box[kept], needed.start[kept], needed.extent[kept], step[kept]), place


def _cut_alike(distinct: Parts, rows: Int64) -> Iterator[Cells]:
    """Cut boxes that have the same number of parts; those whose parts are equal are cut once.

    Args:
        distinct: All different parts.
        rows: Their rows, one line per box, shape (G, n).

    Yields:
        The cells of boxes that are cut alike; ``part`` is a row of ``distinct``.
    """
    columns = [c[rows].reshape(len(rows), -1) for c in (distinct.start, distinct.extent, distinct.step)]
    kinds, kind = equal_rows(np.hstack(columns))
    for k in range(len(kinds)):
        like = rows[kind == k]
        one = _cut(distinct.take(like[0]))
        g, c = len(like), len(one.cells)
        box = distinct.box[like[:, 0]]
        yield Cells(
            _repeated(one.cells, box),
            like[:, one.part].reshape(-1),
            (np.arange(g)[:, None] * c + one.cell).reshape(-1),
            _repeated(one.uses, box),
        )


def _cut(parts: Parts) -> Cells:
    """Cut the parts of one box."""
    grid = grid_of(parts.start, parts.extent, parts.step)
    covered: Int64 = np.zeros(grid.shape, np.int64)
    for i in range(len(parts)):
        covered[grid.index(parts.start[i], parts.extent[i], parts.step[i])] = 1
    boxes, _ = grid.boxes(covered, limit=covered.size)
    start, extent, step = (
        np.array([getattr(b, name) for b in boxes], np.int64).reshape(len(boxes), -1)
        for name in ("start", "extent", "step")
    )
    cells = Parts(np.repeat(parts.box[:1], len(boxes)), start, extent, step)
    part, cell = np.divmod(np.arange(len(parts) * len(boxes)), len(boxes))
    p, c = parts.take(part), cells.take(cell)
    met = Parts(p.box, *meet(p.start, p.extent, p.step, c.start, c.extent, c.step))
    uses = np.flatnonzero((met.extent > 0).all(axis=1))
    return Cells(cells, part[uses], cell[uses], met.take(uses))


def _repeated(parts: Parts, boxes: Int64) -> Parts:
    """Return parts of one box as parts of each of many."""
    g = len(boxes)
    wide = (np.tile(c, (g, 1)) for c in (parts.start, parts.extent, parts.step))
    return Parts(np.repeat(boxes, len(parts)), *wide)


def joined(parts: Sequence[Parts]) -> Parts:
    """Return the rows of all, at least one."""
    return Parts(
        np.concatenate([p.box for p in parts]),
        np.concatenate([p.start for p in parts]),
        np.concatenate([p.extent for p in parts]),
        np.concatenate([p.step for p in parts]),
    )


def _for_each(of_part: Int64, cells: Cells) -> Cells:
    """Return the cells with uses of every needed part, where they had uses of the different ones."""
    order = np.lexsort((cells.cell, cells.part))
    part = cells.part[order]
    low = np.searchsorted(part, of_part, side="left")
    count = np.searchsorted(part, of_part, side="right") - low
    within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    use = order[np.repeat(low, count) + within]
    return Cells(cells.cells, np.repeat(np.arange(len(of_part)), count), cells.cell[use], cells.uses.take(use))
