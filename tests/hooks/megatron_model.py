"""A small model with everything that Megatron cuts: its checkpoint, its Megatron ranks, and engines that take it.

Checkpoint tensors are counted; Megatron's local tensors come from ``megatron_rules``; what an engine must hold is
sliced from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from tests.hooks import megatron_rules as by_rule
from tests.hooks.delivery import Held, Params, held
from weightd.core.layout.cuts import Span, balanced_sizes, shared_heads, spans
from weightd.rollout_hooks.declare import Declaration
from weightd.trainer_hooks.adapters.megatron import (
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

HIDDEN, HEADS, GROUPS, HEAD, FFN, VOCAB, EXPERTS, DIVISOR = 6, 8, 4, 2, 24, 50, 6, 4
LAYERS = 5
DENSE = (0,)
"""Layers without experts."""

STAGES = {1: (range(5),), 2: (range(2), range(2, 5)), 3: (range(1), range(1, 4), range(4, 5))}
"""Unequal stages: an offset that is stage times own number of layers is wrong in each of them."""


def checkpoint() -> Params:
    """Return every tensor of the checkpoint, all elements different."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for n in range(LAYERS):
        shapes.update({f"model.layers.{n}.{name}": shape for name, shape in layer_shapes(n).items()})
    tensors, first = {}, 0
    for name, shape in shapes.items():
        tensors[name] = torch.arange(first, first + prod(shape), dtype=torch.float32).reshape(shape)
        first += prod(shape)
    assert first < 1 << 24  # whole numbers that float32 can count
    return tensors


def layer_shapes(n: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of one layer."""
    rows = {"q": HEADS * HEAD, "k": GROUPS * HEAD, "v": GROUPS * HEAD}
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (HIDDEN,)}
    for part, size in rows.items():
        shapes[f"self_attn.{part}_proj.weight"] = (size, HIDDEN)
        shapes[f"self_attn.{part}_proj.bias"] = (size,)
    shapes["self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD)
    if n not in DENSE:
        shapes["mlp.gate.weight"] = (EXPERTS, HIDDEN)
    for where in ["mlp"] if n in DENSE else [f"mlp.experts.{e}" for e in range(EXPERTS)]:
        shapes[f"{where}.gate_proj.weight"] = (FFN, HIDDEN)
        shapes[f"{where}.up_proj.weight"] = (FFN, HIDDEN)
        shapes[f"{where}.down_proj.weight"] = (HIDDEN, FFN)
    return shapes


# ------------------------------------------------------------ trainer


@dataclass(frozen=True)
class World:
    """A Megatron job: tensor, pipeline and expert parallel sizes, and how experts are kept."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    experts: str = "te"  # te: one parameter for each; sequential: a module for each; legacy: weight1 and weight2

    def ranks(self) -> Iterator[tuple[int, int, int]]:
        """Yield (tensor, expert, pipeline) of every rank."""
        yield from ((t, e, p) for p in range(self.pp) for e in range(self.ep) for t in range(self.tp))

    def declared(self, t: int, e: int, p: int) -> Megatron:
        """Return the declaration of a rank, as a user writes it: the same rules on all of them."""
        return Megatron(
            tensor_rank=t,
            tensor_size=self.tp,
            layers=STAGES[self.pp][p],
            experts=EXPERTS,
            expert_rank=e,
            expert_size=self.ep,
            rules=rules(self.experts),
        )

    def local(self, tensors: Params, t: int, e: int, p: int) -> Params:
        """Return what a rank holds, by Megatron's names."""
        found: Params = {}
        stage = STAGES[self.pp][p]
        if p == 0:
            embedding = tensors["model.embed_tokens.weight"]
            found["embedding.word_embeddings.weight"] = by_rule.vocabulary(embedding, self.tp, DIVISOR)[t]
        for number, n in enumerate(stage):
            own = {k.removeprefix(f"model.layers.{n}."): v for k, v in tensors.items() if f".layers.{n}." in k}
            for name, tensor in self._layer(own, n, t, e).items():
                found[f"decoder.layers.{number}.{name}"] = tensor
        if p == self.pp - 1:
            found["decoder.final_layernorm.weight"] = tensors["model.norm.weight"]
            found["output_layer.weight"] = by_rule.vocabulary(tensors["lm_head.weight"], self.tp, DIVISOR)[t]
        return found

    def _layer(self, own: Params, n: int, t: int, e: int) -> Params:
        found: Params = {"self_attention.linear_qkv.layer_norm_weight": own["input_layernorm.weight"]}
        for kind in ("weight", "bias"):
            q, k, v = (own[f"self_attn.{part}_proj.{kind}"] for part in "qkv")
            found[f"self_attention.linear_qkv.{kind}"] = by_rule.qkv(q, k, v, GROUPS, self.tp)[t]
        found["self_attention.linear_proj.weight"] = by_rule.row(own["self_attn.o_proj.weight"], self.tp)[t]
        if n in DENSE:
            return found | self._mlp(own, "mlp", t, "mlp.linear_fc{}.weight")
        found["mlp.router.weight"] = own["mlp.gate.weight"]
        found["mlp.router.expert_bias"] = torch.zeros(EXPERTS)
        mine = by_rule.local_experts(EXPERTS, self.ep, e)
        if self.experts == "legacy":
            both = [list(self._mlp(own, f"mlp.experts.{g}", t, "{}").values()) for g in mine]
            found["mlp.experts.weight1"] = by_rule.grouped_weight1([fc1 for fc1, _ in both])
            found["mlp.experts.weight2"] = by_rule.grouped_weight2([fc2 for _, fc2 in both])
            return found
        name = "mlp.experts.linear_fc{{}}.weight{}" if self.experts == "te" else _SEQUENTIAL
        for i, g in enumerate(mine):
            found |= self._mlp(own, f"mlp.experts.{g}", t, name.format(i))
        return found

    def _mlp(self, own: Params, where: str, t: int, name: str) -> Params:
        gate, up, down = (own[f"{where}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        fc1, fc2 = by_rule.gate_up(gate, up, self.tp)[t], by_rule.row(down, self.tp)[t]
        return {name.format(1): fc1, name.format(2): fc2}

    def held(self, tensors: Params) -> list[Held]:
        """Return the layout and the slot of every rank."""
        return [held(self.declared(*place).holdings(self.local(tensors, *place))) for place in self.ranks()]


_SEQUENTIAL = "mlp.experts.local_experts.{}.linear_fc{{}}.weight"


def rules(experts: str = "te") -> list[Rule]:
    """Return the rules of a whole model, with which every rank is declared."""
    layer, hf = "decoder.layers.{layer}", "model.layers.{layer}"
    found = [
        Rule("embedding.word_embeddings.weight", Vocabulary("model.embed_tokens.weight", VOCAB), optional=True),
        Rule("output_layer.weight", Vocabulary("lm_head.weight", VOCAB), optional=True),
        Rule("decoder.final_layernorm.weight", Whole("model.norm.weight"), optional=True),
        Rule(f"{layer}.self_attention.linear_qkv.layer_norm_weight", Whole(f"{hf}.input_layernorm.weight")),
        Rule(f"{layer}.self_attention.linear_proj.weight", Row(f"{hf}.self_attn.o_proj.weight")),
        Rule(f"{layer}.mlp.router.weight", Whole(f"{hf}.mlp.gate.weight"), optional=True),
        Rule(f"{layer}.mlp.router.expert_bias", Skip("engines have none"), optional=True),
        Rule(f"{layer}.mlp.linear_fc1.weight", _fc1(f"{hf}.mlp"), optional=True),
        Rule(f"{layer}.mlp.linear_fc2.weight", Row(f"{hf}.mlp.down_proj.weight"), optional=True),
    ]
    for kind in ("weight", "bias"):
        q, k, v = (f"{hf}.self_attn.{part}_proj.{kind}" for part in "qkv")
        found.append(Rule(f"{layer}.self_attention.linear_qkv.{kind}", GroupedQKV(q, k, v, HEADS, GROUPS, HEAD)))
    expert = f"{hf}.mlp.experts.{{expert}}"
    fc1, fc2 = _fc1(expert), Row(f"{expert}.down_proj.weight")
    if experts == "legacy":
        found.append(Rule(f"{layer}.mlp.experts.weight1", Experts(fc1, transposed=True, flat=1), optional=True))
        found.append(Rule(f"{layer}.mlp.experts.weight2", Experts(fc2, transposed=True, flat=0), optional=True))
        return found
    where = {
        "te": f"{layer}.mlp.experts.linear_fc%d.weight{{expert}}",
        "sequential": f"{layer}.mlp.experts.local_experts.{{expert}}.linear_fc%d.weight",
    }[experts]
    return [*found, Rule(where % 1, fc1, optional=True), Rule(where % 2, fc2, optional=True)]


def _fc1(where: str) -> GateUp:
    return GateUp(f"{where}.gate_proj.weight", f"{where}.up_proj.weight")


# ------------------------------------------------------------ engine


@dataclass(frozen=True)
class Engine:
    """A vLLM-like engine: [q; k; v], [gate; up], stacks w13 and w2, padded vocabulary."""

    size: int

    @property
    def kv(self) -> tuple[Span, ...]:
        """Key and value heads of each rank: repeated where there are more ranks, uneven where they do not divide."""
        return shared_heads(GROUPS, self.size) if self.size > GROUPS else spans(balanced_sizes(GROUPS, self.size))

    @property
    def q(self) -> tuple[Span, ...]:
        """Query heads of each rank."""
        if self.size > GROUPS:
            return spans(balanced_sizes(HEADS, self.size))
        return tuple((a * HEADS // GROUPS, b * HEADS // GROUPS) for a, b in self.kv)

    @property
    def ffn(self) -> tuple[int, ...]:
        """Rows of gate and up of each rank."""
        return balanced_sizes(FFN, self.size)

    @property
    def rows(self) -> int:
        """Rows of the vocabulary of each rank, with padding."""
        return -(-VOCAB // self.size) + 1

    def declaration(self, k: int) -> Declaration:
        """Return what rank ``k`` needs, in a user's words."""
        d = Declaration("float32")
        d.vocabulary("embed", (VOCAB, HIDDEN), [self.rows] * self.size, k, "model.embed_tokens.weight")
        d.vocabulary("head", (VOCAB, HIDDEN), [self.rows] * self.size, k, "lm_head.weight")
        d.replicated("norm", (HIDDEN,), "model.norm.weight")
        for n in range(LAYERS):
            at = f"model.layers.{n}"
            d.replicated(f"{n}.norm", (HIDDEN,), f"{at}.input_layernorm.weight")
            for kind, rest in (("weight", (HIDDEN,)), ("bias", ())):
                q, kk, v = (f"{at}.self_attn.{part}_proj.{kind}" for part in "qkv")
                d.qkv(f"{n}.qkv.{kind}", (q, kk, v), HEAD, self.q, self.kv, k, rest)
            heads = [(b - a) * HEAD for a, b in self.q]
            d.row(f"{n}.o", (HIDDEN, HEADS * HEAD), heads, k, f"{at}.self_attn.o_proj.weight")
            if n in DENSE:
                gate, up = f"{at}.mlp.gate_proj.weight", f"{at}.mlp.up_proj.weight"
                d.gate_up(f"{n}.gate_up", (gate, up), (FFN, HIDDEN), self.ffn, k)
                d.row(f"{n}.down", (HIDDEN, FFN), self.ffn, k, f"{at}.mlp.down_proj.weight")
                continue
            d.replicated(f"{n}.router", (EXPERTS, HIDDEN), f"{at}.mlp.gate.weight")
            self._experts(d, n, k)
        return d

    def _experts(self, d: Declaration, n: int, k: int) -> None:
        width, first = self.ffn[k], sum(self.ffn[:k])
        d.parameter(f"{n}.w13", (EXPERTS, 2 * width, HIDDEN))
        d.parameter(f"{n}.w2", (EXPERTS, HIDDEN, width))
        for e in range(EXPERTS):
            at = f"model.layers.{n}.mlp.experts.{e}"
            for j, part in enumerate(("gate", "up")):
                name, place = f"{at}.{part}_proj.weight", (e, j * width, 0)
                d.take(f"{n}.w13", name, (FFN, HIDDEN), (first, 0), (width, HIDDEN), place)
            d.take(f"{n}.w2", f"{at}.down_proj.weight", (HIDDEN, FFN), (0, first), (HIDDEN, width), (e, 0, 0))

    def expected(self, tensors: Params, k: int) -> Params:
        """Return what the parameters of rank ``k`` hold, by slicing; the padding is untouched and left out."""
        q, kv, ffn = slice(*self.q[k]), slice(*self.kv[k]), slice(sum(self.ffn[:k]), sum(self.ffn[: k + 1]))
        heads = {"q": slice(q.start * HEAD, q.stop * HEAD)}
        heads["k"] = heads["v"] = slice(kv.start * HEAD, kv.stop * HEAD)
        found = {"norm": tensors["model.norm.weight"]}
        for name, tensor in (("embed", "model.embed_tokens.weight"), ("head", "lm_head.weight")):
            found[name] = tensors[tensor][k * self.rows : (k + 1) * self.rows]
        for n in range(LAYERS):
            at = f"model.layers.{n}"
            found[f"{n}.norm"] = tensors[f"{at}.input_layernorm.weight"]
            for kind in ("weight", "bias"):
                parts = [tensors[f"{at}.self_attn.{p}_proj.{kind}"][heads[p]] for p in "qkv"]
                found[f"{n}.qkv.{kind}"] = torch.cat(parts)
            found[f"{n}.o"] = tensors[f"{at}.self_attn.o_proj.weight"][:, heads["q"]]
            if n in DENSE:
                found[f"{n}.gate_up"] = _gate_up(tensors, f"{at}.mlp", ffn)
                found[f"{n}.down"] = tensors[f"{at}.mlp.down_proj.weight"][:, ffn]
                continue
            found[f"{n}.router"] = tensors[f"{at}.mlp.gate.weight"]
            each = [f"{at}.mlp.experts.{e}" for e in range(EXPERTS)]
            found[f"{n}.w13"] = torch.stack([_gate_up(tensors, e, ffn) for e in each])
            found[f"{n}.w2"] = torch.stack([tensors[f"{e}.down_proj.weight"][:, ffn] for e in each])
        return found


def _gate_up(tensors: Params, where: str, rows: slice) -> Tensor:
    return torch.cat([tensors[f"{where}.{part}_proj.weight"][rows] for part in ("gate", "up")])


def without_padding(params: Params, expected: Params) -> Params:
    """Return parameters cut to the rows that are expected, after checking that nothing was written behind them."""
    found: Params = {}
    for name, tensor in params.items():
        rows = expected[name].shape[0] if name in ("embed", "head") else tensor.shape[0]
        assert bool(torch.isnan(tensor[rows:]).all()), name
        found[name] = tensor[:rows]
    return found
