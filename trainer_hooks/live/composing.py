"""Pieces of a packed local tensor as pieces of the storage that it lies in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from weightd.core.layout.boxes import Pieces, moved, row_major
from weightd.trainer_hooks.faults import LiveMemoryRefused


def composed(name: str, pieces: Pieces, local_shape: Sequence[int], start: int, strides: Sequence[int]) -> Pieces:
    """Return pieces in elements of the storage.

    Args:
        name: For an error.
        pieces: Offsets and strides are those of the local tensor as a contiguous row-major array.
        local_shape: Shape of the local tensor.
        start: Element of the storage where it begins.
        strides: Its own strides.

    Raises:
        LiveMemoryRefused: A piece is no strided box there.
    """
    packed = row_major(local_shape)
    if all(n == 1 or a == b for n, a, b in zip(local_shape, packed, strides, strict=True)):
        return moved(pieces, start)
    offset, stride = pieces.offset.copy(), pieces.stride.copy()
    for row in range(len(pieces)):
        corner = np.unravel_index(int(pieces.offset[row]), tuple(local_shape))
        reach = [int(c) for c in corner]
        offset[row] = start + sum(c * s for c, s in zip(reach, strides, strict=True))
        for dim in range(pieces.ndim):
            if pieces.extent[row, dim] == 1 or pieces.stride[row, dim] == 0:
                continue
            axis = _axis(int(pieces.stride[row, dim]), local_shape, packed)
            times = int(pieces.stride[row, dim]) // packed[axis]
            reach[axis] += times * (int(pieces.extent[row, dim]) - 1)
            stride[row, dim] = times * strides[axis]
        if any(at >= n for at, n in zip(reach, local_shape, strict=True)):
            why = f"strides {tuple(strides)} of shape {tuple(local_shape)} cut a piece in parts"
            raise LiveMemoryRefused(name, why)
    return replace(pieces, offset=offset, stride=stride)


def _axis(step: int, shape: Sequence[int], packed: Sequence[int]) -> int:
    """Return the outermost dimension that a step through the packed array moves along."""
    return next(axis for axis in range(len(shape)) if shape[axis] > 1 and step % packed[axis] == 0)
