"""A small decoder with the shapes and checkpoint names of Qwen2, in plain torch, for the demo.

Grouped-query attention with biases on q, k and v, rotary positions, RMSNorm and a
gated MLP.  The sizes come from a file in the manner of a checkpoint's
``config.json``; those of the demo divide by nothing that is convenient.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ModelConfig(msgspec.Struct, frozen=True):
    """Sizes, under the names of a Hugging Face configuration; further keys of the file are ignored.

    Attributes:
        vocab_size: Rows of the embedding and of the head.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the MLP.
        num_hidden_layers: Number of decoder layers.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads; divides the query heads.
        head_dim: Width of a head; even.
        tie_word_embeddings: Whether the head is the embedding under another name.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool = False


def read_config(path: Path) -> ModelConfig:
    """Return the sizes in a configuration file."""
    return msgspec.json.decode(path.read_bytes(), type=ModelConfig)


class RMSNorm(nn.Module):
    """Scales by the root of the mean square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` over its root mean square, times the weight."""
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), 1e-6)


class Attention(nn.Module):
    """Causal attention in which several query heads share a key and value head."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, self.heads * self.head_dim)
        self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * self.head_dim)
        self.v_proj = nn.Linear(c.hidden_size, self.kv_heads * self.head_dim)
        self.o_proj = nn.Linear(self.heads * self.head_dim, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended values of ``x``, shape (batch, tokens, hidden)."""
        batch, tokens, _ = x.shape
        q = self.q_proj(x).view(batch, tokens, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, tokens, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, tokens, self.kv_heads, self.head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))  # type: ignore[no-any-return]


def _rotate(x: Tensor) -> Tensor:
    """Return heads with their positions turned in, halves paired as in Qwen2."""
    tokens, half = x.shape[-2], x.shape[-1] // 2
    speed = 10_000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.arange(tokens, dtype=torch.float32)[:, None] * speed
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class MLP(nn.Module):
    """Gated by SiLU."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the gated projection of ``x``."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size)
        self.mlp = MLP(c)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream behind this layer."""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """All but the head; called ``model`` in checkpoint names."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the normed residual stream of token ids, shape (batch, tokens)."""
        x: Tensor = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)  # type: ignore[no-any-return]


class CausalLM(nn.Module):
    """The decoder and its head."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.model = Decoder(c)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        if c.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss of predicting each token from those before it."""
        logits = self.lm_head(self.model(ids[:, :-1]))
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
