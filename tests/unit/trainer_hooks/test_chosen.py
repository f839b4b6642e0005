"""``adapter=``: what a named one takes and refuses, and a declaration of Megatron's in a publisher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.golden_text import check_golden
from weightd.core.errors import ConfigError
from weightd.trainer_hooks.adapters import chosen
from weightd.trainer_hooks.adapters.chosen import chosen_holdings
from weightd.trainer_hooks.adapters.megatron import Column, GateUp, Megatron, Rule
from weightd.trainer_hooks.faults import UnsupportedPlacement
from weightd.trainer_hooks.publisher import Publisher


class DeepSpeedEngine(nn.Module):
    """Stands for DeepSpeed's."""


DeepSpeedEngine.__module__ = "deepspeed.runtime.engine"


def partitioned(tensor: Tensor) -> Tensor:
    tensor.ds_id = 5  # type: ignore[attr-defined]
    return tensor


PLAIN = {"w": torch.ones(4, 3)}
FSDP2 = {"buffer": torch.ones(2), "w": Tensor._make_subclass(DTensor, torch.ones(4, 3))}  # to look at: it has no mesh
DEEPSPEED = {"w": partitioned(torch.ones(4, 3))}

REFUSED: dict[str, tuple[Any, Any]] = {
    "plain_fsdp2": (FSDP2, "plain"),
    "fsdp2_nothing": (PLAIN, "fsdp2"),
    "fsdp2_deepspeed": (DEEPSPEED, "fsdp2"),
    "deepspeed_fsdp2": (FSDP2, "deepspeed"),
    "deepspeed_nothing": (PLAIN, "deepspeed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_named_adapter_refuses_what_it_does_not_know(case: str) -> None:
    with pytest.raises(UnsupportedPlacement) as caught:
        chosen_holdings(*REFUSED[case])

    check_golden(f"errors/E_PLACEMENT.adapter_{case}", str(caught.value))


@pytest.mark.parametrize("source", [PLAIN, list(PLAIN.items())])
@pytest.mark.parametrize("adapter", ["plain", None])
def test_plain_tensors(source: Any, adapter: Any) -> None:
    assert ["w"] == [shard.name for shard in chosen_holdings(source, adapter).shards]


def test_pairs_that_can_be_read_once() -> None:
    assert ["w"] == [shard.name for shard in chosen_holdings(((n, t) for n, t in PLAIN.items()), "plain").shards]


def test_engine_of_deepspeed_needs_its_own_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen, "module_of", lambda engine: nn.Linear(2, 2))
    with pytest.raises(UnsupportedPlacement, match="it is a DeepSpeed engine and adapter is 'plain'"):
        chosen_holdings(DeepSpeedEngine(), "plain")


@pytest.mark.parametrize(
    "make, field",
    [
        (lambda: chosen_holdings(PLAIN, "zero"), "adapter"),  # type: ignore[arg-type]
        (lambda: chosen_holdings(PLAIN, Megatron(rules=[Rule("w", Column("w"))]), masters=True), "masters"),
        (lambda: Publisher.from_shards([], run="r", rank=0, world=1, adapter="plain"), "adapter"),
    ],
)
def test_settings_that_cannot_stand(make: Callable[[], object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()

    assert field == caught.value.field


def test_publisher_describes_by_megatrons_rules() -> None:
    rules = [Rule("layers.{layer}.fc1", GateUp("{layer}.gate", "{layer}.up"))]
    declared = Megatron(rules=rules, tensor_rank=1, tensor_size=2, layers=[7])
    publisher = Publisher(
        {"layers.0.fc1": torch.ones(4, 3)}, run="r", rank=1, world=2, adapter=declared, dtype=torch.bfloat16
    )
    layout = publisher.describe()

    assert [("7.gate", (4, 3), "bfloat16"), ("7.up", (4, 3), "bfloat16")] == [
        (t.name, t.shape, t.dtype) for t in layout.tensors
    ]
    assert [[2, 0], [2, 0]] == layout.start.tolist()
    assert [0, 6] == layout.offset.tolist()
