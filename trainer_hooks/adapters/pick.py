"""Picks the adapter for each tensor of a module or a mapping."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weightd.trainer_hooks.adapters.deepspeed import (
    StepEnd,
    deepspeed_shard,
    dtype_of_masters,
    is_deepspeed,
    is_engine,
    is_partitioned,
    module_of,
)
from weightd.trainer_hooks.adapters.fsdp2 import ShardedParams, dtensor_shard, sharded_params, sharded_reader
from weightd.trainer_hooks.adapters.leaves import Leaf, Source, leaves_of
from weightd.trainer_hooks.adapters.plain import plain_shard, refuse_fsdp1
from weightd.trainer_hooks.adapters.strays import Watch
from weightd.trainer_hooks.names import walk
from weightd.trainer_hooks.shards import Holdings, Shard


def _every(_name: str) -> bool:
    return True


def holdings_of(source: Source, masters: bool = False, wanted: Callable[[str], bool] = _every) -> Holdings:
    """Return what this rank holds of a module's parameters and persistent buffers; no collective.

    Tied tensors are held once, under the first of their names; the others are aliases.

    Args:
        source: A module, a DeepSpeed engine, a mapping, or pairs of names and tensors.
        masters: Describe the fp32 masters of DeepSpeed's parameters instead of these.
        wanted: Says of a name whether it is described; the others are not looked at.

    Raises:
        TrainerHookError: A tensor cannot be described, or two have one name.
        ConfigError: ``masters`` of a source without any.
    """
    prepare: tuple[Callable[[], None], ...] = ()
    if is_engine(source):
        prepare, source = (StepEnd(source).check,), module_of(source, masters)
    managed: ShardedParams = {}
    if isinstance(source, nn.Module):
        for prefix, module in walk(source):
            refuse_fsdp1(prefix.rstrip("."), module)
        managed = sharded_params(module for _, module in walk(source))
    shards: list[Shard] = []
    source = source if isinstance(source, nn.Module | Mapping) else list(source)
    leaves = [leaf for leaf in leaves_of(source) if wanted(leaf.name)]
    master_dtype = dtype_of_masters(leaves) if masters else None
    first: dict[object, Leaf] = {}
    ties: list[tuple[Leaf, Leaf]] = []
    for leaf in leaves:
        canonical = first.setdefault(_identity(leaf, managed), leaf)
        if canonical is not leaf:
            ties.append((leaf, canonical))
        else:
            shards.append(_shard(leaf, managed, master_dtype))
    watch = Watch(source, leaves, ties, lambda leaf: _identity(leaf, managed))
    return Holdings(tuple(shards), tuple((leaf.name, canonical.name) for leaf, canonical in ties), watch.stray, prepare)


def _shard(leaf: Leaf, managed: ShardedParams, masters: torch.dtype | None) -> Shard:
    if is_deepspeed(leaf.read()):
        return deepspeed_shard(leaf, masters)
    read = sharded_reader(leaf, managed.get((id(leaf.owner), leaf.key)))
    return dtensor_shard(leaf.name, read) if isinstance(read(), DTensor) else plain_shard(leaf)


def _identity(leaf: Leaf, managed: ShardedParams) -> object:
    """Return what is equal for two names of one memory, and for nothing else."""
    param = managed.get((id(leaf.owner), leaf.key))
    if param is not None:
        return id(param)
    tensor: Tensor = leaf.read()
    if is_partitioned(tensor):
        return id(tensor)  # what its data points to comes and goes
    if isinstance(tensor, DTensor) or tensor.is_meta or tensor.layout is not torch.strided or tensor.numel() == 0:
        return id(tensor)  # without memory to be found again by
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
