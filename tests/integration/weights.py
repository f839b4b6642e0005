"""A small model whose every element is known, and what each rank must hold of it: the oracle of the integration tests.

Nothing here knows layouts.  A whole tensor is a formula of name, index and version; a trainer's shard
and an engine's parameter are plain numpy slices and concatenations of it.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint16]
"""bfloat16 values as their bits."""

POISON = 0x7FC1
"""What parameters hold before the first version: a NaN that no tensor contains."""

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 13, 12, 6, 2, 18, 41

SHAPES: dict[str, tuple[int, ...]] = {
    "embed_tokens.weight": (VOCAB, HIDDEN),
    "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj.weight": (INNER, HIDDEN),
    "mlp.up_proj.weight": (INNER, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INNER),
    "norm.weight": (HIDDEN,),
    "few.weight": (3, 5),  # fewer rows than ranks: empty shards
    "scale": (),
}


def whole(name: str, version: int) -> Bits:
    """Return every element of a tensor in one version."""
    shape = SHAPES[name]
    index = np.arange(int(np.prod(shape)), dtype=np.uint64) * np.uint64(40503)
    salt = np.uint64(zlib.crc32(f"{name}/{version}".encode()))
    bits = ((index + salt) * np.uint64(2654435761) >> np.uint64(16)) & np.uint64(0x7F7F)  # finite, so never POISON
    return bits.astype(np.uint16).reshape(shape)


def shard_rows(rows: int, world: int, rank: int) -> slice:
    """Return the rows of rank ``rank`` when ``rows`` are cut over ``world`` ranks as ``torch.chunk`` does."""
    most = -(-rows // world)
    return slice(min(rank * most, rows), min((rank + 1) * most, rows))


@dataclass(frozen=True)
class Shard:
    """What a trainer rank holds of one tensor; ``rows`` is None for a 0-d one."""

    name: str
    shape: tuple[int, ...]
    rows: slice | None

    @property
    def start(self) -> tuple[int, ...]:
        """First index."""
        return () if self.rows is None else (self.rows.start, *([0] * (len(self.shape) - 1)))

    @property
    def extent(self) -> tuple[int, ...]:
        """Number of indices."""
        return () if self.rows is None else (self.rows.stop - self.rows.start, *self.shape[1:])

    def bits(self, version: int) -> Bits:
        """Return its elements."""
        full = whole(self.name, version)
        return full if self.rows is None else full[self.rows]


def shards(world: int, rank: int) -> list[Shard]:
    """Return what rank ``rank`` of ``world`` holds; a 0-d tensor is held by every rank."""
    return [Shard(n, s, shard_rows(s[0], world, rank) if s else None) for n, s in SHAPES.items()]


def split(total: int, parts: int) -> list[int]:
    """Return sizes as even as can be, the first ranks taking the rest: 18 over 4 is 5, 5, 4, 4."""
    return [total // parts + (k < total % parts) for k in range(parts)]


@dataclass(frozen=True)
class Cut:
    """How one engine of ``size`` ranks cuts the model; every list is by rank."""

    size: int

    @property
    def kv_heads(self) -> list[int]:
        """Key and value heads; the query heads follow, two to each."""
        return split(KV_HEADS, self.size)

    @property
    def inner(self) -> list[int]:
        """Rows of gate and of up."""
        return split(INNER, self.size)

    @property
    def vocab_rows(self) -> int:
        """Rows of the vocabulary on every rank, padding included: one more than is needed."""
        return -(-VOCAB // self.size) + 1

    def params(self) -> dict[str, tuple[int, ...]]:
        """Names of the parameters, the same on every rank."""
        return dict.fromkeys(self.expected(0, 1), ())

    def expected(self, k: int, version: int) -> dict[str, Bits]:
        """Return what every parameter of rank ``k`` must hold; rows of padding hold ``POISON``."""
        kv = _part([n * HEAD_DIM for n in self.kv_heads], k)
        q = _part([n * HEAD_DIM * HEADS // KV_HEADS for n in self.kv_heads], k)
        inner = _part(self.inner, k)
        first = k * self.vocab_rows
        embed = np.full((self.vocab_rows, HIDDEN), POISON, np.uint16)
        some = whole("embed_tokens.weight", version)[first : first + self.vocab_rows]
        embed[: len(some)] = some
        attention = [whole(f"self_attn.{n}_proj.weight", version) for n in "qkv"]
        return {
            "embed_tokens.weight": embed,
            "self_attn.qkv_proj.weight": np.concatenate([attention[0][q], attention[1][kv], attention[2][kv]]),
            "self_attn.o_proj.weight": whole("self_attn.o_proj.weight", version)[:, q],
            "mlp.gate_up_proj.weight": np.concatenate(
                [whole(f"mlp.{n}_proj.weight", version)[inner] for n in ("gate", "up")]
            ),
            "mlp.down_proj.weight": whole("mlp.down_proj.weight", version)[:, inner],
            "norm.weight": whole("norm.weight", version),
            "few.weight": whole("few.weight", version),
            "scale": whole("scale", version),
        }


def _part(sizes: list[int], k: int) -> slice:
    return slice(sum(sizes[:k]), sum(sizes[: k + 1]))
