"""What a node sends to another: its own reading of the plan of the one that fetches.

No plan travels between daemons.  A request is a number of a bucket, and the
sender knows from the receiver's plan, which it computed itself, which bytes of
its own trainers' pools that bucket holds, and in which order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from weightd.core.plan.copies import take
from weightd.core.plan.node_plan import Bucket, Copies, NodePlan, TrainerSource

if TYPE_CHECKING:
    from weightd.core.units import NodeId


@dataclass(frozen=True, slots=True, eq=False)
class ServedBucket:
    """One bucket from its sender's side.

    Attributes:
        bucket: As in the receiver's plan.
        sources: Pools of the sender's trainers that ``gather.source`` points into.
        gather: Rows whose target offsets count from the begin of the bucket; they fill it without a gap.
    """

    bucket: Bucket
    sources: tuple[TrainerSource, ...]
    gather: Copies


def served_to(receiver: NodePlan, sender: NodeId) -> tuple[Bucket, ...]:
    """Return the buckets of a receiver's plan that one node sends, by index."""
    return tuple(b for b in receiver.fetch.buckets if b.source_node == sender)


def served_bucket(receiver: NodePlan, index: int) -> ServedBucket:
    """Return what fills a bucket of a receiver's plan.

    Raises:
        IndexError: The plan has no such bucket; callers turn it into their own error.
    """
    fetch = receiver.fetch
    if not 0 <= index < len(fetch.buckets):
        raise IndexError(index)
    bucket = fetch.buckets[index]
    rows = take(fetch.gather, slice(bucket.first_row, bucket.last_row))
    used, renumbered = np.unique(rows.source, return_inverse=True)
    gather = replace(
        rows,
        source=renumbered.reshape(-1).astype(np.int64),
        target_offset=rows.target_offset - bucket.landing_offset,
    )
    return ServedBucket(bucket, tuple(fetch.sources[s] for s in used.tolist()), gather)


def needed_of(receiver: NodePlan, sender: NodeId) -> tuple[TrainerSource, ...]:
    """Return the pools of a sender's trainers that a receiver's plan reads, by rank and region."""
    found = {
        receiver.fetch.sources[s]
        for b in served_to(receiver, sender)
        for s in np.unique(receiver.fetch.gather.source[b.first_row : b.last_row]).tolist()
    }
    return tuple(sorted(found, key=lambda s: (s.rank, s.region)))
