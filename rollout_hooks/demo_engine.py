"""One tensor-parallel rank of the demo's engine: plain torch parameters in the fused shapes that engines use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch
from torch import nn

if TYPE_CHECKING:
    from pathlib import Path

PADDING_BITS = 0x7FC0
"""What parameters hold before the first version, and padding for ever: a NaN, as bits of bfloat16."""


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of the engine; lists are by rank, explicit and uneven.

    Attributes:
        size: Ranks.
        layers: Decoder layers.
        hidden_size: Width of the residual stream.
        head_dim: Width of a head.
        heads: Query heads of each rank.
        kv_heads: Key and value heads of each rank.
        intermediate: Rows of the gate, and of up, on each rank.
        vocab_size: Rows of the vocabulary that exist.
        vocab_rows: Rows that every rank has; those of all ranks together exceed ``vocab_size``.
    """

    size: int
    layers: int
    hidden_size: int
    head_dim: int
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    intermediate: tuple[int, ...]
    vocab_size: int
    vocab_rows: int


def read_config(path: Path) -> EngineConfig:
    """Return the sizes in an engine's configuration file."""
    return msgspec.json.decode(path.read_bytes(), type=EngineConfig)


class _Linear(nn.Module):
    def __init__(self, rows: int, columns: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = _parameter(rows, columns)
        if bias:
            self.bias = _parameter(rows)


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = _parameter(width)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, PADDING_BITS, dtype=torch.int16).view(torch.bfloat16), requires_grad=False)


class _Attention(nn.Module):
    def __init__(self, c: EngineConfig, k: int) -> None:
        super().__init__()
        self.qkv_proj = _Linear((c.heads[k] + 2 * c.kv_heads[k]) * c.head_dim, c.hidden_size, bias=True)
        self.o_proj = _Linear(c.hidden_size, c.heads[k] * c.head_dim)


class _MLP(nn.Module):
    def __init__(self, c: EngineConfig, k: int) -> None:
        super().__init__()
        self.gate_up_proj = _Linear(2 * c.intermediate[k], c.hidden_size)
        self.down_proj = _Linear(c.hidden_size, c.intermediate[k])


class _Layer(nn.Module):
    def __init__(self, c: EngineConfig, k: int) -> None:
        super().__init__()
        self.input_layernorm = _Norm(c.hidden_size)
        self.self_attn = _Attention(c, k)
        self.post_attention_layernorm = _Norm(c.hidden_size)
        self.mlp = _MLP(c, k)


class _Decoder(nn.Module):
    def __init__(self, c: EngineConfig, k: int) -> None:
        super().__init__()
        self.embed_tokens = _Linear(c.vocab_rows, c.hidden_size)
        self.layers = nn.ModuleList(_Layer(c, k) for _ in range(c.layers))
        self.norm = _Norm(c.hidden_size)


class EngineModel(nn.Module):
    """The parameters of rank ``k``."""

    def __init__(self, c: EngineConfig, k: int) -> None:
        super().__init__()
        self.model = _Decoder(c, k)
        self.lm_head = _Linear(c.vocab_rows, c.hidden_size)
