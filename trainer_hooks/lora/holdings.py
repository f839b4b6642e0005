"""From a PEFT model to what this rank publishes of it.

Merged: every shard of the base, those of LoRA layers computed at each publish.  Adapter only: that adapter's own
tensors, and nothing of the base, which may be quantised or on another device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weightd.core.errors import ConfigError
from weightd.trainer_hooks.adapters import autotp
from weightd.trainer_hooks.adapters.deepspeed import is_engine, is_partitioned, module_of
from weightd.trainer_hooks.adapters.fsdp2 import sharded_params
from weightd.trainer_hooks.adapters.leaves import Source, leaves_of
from weightd.trainer_hooks.adapters.pick import holdings_of
from weightd.trainer_hooks.exchange import Exchange
from weightd.trainer_hooks.faults import HoldingsChanged, LoraUndecided, LoraUnsupported, NothingToPublish
from weightd.trainer_hooks.lora.choice import CHOICES, Lora, LoraAdapter
from weightd.trainer_hooks.lora.layers import (
    LoraLayer,
    PeftModules,
    copies_of,
    first_peft_module,
    peft_modules,
    refuse_unlisted,
    refuse_unmergeable,
)
from weightd.trainer_hooks.lora.merger import Merger
from weightd.trainer_hooks.names import walk
from weightd.trainer_hooks.renaming import renamed_holdings
from weightd.trainer_hooks.shards import Holdings, Shard, Stray

CHECKPOINT_PREFIX = "base_model.model."
"""In front of every name of a PEFT checkpoint, whatever the adapter is called."""

_FACTORS = {"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"}


def lora_holdings(source: Source, lora: Lora | None, masters: bool, connect: Callable[[], Exchange]) -> Holdings | None:
    """Return what this rank publishes of a PEFT model, or None for a model without adapters; no collective.

    Args:
        source: As of ``holdings_of``.
        lora: What to publish of a PEFT model.
        masters: As of ``holdings_of``.
        connect: Reaches the other trainer ranks; called at the first publish, if factors are cut.

    Raises:
        LoraUndecided: The model has adapters, and ``lora`` is None.
        LoraUnsupported: A module of PEFT cannot be published as asked.
        NothingToPublish: No module has the adapter that is asked for, or any.
        ConfigError: ``lora`` is none of its words, or names no adapter; ``masters`` of merged weights.
        TrainerHookError: As of ``holdings_of``.
    """
    model = module_of(source) if is_engine(source) else source
    if not isinstance(model, nn.Module):
        _refuse_mapping(model, lora)
        return None
    first, count = first_peft_module(model)
    if lora is None and not count:
        return None
    if lora is None:
        raise LoraUndecided(first, count, CHOICES)
    if not (lora in ("merged", "adapter") or isinstance(lora, LoraAdapter)):
        raise ConfigError("lora", str(lora), f"it is one of {', '.join(CHOICES)}")
    found = peft_modules(model)
    if not found.adapters():
        raise NothingToPublish(f"lora={lora!r}, and no module of this model has an adapter", ())
    if lora == "merged":
        if masters:
            why = "merged weights are computed from the factors that the trainer computes with, not from their masters"
            raise ConfigError("masters", "True", why)
        return _merged(source, model, found, connect)
    chosen = _chosen(found, lora)
    holdings = _adapter_only(source, found, chosen, masters)
    if isinstance(lora, LoraAdapter):
        return holdings
    return replace(holdings, prepare=(*holdings.prepare, partial(_refuse_another, found, chosen)))


def _refuse_mapping(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], lora: Lora | None) -> None:
    """Refuse factors in a mapping: nothing there says how they are scaled, or which are in use."""
    if lora is not None:
        raise ConfigError("lora", str(lora), "it needs the PEFT model itself: a mapping says nothing of scaling")
    factors = [name for name in dict(tensors) if _FACTORS & set(name.split("."))]
    if factors:
        raise LoraUndecided(factors[0], len(factors), tuple(f"{choice} with the PEFT model" for choice in CHOICES))


# ------------------------------------------------------------ merged


def _merged(source: Source, model: nn.Module, found: PeftModules, connect: Callable[[], Exchange]) -> Holdings:
    for layer in found.layers:
        refuse_unmergeable(layer)
    own = tuple(prefix for layer in found.layers for prefix in layer.own_parts())
    copies = tuple(copies_of(found.savers))
    used = {saver.copy(saver.active()): saver.prefix for saver in found.savers}

    def is_base(name: str) -> bool:
        return not name.startswith(own) and (name.startswith(tuple(used)) or not name.startswith(copies))

    names = {name for layer in found.layers for adapter in layer.adapters for name in layer.factors(adapter)}
    base = _under_own_names(holdings_of(source, wanted=is_base), used)
    _refuse_split_ties(base, found.layers)
    factors = holdings_of(source, wanted=names.__contains__)
    merger = Merger(found, factors, connect if _any_cut(model, names) else None)
    shards = tuple(_computed(shard, merger) for shard in base.shards)
    return replace(base, shards=shards, stray=_both(base.stray, factors.stray), prepare=(*base.prepare, merger.prepare))


def _computed(shard: Shard, merger: Merger) -> Shard:
    layer = merger.layers.get(shard.name)
    if layer is None:
        return shard
    merger.refuse_mismatch(layer, shard)
    return replace(shard, render=partial(merger.write, layer, shard))


def _refuse_split_ties(base: Holdings, layers: Iterable[LoraLayer]) -> None:
    """Refuse a weight with two names of which only one has the adapter: whichever is written, the other is wrong."""
    modules = {layer.weight: layer.module for layer in layers}
    for name, canonical in base.aliases:
        if modules.get(name) is not modules.get(canonical):
            with_adapter = name if name in modules else canonical
            why = f"its weight is that of {canonical if with_adapter == name else name}, too, which has other adapters"
            raise LoraUnsupported(with_adapter.removesuffix(".weight"), why, ("untied weights", CHOICES[1]))


def _any_cut(model: nn.Module, names: set[str]) -> bool:
    """Say whether a framework cuts any factor; all ranks see the same model, so they say the same."""
    managed = sharded_params(module for _, module in walk(model))
    return any(
        (id(leaf.owner), leaf.key) in managed or _is_cut(leaf.read()) for leaf in leaves_of(model) if leaf.name in names
    )


def _is_cut(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) or is_partitioned(tensor) or hasattr(tensor, autotp.RECORD)


def _both(first: Callable[[], Stray | None], second: Callable[[], Stray | None]) -> Callable[[], Stray | None]:
    return lambda: first() or second()


# ------------------------------------------------------------ one adapter


def _chosen(found: PeftModules, lora: Lora) -> str:
    """Return the name of the adapter that is published."""
    known = found.adapters()
    if isinstance(lora, LoraAdapter):
        if lora.name not in known:
            raise ConfigError("lora", f"LoraAdapter({lora.name!r})", f"the model has the adapters {known}")
        return lora.name
    active = _active(found)
    if len(active) != 1:
        raise ConfigError("lora", lora, f"{len(active)} adapters are active, of {known}: name one, {CHOICES[2]}")
    return active[0]


def _active(found: PeftModules) -> list[str]:
    return sorted({a for layer in found.layers for a in layer.module.active_adapters if a in layer.adapters})


def _refuse_another(found: PeftModules, attached: str) -> None:
    """Refuse to publish the adapter that was active at attach where the model computes with another one now.

    Raises:
        HoldingsChanged: It does.
    """
    active = _active(found)
    if active != [attached]:
        raise HoldingsChanged("the active adapter", attached, ", ".join(active) or "none")


def _adapter_only(source: Source, found: PeftModules, adapter: str, masters: bool) -> Holdings:
    layers = [layer for layer in found.layers if adapter in layer.adapters]
    for layer in layers:
        refuse_unlisted(layer, adapter)
    factors = {name for layer in layers for name in layer.factors(adapter)}
    copies = {saver.copy(adapter): saver.prefix for saver in found.savers}
    prefixes = tuple(copies)
    holdings = holdings_of(source, masters, lambda name: name in factors or name.startswith(prefixes))
    if not holdings.shards:
        raise NothingToPublish(f"no module of this model has adapter {adapter}", tuple(found.adapters()))
    holdings = _under_own_names(holdings, copies)
    return renamed_holdings(holdings, lambda name: CHECKPOINT_PREFIX + _without_adapter(name, adapter, factors))


def _without_adapter(name: str, adapter: str, factors: set[str]) -> str:
    """Return a factor's name as PEFT saves it: ``q.lora_A.default.weight`` is ``q.lora_A.weight``."""
    if name not in factors:
        return name
    stem, last = (name.removesuffix(".weight"), ".weight") if name.endswith(".weight") else (name, "")
    return stem.removesuffix(f".{adapter}") + last


# ------------------------------------------------------------ copies of whole modules


def _under_own_names(holdings: Holdings, copies: Mapping[str, str]) -> Holdings:
    """Return holdings with the parameters of copies under the names of their modules."""

    def name_of(name: str) -> str:
        for prefix, owner in copies.items():
            if name.startswith(prefix):
                return owner + name.removeprefix(prefix)
        return name

    return renamed_holdings(holdings, name_of) if copies else holdings
