"""What Megatron's ranks hold of given checkpoint tensors, by its own rules and nothing of weightd: the tests' oracle.

Every function takes whole tensors and returns one local tensor per rank, by chunks, views and concatenations as
megatron-core makes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PAD = -1e30
"""What rows of padding hold: nothing may publish them."""


def column(full: Tensor, size: int, stride: int = 1) -> list[Tensor]:
    """Rank r gets chunks r, r + size, … of stride * size."""
    chunks = full.chunk(stride * size, 0) if full.shape[0] else [full] * (stride * size)
    return [torch.cat(list(chunks[r::size])) for r in range(size)]


def row(full: Tensor, size: int) -> list[Tensor]:
    """Columns, evenly; not contiguous, as a slice of a larger tensor."""
    return list(full.chunk(size, 1)) if full.shape[1] else [full] * size


def gate_up(gate: Tensor, up: Tensor, size: int) -> list[Tensor]:
    """[gate_r; up_r]."""
    return [torch.cat([g, u]) for g, u in zip(gate.chunk(size), up.chunk(size), strict=True)]


def interleaved(gate: Tensor, up: Tensor, size: int, block: int = 1) -> list[Tensor]:
    """Blocks of gate and up in turn, and the whole cut evenly."""
    turns = zip(torch.split(gate, block), torch.split(up, block), strict=True)
    return list(torch.cat([t for pair in turns for t in pair]).chunk(size))


def qkv(q: Tensor, k: Tensor, v: Tensor, groups: int, size: int, gate: Tensor | None = None) -> list[Tensor]:
    """Group by group [queries; (gates); key; value], and the whole cut evenly, through groups where they are few."""
    heads = [t.chunk(groups) for t in ([q, k, v] if gate is None else [q, gate, k, v])]
    return list(torch.cat([part[g] for g in range(groups) for part in heads]).chunk(size))


def vocabulary(full: Tensor, size: int, divisor: int) -> list[Tensor]:
    """Padded to a multiple of divisor * size rows, then cut evenly."""
    rows = -(-full.shape[0] // (divisor * size)) * divisor * size
    pad = full.new_full((rows - full.shape[0], *full.shape[1:]), PAD)
    return list(torch.cat([full, pad]).chunk(size))


def stacked(experts: Sequence[Tensor]) -> Tensor:
    """Local experts in one parameter, [E, …]."""
    return torch.stack(list(experts))


def grouped_weight1(experts: Sequence[Tensor]) -> Tensor:
    """``GroupedMLP.weight1``: [hidden, E * 2f], used as [E, hidden, 2f]: every expert transposed."""
    blocks = torch.stack([e.t() for e in experts])
    return blocks.reshape(experts[0].shape[1], -1)


def grouped_weight2(experts: Sequence[Tensor]) -> Tensor:
    """``GroupedMLP.weight2``: [E * f, hidden], every expert transposed."""
    return torch.cat([e.t() for e in experts])


def local_experts(count: int, size: int, rank: int) -> range:
    """Global numbers of a rank's experts."""
    each = count // size
    return range(rank * each, (rank + 1) * each)
