"""What several trainer ranks hold equally, compared before it is published.

Which boxes those are follows from all ranks' layouts, which are shown to all once.  At each publish every
rank hashes its copy of them in the slot and shows the hashes; the comparison is then the same on all ranks, so
all of them refuse, or none.  Ranks that hold nothing in common show nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from weightd.core.layout.boxes import pieces_of
from weightd.core.layout.columns import Layout
from weightd.core.layout.local import piece_view
from weightd.core.layout.message import decode_layout, encode_layout
from weightd.link.copies import Bytes
from weightd.trainer_hooks.exchange import Exchange, gather_numbers
from weightd.trainer_hooks.faults import ReplicasDisagree
from weightd.trainer_hooks.payload import buffer_elements

_HASH_BYTES = 8
"""Two different copies are taken for equal once in 2^64."""


class Box(NamedTuple):
    """A box of a tensor, by which copies of it are found.

    Attributes:
        name: The tensor.
        numbers: Start, extent and step of each dimension.
    """

    name: str
    numbers: tuple[int, ...]


class Replicas:
    """Compares one rank's copies with those of the others, publish after publish."""

    def __init__(self, layout: Layout, exchange: Exchange) -> None:
        """Note what is held; nothing is sent before the first comparison."""
        self._layout = layout
        self._exchange = exchange
        self._pieces = pieces_of(layout)
        self._ranks: list[int] = []
        self._rows: list[int] = []
        self._shared: list[list[Box]] = []
        """Boxes of each rank that others hold, too, in the order in which it shows their hashes."""

    def check(self, payload: Bytes) -> None:
        """Compare what is about to be published; a collective.

        Args:
            payload: All bytes of the slot, shape (nbytes,).

        Raises:
            ReplicasDisagree: Two ranks hold different bytes of one box; raised on all ranks.
            ExchangeFailed: A rank did not show its hashes in time.
        """
        if not self._ranks:
            self._meet()
        most = max(len(boxes) for boxes in self._shared)
        if not most:
            return
        mine = self._hashes(payload)
        shown = gather_numbers(self._exchange, [*mine, *([0] * (most - len(mine)))])
        first: dict[Box, tuple[int, int]] = {}
        for rank, boxes, hashes in zip(self._ranks, self._shared, shown, strict=True):
            for box, found in zip(boxes, hashes, strict=False):
                holder, expected = first.setdefault(box, (rank, found))
                if found != expected:
                    raise _disagreement(box, holder, rank)

    def _meet(self) -> None:
        """Find out what others hold, too."""
        ranks = self._exchange.gather_ranks()
        layouts = [decode_layout(data) for data in self._exchange.gather_bytes(encode_layout(self._layout))]
        one_name = _one_name([pair for layout in layouts for pair in layout.aliases])
        every = [_boxes(layout, one_name) for layout in layouts]
        holders: dict[Box, int] = {}
        for box in (box for boxes in every for box in set(boxes)):
            holders[box] = holders.get(box, 0) + 1
        self._shared = [[box for box in dict.fromkeys(boxes) if holders[box] > 1] for boxes in every]
        self._ranks = ranks
        rows = {box: row for row, box in enumerate(_boxes(self._layout, one_name))}
        self._rows = [rows[box] for box in self._shared[ranks.index(self._exchange.rank)]]

    def _hashes(self, payload: Bytes) -> list[int]:
        elements = buffer_elements(self._layout, payload)
        return [_hash(piece_view(elements[int(self._pieces.buffer[row])], self._pieces, row)) for row in self._rows]


def _one_name(aliases: Sequence[tuple[str, str]]) -> Mapping[str, str]:
    """Return one name for all names of a memory, as the planner has it: an alias of one rank is one of all.

    Two pipeline stages may declare a tie from either end.
    """
    found: dict[str, str] = {}
    for alias, canonical in aliases:
        kept, gone = found.get(canonical, canonical), found.get(alias, alias)
        found |= {name: kept for name, one in found.items() if one == gone}
        found |= dict.fromkeys((alias, canonical, gone), kept)
    return found


def _boxes(layout: Layout, one_name: Mapping[str, str]) -> list[Box]:
    """Return the box of each piece."""
    columns = np.concatenate([layout.start, layout.extent, layout.step], axis=1)
    wide = [len(t.shape) for t in layout.tensors]
    names = [one_name.get(t.name, t.name) for t in layout.tensors]
    n = layout.ndim
    keep = [[c * n + d for c in range(3) for d in range(w)] for w in wide]
    rows = zip(layout.tensor.tolist(), columns.tolist(), strict=True)
    return [Box(names[t], tuple(numbers[i] for i in keep[t])) for t, numbers in rows]


def _hash(view: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> int:
    data = np.ascontiguousarray(view).view(np.uint8) if view.ndim else view.reshape(1).view(np.uint8)
    return int.from_bytes(blake2b(data.data, digest_size=_HASH_BYTES).digest(), "little", signed=True)


def _disagreement(box: Box, first: int, second: int) -> ReplicasDisagree:
    ndim = len(box.numbers) // 3
    start, extent = box.numbers[:ndim], box.numbers[ndim : 2 * ndim]
    return ReplicasDisagree(box.name, start, extent, tuple(sorted((first, second))))
