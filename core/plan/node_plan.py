"""A plan as frozen columns: which bytes a node fetches, and which bytes each of its ranks copies.

Everything here is in bytes.  Rows are strided copies of at most three
dimensions and are never lowered to runs: a column cut of a large matrix would
be a thousand million of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weightd.core.layout.columns import Int64
from weightd.core.units import NodeId, RolloutRank, TrainerRank

COPY_DIMS = 3
"""Dimensions of a copy; a box of more varying dimensions becomes several rows."""


@dataclass(frozen=True, slots=True)
class TrainerSource:
    """Shared memory of a trainer rank on this node: its pool number ``region`` (of the slot in use)."""

    rank: TrainerRank
    region: int


@dataclass(frozen=True, slots=True)
class LandingSource:
    """This node's landing (the half in use)."""


Source = TrainerSource | LandingSource


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Strided copies as columns, C rows.

    ``extent`` counts elements of ``itemsize`` bytes; unused leading dimensions have
    extent 1 and stride 0.  Offsets are bytes from the start of the source's pool
    (after its header page) and of the target buffer.

    Attributes:
        source: Row of the plan's table of sources, shape (C,).
        source_offset: Bytes, shape (C,).
        source_stride: Bytes, shape (C, 3).
        target: Row of the target layout's buffers; 0 where the target is the landing, shape (C,).
        target_offset: Bytes, shape (C,).
        target_stride: Bytes, shape (C, 3).
        extent: Elements, shape (C, 3).
        itemsize: Bytes of one element, shape (C,).
    """

    source: Int64
    source_offset: Int64
    source_stride: Int64
    target: Int64
    target_offset: Int64
    target_stride: Int64
    extent: Int64
    itemsize: Int64

    def __len__(self) -> int:
        return int(self.source.shape[0])

    @property
    def nbytes(self) -> Int64:
        """Bytes of each row, shape (C,)."""
        numel: Int64 = np.prod(self.extent, axis=1, dtype=np.int64)
        return numel * self.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class RankPlan:
    """What one rollout rank copies for a version.

    Attributes:
        rank: The rollout rank.
        sources: Table that ``copies.source`` points into.
        copies: Rows sorted by source.
        nbytes: Bytes of all rows.
        target_digest: Digest of the rank's layout, which the buffers' rows belong to.
    """

    rank: RolloutRank
    sources: tuple[Source, ...]
    copies: Copies
    nbytes: int
    target_digest: str


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bounded stretch of the landing that is sent, checked and acknowledged as one.

    Attributes:
        index: Number within the node's plan, from 0.
        source_node: Node that sends it.
        landing_offset: First byte in the landing.
        nbytes: Length.
        first_row: First row of ``FetchPlan.gather`` that fills it.
        last_row: One past its last row.
    """

    index: int
    source_node: NodeId
    landing_offset: int
    nbytes: int
    first_row: int
    last_row: int


@dataclass(frozen=True, slots=True, eq=False)
class FetchPlan:
    """What a node fetches from others for a version: each remote byte once.

    Attributes:
        sources: Trainer pools on other nodes that ``gather.source`` points into.
        buckets: All buckets, by index.
        gather: Rows from those pools to the landing; a bucket's rows are consecutive.
        landing_nbytes: Size of the landing (one half).
    """

    sources: tuple[TrainerSource, ...]
    buckets: tuple[Bucket, ...]
    gather: Copies
    landing_nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class NodePlan:
    """The plan of one node; every daemon computes its own and the leader's must have the same digest.

    Attributes:
        node: The node.
        ranks: Plans of its rollout ranks.
        fetch: What it fetches.
        digest: Of all of the above.
    """

    node: NodeId
    ranks: dict[RolloutRank, RankPlan]
    fetch: FetchPlan
    digest: str
