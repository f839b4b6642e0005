"""What is merged at a publish: which adapters are active now, and their whole factors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from weightd.trainer_hooks.exchange import Exchange
from weightd.trainer_hooks.faults import HoldingsChanged, LoraUnsupported, NothingToPublish
from weightd.trainer_hooks.lora.factors import FactorExchange, Factors, whole_factors
from weightd.trainer_hooks.lora.layers import MERGED, LoraLayer, PeftModules
from weightd.trainer_hooks.lora.merge import Delta, delta_of, write_merged
from weightd.trainer_hooks.shards import Holdings, Shard


class Merger:
    """The LoRA layers of a model, as they are at the publish that is under way.

    Attributes:
        layers: By the name of their base weight.
    """

    def __init__(self, found: PeftModules, factors: Holdings, connect: Callable[[], Exchange] | None) -> None:
        """Note what is there; nothing is read or sent.

        Args:
            found: What PEFT has put into the model.
            factors: The factors of all adapters.
            connect: Reaches the other ranks, where factors are cut; None where they are whole.
        """
        self.layers: Mapping[str, LoraLayer] = {layer.weight: layer for layer in found.layers}
        self._savers = [(saver, saver.active()) for saver in found.savers]
        aliases = dict(factors.aliases)
        by_name = {shard.name: shard for shard in factors.shards}
        self._shards = by_name | {name: by_name[canonical] for name, canonical in aliases.items()}
        self._gather = None if connect is None else FactorExchange(connect)
        self._pending: dict[str, tuple[str, ...]] = {}
        self._factors: Factors = {}

    def refuse_mismatch(self, layer: LoraLayer, base: Shard) -> None:
        """Refuse a layer whose factors do not make a matrix of its weight's shape.

        Raises:
            LoraUnsupported: They do not, or the weight is no floating one.
        """
        if not base.dtype.is_floating_point:
            raise LoraUnsupported(layer.name, f"its weight is of {base.dtype}", MERGED)
        for adapter in layer.adapters:
            a, b = (self._shards[name].parts[0].shape for name in layer.factors(adapter))
            made = (a[1], b[0]) if layer.transposed else (b[0], a[1])
            held = tuple(part.shape for part in base.parts)
            if held != (made,):
                why = f"adapter {adapter} makes a matrix of {made}, the weight is of {held[0]}"
                raise LoraUnsupported(layer.name, why, MERGED)

    def prepare(self) -> None:
        """Look which adapters are active, and get their factors; a collective where factors are cut.

        Raises:
            HoldingsChanged: An adapter was added or taken away, or another whole copy is in use than at attach.
            LoraUnsupported: Adapters are disabled, so the model does not use what would be published.
            NothingToPublish: No adapter is active in any layer.
            ExchangeFailed: The other ranks did not show their factors in time.
        """
        self._refuse_other_copies()
        pending = {weight: self._active(layer) for weight, layer in self.layers.items()}
        merged = sum(len(layer.merged()) for layer in self.layers.values())
        if not merged and not any(pending.values()) and not any(active for _, active in self._savers):
            raise NothingToPublish("no adapter is active in any module", tuple(self.layers))
        names = [n for w, some in pending.items() for adapter in some for n in self.layers[w].factors(adapter)]
        shards = list({self._shards[name].name: self._shards[name] for name in names}.values())
        self._factors = self._gather.gather(shards) if self._gather is not None else whole_factors(shards)
        self._pending = pending

    def write(self, layer: LoraLayer, shard: Shard, destination: Tensor) -> None:
        """Write a base shard with its adapters into ``destination``."""
        deltas = [self._delta(layer, adapter, shard.dtype) for adapter in self._pending[layer.weight]]
        with torch.no_grad():
            write_merged(destination, shard.read().detach(), shard.parts[0].pieces, deltas)

    def _delta(self, layer: LoraLayer, adapter: str, base: torch.dtype) -> Delta:
        a, b = (self._factors[self._shards[name].name] for name in layer.factors(adapter))
        return delta_of(layer.scale(adapter), a, b, layer.transposed, base)

    def _active(self, layer: LoraLayer) -> tuple[str, ...]:
        if layer.module.disable_adapters:
            why = "its adapters are disabled, so the model does not compute with what would be published"
            raise LoraUnsupported(layer.name, why, ("enabled adapters",))
        active, merged = layer.pending(), layer.merged()
        if active and merged:
            why = (
                f"{', '.join(merged)} is merged into it and {', '.join(active)} is active and is not: "
                "the model computes without the latter"
            )
            raise LoraUnsupported(layer.name, why, ("all active adapters merged in place, or none",))
        for adapter in active:
            new = [name for name in layer.factors(adapter) if name not in self._shards]
            if new:
                raise HoldingsChanged(new[0], "not there", "a factor of an adapter that was added")
        return active

    def _refuse_other_copies(self) -> None:
        for saver, attached in self._savers:
            found = saver.active()
            if found != attached:
                name = f"{saver.prefix.rstrip('.')}.modules_to_save"
                raise HoldingsChanged(name, _copy(attached), _copy(found))


def _copy(adapter: str | None) -> str:
    return "the original module" if adapter is None else f"the copy of adapter {adapter}"
