"""Each way in which Megatron cuts a parameter, of any small size: cut by its rules, taken by engines of any size."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.hooks import megatron_rules as by_rule
from tests.hooks.delivery import Held, delivered, differing, held
from weightd.core.layout.cuts import balanced_sizes
from weightd.rollout_hooks.declare import Declaration
from weightd.trainer_hooks.adapters.megatron import (
    Column,
    Experts,
    GateUp,
    GroupedQKV,
    Megatron,
    Row,
    Rule,
    Vocabulary,
)

FEW = settings(max_examples=500 if os.environ.get("WEIGHTD_FULL") == "1" else 30)

sizes = st.sampled_from([1, 2, 3, 4, 8])
engines = st.integers(1, 4)
small = st.integers(1, 4)


def counted(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Return tensors of which no two elements are equal."""
    found, first = [], 1
    for shape in shapes:
        found.append(torch.arange(first, first + prod(shape), dtype=torch.float32).reshape(shape))
        first += prod(shape)
    return found


def ranks(split: Any, locals_: Sequence[Tensor], **more: Any) -> list[Held]:
    """Return the slots of all tensor-parallel ranks of one parameter."""
    size = len(locals_)
    return [
        held(Megatron(rules=[Rule("w", split)], tensor_rank=r, tensor_size=size, **more).holdings({"w": local}))
        for r, local in enumerate(locals_)
    ]


def check(trainers: Sequence[Held], fulls: Mapping[str, Tensor], size: int, dim: int = 0) -> None:
    """Deliver to an engine that cuts every tensor along ``dim``, unevenly where it has to, and compare with slices."""

    def declare(k: int) -> Declaration:
        d = Declaration("float32")
        for name, full in fulls.items():
            d.cut(name, tuple(full.shape), dim, balanced_sizes(full.shape[dim], size), k)
        return d

    params = delivered(trainers, size, declare)
    cuts = {n: torch.split(full, list(balanced_sizes(full.shape[dim], size)), dim) for n, full in fulls.items()}
    for k in range(size):
        assert [] == differing(params[k], {name: parts[k] for name, parts in cuts.items()})


@FEW
@given(sizes, small, small, st.integers(1, 3), engines, st.booleans())
def test_column_with_a_stride(size: int, part: int, hidden: int, stride: int, engine: int, bias: bool) -> None:
    rows = stride * size * part
    (full,) = counted((rows,) if bias else (rows, hidden))
    check(ranks(Column("w", stride), by_rule.column(full, size, stride)), {"w": full}, engine)


@FEW
@given(sizes, small, small, engines, st.integers(0, 1))
def test_row(size: int, part: int, rows: int, engine: int, dim: int) -> None:
    (full,) = counted((rows, size * part))
    check(ranks(Row("w"), by_rule.row(full, size)), {"w": full}, engine, dim)


@FEW
@given(sizes, small, small, st.integers(0, 3), engines, st.booleans())
def test_gate_and_up(size: int, part: int, hidden: int, interleave: int, engine: int, bias: bool) -> None:
    rows = size * part * max(interleave, 1)
    gate, up = counted(*[(rows,) if bias else (rows, hidden)] * 2)
    turns = by_rule.interleaved(gate, up, size, interleave) if interleave else None
    locals_ = turns or by_rule.gate_up(gate, up, size)
    check(ranks(GateUp("gate", "up", interleave), locals_), {"gate": gate, "up": up}, engine)


@st.composite
def attention(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """Draw ranks, query heads, groups and rows of a head such that the grouped rows can be cut evenly."""
    size, groups = draw(sizes), draw(small)
    per, head = draw(st.integers(1, 3)), draw(small)
    while groups * (per + 2) * head % size or groups * (2 * per + 2) * head % size:
        head += 1
    return size, groups * per, groups, head


@FEW
@given(attention(), small, engines, st.sampled_from(["none", "apart", "with q"]), st.booleans())
def test_grouped_qkv(shape: tuple[int, int, int, int], hidden: int, engine: int, gated: str, bias: bool) -> None:
    size, heads, groups, head = shape
    rest = () if bias else (hidden,)
    q, gate, k, v = counted(*[(n * head, *rest) for n in (heads, heads, groups, groups)])
    name = {"none": "", "apart": "gate", "with q": "q"}[gated]
    locals_ = by_rule.qkv(q, k, v, groups, size, gate if name else None)
    fulls = {"q": q, "k": k, "v": v}
    if gated == "apart":
        fulls["gate"] = gate
    elif gated == "with q":  # the checkpoint keeps each head's gate behind the head
        pairs = zip(torch.split(q, head), torch.split(gate, head), strict=True)
        fulls["q"] = torch.cat([t for pair in pairs for t in pair])
    check(ranks(GroupedQKV("q", "k", "v", heads, groups, head, name), locals_), fulls, engine)


@FEW
@given(sizes, st.integers(1, 40), small, st.integers(1, 5), engines)
def test_vocabulary(size: int, rows: int, hidden: int, divisor: int, engine: int) -> None:
    (full,) = counted((rows, hidden))
    check(ranks(Vocabulary("w", rows), by_rule.vocabulary(full, size, divisor)), {"w": full}, engine)


@FEW
@given(
    st.sampled_from([1, 2, 3]), sizes, small, small, small, engines, st.sampled_from(["stack", "transposed", "legacy"])
)
def test_experts_in_one_parameter(ep: int, etp: int, each: int, part: int, hidden: int, engine: int, kept: str) -> None:
    """Also into a checkpoint that stacks them, and with experts cut over other ranks than the rest."""
    count, ffn = ep * each, etp * part
    gates, ups, downs = (torch.stack(ts) for ts in _experts(count, ffn, hidden))
    split1, split2 = GateUp("gate.{expert}", "up.{expert}"), Row("down")
    options: dict[str, Any] = {"transposed": kept != "stack"}
    rules = [
        Rule("fc1", Experts(split1, flat=1 if kept == "legacy" else None, **options)),
        Rule("fc2", Experts(split2, flat=0 if kept == "legacy" else None, **options)),
    ]
    trainers = []
    for e in range(ep):
        mine = by_rule.local_experts(count, ep, e)
        for t in range(etp):
            fc1 = [by_rule.gate_up(gates[g], ups[g], etp)[t] for g in mine]
            fc2 = [by_rule.row(downs[g], etp)[t] for g in mine]
            megatron = Megatron(
                rules=rules,
                experts=count,
                expert_rank=e,
                expert_size=ep,
                expert_tensor_rank=t,
                expert_tensor_size=etp,
            )
            trainers.append(held(megatron.holdings({"fc1": _kept(fc1, kept, 1), "fc2": _kept(fc2, kept, 2)})))
    fulls = {f"gate.{g}": gates[g] for g in range(count)} | {f"up.{g}": ups[g] for g in range(count)}
    check(trainers, {**fulls, "down": downs}, engine)


def _experts(count: int, ffn: int, hidden: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    found = counted(*[(ffn, hidden)] * 2 * count, *[(hidden, ffn)] * count)
    return found[:count], found[count : 2 * count], found[2 * count :]


def _kept(experts: list[Tensor], kept: str, number: int) -> Tensor:
    if kept == "stack":
        return by_rule.stacked(experts)
    if kept == "transposed":
        return by_rule.stacked([e.t() for e in experts])
    return by_rule.grouped_weight1(experts) if number == 1 else by_rule.grouped_weight2(experts)
