"""How Megatron cuts a parameter over tensor-parallel ranks, one class for each way.

Each is given the local shape and this rank's place and says which boxes of which
checkpoint tensors the local tensor is.  Every cut of Megatron is even, so global sizes
follow from local ones; what does not follow (true rows of a vocabulary, heads) is declared.

Source: megatron-core 0.16, ``tensor_parallel/layers.py``, ``transformer/mlp.py``,
``transformer/attention.py``; read, and tried on tensors that are built by its rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from weightd.core.layout.algebra import compose, embed
from weightd.core.layout.boxes import Pieces, box, join, row_major
from weightd.core.layout.reshape import merge_dims
from weightd.trainer_hooks.adapters.megatron.place import DoesNotFit, Expertise, Held, Partition, Ring
from weightd.trainer_hooks.shards import Part

Shape = tuple[int, ...]


class Split(Protocol):
    """One way in which a parameter is cut."""

    @property
    def names(self) -> tuple[str, ...]:
        """Templates of the checkpoint tensors' names."""
        ...

    def held(self, shape: Shape, ring: Ring, experts: Expertise) -> Held:
        """Return what a local tensor of ``shape`` holds.

        Raises:
            DoesNotFit: It cannot have this shape.
        """
        ...

    def partition(self, shape: Shape) -> Partition | None:
        """Return what Megatron marks such a parameter with; None where it is whole."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """The same on every rank: norms, router, biases of row-parallel layers.

    Attributes:
        name: Checkpoint name.
    """

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        """The one name."""
        return (self.name,)

    def held(self, shape: Shape, ring: Ring, experts: Expertise) -> Held:
        """Return the whole tensor."""
        return Held((Part(self.name, shape, box(shape)),))

    def partition(self, shape: Shape) -> Partition | None:
        """Return None."""
        return None


@dataclass(frozen=True, slots=True)
class Skip:
    """A parameter or buffer that is not published.

    Attributes:
        why: For whoever reads the declaration.
    """

    why: str

    @property
    def names(self) -> tuple[str, ...]:
        """No name."""
        return ()

    def held(self, shape: Shape, ring: Ring, experts: Expertise) -> Held:
        """Return nothing."""
        return Held((), prod(shape))

    def partition(self, shape: Shape) -> Partition | None:
        """Return None; nothing is compared."""
        return None


@dataclass(frozen=True, slots=True)
class Column:
    """Column parallel: cut along dimension 0, weights and biases alike.

    Attributes:
        name: Checkpoint name.
        stride: Megatron's ``partition_stride``: the dimension is cut into ``stride * size`` parts and rank r has
            parts r, r + size, …; 2 for a checkpoint that keeps [gate; up] as one tensor.
    """

    name: str
    stride: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        """The one name."""
        return (self.name,)

    def held(self, shape: Shape, ring: Ring, experts: Expertise) -> Held:
        """Return every ``size``-th part of the rows."""
        return _cut(self.name, shape, 0, self.stride, ring)

    def partition(self, shape: Shape) -> Partition | None:
        """Return dimension 0 and the stride."""
        return Partition(0, (self.stride,))


@dataclass(frozen=True, slots=True)
class Row:
    """Row parallel: cut along dimension 1; the bias of such a layer is ``Whole``.

    Attributes:
        name: Checkpoint name.
    """

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        """The one name."""
        return (self.name,)

    def held(self, shape: Shape, ring: Ring, experts: Expertise) -> Held:
        """Return the columns of this rank."""
        return _cut(self.name, shape, 1, 1, ring)

    def partition(self, shape: Shape) -> Partition | None:
        """Return dimension 1."""
        return Partition(1, (1,))


@dataclass(frozen=True, slots=True)
class GateUp:
    """``linear_fc1`` of a gated layer: a rank has its rows of the gate and its rows of up.

    Attributes:
        gate: Checkpoint name of the gate's projection.
        up: Checkpoint name of the other one.
        interleave: 0 for [gate; up]; otherwise so many rows of the gate and as many of up take turns.
    """

    gate: str
    up: str
    interleave: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Gate and up."""
        return (self.gate, self.up)

    def held(self, shape: Shape, ring: Ring, experts: Expertise) -> Held:
        """Return the rows of gate and up."""
        rows, rest = _rows(shape)
        half = rows // 2
        block = self.interleave or max(half, 1)
        if rows % 2 or half % block:
            raise DoesNotFit(f"{rows} rows are not gate and up in equal blocks{_of(self.interleave)}")
        return Held(tuple(self._part(name, j, half, block, rest, ring) for j, name in enumerate(self.names)))

    def partition(self, shape: Shape) -> Partition | None:
        """Return dimension 0; 2 is Megatron's stride for [gate; up], Transformer Engine leaves it at 1."""
        return Partition(0, (1,) if self.interleave else (1, 2))

    @staticmethod
    def _part(name: str, number: int, half: int, block: int, rest: Shape, ring: Ring) -> Part:
        unit = prod(rest)
        stride = (2 * block * unit, unit, *row_major(rest))
        turns = box((half // block, block, *rest), offset=number * block * unit, stride=stride)
        rows = embed(merge_dims(turns, 0, block), 0, ring.rank * half)
        return Part(name, (half * ring.size, *rest), rows)


@dataclass(frozen=True, slots=True)
class GroupedQKV:
    """``linear_qkv``: for each query group its query heads, (their gates,) one key head and one value head.

    The rows of all groups, in that order, are cut evenly over the ranks.  Where there are fewer groups
    than ranks, the cut goes through a group.

    Attributes:
        q: Checkpoint name of the query projection.
        k: Checkpoint name of the key projection.
        v: Checkpoint name of the value projection.
        heads: Query heads of the whole layer.
        groups: Query groups (key and value heads) of the whole layer; ``heads`` without grouping.
        head_dim: Rows of one head.
        gate: Name of the tensor of the output gates, if the layer has them; the same as ``q`` where the
            checkpoint keeps each head's gate behind the head.
    """

    q: str
    k: str
    v: str
    heads: int
    groups: int
    head_dim: int
    gate: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Every different name."""
        return tuple(dict.fromkeys(name for name in (self.q, self.gate, self.k, self.v) if name))

    def held(self, shape: Shape, ring: Ring, experts: Expertise) -> Held:
        """Return the rows of q, k and v."""
        rows, rest = _rows(shape)
        if self.groups < 1 or self.heads % self.groups:
            raise DoesNotFit(f"{self.heads} query heads are no whole number for each of {self.groups} groups")
        whole = self.groups * self._group_rows
        if rows * ring.size != whole:
            raise DoesNotFit(
                f"{rows} rows on each of {ring.size} ranks, {self.groups} groups of {self._group_rows} rows are {whole}"
            )
        mine = box((rows, *rest), start=(ring.rank * rows, *(0 for _ in rest)))
        return Held(
            tuple(Part(name, (n, *rest), compose(p, mine, (whole, *rest))) for name, n, p in self._grouped(rest))
        )

    def partition(self, shape: Shape) -> Partition | None:
        """Return dimension 0."""
        return Partition(0, (1,))

    @property
    def _per_group(self) -> int:
        return self.heads // self.groups

    @property
    def _group_rows(self) -> int:
        return (self._per_group * (2 if self.gate else 1) + 2) * self.head_dim

    def _grouped(self, rest: Shape) -> list[tuple[str, int, Pieces]]:
        """Return (name, rows, pieces in the whole grouped matrix) of each checkpoint tensor."""
        query, head = self._per_group, self.head_dim
        behind = query * (2 if self.gate else 1)
        keys = [
            (self.k, self.groups * head, self._heads(behind, 1, 1, 0, rest)),
            (self.v, self.groups * head, self._heads(behind + 1, 1, 1, 0, rest)),
        ]
        if self.gate == self.q:
            both = join([self._heads(j * query, query, 2, j, rest) for j in range(2)], 1 + len(rest))
            return [(self.q, 2 * self.heads * head, both), *keys]
        queries = [(self.q, self.heads * head, self._heads(0, query, 1, 0, rest))]
        if self.gate:
            queries.append((self.gate, self.heads * head, self._heads(query, query, 1, 0, rest)))
        return [*queries, *keys]

    def _heads(self, first: int, count: int, every: int, at: int, rest: Shape) -> Pieces:
        """Return ``count`` heads from ``first`` on of every group, as heads ``at``, ``at + every``, … of a tensor."""
        head, unit = self.head_dim, prod(rest)
        found = box(
            (self.groups, count, 1, head, *rest),
            start=(0, 0, at, 0, *(0 for _ in rest)),
            offset=first * head * unit,
            stride=(self._group_rows * unit, head * unit, 1, unit, *row_major(rest)),
        )
        for inner in (count, every, head):
            found = merge_dims(found, 0, inner)
        return found


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """An embedding or output layer, padded to a common length of all ranks and cut along dimension 0.

    Rows of padding, which the last ranks have, are never published.

    Attributes:
        name: Checkpoint name.
        rows: True rows of the vocabulary, of all ranks together.
    """

    name: str
    rows: int

    @property
    def names(self) -> tuple[str, ...]:
        """The one name."""
        return (self.name,)

    def held(self, shape: Shape, ring: Ring, experts: Expertise) -> Held:
        """Return the true rows of this rank, maybe none."""
        rows, rest = _rows(shape)
        if rows * ring.size < self.rows:
            raise DoesNotFit(f"{rows} rows on each of {ring.size} ranks are fewer than {self.rows}")
        first = ring.rank * rows
        real = min(max(self.rows - first, 0), rows)
        pieces = box((real, *rest), start=(first, *(0 for _ in rest)))
        return Held((Part(self.name, (self.rows, *rest), pieces),), (rows - real) * prod(rest))

    def partition(self, shape: Shape) -> Partition | None:
        """Return dimension 0."""
        return Partition(0, (1,))


def _cut(name: str, shape: Shape, dim: int, stride: int, ring: Ring) -> Held:
    """Return parts r, r + size, … of the ``stride * size`` parts of a dimension."""
    if dim >= len(shape):
        raise DoesNotFit(f"it has {len(shape)} dimensions and would be cut along number {dim}")
    if stride < 1 or shape[dim] % stride:
        raise DoesNotFit(f"{shape[dim]} indices of dimension {dim} are not {stride} equal parts")
    part, strides = shape[dim] // stride, row_major(shape)
    extent = (*shape[:dim], part, *shape[dim + 1 :])
    found = [
        embed(box(extent, offset=j * part * strides[dim], stride=strides), dim, (j * ring.size + ring.rank) * part)
        for j in range(stride)
    ]
    full = (*shape[:dim], shape[dim] * ring.size, *shape[dim + 1 :])
    return Held((Part(name, full, join(found, len(shape))),))


def _rows(shape: Sequence[int]) -> tuple[int, Shape]:
    if not shape:
        raise DoesNotFit("it is 0-d and has no rows")
    return shape[0], tuple(shape[1:])


def _of(interleave: int) -> str:
    return f" of {interleave}" if interleave else ""
