"""What the demo's engine ranks must hold, cut from whole tensors by plain arithmetic.

Shares no code with layouts, proof or plan: numpy slices alone.  The trainer
gathers every whole tensor with ``full_tensor()`` and writes it to
``v<version>.bin``, described by ``v<version>.json``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from weightd.rollout_hooks.demo_engine import EngineConfig

Bits = NDArray[np.uint16]
"""bfloat16 values as their bits."""


class OracleTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One whole tensor in the file of its version; ``offset`` counts elements."""

    name: str
    shape: tuple[int, ...]
    offset: int


class OracleMissing(Exception):
    """The trainer did not write its gathered tensors in time."""


def read_oracle(folder: Path, version: int, timeout_s: float) -> dict[str, Bits]:
    """Return every whole tensor of ``version``, once the trainer has written them.

    Raises:
        OracleMissing: The description is not there after ``timeout_s``.
    """
    listing = folder / f"v{version}.json"
    end = time.monotonic() + timeout_s
    while not listing.exists():
        if time.monotonic() > end:
            raise OracleMissing(f"{listing} is not there after {timeout_s} s")
        time.sleep(0.02)
    tensors = msgspec.json.decode(listing.read_bytes(), type=list[OracleTensor])
    bits = np.fromfile(folder / f"v{version}.bin", np.uint16)
    return {t.name: bits[t.offset : t.offset + int(np.prod(t.shape))].reshape(t.shape) for t in tensors}


def expected_params(whole: dict[str, Bits], c: EngineConfig, k: int) -> dict[str, Bits]:
    """Return what each parameter of rank ``k`` must hold; rows of padding are left out."""
    heads = _bounds([n * c.head_dim for n in c.heads], k)
    kv_heads = _bounds([n * c.head_dim for n in c.kv_heads], k)
    inner = _bounds(c.intermediate, k)
    vocab = slice(k * c.vocab_rows, min((k + 1) * c.vocab_rows, c.vocab_size))
    out = {name: whole[name][vocab] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    out["model.norm.weight"] = whole["model.norm.weight"]
    for i in range(c.layers):
        p = f"model.layers.{i}"
        attention, mlp = f"{p}.self_attn", f"{p}.mlp"
        for kind in ("weight", "bias"):
            q, key, value = (whole[f"{attention}.{x}_proj.{kind}"] for x in "qkv")
            out[f"{attention}.qkv_proj.{kind}"] = np.concatenate((q[heads], key[kv_heads], value[kv_heads]))
        gate, up = whole[f"{mlp}.gate_proj.weight"], whole[f"{mlp}.up_proj.weight"]
        out[f"{mlp}.gate_up_proj.weight"] = np.concatenate((gate[inner], up[inner]))
        out[f"{attention}.o_proj.weight"] = whole[f"{attention}.o_proj.weight"][:, heads]
        out[f"{mlp}.down_proj.weight"] = whole[f"{mlp}.down_proj.weight"][:, inner]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"{p}.{norm}.weight"] = whole[f"{p}.{norm}.weight"]
    return out


def _bounds(sizes: Sequence[int], k: int) -> slice:
    first = sum(sizes[:k])
    return slice(first, first + sizes[k])
