"""What the elements of one stretch of memory are made of, while a loader runs.

Memory is a checkpoint tensor, an engine parameter, or something that the loader made in between.  What is written
down is settled when it is read: of two writes to the same elements the later one counts if it covers the earlier one
whole; to keep what an overwritten box leaves would hide that a loader reads a tensor twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from weightd.core.layout.boxes import Pieces
from weightd.core.layout.intersect import intersect
from weightd.rollout_hooks.trace.affine import Row, View, boxes, pieces_of_rows


class Trouble(NamedTuple):
    """Why nobody can say what some elements are made of.

    Attributes:
        operation: What the loader did.
        where: File and line of the loader.
        why: What it means.
        tensor: A checkpoint tensor that it did it to.
    """

    operation: str
    where: str
    why: str
    tensor: str = ""


class Move(NamedTuple):
    """Elements of a checkpoint tensor and where they lie in some other memory."""

    origin: int
    source: View
    target: View


class Write(NamedTuple):
    """One write: all elements of ``region``, of which ``moves`` say what they are; the others are constants."""

    region: View
    moves: tuple[Move, ...]
    where: str


class Clash(NamedTuple):
    """Two writes of which the later one covers a part of the earlier one."""

    elements: int
    first: str
    second: str


@dataclass
class Contents:
    """One stretch of memory.

    Attributes:
        name: For texts: the checkpoint tensor, the parameter, or the operation that made it.
        shape: Shape of the row-major array that its elements are.
        dtype: Element type.
        origin: Number of the checkpoint tensor that this is.
        trouble: Why its elements are unknown.
        writes: What was written, in order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    origin: int | None = None
    trouble: Trouble | None = None
    writes: list[Write] = field(default_factory=list)
    _settled: tuple[int, Pieces, Clash | None] | None = None

    def read(self, view: View, target: View) -> tuple[Move, ...]:
        """Return what ``view`` is made of, as it lies in ``target``; what is not returned are constants."""
        if self.origin is not None:
            return (Move(self.origin, view, target),)
        wanted = boxes(self.shape, view, target)
        common = intersect(self.pieces(), pieces_of_rows(wanted, [0] * len(wanted), len(self.shape)))
        origins = self.pieces().buffer[common.source].tolist()
        found = []
        for row, origin in enumerate(origins):
            extent = tuple(common.extent[row].tolist())
            source = View(int(common.source_offset[row]), extent, tuple(common.source_stride[row].tolist()))
            placed = View(int(common.target_offset[row]), extent, tuple(common.target_stride[row].tolist()))
            found.append(Move(origin, source, placed))
        return tuple(found)

    def pieces(self) -> Pieces:
        """Return the boxes that are made of checkpoint tensors, their origins as buffers."""
        return self._settle()[1]

    def clash(self) -> Clash | None:
        """Return the first two writes that cover each other in part."""
        return self._settle()[2] if len(self.writes) > 1 else None

    def _settle(self) -> tuple[int, Pieces, Clash | None]:
        if self._settled is None or self._settled[0] != len(self.writes):
            self._settled = (len(self.writes), *_settled(self.shape, self.writes))
        return self._settled


def _settled(shape: Sequence[int], writes: Sequence[Write]) -> tuple[Pieces, Clash | None]:
    """Return what stands after all writes, and the first two of them that cover each other in part."""
    made, made_by, origins = list[Row](), list[int](), list[int]()
    over, over_by = list[Row](), list[int]()
    for number, write in enumerate(writes):
        covered = boxes(shape, write.region, write.region)
        over.extend(covered)
        over_by.extend([number] * len(covered))
        for move in write.moves:
            rows = boxes(shape, move.target, move.source)
            made.extend(rows)
            made_by.extend([number] * len(rows))
            origins.extend([move.origin] * len(rows))
    pieces = pieces_of_rows(made, origins, len(shape))
    common = intersect(pieces, pieces_of_rows(over, [0] * len(over), len(shape)))
    earlier = np.array(made_by, np.int64)[common.source]
    later = np.array(over_by, np.int64)[common.target]
    rows_over = np.flatnonzero(later > earlier)
    if not rows_over.size:
        return pieces, None
    covered_by: dict[int, dict[int, int]] = {}
    for row, by, count in zip(common.source[rows_over], later[rows_over], common.numel[rows_over], strict=True):
        times = covered_by.setdefault(int(row), {})
        times[int(by)] = times.get(int(by), 0) + int(count)
    numel = pieces.numel
    gone = {row for row, times in covered_by.items() if int(numel[row]) in times.values()}
    clash = None
    for row in sorted(covered_by.keys() - gone)[:1]:
        by, count = next(iter(covered_by[row].items()))
        clash = Clash(count, writes[made_by[row]].where, writes[by].where)
    kept = np.array([row not in gone for row in range(len(pieces))], np.bool_)
    return pieces.take(kept), clash
