"""Shards that their holder declares, for trainers that no adapter knows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from weightd.core.layout.boxes import box
from weightd.trainer_hooks.faults import PiecesDoNotAddUp
from weightd.trainer_hooks.shards import Holdings, Shard, refuse_unreadable, unfused

ShardSpec = tuple[str, Sequence[int], Sequence[int], Sequence[int], Tensor]
"""(name, global shape, start, extent, tensor); the tensor is of shape ``extent``."""


def declared_holdings(shards: Iterable[ShardSpec]) -> Holdings:
    """Return declared shards as holdings; several of one tensor are several boxes of it.

    Raises:
        PiecesDoNotAddUp: A tensor is not of the declared extent, or the numbers of dimensions differ.
        UnsupportedPlacement: A tensor has no bytes here.
    """
    return Holdings(tuple(_declared(*spec) for spec in shards))


def _declared(name: str, shape: Sequence[int], start: Sequence[int], extent: Sequence[int], tensor: Tensor) -> Shard:
    whole, first, count = tuple(shape), tuple(start), tuple(extent)
    found = tuple(tensor.shape)
    if count != found or not len(whole) == len(first) == len(count):
        raise PiecesDoNotAddUp(name, whole, count, found, _numel(count), tensor.numel())
    refuse_unreadable(name, tensor)
    return unfused(name, whole, tensor.dtype, count, box(count, first), lambda: tensor)


def _numel(extent: tuple[int, ...]) -> int:
    n = 1
    for e in extent:
        n *= e
    return n
