"""Base weights with their adapters, box by box, written straight into the slot: the model is only read.

The product is computed in float32 (float64 for a float64 base) and cast once, into what is published.  PEFT does
so on CPUs, but casts after each adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weightd.core.layout.boxes import Pieces
from weightd.core.layout.local import piece_index

_BLOCK = 1 << 22
"""Elements computed at once: 16 MiB of float32 beside the slot, whatever the size of the weight."""


class Delta(NamedTuple):
    """What one adapter adds to a weight.

    Attributes:
        scale: What the product is multiplied by.
        left: First factor, shape (rows, r).
        right: Second factor, shape (r, columns).
    """

    scale: float
    left: Tensor
    right: Tensor


def delta_of(scale: float, a: Tensor, b: Tensor, transposed: bool, base: torch.dtype) -> Delta:
    """Return what an adapter adds to a weight of type ``base``.

    Args:
        scale: PEFT's scaling.
        a: Shape (r, in).
        b: Shape (out, r).
        transposed: The weight is of shape (in, out).
        base: Element type of the base weight.
    """
    compute = torch.promote_types(base, torch.float32)
    a, b = a.to(compute), b.to(compute)
    return Delta(scale, a.t(), b.t()) if transposed else Delta(scale, b, a)


def write_merged(destination: Tensor, base: Tensor, pieces: Pieces, deltas: Sequence[Delta]) -> None:
    """Write ``base`` with everything that is added to it.

    Args:
        destination: Contiguous, of the base's local shape and the published type.
        base: The local tensor; not written.
        pieces: What it holds of the weight, shape (rows, columns).
        deltas: What is added.
    """
    if not deltas:
        destination.copy_(base)
        return
    source, out = base.contiguous().reshape(-1), destination.view(-1)
    compute = torch.promote_types(base.dtype, torch.float32)
    for row in range(len(pieces)):
        rows, columns = piece_index(pieces, row, 2)
        count, width = pieces.extent[row, :2].tolist()
        stride = pieces.stride[row, :2].tolist()
        at = int(pieces.offset[row])
        for low in range(0, count, max(_BLOCK // width, 1)):
            high = min(low + max(_BLOCK // width, 1), count)
            place = (high - low, width), stride, at + low * stride[0]
            merged = _view(source, *place).to(compute, copy=True)
            some = slice(rows.start + low * rows.step, rows.start + (high - 1) * rows.step + 1, rows.step)
            for delta in deltas:
                merged += (delta.left[some] @ delta.right[:, columns]) * delta.scale
            _view(out, *place).copy_(merged)


def _view(flat: Tensor, shape: tuple[int, int], stride: list[int], offset: int) -> Tensor:
    return flat.as_strided(shape, stride, flat.storage_offset() + offset)
