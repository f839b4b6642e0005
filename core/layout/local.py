"""Pieces as numpy views: the reference that everything faster is compared with.

A buffer is a one-dimensional array of its element type's carrier
(``core.dtypes``), a tensor an array of the same type in its logical shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from weightd.core.dtypes import dtype_named
from weightd.core.layout.boxes import pieces_of
from weightd.core.layout.faults import BadColumns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightd.core.layout.boxes import Pieces
    from weightd.core.layout.columns import Int64, Layout
    from weightd.core.layout.moves import Moves


Elements = NDArray[Any]
"""All elements of one buffer, of the carrier of its type."""


def piece_view(buffer: NDArray[Any], pieces: Pieces, row: int) -> NDArray[Any]:
    """Return a piece as a view of its buffer.

    Args:
        buffer: All elements of the buffer, shape (elements,).
        pieces: Pieces; the buffer's number in them is not looked at.
        row: Which piece.

    Returns:
        A writable view of shape ``extent``.

    Raises:
        BadColumns: The piece reaches outside of the buffer.

    >>> from weightd.core.layout.boxes import box
    >>> piece_view(np.arange(12), box((2, 2), offset=4, stride=(3, 1)), 0).tolist()
    [[4, 5], [7, 8]]
    """
    return _strided(buffer, int(pieces.offset[row]), pieces.extent[row], pieces.stride[row])


def piece_index(pieces: Pieces, row: int, ndim: int) -> tuple[slice, ...]:
    """Return the index that selects a piece in its tensor of ``ndim`` dimensions.

    >>> from weightd.core.layout.boxes import box
    >>> piece_index(box((2,), start=(1,), step=(3,)), 0, 1)
    (slice(1, 5, 3),)
    """
    start, extent, step = pieces.start[row, :ndim], pieces.extent[row, :ndim], pieces.step[row, :ndim]
    return tuple(
        slice(s, s + (n - 1) * k + 1, k) for s, n, k in zip(start.tolist(), extent.tolist(), step.tolist(), strict=True)
    )


def empty_buffers(layout: Layout) -> list[NDArray[Any]]:
    """Return zeroed buffers as a layout describes them, one array of elements per row of its table."""
    return [np.zeros(b.nbytes // dtype_named(b.dtype).nbytes, dtype_named(b.dtype).carrier) for b in layout.buffers]


def fill(layout: Layout, buffers: Sequence[NDArray[Any]], tensors: Mapping[str, NDArray[Any]]) -> int:
    """Write whole tensors into the buffers of one rank, piece by piece, and return the elements written.

    Args:
        layout: The rank's layout.
        buffers: Elements of each of its buffers.
        tensors: Every tensor that has a piece, whole.
    """
    pieces, written = pieces_of(layout), 0
    for row, tensor in enumerate(layout.tensor.tolist()):
        info = layout.tensors[tensor]
        view = piece_view(buffers[int(layout.buffer[row])], pieces, row)
        part = tensors[info.name][piece_index(pieces, row, len(info.shape))]
        view[...] = part.reshape(view.shape)
        written += view.size
    return written


def collect(layout: Layout, buffers: Sequence[NDArray[Any]], tensors: Mapping[str, NDArray[Any]]) -> int:
    """Write the pieces of one rank into whole tensors, and return the elements written.

    Args:
        layout: The rank's layout.
        buffers: Elements of each of its buffers.
        tensors: Every tensor that has a piece, whole; written to.
    """
    pieces, written = pieces_of(layout), 0
    for row, tensor in enumerate(layout.tensor.tolist()):
        info = layout.tensors[tensor]
        view = piece_view(buffers[int(layout.buffer[row])], pieces, row)
        index = piece_index(pieces, row, len(info.shape))
        tensors[info.name][index] = view.reshape(view.shape[: len(info.shape)])
        written += view.size
    return written


def move(moves: Moves, row: int, source: NDArray[Any], target: NDArray[Any]) -> int:
    """Carry out one move between two buffers, and return the elements copied.

    Args:
        moves: Moves of any number of dimensions.
        row: Which one.
        source: Elements of the source's buffer.
        target: Elements of the target's buffer; written to.

    Raises:
        BadColumns: The move reaches outside of a buffer.
    """
    extent = moves.extent[row]
    read = _strided(source, int(moves.source_offset[row]), extent, moves.source_stride[row])
    write = _strided(target, int(moves.target_offset[row]), extent, moves.target_stride[row])
    write[...] = read
    return int(write.size)


def _strided(buffer: NDArray[Any], offset: int, extent: Int64, stride: Int64) -> NDArray[Any]:
    """Return a strided view after checking that it stays inside: ``as_strided`` checks nothing."""
    last = offset + sum((n - 1) * s for n, s in zip(extent.tolist(), stride.tolist(), strict=True))
    if not 0 <= offset <= last < len(buffer):
        raise BadColumns("offset", f"elements {offset} to {last} are not all in a buffer of {len(buffer)}")
    return as_strided(buffer[offset:], extent.tolist(), [s * buffer.itemsize for s in stride.tolist()])
