"""What a declaration of a Megatron rank refuses, and what it reads from Megatron's own marks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.golden_text import check_error_is_whole, check_golden
from weightd.core.errors import ConfigError
from weightd.trainer_hooks.adapters.megatron import (
    Column,
    Experts,
    GateUp,
    GroupedQKV,
    Megatron,
    Row,
    Rule,
    Skip,
    Vocabulary,
    Whole,
)
from weightd.trainer_hooks.adapters.megatron.faults import RulesDoNotFit
from weightd.trainer_hooks.faults import UnsupportedPlacement
from weightd.trainer_hooks.shards import Holdings

UP = Rule("up.weight", Column("hf.up"))
DOWN = Rule("down.weight", Row("hf.down"))


def declared(*rules: Rule, **more: Any) -> Megatron:
    return Megatron(rules=rules, **{"tensor_size": 2, **more})


def marked(tensor: Tensor, dim: int = 0, stride: int = 1, parallel: bool = True) -> Tensor:
    """Return a tensor as Megatron marks it."""
    tensor.tensor_model_parallel, tensor.partition_dim, tensor.partition_stride = parallel, dim, stride  # type: ignore[attr-defined]
    return tensor


def boxes(holdings: Holdings) -> list[tuple[str, list[list[int]], list[list[int]]]]:
    return [
        (p.name, p.pieces.start.tolist(), p.pieces.extent.tolist()) for shard in holdings.shards for p in shard.parts
    ]


REFUSED: dict[str, tuple[Megatron, dict[str, Tensor]]] = {
    "unmatched": (declared(UP, DOWN), {"up.weight": torch.ones(4, 3), "gate.weight": torch.ones(4, 3)}),
    "idle": (declared(UP, DOWN), {"up.weight": torch.ones(4, 3)}),
    "several": (declared(UP, Rule("{which}.weight", Row("hf.{which}"))), {"up.weight": torch.ones(4, 3)}),
    "dim": (declared(UP), {"up.weight": marked(torch.ones(4, 3), 1)}),
    "stride": (declared(UP), {"up.weight": marked(torch.ones(4, 3), 0, 2)}),
    "whole": (declared(Rule("up.weight", Whole("w"))), {"up.weight": marked(torch.ones(4, 3))}),
    "cut": (declared(UP), {"up.weight": marked(torch.ones(4, 3), -1, 1, False)}),
    "flat": (declared(DOWN), {"down.weight": marked(torch.ones(12), 1)}),
    "shape": (
        declared(Rule("qkv", GroupedQKV("q", "k", "v", heads=4, groups=2, head_dim=2))),
        {"qkv": torch.ones(9, 3)},
    ),
    "vocabulary": (declared(Rule("emb", Vocabulary("emb", 50))), {"emb": torch.ones(24, 3)}),
    "layer": (declared(Rule("{layer}.w", Column("{layer}.w")), layers=range(2, 4)), {"2.w": torch.ones(4)}),
    "expert": (
        declared(Rule("w{expert}", Column("{expert}.w")), experts=6, expert_size=3),
        {"w2": torch.ones(4)},
    ),
    "twice": (
        declared(Rule("a", Column("hf.w")), Rule("b", Column("hf.w"))),
        {"a": torch.ones(4, 3), "b": torch.zeros(4, 3)},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rules_that_do_not_fit(case: str) -> None:
    megatron, tensors = REFUSED[case]
    with pytest.raises(RulesDoNotFit) as caught:
        megatron.holdings(tensors)

    check_golden(f"errors/E_RULES.{case}", str(caught.value))
    check_error_is_whole(caught.value)


def with_sizes(tensor: Tensor) -> Tensor:
    tensor.partition_sizes = [2, 2]  # type: ignore[attr-defined]
    return tensor


def of_zero(tensor: Tensor) -> Tensor:
    tensor.ds_id = 3  # type: ignore[attr-defined]
    return tensor


class Float8Tensor(torch.Tensor):
    """Stands for Transformer Engine's."""


UNSUPPORTED: dict[str, tuple[str, Tensor]] = {
    "fp8": ("up.weight", torch.ones(4, 3).to(torch.float8_e4m3fn)),
    "fp8_class": ("up.weight", torch.ones(4, 3).as_subclass(Float8Tensor)),
    "mamba": ("up.weight", with_sizes(torch.ones(4, 3))),
    "mixer": ("mixer.in_proj.weight", torch.ones(4, 3)),
    "zero": ("up.weight", of_zero(torch.ones(4, 3))),
    "meta": ("up.weight", torch.ones(4, 3, device="meta")),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_no_rule_can_describe_is_refused_by_name(case: str) -> None:
    name, tensor = UNSUPPORTED[case]
    with pytest.raises(UnsupportedPlacement) as caught:
        declared(Rule(name, Column("w"))).holdings({name: tensor})

    assert caught.value.name == name
    check_golden(f"errors/E_PLACEMENT.megatron_{case}", str(caught.value).replace(f"{__name__}.", ""))


class _ParamAndGradBuffer:
    """Stands for the distributed optimizer's."""

    def __iter__(self) -> Any:
        return iter(())


def test_buffers_of_the_distributed_optimizer_are_refused_by_name() -> None:
    source: Any = _ParamAndGradBuffer()
    with pytest.raises(UnsupportedPlacement) as caught:
        declared(UP).holdings(source)

    check_golden("errors/E_PLACEMENT.megatron_optimizer", str(caught.value))


@pytest.mark.parametrize(
    "make, field",
    [
        (lambda: declared(UP, tensor_rank=2), "tensor_rank"),
        (lambda: declared(UP, expert_rank=-1), "expert_rank"),
        (lambda: declared(UP, expert_tensor_rank=3), "expert_tensor_rank"),
        (lambda: declared(UP, experts=5, expert_size=2), "experts"),
        (lambda: declared(Rule("w{expert}", Column("{expert}.w"))), "experts"),
        (lambda: declared(UP, layers=(2, 2)), "layers"),
        (lambda: Rule("{layer}.w", Column("w")), "pattern"),
        (lambda: Rule("w", Column("{layer}.w")), "pattern"),
        (lambda: Rule("w{expert}", Experts(Column("{expert}.w"))), "pattern"),
    ],
)
def test_declarations_that_cannot_stand(make: Callable[[], object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()

    assert caught.value.field == field


@pytest.mark.parametrize(
    "split, tensor",
    [
        (Column("w"), marked(torch.ones(4, 3))),
        (Row("w"), marked(torch.ones(4, 3), 1)),
        (GateUp("g", "u"), marked(torch.ones(4, 3), 0, 2)),
        (GateUp("g", "u"), marked(torch.ones(4, 3), 0, 1)),  # Transformer Engine
        (Column("w", 2), marked(torch.ones(4, 3), 0, 2)),
        (Whole("w"), marked(torch.ones(4, 3), -1, 1, False)),
        (Vocabulary("w", 5), marked(torch.ones(4, 3))),
        (Experts(GateUp("{expert}.g", "{expert}.u"), transposed=True, flat=1), marked(torch.ones(3, 8), 1)),
        (Experts(Row("{expert}.d"), transposed=True, flat=0), marked(torch.ones(6, 3), 0)),
        (Experts(Row("{expert}.d")), marked(torch.ones(2, 3, 4), 2)),
        (Experts(Whole("{expert}.d")), marked(torch.ones(2, 3), -1, 1, False)),
    ],
)
def test_marks_that_agree(split: Any, tensor: Tensor) -> None:
    assert len(declared(Rule("w", split), experts=2).holdings({"w": tensor}).shards) == 1


def test_over_one_rank_cut_and_whole_are_the_same() -> None:
    tensors = {"up.weight": marked(torch.ones(4, 3), -1, 1, False), "w": marked(torch.ones(4, 3))}

    assert len(declared(UP, Rule("w", Whole("w")), tensor_size=1).holdings(tensors).shards) == 2


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.w = nn.Parameter(torch.ones(4, 3))


class Wrapper(nn.Module):
    """As Megatron's DDP and its half-precision module: by name, a child called module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def stage(numbers: Sequence[int]) -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList([Layer(n) for n in numbers])})


LAYERS = Rule("layers.{layer}.w", Column("hf.{layer}.w"))


def test_layers_get_their_global_numbers_whatever_wraps_the_model() -> None:
    megatron = declared(LAYERS, layers=range(2, 4))

    for model in (stage([3, 4]), Wrapper(Wrapper(stage([3, 4])))):
        assert ["hf.2.w", "hf.3.w"] == [name for name, *_ in boxes(megatron.holdings(model))]


def test_layer_number_that_contradicts_the_declaration() -> None:
    with pytest.raises(RulesDoNotFit) as caught:
        declared(LAYERS, layers=range(3, 5)).holdings(Wrapper(stage([3, 4])))

    check_golden("errors/E_RULES.layer_number", str(caught.value))


def test_tied_parameters_are_one_shard_and_an_alias() -> None:
    weight = torch.ones(4, 3)
    rules = [Rule(n, Vocabulary(f"hf.{n}", 7)) for n in ("emb", "head")]
    holdings = declared(*rules).holdings({"emb": weight, "head": weight})

    assert [("hf.emb", [[0, 0]], [[4, 3]])] == boxes(holdings)
    assert (("hf.head", "hf.emb"),) == holdings.aliases


def test_tied_parameters_that_are_declared_as_different_cuts() -> None:
    weight = torch.ones(4, 4)
    with pytest.raises(RulesDoNotFit, match="share memory"):
        declared(UP, DOWN).holdings({"up.weight": weight, "down.weight": weight})


def test_a_tie_that_is_broken_later_is_noticed() -> None:
    weight = torch.ones(4, 3)
    source = {"emb": weight, "head": weight}
    holdings = declared(*[Rule(n, Vocabulary(f"hf.{n}", 7)) for n in source]).holdings(source)
    assert holdings.stray() is None
    source["head"] = torch.zeros(4, 3)
    stray = holdings.stray()

    assert stray is not None
    assert "head" == stray.name


def test_skipped_parameters_are_not_published() -> None:
    holdings = declared(UP, Rule("bias", Skip("frozen"))).holdings(
        {"up.weight": torch.ones(4, 3), "bias": torch.ones(1)}
    )

    assert ["hf.up"] == [name for name, *_ in boxes(holdings)]


def test_a_module_with_megatrons_marks_is_taken_although_its_class_is_megatrons() -> None:
    class MegatronModule(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(3, 4, bias=False)
            marked(self.up.weight)

    assert [("hf.up", [[4, 0]], [[4, 3]])] == boxes(declared(UP, tensor_rank=1).holdings(MegatronModule()))
