"""The plan of one node: local copies straight from the trainers' pools, and everything else fetched once.

Every node plans for itself from the same proof, and its plan's digest must be
the one that the leader computed for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from weightd.core.errors import InternalInvariantBroken
from weightd.core.layout.boxes import Pieces, widened
from weightd.core.layout.columns import Int64
from weightd.core.layout.intersect import Overlaps, intersect
from weightd.core.plan.buckets import Packed, pack_buckets
from weightd.core.plan.copies import columns_of, concatenated, no_copies, take
from weightd.core.plan.holdings import Boxes, buffer_columns
from weightd.core.plan.lower import fuse, lower
from weightd.core.plan.node_plan import (
    Copies,
    FetchPlan,
    LandingSource,
    NodePlan,
    RankPlan,
    Source,
    TrainerSource,
)
from weightd.core.plan.remote import Cells, Parts, cut_into_cells
from weightd.core.plan.sources import choose_local, choose_remote, holders_of, ring
from weightd.core.plan.violations import BudgetError
from weightd.core.units import NodeId, RolloutRank, TrainerRank

if TYPE_CHECKING:
    from weightd.core.plan.proof import CoverageProof

LANDING = -1
"""In place of a source's row while a plan is made: the landing."""


def plan_node(proof: CoverageProof, node: NodeId, bucket_limit_bytes: int) -> NodePlan:
    """Return which bytes a node fetches and which bytes each of its ranks copies.

    Args:
        proof: What was proved; a rank of the node that a proof of some ranks left out gets no plan.
        node: A node; one without rollout ranks has nothing to fetch.
        bucket_limit_bytes: Largest bucket.

    Raises:
        BudgetError: A bucket could not hold one element.
        InternalInvariantBroken: The plan does not add up to the proof.
    """
    ranks = tuple(r for r in proof.topology.rollout_ranks(node) if r in proof.rollout_layouts)
    if not ranks:
        fetch = FetchPlan((), (), no_copies(), 0)
        return NodePlan(node, {}, fetch, plan_digest(node, {}, fetch))
    work = _NodeWork(proof, node, ranks)
    work.check_limit(bucket_limit_bytes)
    local, landed, fetch = work.local_copies(), *work.remote_copies(bucket_limit_bytes)
    plans = {}
    for place, rank in enumerate(ranks):
        plans[rank] = _rank_plan(proof, rank, work.sources, concatenated([local[place], landed[place]]))
    return NodePlan(node, plans, fetch, plan_digest(node, plans, fetch))


@dataclass(frozen=True, slots=True, eq=False)
class Feeding:
    """Which trainer rank feeds which elements of a node's ranks, before anything is lowered.

    Attributes:
        meets: Boxes of tensors, in logical indices.
        tensor: Number of the tensor in the catalog, shape (M,).
        rank: Rollout rank that needs each, by its position among the node's ranks, shape (M,).
        trainer: Trainer rank that feeds it, shape (M,).
    """

    meets: Overlaps
    tensor: Int64
    rank: Int64
    trainer: Int64


def feeding(proof: CoverageProof, node: NodeId) -> tuple[tuple[RolloutRank, ...], Feeding]:
    """Return the planned rollout ranks of a node, and the choice of sources that ``plan_node`` makes for them."""
    ranks = tuple(r for r in proof.topology.rollout_ranks(node) if r in proof.rollout_layouts)
    return ranks, _NodeWork(proof, node, ranks).feeding()


class _NodeWork:
    """What one node needs, met with what the trainer holds."""

    def __init__(self, proof: CoverageProof, node: NodeId, ranks: tuple[RolloutRank, ...]) -> None:
        self._proof = proof
        self._node = node
        self._ranks = ranks
        needs, self._rank_of_need = proof.needs(ranks)
        wanted = np.zeros(len(proof.catalog.tensors), np.bool_)
        wanted[needs.tensor] = True
        boxes = proof.sources(wanted)
        width = max(needs.ndim, boxes.pieces.ndim)  # a side may be wider by tensors that are not looked at
        self._needs, self._boxes = widened(needs, width), replace(boxes, pieces=widened(boxes.pieces, width))
        self._held = _Held.of(proof, self._boxes)
        self._holders = holders_of(self._boxes)
        box = self._boxes.representatives
        meets = intersect(box, self._needs)
        self._itemsize = proof.catalog.itemsize[box.tensor][meets.source] if len(box) else np.zeros(0, np.int64)
        rank = self._rank_of_need[meets.target]
        chosen = choose_local(
            proof.topology, node, ranks, self._holders, meets.source, rank, meets.numel * self._itemsize
        )
        self._meets, self._rank, self._chosen, self._box = meets, rank, chosen, box
        self.sources: list[TrainerSource] = self._held.sources

    def check_limit(self, limit_bytes: int) -> None:
        """Refuse a limit below the size of the largest element that is needed."""
        if len(self._itemsize) and limit_bytes < int(self._itemsize.max()):
            row = int(np.argmax(self._itemsize))
            tensor = self._proof.catalog.tensors[int(self._box.tensor[self._meets.source[row]])]
            raise BudgetError(limit_bytes, tensor.name, int(self._itemsize[row]))

    def _part_of_box(self, meets: Overlaps) -> Parts:
        """Return the overlaps in indices of their boxes."""
        b = self._box.take(meets.source)
        step = np.where(meets.extent > 1, meets.step // b.step, 1)
        return Parts(meets.source, (meets.start - b.start) // b.step, meets.extent, step)

    def local_copies(self) -> list[Copies]:
        """Return per rank what it copies straight from trainers of its node, in as many dimensions as the tensors."""
        rows = np.flatnonzero(self._chosen >= 0)
        meets, piece, size = self._meets.take(rows), self._chosen[rows], self._itemsize[rows]
        offset, stride = self._held.places(self._part_of_box(meets), piece, size)
        copies = Copies(
            source=self._held.source[piece],
            source_offset=offset,
            source_stride=stride,
            target=self._needs.buffer[meets.target],
            target_offset=meets.target_offset * size,
            target_stride=meets.target_stride * size[:, None],
            extent=meets.extent,
            itemsize=size,
        )
        return [take(copies, np.flatnonzero(self._rank[rows] == r)) for r in range(len(self._ranks))]

    def remote_copies(self, limit_bytes: int) -> tuple[list[Copies], FetchPlan]:
        """Return per rank what it copies from the landing, and what the node fetches."""
        rows = np.flatnonzero(self._chosen < 0)
        if not len(rows):
            none = no_copies(self._meets.extent.shape[1])
            return [none] * len(self._ranks), FetchPlan((), (), no_copies(), 0)
        meets = self._meets.take(rows)
        cut = cut_into_cells(self._part_of_box(meets))
        size = self._proof.catalog.itemsize[self._box.tensor[cut.cells.box]]
        piece = self._feeders(cut.cells, size)
        packed, strides, sources = self._packed(cut.cells, piece, size, limit_bytes)
        landed = self._landed(meets, cut, packed, strides, size)
        rank = self._rank[rows][cut.part]
        per_rank = [take(landed, np.flatnonzero(rank == r)) for r in range(len(self._ranks))]
        return per_rank, FetchPlan(sources, packed.buckets, packed.gather, packed.nbytes)

    def feeding(self) -> Feeding:
        """Return the choice of sources, remote ones included."""
        chosen = self._chosen.copy()
        rows = np.flatnonzero(chosen < 0)
        if len(rows):
            cells = cut_into_cells(self._part_of_box(self._meets.take(rows))).cells
            size = self._proof.catalog.itemsize[self._box.tensor[cells.box]]
            of_box: Int64 = np.zeros(len(self._boxes), np.int64)
            of_box[cells.box] = self._feeders(cells, size)
            chosen[rows] = of_box[self._meets.source[rows]]
        return Feeding(self._meets, self._box.tensor[self._meets.source], self._rank, self._boxes.rank[chosen])

    def _feeders(self, cells: Parts, size: Int64) -> Int64:
        """Return the piece that each cell is fetched from; all cells of a box come from one."""
        first = np.flatnonzero(np.diff(cells.box, prepend=-1))
        nbytes = np.add.reduceat(cells.numel * size, first)
        piece = choose_remote(self._proof.topology, self._node, self._holders, cells.box[first], nbytes)
        return np.repeat(piece, np.diff(np.append(first, len(cells))))

    def _packed(
        self, cells: Parts, piece: Int64, size: Int64, limit_bytes: int
    ) -> tuple[Packed, Int64, tuple[TrainerSource, ...]]:
        """Lay the cells into the landing; return it with the cells' strides there and the pools they come from.

        A cell lies in the landing in the order of dimensions that it has at its source: the sender reads and
        sends in one direction, and the ranks of the receiver, which are many, transpose.
        """
        topology = self._proof.topology
        nodes = ring(topology, self._node)
        number = {n: i for i, n in enumerate(nodes)}
        home_of = np.array([number[p.node] for p in topology.trainers], np.int64)
        offset, stride = self._held.places(cells, piece, size)
        home = home_of[self._boxes.rank[piece]]
        source = self._held.source[piece]
        order = np.lexsort((offset, source, -size, home))  # larger elements first: see core.plan.buckets
        dense = _dense_strides(cells.extent, stride, size)
        zero: Int64 = np.zeros(len(order), np.int64)
        wide = Copies(
            source[order], offset[order], stride[order], zero, zero, dense[order], cells.extent[order], size[order]
        )
        rows, of = lower(wide)
        packed = pack_buckets(rows, of, home[order][of], tuple(nodes), limit_bytes)
        place: Int64 = np.empty_like(zero)
        place[order] = packed.cell_offset
        used, renumbered = np.unique(packed.gather.source, return_inverse=True)
        gather = replace(packed.gather, source=renumbered.reshape(-1).astype(np.int64))
        sources = tuple(self.sources[s] for s in used.tolist())
        return replace(packed, gather=gather, cell_offset=place), dense, sources

    def _landed(self, meets: Overlaps, cut: Cells, packed: Packed, strides: Int64, size: Int64) -> Copies:
        """Return the copies from the landing, one per part and cell."""
        use, cell, need = cut.uses, cut.cells.take(cut.cell), self._needs.take(meets.target[cut.part])
        box = self._box.take(use.box)
        start = box.start + use.start * box.step
        step, many = use.step * box.step, use.extent > 1
        size, stride = size[cut.cell], strides[cut.cell]
        return Copies(
            source=np.full(len(use), LANDING, np.int64),
            source_offset=packed.cell_offset[cut.cell] + ((use.start - cell.start) // cell.step * stride).sum(axis=1),
            source_stride=np.where(many, use.step // cell.step * stride, 0),
            target=need.buffer,
            target_offset=(need.offset + ((start - need.start) // need.step * need.stride).sum(axis=1)) * size,
            target_stride=np.where(many, step // need.step * need.stride, 0) * size[:, None],
            extent=use.extent,
            itemsize=size,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """Where the source's pieces lie, in bytes of their pools."""

    pieces: Pieces
    base: Int64
    source: Int64
    sources: list[TrainerSource]

    @classmethod
    def of(cls, proof: CoverageProof, boxes: Boxes) -> _Held:
        region, base, _ = buffer_columns(proof.trainer_layouts, boxes.pieces, boxes.rank)
        regions = int(region.max(initial=0)) + 1
        pools, source = np.unique(boxes.rank * regions + region, return_inverse=True)
        sources = [TrainerSource(TrainerRank(p // regions), p % regions) for p in pools.tolist()]
        return cls(boxes.pieces, base, source.reshape(-1).astype(np.int64), sources)

    def places(self, parts: Parts, piece: Int64, size: Int64) -> tuple[Int64, Int64]:
        """Return byte offset and byte strides of parts of boxes in the pools of given pieces."""
        stride = self.pieces.stride[piece]
        offset = self.base[piece] + (self.pieces.offset[piece] + (parts.start * stride).sum(axis=1)) * size
        return offset, np.where(parts.extent > 1, parts.step * stride, 0) * size[:, None]


def _dense_strides(extent: Int64, stride: Int64, size: Int64) -> Int64:
    """Return byte strides of dense boxes whose dimensions have the same order as those of ``stride``."""
    order = np.argsort(np.where(extent == 1, np.iinfo(np.int64).min, -stride), axis=1, kind="stable")
    sorted_extent = np.take_along_axis(extent, order, axis=1)
    inner: Int64 = np.ones_like(sorted_extent)
    inner[:, :-1] = np.cumprod(sorted_extent[:, :0:-1], axis=1)[:, ::-1]
    dense: Int64 = np.empty_like(inner)
    np.put_along_axis(dense, order, inner, axis=1)
    return np.where(extent > 1, dense, 0) * size[:, None]


def _rank_plan(proof: CoverageProof, rank: RolloutRank, pools: list[TrainerSource], wide: Copies) -> RankPlan:
    """Lower the copies of one rank and number its sources: pools by rank and region, then the landing."""
    copies, _ = lower(wide)
    last = np.where(copies.source == LANDING, len(pools), copies.source)
    copies = fuse(replace(copies, source=last))
    used, renumbered = np.unique(copies.source, return_inverse=True)
    sources: tuple[Source, ...] = tuple(LandingSource() if s == len(pools) else pools[s] for s in used.tolist())
    copies = replace(copies, source=renumbered.reshape(-1).astype(np.int64))
    nbytes = int(copies.nbytes.sum())
    if nbytes != proof.totals[rank].nbytes:
        facts = f"{rank} needs {proof.totals[rank].nbytes} bytes, its plan copies {nbytes}"
        raise InternalInvariantBroken("I4: sum of segment bytes = destination bytes", facts)
    return RankPlan(rank, sources, copies, nbytes, proof.rollout_digests[rank])


def plan_digest(node: NodeId, plans: dict[RolloutRank, RankPlan], fetch: FetchPlan) -> str:
    """Return a name for a plan: equal plans, equal digest, on every machine."""
    state = blake2b(digest_size=16, person=b"weightd-plan")
    state.update(
        msgspec.msgpack.encode(
            [
                node,
                [[r.engine, r.k, p.nbytes, p.target_digest, _named(p.sources)] for r, p in plans.items()],
                _named(fetch.sources),
                [[b.index, b.source_node, b.landing_offset, b.nbytes, b.first_row, b.last_row] for b in fetch.buckets],
                fetch.landing_nbytes,
                [len(p.copies) for p in plans.values()],
                len(fetch.gather),
            ]
        )
    )
    for copies in [*(p.copies for p in plans.values()), fetch.gather]:
        for column in columns_of(copies):
            state.update(np.ascontiguousarray(column, "<i8").tobytes())
    return state.hexdigest()


def _named(sources: tuple[Source, ...]) -> list[list[int]]:
    return [[s.rank, s.region] if isinstance(s, TrainerSource) else [] for s in sources]
