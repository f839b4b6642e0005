"""What a publisher would publish, read back from a slot by the layout's numbers only; no daemon takes part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.hooks.delivery import Held
from weightd.core.dtypes import dtype_named
from weightd.core.layout.columns import Layout
from weightd.core.layout.local import collect
from weightd.core.units import TrainerRank
from weightd.trainer_hooks.payload import buffer_elements
from weightd.trainer_hooks.publisher import Publisher
from weightd.trainer_hooks.slots import Slots

POISON = 0xA5


class Rank:
    """One trainer rank's publisher, with its slots and without its daemon."""

    def __init__(self, source: Any, rank: int = 0, world: int = 1, slots: int = 1, **options: Any) -> None:
        if isinstance(source, list):
            self.publisher = Publisher.from_shards(source, run="r", rank=rank, world=world, **options)
        else:
            self.publisher = Publisher(source, run="r", rank=rank, world=world, **options)
        self.described = self.publisher._checked()
        self.layout: Layout = self.described.layout
        self.slots = Slots(TrainerRank(rank), self.described, "", slots)
        for pool in self.slots.pools:
            pool.payload[:] = POISON

    def fill(self, slot: int = 0) -> Held:
        """Publish into a slot and return what lies there."""
        self.slots.fill(slot)
        return self.layout, self.slots.pools[slot].payload.copy()

    def publish(self, slot: int = 0) -> dict[str, Tensor]:
        """Publish into a slot and return every tensor, whole."""
        return whole([self.fill(slot)])

    def names(self) -> list[str]:
        """Return the published names, aliases last."""
        return [t.name for t in self.layout.tensors] + [name for name, _ in self.layout.aliases]


def whole(ranks: Sequence[Held]) -> dict[str, Tensor]:
    """Return the tensors that ranks hold together; elements that nobody holds are poison."""
    infos = {info.name: info for layout, _ in ranks for info in layout.tensors}
    found: dict[str, Tensor] = {}
    for info in infos.values():
        dtype: Any = getattr(torch, info.dtype)
        found[info.name] = torch.full((*info.shape, dtype.itemsize), POISON, dtype=torch.uint8)
    arrays = {
        name: t.numpy().view(dtype_named(infos[name].dtype).carrier).reshape(infos[name].shape)
        for name, t in found.items()
    }
    for layout, payload in ranks:
        collect(layout, buffer_elements(layout, payload), arrays)
    return {name: t.view(getattr(torch, infos[name].dtype)).reshape(infos[name].shape) for name, t in found.items()}


def unequal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Return what differs: names that only one side has, and tensors that are not equal element for element."""
    names = sorted(set(found) ^ set(expected))
    return names + [n for n in expected if n in found and not torch.equal(found[n], expected[n])]
