"""The adapter that a user names, or the one that the tensors call for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import nn
from torch.distributed.tensor import DTensor

from weightd.core.errors import ConfigError
from weightd.trainer_hooks.adapters.deepspeed import is_deepspeed, is_engine, module_of
from weightd.trainer_hooks.adapters.fsdp2 import sharded_params
from weightd.trainer_hooks.adapters.leaves import Source, leaves_of
from weightd.trainer_hooks.adapters.megatron import Megatron
from weightd.trainer_hooks.adapters.pick import holdings_of
from weightd.trainer_hooks.faults import UnsupportedPlacement
from weightd.trainer_hooks.names import walk
from weightd.trainer_hooks.shards import Holdings

Named = Literal["plain", "fsdp2", "deepspeed"]

Adapter = Named | Megatron | None
"""A framework by name, the declaration of a Megatron rank, or None: each tensor says what it is."""

_NAMED: dict[str, str] = {
    "plain": "plain tensors, DDP",
    "fsdp2": "DTensors of fully_shard, and plain tensors beside them",
    "deepspeed": "parameters of a DeepSpeed engine, and plain tensors beside them",
}


def chosen_holdings(source: Source, adapter: Adapter, masters: bool = False) -> Holdings:
    """Return what this rank holds, as ``adapter`` sees it.

    Args:
        source: What the publisher was given.
        adapter: A named one refuses tensors of another framework, and a source without any of its own.
        masters: Describe DeepSpeed's fp32 masters.

    Raises:
        ConfigError: There is no adapter of that name, or ``masters`` of a source without any.
        TrainerHookError: A tensor cannot be described, or is not the adapter's.
    """
    if isinstance(adapter, Megatron):
        if masters:
            raise ConfigError("masters", "True", "only DeepSpeed's ZeRO keeps masters apart from the parameters")
        return adapter.holdings(source)
    if adapter is not None:
        if not isinstance(source, nn.Module | Mapping) and not is_engine(source):
            source = list(source)
        refuse_others(source, adapter)
    return holdings_of(source, masters)


def refuse_others(source: Source, adapter: Named) -> None:
    """Refuse a source of which a tensor is another framework's, or none is the named one's.

    Raises:
        ConfigError: There is no adapter of that name.
        UnsupportedPlacement: A tensor is another's, or none is the named one's.
    """
    if adapter not in _NAMED:
        raise ConfigError("adapter", str(adapter), f"known are {', '.join(_NAMED)}, Megatron(...) and None")
    engine = is_engine(source)
    kinds = {name: kind for name, kind in _kinds(module_of(source) if engine else source).items() if kind != "plain"}
    for name, kind in kinds.items():
        if kind != adapter:
            found = f"it is {kind}'s and adapter is {adapter!r}"
            raise UnsupportedPlacement(name, found, (_NAMED[adapter], f"adapter={kind!r}", "adapter=None"))
    if adapter != "plain" and not kinds and not (engine and adapter == "deepspeed"):
        found = f"adapter is {adapter!r} and none of its tensors is"
        raise UnsupportedPlacement("the source", found, (_NAMED[adapter], "adapter='plain'", "adapter=None"))
    if engine and adapter != "deepspeed":
        found = f"it is a DeepSpeed engine and adapter is {adapter!r}"
        raise UnsupportedPlacement("the source", found, (_NAMED[adapter], "adapter='deepspeed'", "adapter=None"))


def _kinds(source: Source) -> dict[str, Named]:
    """Return whose each tensor is."""
    managed = sharded_params(module for _, module in walk(source)) if isinstance(source, nn.Module) else {}
    found: dict[str, Named] = {}
    for leaf in leaves_of(source):
        tensor = leaf.read()
        if is_deepspeed(tensor):
            found[leaf.name] = "deepspeed"
        elif isinstance(tensor, DTensor) or (id(leaf.owner), leaf.key) in managed:
            found[leaf.name] = "fsdp2"
        else:
            found[leaf.name] = "plain"
    return found
