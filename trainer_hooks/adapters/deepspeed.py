"""DeepSpeed engines: ZeRO-1, -2 and -3 with and without AutoTP, described without any collective.

What a rank holds is two cuts, one inside the other: AutoTP's of the tensor (``autotp``), then
ZeRO's of what that left (``zero``).  The engine says when there is something to publish.

DeepSpeed is not imported: everything is read from the engine and the parameters that are given.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from weightd.core.errors import ConfigError
from weightd.core.layout.algebra import compose
from weightd.core.layout.faults import NotDescribable
from weightd.trainer_hooks.adapters import autotp, zero
from weightd.trainer_hooks.adapters.leaves import Leaf
from weightd.trainer_hooks.faults import NotBetweenSteps, UnsupportedPlacement
from weightd.trainer_hooks.shards import Shard, refuse_unreadable, unfused

_LOG = logging.getLogger(__name__)

Engine = Any
"""``deepspeed.DeepSpeedEngine``."""


def is_engine(source: object) -> bool:
    """Say whether ``source`` is what ``deepspeed.initialize`` returns."""
    return _is_a(source, "DeepSpeedEngine")


def is_deepspeed(param: Tensor) -> bool:
    """Say whether DeepSpeed cut, partitioned or optimises the parameter."""
    return any(hasattr(param, mark) for mark in (zero.PARTITIONED, zero.FRAGMENT, autotp.RECORD))


def is_partitioned(param: Tensor) -> bool:
    """Say whether ZeRO-3 keeps the parameter, so that its ``data`` is only what is gathered of it."""
    return zero.is_partitioned(param)


def module_of(engine: Engine, masters: bool = False) -> nn.Module:
    """Return the module that an engine trains.

    Args:
        engine: The engine.
        masters: Whether its masters are to be read.

    Raises:
        UnsupportedPlacement: The engine is of a kind whose parameters are not what this adapter reads.
    """
    found = _unknown_engine(engine)
    if found is not None:
        raise UnsupportedPlacement("the DeepSpeed engine", found, zero.SUPPORTED)
    module: nn.Module = engine.module
    if masters and engine.zero_round_robin_gradients():
        raise UnsupportedPlacement(next((n for n, _ in module.named_parameters()), ""), zero.UNLINKED, zero.LINKED)
    quantised = engine.zero_quantized_weights()
    for name, param in module.named_parameters():
        zero.refuse_experts(name, param)  # here, too: without ZeRO they look like any parameter
        if quantised and zero.is_partitioned(param):
            found = "the engine computes with quantised weights (zero_quantized_weights), not with those that are held"
            raise UnsupportedPlacement(name, found, zero.SUPPORTED)
    return module


def _unknown_engine(engine: Engine) -> str | None:
    if _is_a(engine, "PipelineEngine"):
        return "a pipeline engine, whose stages number their layers from 0"
    if _is_a(engine, "DeepSpeedHybridEngine"):
        return "a hybrid engine, which keeps a second model for inference"
    if getattr(engine, "zenflow", None):
        return "ZenFlow updates part of the parameters after the step has returned"
    return None


def _is_a(thing: object, name: str) -> bool:
    return any(c.__name__ == name and c.__module__.startswith("deepspeed.") for c in type(thing).__mro__)


# ---------------------------------------------------------------- shards


def deepspeed_shard(leaf: Leaf, masters: torch.dtype | None = None) -> Shard:
    """Return the shard of a parameter.

    Args:
        leaf: Where the parameter is.
        masters: Element type of the masters, to publish those; None publishes what the trainer computes with.

    Raises:
        UnsupportedPlacement: Its memory is not what DeepSpeed's records say of the supported kinds.
        PiecesDoNotAddUp: The records disagree with the memory.
    """
    param = leaf.read()
    zero.refuse_unknown(leaf.name, param)
    local = zero.shape_of(param)
    cut = autotp.cut_of(leaf, param, local)
    held = zero.held_bits(leaf, param) if masters is None else zero.held_masters(leaf, param, masters)
    refuse_unreadable(leaf.name, held.read())
    try:
        pieces = compose(cut.pieces, held.pieces, local)
    except NotDescribable as error:
        raise UnsupportedPlacement(leaf.name, str(error), zero.SUPPORTED) from error
    return unfused(leaf.name, cut.shape, held.dtype, held.shape, pieces, held.read)


def dtype_of_masters(leaves: Iterable[Leaf]) -> torch.dtype:
    """Return the element type of the fp32 masters of a model.

    Raises:
        ConfigError: No parameter of it is DeepSpeed's.
        UnsupportedPlacement: The masters are not where DeepSpeed records them.
    """
    named = [(leaf.name, param) for leaf, param in ((leaf, leaf.read()) for leaf in leaves) if is_deepspeed(param)]
    if not named:
        raise ConfigError("masters", "True", "only DeepSpeed's ZeRO keeps masters apart from the parameters")
    zero.refuse_unlinked(named)
    return zero.master_dtype(param for _, param in named)


# ---------------------------------------------------------------- when


class StepEnd:
    """Looks, before every publish, whether the engine is between two steps."""

    def __init__(self, engine: Engine) -> None:
        """Take the engine as it is at attach."""
        self._engine = engine
        self._skipped = int(engine.skipped_steps)

    def check(self) -> None:
        """Return where every parameter is what the last step left.

        A step that was skipped for overflow left them as they were: the version is published, since all
        ranks skip the same steps and a loop counts on one version per step, and a warning says so.

        Raises:
            NotBetweenSteps: Micro-batches were taken since the last step, or a step is running.
        """
        found = _between(self._engine)
        if found is not None:
            raise NotBetweenSteps(int(self._engine.global_steps), *found)
        skipped = int(self._engine.skipped_steps)
        if skipped > self._skipped and not self._engine.was_step_applied():
            step = int(self._engine.global_steps)
            _LOG.warning("DeepSpeed skipped step %d for overflow: what is published now is as before it", step)
        self._skipped = skipped


def _between(engine: Engine) -> tuple[str, str] | None:
    """Return what the engine is in the middle of and what ends it, or None between two steps."""
    finish = "publish behind the engine.step() that ends the accumulation"
    if getattr(engine, "_running_engine_step", False):
        return "engine.step() is running, or raised", "publish once engine.step() has returned"
    if not _managed(engine):
        taken = int(getattr(engine, "_unmanaged_backward_count", 0))
        return (f"{taken} micro-batches were taken since, and no engine.step()", finish) if taken else None
    override = getattr(engine, "_is_gradient_accumulation_boundary", None)
    if override is not None:
        # The caller counts: all that is known is that the next step() would not be one.
        return None if override else ("set_gradient_accumulation_boundary(False) says that more is to come", finish)
    size = int(engine.gradient_accumulation_steps())
    taken = int(engine.micro_steps) % size
    return (f"{taken} of {size} micro-batches of the next step are taken", finish) if taken else None


def _managed(engine: Engine) -> bool:
    managed = getattr(engine, "managed_gradient_accumulation", None)  # not in all of 0.19
    return managed is None or bool(managed())
