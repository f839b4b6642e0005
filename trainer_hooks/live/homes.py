"""Where the storages of a rank's shards lie in its live memory: each whole, as it is, on a cache line of its own.

Padding of a storage (FSDP2 fills up uneven shards) moves with it and is no part of any piece.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weightd.core.layout.checks import BASE_ALIGN
from weightd.trainer_hooks.faults import LiveMemoryRefused
from weightd.trainer_hooks.live.aliases import StorageId, storage_id, storage_of
from weightd.trainer_hooks.shards import Shard


@dataclass(frozen=True, slots=True)
class Stand:
    """A shard in its storage.

    Attributes:
        shard: The shard.
        start: Element of the storage where its local tensor begins.
        strides: The local tensor's, in elements.
    """

    shard: Shard
    start: int
    strides: tuple[int, ...]

    def is_at(self, tensor: Tensor, address: int) -> bool:
        """Say whether a local tensor lies as this one did, in a storage that begins at ``address``."""
        return (
            tensor.data_ptr() == address + self.start * tensor.element_size()
            and tensor.dtype is self.shard.dtype
            and tensor.stride() == self.strides
            and tensor.shape == self.shard.local_shape
        )


@dataclass(eq=False, slots=True)
class Home:
    """A storage and its place.

    Attributes:
        nbytes: Its size.
        dtype: Element type of everything in it that is published.
        first_byte: Where it begins in the payload.
        stands: The shards in it.
    """

    nbytes: int
    dtype: torch.dtype
    first_byte: int = 0
    stands: list[Stand] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name for texts: that of its first shard, and how many more there are."""
        more = len(self.stands) - 1
        return self.stands[0].shard.name + (f" and {more} more in one memory" if more else "")

    @property
    def room(self) -> int:
        """Bytes that it takes up in the payload."""
        return -(-self.nbytes // BASE_ALIGN) * BASE_ALIGN


def homes_of(shards: Iterable[Shard]) -> list[Home]:
    """Return the storages of some shards in the order in which they are met, without places.

    Raises:
        LiveMemoryRefused: One has none, or holds tensors of several element types.
    """
    homes: dict[StorageId, Home] = {}
    for shard in shards:
        tensor = shard.read()
        storage = storage_of(tensor)
        if storage is None:
            raise LiveMemoryRefused(shard.name, f"a {type(tensor).__name__} without memory of its own")
        home = homes.setdefault(storage_id(storage), Home(storage.nbytes(), shard.dtype))
        if home.dtype != shard.dtype:
            raise LiveMemoryRefused(shard.name, f"it is {shard.dtype} in one memory with {home.name}, {home.dtype}")
        home.stands.append(Stand(shard, int(tensor.storage_offset()), tensor.stride()))
    return list(homes.values())
