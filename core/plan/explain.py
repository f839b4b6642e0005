"""Proofs and plans for people: whence every rank gets its bytes, what crosses which link, what memory it takes.

``summarize`` gives plain values, fit for JSON; ``explain_plan`` the same as a
text.  Who feeds one tensor on one rank is answered by ``core.plan.feeders``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from weightd.core.errors import binary_size
from weightd.core.plan.feeders import Way, way_between
from weightd.core.plan.node_plan import LandingSource, NodePlan, RankPlan
from weightd.core.units import NodeId

if TYPE_CHECKING:
    from weightd.core.layout.columns import Layout
    from weightd.core.plan.proof import CoverageProof
    from weightd.core.roster.topology import Topology

HALVES = 2
"""Copies of slots and landings a node holds: the committed version stays readable while the next one comes in."""


class RankBytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one rollout rank's bytes come from; ``same_slot + same_node + remote = nbytes``."""

    rank: str
    node: str
    slot: str
    nbytes: int
    same_slot: int
    same_node: int
    remote: int
    copies: int


class LinkBytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What crosses from one node to another for a version."""

    source: str
    target: str
    nbytes: int
    buckets: int


class NodeMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a node holds; ``peak_nbytes`` is twice the slots and twice the landing.

    Attributes:
        node: The node.
        fetched_nbytes: Bytes that it fetches for a version: all its links together.
        buckets: Buckets that they come in.
        largest_bucket_nbytes: The largest of them.
        landing_nbytes: One half of the landing.
        slots_nbytes: One slot of each of its trainer ranks.
        peak_nbytes: Shared memory for two versions.
    """

    node: str
    fetched_nbytes: int
    buckets: int
    largest_bucket_nbytes: int
    landing_nbytes: int
    slots_nbytes: int
    peak_nbytes: int


class PlanSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A proof and the plans made from it.

    Attributes:
        trainer_ranks: Number of sources, reserved and empty ranks included.
        rollout_ranks: Number of rollout ranks, empty ones included.
        owned: Different elements of the trainer.
        used: Those that are taken.
        declared_unused: Those that nobody takes, by declaration.
        needed_nbytes: Bytes of all rollout ranks.
        local_nbytes: Those that are copied inside a node.
        landed_nbytes: Those that are copied from a landing; each may be needed by several ranks.
        wire_nbytes: Bytes between nodes.
        ranks: By rollout rank.
        links: By source and target node.
        nodes: By node.
        live_ranks: Trainer ranks whose parameters are published where they lie: nothing of them is retained.
    """

    trainer_ranks: int
    rollout_ranks: int
    owned: int
    used: int
    declared_unused: int
    needed_nbytes: int
    local_nbytes: int
    landed_nbytes: int
    wire_nbytes: int
    ranks: tuple[RankBytes, ...]
    links: tuple[LinkBytes, ...]
    nodes: tuple[NodeMemory, ...]
    live_ranks: tuple[int, ...] = ()


def summarize(proof: CoverageProof, plans: Mapping[NodeId, NodePlan]) -> PlanSummary:
    """Return a proof and its plans in numbers.

    Args:
        proof: The proof.
        plans: Plans of its nodes; those that are not given are left out.
    """
    ranks = tuple(_rank_bytes(proof.topology, p) for plan in plans.values() for p in plan.ranks.values())
    links = tuple(link for plan in plans.values() for link in _links(plan))
    landed = sum(r.remote for r in ranks)
    needed = sum(r.nbytes for r in ranks)
    return PlanSummary(
        trainer_ranks=len(proof.trainer_layouts),
        rollout_ranks=len(proof.ranks),
        owned=proof.source.owned,
        used=proof.source.used,
        declared_unused=proof.source.declared,
        needed_nbytes=needed,
        local_nbytes=needed - landed,
        landed_nbytes=landed,
        wire_nbytes=sum(link.nbytes for link in links),
        ranks=ranks,
        links=links,
        nodes=tuple(_memory(proof, plan) for plan in plans.values()),
        live_ranks=tuple(
            rank for rank, layout in enumerate(proof.trainer_layouts) if any(b.kind == "live" for b in layout.buffers)
        ),
    )


def _rank_bytes(topology: Topology, plan: RankPlan) -> RankBytes:
    place = topology.place(plan.rank)
    by_way: dict[Way, int] = {"same slot": 0, "same node": 0, "remote": 0}
    nbytes = plan.copies.nbytes
    for row, source in enumerate(plan.sources):
        way = "remote" if isinstance(source, LandingSource) else way_between(topology, source.rank, place)
        by_way[way] += int(nbytes[plan.copies.source == row].sum())
    return RankBytes(
        rank=str(plan.rank),
        node=place.node,
        slot=place.slot,
        nbytes=plan.nbytes,
        same_slot=by_way["same slot"],
        same_node=by_way["same node"],
        remote=by_way["remote"],
        copies=len(plan.copies),
    )


def _links(plan: NodePlan) -> list[LinkBytes]:
    found: dict[NodeId, list[int]] = {}
    for b in plan.fetch.buckets:
        found.setdefault(b.source_node, []).append(b.nbytes)
    return [LinkBytes(source, plan.node, sum(sizes), len(sizes)) for source, sizes in sorted(found.items())]


def slots_nbytes(layout: Layout) -> int:
    """Return the bytes of one slot of a trainer rank: all its regions, each up to the end of its last buffer."""
    ends: dict[int, int] = {}
    for b in layout.buffers:
        ends[b.region] = max(ends.get(b.region, 0), b.base + b.nbytes)
    return sum(ends.values())


def _memory(proof: CoverageProof, plan: NodePlan) -> NodeMemory:
    slots = sum(slots_nbytes(proof.trainer_layouts[r]) for r in proof.topology.trainer_ranks(plan.node))
    sizes = [b.nbytes for b in plan.fetch.buckets]
    return NodeMemory(
        node=plan.node,
        fetched_nbytes=sum(sizes),
        buckets=len(sizes),
        largest_bucket_nbytes=max(sizes, default=0),
        landing_nbytes=plan.fetch.landing_nbytes,
        slots_nbytes=slots,
        peak_nbytes=HALVES * (slots + plan.fetch.landing_nbytes),
    )


def explain_plan(summary: PlanSummary) -> str:
    """Return a summary as a text of a few tables."""
    s = summary
    lines = [
        f"covered: {s.rollout_ranks} rollout ranks from {s.trainer_ranks} trainer ranks",
        f"  elements: {s.owned} owned = {s.used} used + {s.declared_unused} declared unused",
        (
            f"  bytes: {s.needed_nbytes} needed = {s.local_nbytes} copied inside a node "
            f"+ {s.landed_nbytes} from landings; {s.wire_nbytes} cross between nodes"
        ),
        "ranks:",
        *_table(
            ("rank", "node/slot", "bytes", "same slot", "same node", "remote", "copies"),
            [
                (
                    r.rank,
                    f"{r.node}/{r.slot}",
                    *(binary_size(n) for n in (r.nbytes, r.same_slot, r.same_node, r.remote)),
                    str(r.copies),
                )
                for r in s.ranks
            ],
        ),
        "links:" if s.links else "links: none, no byte crosses between nodes",
        *_table(
            ("source -> target", "bytes", "buckets"),
            [(f"{x.source} -> {x.target}", binary_size(x.nbytes), str(x.buckets)) for x in s.links],
        ),
        "memory:",
        *_table(
            ("node", "slots x2", "landing x2", "peak", "largest bucket"),
            [
                (
                    n.node,
                    *(
                        binary_size(b)
                        for b in (
                            HALVES * n.slots_nbytes,
                            HALVES * n.landing_nbytes,
                            n.peak_nbytes,
                            n.largest_bucket_nbytes,
                        )
                    ),
                )
                for n in s.nodes
            ],
        ),
        *_not_retained(s.live_ranks),
    ]
    return "\n".join(lines)


def _not_retained(ranks: Sequence[int]) -> list[str]:
    if not ranks:
        return []
    named = ", ".join([*map(str, ranks[:8]), *(["..."] if len(ranks) > 8 else [])])
    return [
        f"not retained: the bytes of {len(ranks)} trainer ranks with live memory ({named})",
        "  once a version is decided the next step writes them; an engine that comes later waits for the next version",
    ]


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Return rows under a head, the first column to the left and numbers to the right; nothing without rows."""
    if not rows:
        return []
    widths = [max(len(line[c]) for line in (head, *rows)) for c in range(len(head))]
    lines = []
    for line in (head, *rows):
        cells = [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
        lines.append("  " + "  ".join(cells))
    return lines
