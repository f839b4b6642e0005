"""PEFT's modules in a model: LoRA layers with their adapters, modules that are saved whole, and what is refused.

Source: peft 0.21, ``tuners/lora/layer.py`` (``get_delta_weight``, ``merge``) and ``utils/other.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from weightd.trainer_hooks.faults import LoraUnsupported
from weightd.trainer_hooks.names import ORIGINAL, SAVED, walk
from weightd.trainer_hooks.peft_types import (
    LORA_LAYER,
    SAVER,
    TRAINING_WRAPPER,
    TUNER_LAYER,
    peft_classes,
    peft_qualified,
)

MERGED = ("LoRA of Linear and Embedding", "modules_to_save")
"""What can be merged."""

_MERGEABLE = ("peft.tuners.lora.layer.Linear", "peft.tuners.lora.layer.Embedding")
_NO_PLAIN_FACTORS = ("_ConvNd", "ParamWrapper", "MultiheadAttention")
_BASE = "base_layer"


@dataclass(frozen=True, slots=True, eq=False)
class LoraLayer:
    """A module with LoRA adapters.

    Attributes:
        prefix: Prefix of the names of its base's parameters: ``layers.0.q_proj.``, or nothing for a bare layer.
        module: PEFT's layer.
    """

    prefix: str
    module: Any

    @property
    def name(self) -> str:
        """Its name in the model."""
        return self.prefix.rstrip(".") or "the model"

    @property
    def weight(self) -> str:
        """Name of the base weight."""
        return f"{self.prefix}weight"

    @property
    def is_embedding(self) -> bool:
        """Whether its factors are parameters of their own, and the product is transposed."""
        return "Embedding" in peft_classes(self.module)

    @property
    def transposed(self) -> bool:
        """Whether the base weight is of shape (in, out), where the product of the factors is (out, in)."""
        return self.is_embedding or bool(getattr(self.module, "fan_in_fan_out", False))

    @property
    def adapters(self) -> tuple[str, ...]:
        """Adapters that it has factors of."""
        return tuple(self.module.lora_embedding_A if self.is_embedding else self.module.lora_A)

    def factors(self, adapter: str) -> tuple[str, str]:
        """Return the names of an adapter's factors: A of shape (r, in), B of shape (out, r)."""
        if self.is_embedding:
            return f"{self.prefix}lora_embedding_A.{adapter}", f"{self.prefix}lora_embedding_B.{adapter}"
        return f"{self.prefix}lora_A.{adapter}.weight", f"{self.prefix}lora_B.{adapter}.weight"

    def scale(self, adapter: str) -> float:
        """Return what the product is multiplied by; rank-stabilised or not is PEFT's to know."""
        return float(self.module.scaling[adapter])

    def merged(self) -> tuple[str, ...]:
        """Return the adapters whose product lies in the base weight already."""
        return tuple(a for a in self.module.merged_adapters if a in self.adapters)

    def pending(self) -> tuple[str, ...]:
        """Return the active adapters whose product does not."""
        done = self.merged()
        return tuple(a for a in self.module.active_adapters if a in self.adapters and a not in done)

    def own_parts(self) -> tuple[str, ...]:
        """Return the prefixes of its parameters that are not the base's."""
        return tuple(f"{self.prefix}{key}." for key in self.module._modules if key != _BASE)


@dataclass(frozen=True, slots=True, eq=False)
class Saver:
    """A module that every adapter has a whole copy of.

    Attributes:
        prefix: Prefix of the names of its parameters.
        module: PEFT's wrapper.
    """

    prefix: str
    module: Any

    def active(self) -> str | None:
        """Return the adapter whose copy the model uses, or None where it uses the original."""
        if self.module.disable_adapters:
            return None
        return next((a for a in self.module.active_adapters if a in self.module.modules_to_save), None)

    def copy(self, adapter: str | None) -> str:
        """Return the prefix of a copy's parameters, or of the original's."""
        return f"{self.prefix}{ORIGINAL}." if adapter is None else f"{self.prefix}{SAVED}.{adapter}."


@dataclass(frozen=True, slots=True, eq=False)
class PeftModules:
    """All that PEFT has put into a model.

    Attributes:
        layers: LoRA layers; one that is reachable by two names comes twice.
        savers: Modules with copies.
    """

    layers: tuple[LoraLayer, ...]
    savers: tuple[Saver, ...]

    def adapters(self) -> list[str]:
        """Return every adapter that any module has."""
        found = [a for layer in self.layers for a in layer.adapters]
        return sorted({*found, *(a for saver in self.savers for a in saver.module.modules_to_save)})


def first_peft_module(model: nn.Module) -> tuple[str, int]:
    """Return the name of the first module with an adapter and how many there are; ("", 0) without."""
    kinds = {TUNER_LAYER, TRAINING_WRAPPER, "PeftModel", "PromptEmbedding"}
    found = [prefix for prefix, module in walk(model) if kinds & set(peft_classes(module))]
    named = [prefix.rstrip(".") for prefix in found if prefix]
    return (named[0] if named else "the model itself"), len(named) or len(found)


def peft_modules(model: nn.Module) -> PeftModules:
    """Return what PEFT has put into a model.

    Raises:
        LoraUnsupported: A module of another method than LoRA.
    """
    layers: list[LoraLayer] = []
    savers: list[Saver] = []
    for prefix, module in walk(model):
        kinds = peft_classes(module)
        if "PeftModel" in kinds and "prompt_encoder" in module._modules:
            raise _unsupported(prefix, "learned prompts: no weight holds them")
        if SAVER in kinds:
            savers.append(Saver(prefix, module))
        elif TRAINING_WRAPPER in kinds or (TUNER_LAYER in kinds and LORA_LAYER not in kinds):
            raise _unsupported(prefix, peft_qualified(module))
        elif TUNER_LAYER in kinds:
            layers.append(LoraLayer(prefix, module))
    return PeftModules(tuple(layers), tuple(savers))


def refuse_unmergeable(layer: LoraLayer) -> None:
    """Refuse a layer whose adapters are more than ``scale * B @ A`` added to its weight.

    Raises:
        LoraUnsupported: DoRA and other variants, bias, convolutions, quantised bases, targets below a module.
    """
    kind = peft_qualified(layer.module)
    if kind not in _MERGEABLE:
        raise _unsupported(layer.prefix, kind)
    for adapter in layer.adapters:
        _refuse_variant(layer, adapter)


def refuse_unlisted(layer: LoraLayer, adapter: str) -> None:
    """Refuse a layer of which an adapter is more than its two factors.

    Raises:
        LoraUnsupported: As in ``refuse_unmergeable``, but for quantised bases: nothing of a base is published.
    """
    if set(_NO_PLAIN_FACTORS) & set(peft_classes(layer.module)):
        raise _unsupported(layer.prefix, peft_qualified(layer.module))
    _refuse_variant(layer, adapter)


def _refuse_variant(layer: LoraLayer, adapter: str) -> None:
    variant = layer.module.lora_variant.get(adapter)
    if variant is not None:
        raise _unsupported(layer.prefix, f"adapter {adapter} is of {type(variant).__name__}")
    if layer.module.lora_bias.get(adapter):
        raise _unsupported(layer.prefix, f"adapter {adapter} has a bias (lora_bias)")


def _unsupported(prefix: str, found: str) -> LoraUnsupported:
    return LoraUnsupported(prefix.rstrip(".") or "the model", found, MERGED)


def copies_of(savers: tuple[Saver, ...]) -> Iterator[str]:
    """Yield the prefix of every copy and every original."""
    for saver in savers:
        yield saver.copy(None)
        yield f"{saver.prefix}{SAVED}."
