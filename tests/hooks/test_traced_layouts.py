"""What a loader does with real tensors is what its traced layout does with them, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.hooks.delivery import BUCKET_BYTES, apply, proved
from tests.hooks.engine_loaders import CASES, VOCAB, Case, VllmLike, combinations, engines, param, vllm_checkpoint
from tests.hooks.published import Rank
from weightd.core.errors import Refused
from weightd.core.layout.columns import Layout
from weightd.core.units import EngineId, EngineRank, RolloutRank
from weightd.rollout_hooks.parameters import DeclarationMismatch
from weightd.rollout_hooks.targets import targets_of
from weightd.rollout_hooks.trace import Difference, Traced, differences, probe, trace
from weightd.rollout_hooks.trace.faults import NotWritten, ReLaid


def counted(shapes: Mapping[str, tuple[int, ...]], stored: str, first: int = 1) -> dict[str, Tensor]:
    """Return a checkpoint in which no two elements are equal bits, as far as the type has room."""
    tensors, dtype = {}, getattr(torch, stored)
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        bits = torch.arange(first, first + count, dtype=torch.int32)
        # Bits of bfloat16 numbers: exact in every wider type, and a cast back is exact, too.
        tensors[name] = bits.to(torch.int16).view(torch.bfloat16).reshape(shape).to(dtype)
        first += count
    return tensors


def described(case: Case) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (shape, case.stored) for name, shape in case.shapes.items()}


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in model.state_dict().items()}


def same(model: nn.Module, expected: Mapping[str, Tensor]) -> list[str]:
    """Return what differs in bits."""
    found = model.state_dict()
    assert found.keys() == expected.keys()
    return [n for n, t in expected.items() if not torch.equal(found[n].view(torch.int16), t.view(torch.int16))]


def moved(models: list[Any], layouts: list[Layout], tensors: dict[str, Tensor]) -> None:
    """Publish tensors as a trainer would, and move them into the models by their layouts."""
    ranks = [RolloutRank(EngineId("E0"), EngineRank(k)) for k in range(len(models))]
    targets = {r: targets_of(m, layout, str(r)) for r, m, layout in zip(ranks, models, layouts, strict=True)}
    trainer = Rank(tensors).fill()
    apply(proved([trainer], {r: t.layout for r, t in targets.items()}), [trainer], targets, BUCKET_BYTES)


@pytest.mark.parametrize("name, tp", engines())
def test_moved_by_the_trace_is_loaded_by_the_loader(name: str, tp: int) -> None:
    case = CASES[name]
    checkpoint = counted(case.shapes, case.stored)
    models = [case.build(tp, k) for k in range(tp)]
    for model in models:
        # Copies: a loader may keep views of what it is given, and the engine serves from that memory then.
        model.load_weights([(n, t.clone()) for n, t in checkpoint.items()])
    loaded = [state(m) for m in models]
    for model in models:
        for tensor in model.state_dict().values():
            tensor.zero_()
    traces = [trace(m, described(case)) for m in models]

    assert [[]] * tp == [[n for n, t in m.state_dict().items() if t.count_nonzero()] for m in models]
    moved(models, [t.layout() for t in traces], published(checkpoint, traces[0]))
    assert [[]] * tp == [same(m, expected) for m, expected in zip(models, loaded, strict=True)]


def published(checkpoint: dict[str, Tensor], traced: Traced) -> dict[str, Tensor]:
    """Return the tensors as the trace demands them of a trainer."""
    return {n: checkpoint[n].to(getattr(torch, p.dtype)) for n, p in traced.tensors.items()}


@pytest.mark.parametrize("name, tp, k", combinations())
def test_trace_says_what_is_declared(name: str, tp: int, k: int) -> None:
    case = CASES[name]
    assert case.declared is not None
    traced = trace(case.build(tp, k), described(case))

    assert () == differences(traced.layout(), case.declared(tp, k).layout())


def test_what_the_trace_reports() -> None:
    shapes = {**vllm_checkpoint(1), "lm_head.weight": (VOCAB, 12), "rotary.inv_freq": (6,)}
    model = VllmLike(3, 2, 1)
    model.register_buffer("positions", torch.arange(4))
    mask = torch.zeros(4)
    model.register_buffer("mask", mask)
    original = model.load_weights

    def load(weights: Any) -> None:
        kept = [(n, t) for n, t in weights if n != "rotary.inv_freq"]
        original(kept)
        mask.fill_(1.0)

    traced = trace(model, {n: (shape, "float32") for n, shape in shapes.items()}, load)

    assert ("lm_head.weight", "rotary.inv_freq") == traced.unused
    assert ("positions",) == traced.uncovered
    assert ("mask",) == traced.filled
    assert {"head.weight": "embed.weight"} == traced.tied
    assert {"embed.weight": 2 * 12} == traced.unfed  # rows 8 to 11, of which the vocabulary has two
    assert {("float32", "bfloat16")} == {(c.stored, c.needed) for c in traced.casts}
    assert "bfloat16" == traced.tensors["norm.weight"].dtype
    assert 0 == int(mask.count_nonzero())
    with pytest.raises(Refused) as refused:
        traced.layout()
    (missing,) = refused.value.violations
    assert isinstance(missing, NotWritten)
    assert ("positions",) == missing.parameters
    assert ("positions",) == traced.layout(kept=["positions"]).kept


def test_a_shard_of_padding_alone_needs_nothing() -> None:
    """Ten rows of vocabulary, padded to 24 and cut in three: the last rank has none of them."""
    models = [VllmLike(3, k, 1) for k in range(3)]
    for k, model in enumerate(models):
        model.embed.weight = model.head.weight = param(8, 12)
        model.embed.weight.fill_(k)
    shapes = {"embed.weight": (VOCAB, 12)}
    others = {n for n in models[0].state_dict() if n not in ("embed.weight", "head.weight")}
    traces = [trace(m, {n: (s, "bfloat16") for n, s in shapes.items()}) for m in models]

    assert ("embed.weight",) == traces[2].filled
    tensors = counted(shapes, "bfloat16")
    moved(list(models), [t.layout(kept=others) for t in traces], tensors)
    assert torch.equal(models[1].get_parameter("embed.weight")[:2], tensors["embed.weight"][8:])
    assert torch.equal(models[2].get_parameter("embed.weight"), torch.full((8, 12), 2, dtype=torch.bfloat16))


def test_replaced_parameters_are_put_back() -> None:
    case = CASES["transformers"]
    model = case.build(1, 0)
    before = dict(model.named_parameters())
    trace(model, described(case))

    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_strided_parameters_keep_their_strides() -> None:
    """A loader that assigns a transposed view leaves a parameter of other strides; they are followed."""

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3, 4, dtype=torch.bfloat16).t(), requires_grad=False)

        def load_weights(self, weights: Any) -> None:
            for _, tensor in weights:
                self.w.data.copy_(tensor)

    model = Transposed()
    traced = trace(model, {"w": ((4, 3), "bfloat16")})

    (piece,) = traced.pieces
    assert (1, 4) == piece.row.stride
    tensors = counted({"w": (4, 3)}, "bfloat16")
    moved([model], [traced.layout()], tensors)
    assert torch.equal(model.w, tensors["w"])


# ------------------------------------------------------------ probe


class ReLaying(nn.Module):
    """Re-lays its experts after loading, in the same shape, as kernels for matrix units want them."""

    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = param(2, 4, 6)
        self.norm = param(6)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor)

    def process_weights_after_loading(self) -> None:
        data = self.w13_weight.data
        data.copy_(data.view(2, 2, 2, 6).transpose(1, 2).reshape(2, 4, 6).clone())


def test_probe_names_the_parameter_that_was_re_laid() -> None:
    model, shapes = ReLaying(), {"w13_weight": (2, 4, 6), "norm": (6,)}
    traced = trace(model, {n: (s, "float32") for n, s in shapes.items()})
    tensors = counted(shapes, "float32")
    model.load_weights(tensors.items())
    traced.probe(model, tensors)
    probe(model, traced.layout(), tensors)
    model.process_weights_after_loading()
    with pytest.raises(Refused) as refused:
        traced.probe(model, tensors)

    (wrong,) = refused.value.violations
    assert isinstance(wrong, ReLaid)
    assert ("w13_weight", 24, 48, 6) == (wrong.parameter, wrong.differing, wrong.compared, wrong.element)
    assert "w13_weight[0, 1, 0]" == wrong.source


# ------------------------------------------------------------ comparison


def test_differences_name_parameter_element_and_both_sources() -> None:
    case = CASES["vllm"]
    assert case.declared is not None
    traced = trace(case.build(2, 1), described(case)).layout()
    swapped = trace(case.build(2, 0), described(case)).layout()
    found = {d.parameter: d for d in differences(traced, swapped)}

    assert (
        Difference("down_proj.weight", 0, "down_proj.weight[0, 12]", "down_proj.weight[0, 0]")
        == found["down_proj.weight"]
    )
    assert Difference("embed.weight", 0, "embed.weight[6, 0]", "embed.weight[0, 0]") == found["embed.weight"]
    assert "norm.weight" not in found
    (alone,) = differences(traced, one_less(traced))
    assert ("norm.weight", -1, "24 bytes of bfloat16", "no such parameter") == alone


def one_less(layout: Layout) -> Layout:
    """Return the layout without its parameter norm.weight."""
    import dataclasses

    row = next(r for r, b in enumerate(layout.buffers) if b.name == "norm.weight")
    rows = layout.buffer != row
    columns = {n: getattr(layout, n)[rows] for n in ("tensor", "start", "extent", "step", "offset", "stride")}
    buffer = layout.buffer[rows]
    buffers = tuple(b for b in layout.buffers if b.name != "norm.weight")
    return dataclasses.replace(layout, buffers=buffers, buffer=buffer - (buffer > row), **columns)


def test_element_types_of_the_layout_are_the_parameters() -> None:
    """Receivers take exact types: the trace of a casting loader demands what the parameter is."""
    model = ReLaying()
    traced = trace(model, {"w13_weight": ((2, 4, 6), "float32"), "norm": ((6,), "float32")})

    assert {"bfloat16"} == {t.dtype for t in traced.layout().tensors}
    with pytest.raises(Refused) as refused:
        targets_of({"w13_weight": torch.zeros(2, 4, 6), "norm": torch.zeros(6)}, traced.layout(), "E0[0]")
    assert all(isinstance(v, DeclarationMismatch) for v in refused.value.violations)
