"""Two tensors that are declared to be one weight: compared in the slot, before anybody is told of it.

Sharding can break a tie without a word: where only one of the two is tensor-parallel they are two parameters that
drift apart.  Each rank compares what it holds of both, element by element, as it would be published.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from weightd.core.layout.boxes import Pieces, pieces_of, placed
from weightd.core.layout.columns import Int64, Layout
from weightd.core.layout.intersect import Overlaps, intersect
from weightd.core.layout.local import Elements, piece_view
from weightd.link.copies import Bytes
from weightd.trainer_hooks.faults import TieBroken
from weightd.trainer_hooks.payload import buffer_elements


def tie_check(layout: Layout, name: str, canonical: str) -> Callable[[Bytes], None]:
    """Return what compares two tensors in the payload of a slot.

    Args:
        layout: What the slot holds.
        name: The further name.
        canonical: The name that it is declared to be tied to.

    Raises:
        TieBroken: They differ in shape or element type, so they cannot be one weight.
    """
    rows = [next(row for row, info in enumerate(layout.tensors) if info.name == n) for n in (name, canonical)]
    found = [f"{layout.tensors[row].shape} {layout.tensors[row].dtype}" for row in rows]
    if found[0] != found[1]:
        raise TieBroken(name, canonical, found[0], found[1], 0, 0)
    mine, its = (_of(pieces_of(layout), row) for row in rows)
    return partial(_compare, layout, (name, canonical, found[0]), _sides(intersect(mine, its), mine, its))


def _of(pieces: Pieces, tensor: int) -> Pieces:
    return placed(pieces.take(np.flatnonzero(pieces.tensor == tensor)), tensor=0)


def _sides(shared: Overlaps, mine: Pieces, its: Pieces) -> tuple[Pieces, Pieces]:
    """Return what both hold, as pieces of the one and of the other."""

    def side(buffer: Int64, offset: Int64, stride: Int64) -> Pieces:
        zero = np.zeros_like(offset)
        return Pieces(zero, shared.start, shared.extent, shared.step, buffer, offset, stride)

    return (
        side(mine.buffer[shared.source], shared.source_offset, shared.source_stride),
        side(its.buffer[shared.target], shared.target_offset, shared.target_stride),
    )


def _compare(layout: Layout, what: tuple[str, str, str], sides: tuple[Pieces, Pieces], payload: Bytes) -> None:
    elements = buffer_elements(layout, payload)
    differing = sum(_differing(elements, sides, row) for row in range(len(sides[0])))
    if differing:
        name, canonical, shape = what
        raise TieBroken(name, canonical, shape, shape, differing, int(sides[0].numel.sum()))


def _differing(elements: Sequence[Elements], sides: tuple[Pieces, Pieces], row: int) -> int:
    mine, its = (piece_view(elements[int(side.buffer[row])], side, row) for side in sides)
    return int(np.count_nonzero(mine != its))
