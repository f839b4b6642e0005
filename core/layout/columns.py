"""What one rank holds or needs, as columns of pieces.

A *piece* is a box of a logical tensor and where it lies in a buffer.  A
*layout* is all pieces of one rank.  70,000 tensors must stay cheap, so pieces
are rows of int64 arrays and never objects; everything is in elements, exact
and integer.

Element ``start + step * i`` (per dimension, ``0 <= i < extent``) of the logical
tensor is element ``offset + sum(i * stride)`` of the buffer.

Rules that hold for every layout:

- Names are HF checkpoint names on both sides; fused tensors are described as
  pieces of the unfused ones, by the side that fuses.
- A 0-d tensor is one piece of one element.  An empty shard is no piece at all.
- Padding is never a piece.
- Columns are as wide as the tensor of most dimensions; a tensor of fewer is
  padded at the *right* with start 0, extent 1, step 1, stride 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


class TensorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One logical tensor.

    Attributes:
        name: Canonical (HF checkpoint) name.
        shape: Logical shape in elements, without padding; ``()`` for a 0-d tensor.
        dtype: Name of the element type as it lies in the buffers (``core.dtypes``).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


class BufferInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One typed stretch of memory that pieces lie in.

    Attributes:
        name: Unique within the layout; for a receiver the parameter or storage it stands for.
        nbytes: Length in bytes.
        dtype: Element type; offsets and strides of its pieces count such elements.
        kind: ``slot`` (a section of a trainer rank's shared memory), ``live`` (likewise, and what it trains on:
            not retained once a version is decided) or ``param`` (private memory of a rollout rank).
        region: Which of the rank's shared memory pools it lies in (0 where there is one).
        base: Byte offset of the buffer in its region; a multiple of 64.
    """

    name: str
    nbytes: int
    dtype: str
    kind: str
    region: int = 0
    base: int = 0


class RowRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows ``[start, end)`` along dimension 0."""

    start: int
    end: int


class Unused(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A source's declaration that some of what it owns is meant for nobody.

    Attributes:
        name: Tensor name.
        rows: The rows that nobody takes, or None for the whole tensor.
        why: Free text for the report: frozen, tied alias, trimmed vocabulary rows, MTP.
    """

    name: str
    rows: RowRange | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """All pieces of one rank: what a trainer rank holds, or what a rollout rank needs.

    Attributes:
        tensors: Table of logical tensors; names are unique.
        buffers: Table of buffers; names are unique.
        tensor: Row of ``tensors`` per piece, shape (P,).
        start: First logical index per dimension, shape (P, N).
        extent: Number of indices per dimension, shape (P, N), at least 1.
        step: Distance of neighbouring logical indices, shape (P, N), at least 1.
        buffer: Row of ``buffers`` per piece, shape (P,).
        offset: Element of the buffer where the piece begins, shape (P,).
        stride: Buffer elements between neighbouring indices, shape (P, N).
        aliases: Pairs (name, canonical name): one memory, two names.
        unused: On a source: what nobody takes.
        kept: On a target: names that the engine keeps as they are.
    """

    tensors: tuple[TensorInfo, ...]
    buffers: tuple[BufferInfo, ...]
    tensor: Int64
    start: Int64
    extent: Int64
    step: Int64
    buffer: Int64
    offset: Int64
    stride: Int64
    aliases: tuple[tuple[str, str], ...] = ()
    unused: tuple[Unused, ...] = ()
    kept: tuple[str, ...] = field(default=())

    @property
    def pieces(self) -> int:
        """Number of pieces P."""
        return int(self.tensor.shape[0])

    @property
    def ndim(self) -> int:
        """Width N of the columns: dimensions of the tensor that has most."""
        return int(self.start.shape[1])
