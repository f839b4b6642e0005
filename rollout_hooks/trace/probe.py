"""Whether an engine's parameters hold what its layout says, in the version that the engine was loaded from.

Engines re-lay parameters after loading, some without a change of shape: every check of shapes and coverage passes,
and a direct write would corrupt the model.  Only bytes tell.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weightd.core.dtypes import DTYPES
from weightd.core.errors import Refused
from weightd.core.layout.boxes import Pieces, pieces_of
from weightd.core.layout.columns import Int64, Layout, TensorInfo
from weightd.core.layout.faults import BadEntry
from weightd.core.layout.local import piece_index, piece_view
from weightd.rollout_hooks.targets import Target, flat_bytes, named_tensors
from weightd.rollout_hooks.trace.faults import UNTOUCHED, ReLaid


def probe(model: Target, layout: Layout, loaded_from: Mapping[str, Tensor]) -> None:
    """Compare an engine's live bytes with the version that it was loaded from; declared layouts, too.

    Args:
        model: The engine's module on this rank, or its tensors by name.
        layout: What its parameters are made of.
        loaded_from: The checkpoint's tensors, whole; each is looked up once, so that they may be read one by one.

    Raises:
        Refused: One ``ReLaid`` for each parameter that holds something else.
        BadEntry: A tensor of the layout is not given, or has another shape.
    """
    live, pieces = named_tensors(model), pieces_of(layout)
    memory = {row: flat_bytes(live[b.name]).view(DTYPES[b.dtype].carrier) for row, b in enumerate(layout.buffers)}
    found: dict[int, _Tally] = {}
    order = np.argsort(layout.tensor, kind="stable")
    numbers, begins = np.unique(layout.tensor[order], return_index=True)
    for number, rows in zip(numbers.tolist(), np.split(order, begins[1:]), strict=True):
        info = layout.tensors[number]
        whole = _elements(info, loaded_from)
        for row in rows.tolist():
            buffer, index = int(layout.buffer[row]), piece_index(pieces, row, len(info.shape))
            view = piece_view(memory[buffer], pieces, row)
            differs: Int64 = np.argwhere(view != whole[index].reshape(view.shape))
            found.setdefault(buffer, _Tally()).add(view.size, differs, pieces, row, info.name)
    wrong = tuple(
        ReLaid(layout.buffers[b].name, t.differing, t.compared, t.element, t.source)
        for b, t in sorted(found.items())
        if t.differing
    )
    if wrong:
        raise Refused("direct write", wrong, UNTOUCHED.replace("no layout was made; ", ""))


def _elements(info: TensorInfo, loaded_from: Mapping[str, Tensor]) -> NDArray[np.generic]:
    """Return a whole tensor in the element type that the layout has, its elements as integers."""
    if info.name not in loaded_from:
        raise BadEntry("tensors", info.name, "the version to compare with has no such tensor")
    given = loaded_from[info.name].detach()
    if tuple(given.shape) != info.shape:
        raise BadEntry(
            "tensors",
            info.name,
            f"shape {tuple(given.shape)} in the version to compare with, {info.shape} in the layout",
        )
    dtype: torch.dtype = getattr(torch, info.dtype)
    return flat_bytes(given.to("cpu", dtype).contiguous()).view(DTYPES[info.dtype].carrier).reshape(info.shape)


class _Tally:
    """Elements of one parameter that were compared."""

    def __init__(self) -> None:
        self.compared = 0
        self.differing = 0
        self.element = -1
        self.source = ""

    def add(self, compared: int, differs: Int64, pieces: Pieces, row: int, name: str) -> None:
        """Count a piece; ``differs`` are the places of it that do."""
        self.compared += compared
        self.differing += len(differs)
        if not len(differs):
            return
        elements = pieces.offset[row] + differs @ pieces.stride[row]
        first = int(elements.argmin())
        if self.element < 0 or elements[first] < self.element:
            at = pieces.start[row] + pieces.step[row] * differs[first]
            self.element, self.source = int(elements[first]), f"{name}{at.tolist()}"
