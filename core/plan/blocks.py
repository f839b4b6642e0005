"""Scales of block-quantised tensors: one scale a block, and no block shared by two ranks.

The scales of a tensor W of shape (N, K) with blocks of b x b are a tensor of
their own, of shape (ceil(N / b), ceil(K / b)).  Whoever holds a box of W holds
the box of scales that belongs to it, which exists only where every cut of the
box is a cut between blocks, or the tensor's end.
"""

from __future__ import annotations

from collections.abc import Sequence

from weightd.core.plan.violations import BlockCut

FP8_BLOCK = 128
"""Length of a block in each dimension, as published checkpoints with FP8 weights have it."""


def scale_shape(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor.

    >>> scale_shape((7168, 2000), (128, 128))
    (56, 16)
    """
    return tuple(-(-n // b) for n, b in zip(shape, block, strict=True))


def scale_box(
    parameter: str, shape: Sequence[int], start: Sequence[int], extent: Sequence[int], block: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return start and extent of the scales that belong to a box of a quantised tensor.

    Args:
        parameter: Name of the quantised tensor.
        shape: Its shape.
        start: First index of the box per dimension.
        extent: Number of indices per dimension; a box without elements has no scales.
        block: Length of a block per dimension.

    Raises:
        BlockCut: A cut falls inside a block (E_SHAPE): scales shared by two ranks are not supported.

    >>> scale_box("w", (300, 256), (128, 0), (172, 256), (128, 128))  # the last block is short
    ((1, 0), (2, 2))
    """
    if 0 in extent:
        return tuple(s // b for s, b in zip(start, block, strict=True)), (0,) * len(extent)
    for dim, (n, s, e, b) in enumerate(zip(shape, start, extent, block, strict=True)):
        for cut in (s, s + e):
            if cut % b and cut != n:
                raise BlockCut(parameter, dim, b, cut)
    first = tuple(s // b for s, b in zip(start, block, strict=True))
    end = tuple(-(-(s + e) // b) for s, e, b in zip(start, extent, block, strict=True))
    return first, tuple(z - a for a, z in zip(first, end, strict=True))
