"""Proofs and plans by the digests of what they were made from: an unchanged epoch costs a look-up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from weightd.core.layout.digest import layout_digest
from weightd.core.plan.planner import plan_node
from weightd.core.plan.proof import prove_coverage

if TYPE_CHECKING:
    from weightd.core.layout.columns import Layout
    from weightd.core.plan.node_plan import NodePlan
    from weightd.core.plan.proof import CoverageProof
    from weightd.core.roster.topology import Topology
    from weightd.core.units import NodeId, RolloutRank

KEPT = 4
"""Epochs that are remembered: the one in force, the one being planned, and one engine that leaves and comes back."""

_ProofKey = tuple[object, ...]


class PlanCache:
    """Remembers the last few proofs with the node plans made from them.

    Not for several threads at once: each planning thread has its own.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._proofs: OrderedDict[_ProofKey, CoverageProof] = OrderedDict()
        self._plans: dict[_ProofKey, dict[tuple[NodeId, int], NodePlan]] = {}

    def proof(
        self,
        topology: Topology,
        trainer_layouts: Sequence[Layout],
        rollout_layouts: Mapping[RolloutRank, Layout],
        *,
        only: Collection[RolloutRank] | None = None,
        digests: tuple[Sequence[str], Mapping[RolloutRank, str]] | None = None,
    ) -> CoverageProof:
        """Return ``prove_coverage`` of the same arguments, from memory where it was asked before.

        Args:
            topology: As for ``prove_coverage``.
            trainer_layouts: Likewise.
            rollout_layouts: Likewise.
            only: Likewise.
            digests: Digests of both sides' layouts, where the caller has them: computing those of 512 ranks takes
                longer than the proof.

        Raises:
            Refused: As ``prove_coverage``; a refusal is not remembered.
        """
        trainers, rollouts = digests or (
            [layout_digest(layout) for layout in trainer_layouts],
            {r: layout_digest(layout) for r, layout in rollout_layouts.items()},
        )
        key: _ProofKey = (
            topology.trainers,
            tuple(topology.engines.items()),
            topology.reserved,
            topology.mode,
            tuple(trainers),
            tuple(rollouts.items()),
            None if only is None else frozenset(only),
        )
        proof = self._proofs.get(key)
        if proof is None:
            proof = prove_coverage(topology, trainer_layouts, rollout_layouts, only=only)
            self._proofs[key] = proof
            self._plans[key] = {}
            while len(self._proofs) > self._kept:
                oldest, _ = self._proofs.popitem(last=False)
                del self._plans[oldest]
        self._proofs.move_to_end(key)
        return proof

    def plan(self, proof: CoverageProof, node: NodeId, bucket_limit_bytes: int) -> NodePlan:
        """Return ``plan_node`` of the same arguments, from memory where it was asked before.

        Raises:
            BudgetError: As ``plan_node``.
        """
        known = next((self._plans[key] for key, p in self._proofs.items() if p is proof), {})
        wanted = (node, bucket_limit_bytes)
        if wanted not in known:
            known[wanted] = plan_node(proof, node, bucket_limit_bytes)
        return known[wanted]
