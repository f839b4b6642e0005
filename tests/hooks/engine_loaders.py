"""Engine models that load as the field's do, each with a loader of its own; no engine is installed.

A model is one rank of a tensor-parallel engine; its ``load_weights`` takes whole checkpoint tensors and cuts what the
rank needs.  ``declared`` says the same by hand, where a ``Declaration`` can say it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weightd.core.layout.cuts import shared_heads, span, spans
from weightd.rollout_hooks.declare import Declaration, Part

Weights = Iterable[tuple[str, Tensor]]

HIDDEN, HEAD, HEADS, INTER, VOCAB, PADDED, EXPERTS = 12, 2, 6, 24, 10, 12, 2


def param(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


class VllmLike(nn.Module):
    """Stacked qkv by shard id, merged gate and up, row-parallel down, padded vocabulary, a tied head, experts."""

    STACKED = (
        (".qkv_proj", ".q_proj", "q"),
        (".qkv_proj", ".k_proj", "k"),
        (".qkv_proj", ".v_proj", "v"),
        (".gate_up_proj", ".gate_proj", 0),
        (".gate_up_proj", ".up_proj", 1),
    )

    def __init__(self, tp: int, k: int, kv_heads: int = 2) -> None:
        super().__init__()
        self.tp, self.k = tp, k
        self.kv_heads = kv_heads
        self.q_rows, self.kv_rows = HEADS // tp * HEAD, max(kv_heads // tp, 1) * HEAD
        self.embed = nn.Module()
        self.embed.weight = param(PADDED // tp, HIDDEN)
        self.head = nn.Module()
        self.head.weight = self.embed.weight
        self.qkv_proj = nn.Module()
        self.qkv_proj.weight = param(self.q_rows + 2 * self.kv_rows, HIDDEN)
        self.qkv_proj.bias = param(self.q_rows + 2 * self.kv_rows)
        self.gate_up_proj = nn.Module()
        self.gate_up_proj.weight = param(2 * INTER // tp, HIDDEN)
        self.down_proj = nn.Module()
        self.down_proj.weight = param(HIDDEN, INTER // tp)
        self.norm = nn.Module()
        self.norm.weight = param(HIDDEN)
        self.experts = nn.Module()
        self.experts.w13_weight = param(EXPERTS, 2 * INTER // tp, HIDDEN)
        self.experts.w2_weight = param(EXPERTS, HIDDEN, INTER // tp)
        self.expert_map = torch.arange(EXPERTS)  # looked at with item(), as expert parallelism does

    def load_weights(self, weights: Weights) -> set[str]:
        params = dict(self.named_parameters())
        loaded = set()
        for raw, tensor in weights:
            name = "." + raw
            if name.startswith(".lm_head"):  # tied
                continue
            if "experts" in name:
                self.load_expert(params, name, tensor)
                continue
            for ours, theirs, shard in self.STACKED:
                if theirs in name:
                    target = params[name.replace(theirs, ours)[1:]]
                    self.load_stacked(target, tensor, shard)
                    break
            else:
                self.load_plain(params[raw], raw, tensor)
            loaded.add(raw)
        return loaded

    def load_stacked(self, target: nn.Parameter, tensor: Tensor, shard: str | int) -> None:
        if isinstance(shard, int):
            rows = INTER // self.tp
            at, first = shard * rows, self.k * rows
        else:
            at = {"q": 0, "k": self.q_rows, "v": self.q_rows + self.kv_rows}[shard]
            rows = self.q_rows if shard == "q" else self.kv_rows
            sharing = 1 if shard == "q" else max(self.tp // self.kv_heads, 1)
            first = self.k // sharing * rows
        data = target.data.narrow(0, at, rows)
        cut = tensor.narrow(0, first, rows)
        assert data.shape == cut.shape
        data.copy_(cut)

    def load_plain(self, target: nn.Parameter, name: str, tensor: Tensor) -> None:
        if name.startswith("embed"):
            rows = target.shape[0]
            first = min(self.k * rows, VOCAB)
            cut = tensor.narrow(0, first, min(rows, VOCAB - first))
            target[: cut.shape[0]].data.copy_(cut)
            target[cut.shape[0] :].data.fill_(0)
        elif name.startswith("down_proj"):
            size = target.shape[1]
            target.data.copy_(tensor.narrow(1, self.k * size, size))
        else:
            assert target.size() == tensor.size()
            target.data.copy_(tensor)

    def load_expert(self, params: dict[str, nn.Parameter], name: str, tensor: Tensor) -> None:
        _, _, number, which, _ = name.split(".")
        expert = int(self.expert_map[int(number)].item())
        size = INTER // self.tp
        if which == "down_proj":
            params["experts.w2_weight"].data[expert].copy_(tensor.chunk(self.tp, dim=1)[self.k])
        else:
            at = size if which == "up_proj" else 0
            data = params["experts.w13_weight"].data[expert]
            data[at : at + size] = tensor[self.k * size : (self.k + 1) * size]


def vllm_checkpoint(kv_heads: int = 2) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (VOCAB, HIDDEN),
        "q_proj.weight": (HEADS * HEAD, HIDDEN),
        "k_proj.weight": (kv_heads * HEAD, HIDDEN),
        "v_proj.weight": (kv_heads * HEAD, HIDDEN),
        "q_proj.bias": (HEADS * HEAD,),
        "k_proj.bias": (kv_heads * HEAD,),
        "v_proj.bias": (kv_heads * HEAD,),
        "gate_proj.weight": (INTER, HIDDEN),
        "up_proj.weight": (INTER, HIDDEN),
        "down_proj.weight": (HIDDEN, INTER),
        "norm.weight": (HIDDEN,),
    }
    for e in range(EXPERTS):
        for name in ("gate_proj", "up_proj"):
            shapes[f"experts.{e}.{name}.weight"] = (INTER, HIDDEN)
        shapes[f"experts.{e}.down_proj.weight"] = (HIDDEN, INTER)
    return shapes


def vllm_declared(tp: int, k: int, kv_heads: int = 2) -> Declaration:
    d = Declaration("bfloat16")
    d.vocabulary("embed.weight", (VOCAB, HIDDEN), [PADDED // tp] * tp, k)
    q, kv = spans([HEADS // tp] * tp), shared_heads(kv_heads, tp)
    for kind, rest in (("weight", (HIDDEN,)), ("bias", ())):
        names = (f"q_proj.{kind}", f"k_proj.{kind}", f"v_proj.{kind}")
        d.qkv(f"qkv_proj.{kind}", names, HEAD, q, kv, k, rest)
    sizes = [INTER // tp] * tp
    d.gate_up("gate_up_proj.weight", ("gate_proj.weight", "up_proj.weight"), (INTER, HIDDEN), sizes, k)
    d.row("down_proj.weight", (HIDDEN, INTER), sizes, k)
    d.replicated("norm.weight", (HIDDEN,))
    first, end = span(INTER, sizes, k)
    d.parameter("experts.w13_weight", (EXPERTS, 2 * (end - first), HIDDEN))
    d.parameter("experts.w2_weight", (EXPERTS, HIDDEN, end - first))
    for e in range(EXPERTS):
        for at, name in enumerate(("gate_proj", "up_proj")):
            where = (e, at * (end - first), 0)
            tensor = f"experts.{e}.{name}.weight"
            d.take("experts.w13_weight", tensor, (INTER, HIDDEN), (first, 0), (end - first, HIDDEN), where)
        down = f"experts.{e}.down_proj.weight"
        d.take("experts.w2_weight", down, (HIDDEN, INTER), (0, first), (HIDDEN, end - first), (e, 0, 0))
    return d


class Gpt2Like(nn.Module):
    """Conv1D weights are (in, out): transposed on the way; fused q, k and v are cut one by one."""

    def __init__(self, tp: int, k: int) -> None:
        super().__init__()
        self.tp, self.k = tp, k
        self.c_attn = nn.Module()
        self.c_attn.weight = param(3 * HIDDEN // tp, HIDDEN)
        self.c_proj = nn.Module()
        self.c_proj.weight = param(HIDDEN, HIDDEN // tp)

    def load_weights(self, weights: Weights) -> None:
        params = dict(self.named_parameters())
        for name, given in weights:
            tensor, target = given.t(), params[name]
            size = HIDDEN // self.tp
            if name == "c_attn.weight":
                for n, part in enumerate(tensor.chunk(3, dim=0)):
                    target.data.narrow(0, n * size, size).copy_(part.narrow(0, self.k * size, size))
            else:
                target.data = tensor.narrow(1, self.k * size, size).contiguous()


class InterleavedLike(nn.Module):
    """Heads of q, k and v interleaved in one checkpoint tensor, taken apart by view, permute and reshape."""

    def __init__(self, tp: int, k: int) -> None:
        super().__init__()
        self.tp, self.k = tp, k
        self.weight = param(3 * HEADS * HEAD // tp, HIDDEN)
        self.bias = param(3 * HEADS * HEAD // tp)

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            heads = tensor.view(HEADS, 3, HEAD, *tensor.shape[1:]).transpose(0, 1)
            mine = heads[:, self.k * HEADS // self.tp : (self.k + 1) * HEADS // self.tp]
            getattr(self, name).data.copy_(mine.reshape(-1, *tensor.shape[1:]))


class FusedExpertsLike(nn.Module):
    """Experts are one checkpoint tensor, gate and up are its columns; stored transposed, and cast on the way."""

    def __init__(self, tp: int, k: int) -> None:
        super().__init__()
        self.tp, self.k = tp, k
        self.w13_weight = param(EXPERTS, 2 * INTER // tp, HIDDEN)
        self.w2_weight = param(EXPERTS, HIDDEN, INTER // tp)

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            tensor = tensor.to(self.w2_weight.dtype).transpose(-1, -2)
            if name == "gate_up_proj":
                gate, up = (part.chunk(self.tp, dim=1)[self.k] for part in tensor.chunk(2, dim=1))
                self.w13_weight.data.copy_(torch.cat([gate, up], dim=1))
            else:
                self.w2_weight.data.copy_(tensor.chunk(self.tp, dim=2)[self.k])


class TransformersLike(nn.Module):
    """A whole model: conversions collect experts and stack them, and parameters are assigned, not copied into."""

    scale: Tensor

    def __init__(self, tp: int, k: int) -> None:
        super().__init__()
        self.tp, self.k = tp, k
        self.c_fc = nn.Module()
        self.c_fc.weight = param(HIDDEN, INTER // tp)  # Conv1D: (in, out)
        self.c_fc.bias = param(INTER // tp)
        self.experts = param(EXPERTS, INTER // tp, HIDDEN)
        self.conv1d = param(INTER // tp, 1, 4)  # a depthwise convolution, as of state-space layers
        self.register_buffer("scale", torch.zeros((), dtype=torch.bfloat16))

    def load_weights(self, weights: Weights) -> None:
        given = dict(weights)
        size = INTER // self.tp
        mine = slice(self.k * size, (self.k + 1) * size)
        self.c_fc.weight = nn.Parameter(given["c_fc.weight"][:, mine], requires_grad=False)
        with torch.no_grad():
            self.get_parameter("c_fc.bias")[...] = given["c_fc.bias"][mine]
            self.experts.copy_(torch.stack([given[f"experts.{e}.weight"][mine] for e in range(EXPERTS)]))
            self.conv1d.copy_(given["conv1d.weight"].unsqueeze(1)[mine])
            self.scale.copy_(given["scale"])


class Case(NamedTuple):
    """A kind of engine.

    Attributes:
        build: Makes rank k of tp.
        shapes: The checkpoint's tensors.
        declared: The same by hand, if that can be.
        stored: Element type of the checkpoint.
    """

    build: Callable[[int, int], Any]
    shapes: dict[str, tuple[int, ...]]
    declared: Callable[[int, int], Declaration] | None = None
    stored: str = "bfloat16"


def interleaved_declared(tp: int, k: int) -> Declaration:
    """Rows of the fused tensor, head by head."""
    d = Declaration("bfloat16")
    heads = range(k * HEADS // tp, (k + 1) * HEADS // tp)
    whole = 3 * HEADS * HEAD
    for name, rest in (("weight", (HIDDEN,)), ("bias", ())):
        rows = [(head * 3 + part) * HEAD for part in range(3) for head in heads]
        d.fused(name, [Part(name, (whole, *rest), (row, row + HEAD)) for row in rows])
    return d


CASES: dict[str, Case] = {
    "vllm": Case(VllmLike, vllm_checkpoint(), vllm_declared),
    "vllm, kv head replicated": Case(
        lambda tp, k: VllmLike(tp, k, 1), vllm_checkpoint(1), lambda tp, k: vllm_declared(tp, k, 1)
    ),
    "gpt2": Case(Gpt2Like, {"c_attn.weight": (HIDDEN, 3 * HIDDEN), "c_proj.weight": (HIDDEN, HIDDEN)}),
    "interleaved": Case(
        InterleavedLike, {"weight": (3 * HEADS * HEAD, HIDDEN), "bias": (3 * HEADS * HEAD,)}, interleaved_declared
    ),
    "fused experts": Case(
        FusedExpertsLike,
        {"gate_up_proj": (EXPERTS, HIDDEN, 2 * INTER), "down_proj": (EXPERTS, INTER, HIDDEN)},
        stored="float32",
    ),
    "transformers": Case(
        TransformersLike,
        {
            "c_fc.weight": (HIDDEN, INTER),
            "c_fc.bias": (INTER,),
            **{f"experts.{e}.weight": (INTER, HIDDEN) for e in range(EXPERTS)},
            "conv1d.weight": (INTER, 4),
            "scale": (),
        },
    ),
}


def engines() -> list[tuple[str, int]]:
    """Return every case at every size that it can be cut to: two kv heads do not go over three ranks."""
    return [(name, tp) for name in CASES for tp in (1, 2, 3) if (name, tp) != ("vllm", 3)]


def combinations() -> list[tuple[str, int, int]]:
    """Return every rank of those that a declaration can describe: none of a transposed weight can."""
    return [(name, tp, k) for name, tp in engines() if CASES[name].declared is not None for k in range(tp)]
