"""Where two layouts of one rank differ, for instance a traced and a declared one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weightd.core.dtypes import dtype_named
from weightd.core.layout.boxes import Pieces, pieces_of
from weightd.core.layout.columns import Int64, Layout
from weightd.core.layout.local import piece_index, piece_view


class Difference(NamedTuple):
    """A parameter that two layouts fill differently.

    Attributes:
        parameter: Its name.
        element: The first element that differs, counted in the parameter's memory; -1 where all of it does.
        ours: What the first layout puts there: ``name[index]``, ``nothing``, or what the parameter is.
        theirs: Likewise, of the second.
    """

    parameter: str
    element: int
    ours: str
    theirs: str


def differences(ours: Layout, theirs: Layout) -> tuple[Difference, ...]:
    """Return every parameter in which two layouts of a rank differ, with the first element.

    Parameters whose pieces are cut alike are compared as columns; the others element for element, which takes
    16 bytes for each element of the parameter.

    Args:
        ours: A layout.
        theirs: Another one of the same rank.
    """
    mine, yours = _ByParameter(ours), _ByParameter(theirs)
    found = (_difference(name, mine, yours) for name in dict.fromkeys([*mine.buffers, *yours.buffers]))
    return tuple(difference for difference in found if difference is not None)


class _ByParameter:
    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.pieces = pieces_of(layout)
        self.buffers = {b.name: row for row, b in enumerate(layout.buffers)}

    def said(self, name: str) -> str:
        """Return what a parameter is said to be."""
        if name not in self.buffers:
            return "no such parameter"
        buffer = self.layout.buffers[self.buffers[name]]
        return f"{buffer.nbytes} bytes of {buffer.dtype}"

    def rows(self, name: str) -> Int64:
        """Return the parameter's pieces, in the order of its memory."""
        rows: Int64 = np.flatnonzero(self.layout.buffer == self.buffers[name])
        return rows[np.argsort(self.layout.offset[rows], kind="stable")]

    def columns(self, name: str) -> list[object]:
        """Return the parameter's pieces as values that are equal where they are cut alike."""
        pieces: Pieces = self.pieces.take(self.rows(name))
        tensors = [self.layout.tensors[t] for t in pieces.tensor.tolist()]
        depth = [len(t.shape) for t in tensors]
        wide = zip(
            pieces.start.tolist(), pieces.extent.tolist(), pieces.step.tolist(), pieces.stride.tolist(), strict=True
        )
        boxes = [tuple(tuple(c[:n]) for c in columns) for n, columns in zip(depth, wide, strict=True)]
        return list(zip(tensors, pieces.offset.tolist(), boxes, strict=True))

    def elements(self, name: str) -> tuple[Int64, Int64]:
        """Return tensor and flat index of each element of the parameter's memory; -1 where there is nothing."""
        buffer = self.layout.buffers[self.buffers[name]]
        count = buffer.nbytes // dtype_named(buffer.dtype).nbytes
        tensor: Int64 = np.full(count, -1, np.int64)
        index: Int64 = np.full(count, -1, np.int64)
        for row in self.rows(name).tolist():
            shape = self.layout.tensors[int(self.layout.tensor[row])].shape
            box = [np.arange(s.start, s.stop, s.step) for s in piece_index(self.pieces, row, len(shape))]
            flat = np.ravel_multi_index(np.ix_(*box), shape) if shape else np.zeros((), np.int64)
            view = piece_view(index, self.pieces, row)
            view[...] = flat.reshape(view.shape)
            piece_view(tensor, self.pieces, row)[...] = self.layout.tensor[row]
        return tensor, index

    def source(self, tensor: int, index: int) -> str:
        """Return an element's name."""
        if tensor < 0:
            return "nothing"
        info = self.layout.tensors[tensor]
        return f"{info.name}{[int(i) for i in np.unravel_index(index, info.shape)] if info.shape else []}"


def _difference(name: str, mine: _ByParameter, yours: _ByParameter) -> Difference | None:
    if mine.said(name) != yours.said(name):
        return Difference(name, -1, mine.said(name), yours.said(name))
    if mine.columns(name) == yours.columns(name):
        return None
    a_tensor, a_index = mine.elements(name)
    b_tensor, b_index = yours.elements(name)
    known = {t.name: row for row, t in enumerate(mine.layout.tensors)}
    as_mine = [known.get(t.name, -2 - row) for row, t in enumerate(yours.layout.tensors)]
    renamed = np.array([*as_mine, -1], np.int64)[b_tensor]  # the last one is met by -1: nothing
    at = np.flatnonzero((a_tensor != renamed) | (a_index != b_index))
    if not at.size:
        return None
    first = int(at[0])
    return Difference(
        name,
        first,
        mine.source(int(a_tensor[first]), int(a_index[first])),
        yours.source(int(b_tensor[first]), int(b_index[first])),
    )
