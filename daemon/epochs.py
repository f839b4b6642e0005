"""An epoch on this node: its layouts, the proof, the plans of all nodes.

Blocking and pure of sockets: the run's shell collects the layouts, then calls
``plan_epoch`` in a worker thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import anyio
import msgspec
import numpy as np

from weightd.core.dtypes import dtype_named
from weightd.core.layout.columns import Layout
from weightd.core.plan.message import encode_rank_plan
from weightd.core.plan.node_plan import NodePlan, TrainerSource
from weightd.core.plan.planner import plan_node
from weightd.core.plan.proof import CoverageProof, prove_coverage
from weightd.core.roster.topology import Place, Topology
from weightd.core.session.events import EpochPlanned, EpochProved
from weightd.core.units import Boot, EngineId, NodeId, RolloutRank, TrainerRank
from weightd.core.wire.blobs import blob_digest
from weightd.core.wire.messages import EpochSpec, NodePlanDigest
from weightd.daemon.admission import PeerUnknown
from weightd.daemon.bulk.landing import Halves

KEPT_LAYOUTS = 4096
"""Layouts kept by digest: those of a few epochs of the largest roster that is planned here."""


def topology_of(spec: EpochSpec) -> Topology:
    """Return the topology of an epoch that the leader has judged."""
    trainers = sorted(spec.trainers, key=lambda t: t.rank)
    engines: dict[EngineId, list[tuple[int, Place]]] = {}
    for r in (*spec.receivers, *spec.down):
        engines.setdefault(r.engine, []).append((r.k, Place(r.node, r.slot)))
    return Topology(
        trainers=tuple(Place(t.node, t.slot) for t in trainers),
        engines={
            EngineId(e.id): tuple(p for _, p in sorted(engines[EngineId(e.id)], key=lambda kp: kp[0]))
            for e in spec.roster.engines
            if EngineId(e.id) in engines
        },
        reserved=frozenset(TrainerRank(r) for r in spec.roster.reserved),
        mode=spec.roster.mode,
    )


def layout_digests(spec: EpochSpec) -> tuple[str, ...]:
    """Return the digest of every layout of an epoch, each once, in a fixed order."""
    digests = [t.layout_digest for t in spec.trainers] + [r.layout_digest for r in (*spec.receivers, *spec.down)]
    return tuple(dict.fromkeys(digests))


@dataclass(slots=True, eq=False)
class EpochPlans:
    """All that is planned for an epoch.

    Attributes:
        spec: The epoch, without plan digests.
        topology: Who is where.
        proof: Coverage.
        plans: Plan of every node; a node serves others by their plans.
        snapshot_nbytes: Bytes that the trainer ranks copy into their slots for a version.
        halves: The landing that this node's plan was made over; see ``Planning``.
        rank_blobs: Encoded plans of this node's rollout ranks, by rank: (digest, bytes); see ``encode_plans``.
    """

    spec: EpochSpec
    topology: Topology
    proof: CoverageProof
    plans: dict[NodeId, NodePlan]
    snapshot_nbytes: int
    halves: Halves = field(default_factory=Halves)
    rank_blobs: dict[RolloutRank, tuple[str, bytes]] = field(default_factory=dict)

    @property
    def boots(self) -> dict[TrainerRank, Boot]:
        """The incarnation of every trainer rank, whose memory and no other's is meant."""
        return {t.rank: t.boot for t in self.spec.trainers}

    def proved(self) -> EpochProved:
        """Return the leader's event: every node's plan digest and every rank's bytes."""
        return EpochProved(
            self.spec.epoch,
            tuple(
                NodePlanDigest(n, p.digest, p.fetch.landing_nbytes, sum(b.nbytes for b in p.fetch.buckets))
                for n, p in sorted(self.plans.items())
            ),
            tuple((str(r.engine), int(r.k), rp.nbytes) for p in self.plans.values() for r, rp in p.ranks.items()),
        )

    def planned(self, node: NodeId) -> EpochPlanned:
        """Return the node machine's event for ``node``."""
        plan = self.plans[node]
        return EpochPlanned(
            self.spec.epoch,
            plan.digest,
            plan.fetch.landing_nbytes,
            sum(b.nbytes for b in plan.fetch.buckets),
            tuple(
                (str(r.engine), int(r.k), self.rank_blobs[r][0], len(self.rank_blobs[r][1]), rp.nbytes)
                for r, rp in plan.ranks.items()
            ),
        )


def plan_epoch(spec: EpochSpec, layouts: Mapping[str, Layout], node: NodeId) -> EpochPlans:
    """Prove coverage of an epoch and plan every node of it.

    Args:
        spec: The epoch.
        layouts: By digest; every digest of ``layout_digests(spec)``.
        node: This node, planned even where it has no rank.

    Raises:
        Refused: With every violation.
    """
    topology = topology_of(spec)
    trainers = [layouts[t.layout_digest] for t in sorted(spec.trainers, key=lambda t: t.rank)]
    rollouts = {RolloutRank(r.engine, r.k): layouts[r.layout_digest] for r in (*spec.receivers, *spec.down)}
    proof = prove_coverage(topology, trainers, rollouts)
    if spec.down:
        # What engines that are down need counts as used above; nothing is planned for them.
        up = [RolloutRank(r.engine, r.k) for r in spec.receivers]
        proof = prove_coverage(topology, trainers, rollouts, only=up)
    nodes = dict.fromkeys([*topology.nodes, node])
    plans = {n: plan_node(proof, n, spec.bucket_limit_bytes) for n in nodes}
    snapshot_nbytes = sum(layout_nbytes(layout) for layout in trainers)
    return EpochPlans(msgspec.structs.replace(spec, plans=()), topology, proof, plans, snapshot_nbytes)


def layout_nbytes(layout: Layout) -> int:
    """Return the bytes of a layout's pieces."""
    size = np.array([dtype_named(t.dtype).nbytes for t in layout.tensors], np.int64)
    return int((np.prod(layout.extent, axis=1, dtype=np.int64) * size[layout.tensor]).sum()) if layout.pieces else 0


def encode_plans(plans: EpochPlans, node: NodeId, landing_serial: int) -> None:
    """Encode the plans of this node's ranks, over the memory that they read from now on.

    Args:
        plans: Of the epoch; ``rank_blobs`` is filled.
        node: This node.
        landing_serial: Grows when the landing's pools are replaced.
    """
    boots = plans.boots
    for rank, rank_plan in plans.plans[node].ranks.items():
        pools = sorted({f"{s.rank}={boots[s.rank]}" for s in rank_plan.sources if isinstance(s, TrainerSource)})
        memory = " ".join([f"landing={landing_serial}", *pools])
        data = encode_rank_plan(rank_plan, memory)
        plans.rank_blobs[rank] = (blob_digest(data), data)


def unknown_peers(plans: EpochPlans, node: NodeId, peers: Collection[NodeId]) -> PeerUnknown | None:
    """Return which nodes ``node`` would have to fetch from and does not know, if any."""
    buckets = [b for b in plans.plans[node].fetch.buckets if b.source_node not in peers]
    if not buckets:
        return None
    unknown = tuple(sorted({str(b.source_node) for b in buckets}))
    return PeerUnknown(str(node), unknown, tuple(sorted(map(str, peers))), sum(b.nbytes for b in buckets))


@dataclass
class LayoutStore:
    """Layouts by digest, least recently used dropped first."""

    _kept: OrderedDict[str, tuple[bytes, Layout]] = field(default_factory=OrderedDict)
    _arrived: anyio.Event = field(default_factory=anyio.Event)

    def put(self, digest: str, data: bytes, layout: Layout) -> None:
        """Keep a layout that was decoded and checked."""
        self._kept[digest] = (data, layout)
        self._kept.move_to_end(digest)
        while len(self._kept) > KEPT_LAYOUTS:
            self._kept.popitem(last=False)
        arrived, self._arrived = self._arrived, anyio.Event()
        arrived.set()

    async def arrival(self, timeout_s: float) -> None:
        """Return when a layout arrives, after ``timeout_s`` at the latest."""
        with anyio.move_on_after(timeout_s):
            await self._arrived.wait()

    def layout(self, digest: str) -> Layout | None:
        """Return the layout, if it is here."""
        return self._kept[digest][1] if digest in self._kept else None

    def data(self, digest: str) -> bytes | None:
        """Return its encoded form, if it is here."""
        return self._kept[digest][0] if digest in self._kept else None

    @property
    def digests(self) -> tuple[str, ...]:
        """All that are here."""
        return tuple(self._kept)
