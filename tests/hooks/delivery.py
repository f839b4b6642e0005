"""From filled slots to an engine's parameters in one process: the real proof, the real plans, the real copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.property.worlds import POISON, carry, topology_of
from weightd.core.layout.columns import Layout
from weightd.core.plan.node_plan import LandingSource, NodePlan, TrainerSource
from weightd.core.plan.planner import plan_node
from weightd.core.plan.proof import CoverageProof, prove_coverage
from weightd.core.units import EngineId, EngineRank, NodeId, RolloutRank, TrainerRank
from weightd.link.copies import CopyPlan
from weightd.rollout_hooks.declare import Declaration
from weightd.rollout_hooks.targets import Targets, targets_of
from weightd.trainer_hooks.describe import Casts, UnusedSpec, describe_holdings
from weightd.trainer_hooks.shards import Holdings
from weightd.trainer_hooks.slots import Slots

Payload = NDArray[np.uint8]
Held = tuple[Layout, Payload]
"""A trainer rank: what it says, and its slot."""

Params = dict[str, torch.Tensor]

BUCKET_BYTES = 1 << 20


def held(holdings: Holdings, casts: Casts = None, unused: Sequence[UnusedSpec] = ()) -> Held:
    """Return a rank's layout and what a publish writes into its slot; everything else there is poison."""
    described = describe_holdings(holdings, casts, unused, "layout of a trainer rank")
    slots = Slots(TrainerRank(0), described, "", 1)
    try:
        slots.pools[0].payload[:] = POISON
        slots.fill(0)
        return described.layout, slots.pools[0].payload.copy()
    finally:
        slots.close()


def delivered(
    trainers: Sequence[Held],
    size: int,
    declare: Callable[[int], Declaration],
    trainer_node: str | Sequence[str] = "a",
    bucket: int = 0,
) -> list[Params]:
    """Return the parameters of each rank of an engine, NaN where no byte was written.

    Args:
        trainers: Trainer rank r at position r.
        size: Ranks of the engine; they are on node ``a``.
        declare: What rank k needs.
        trainer_node: Node of the trainers, or of each; another than ``a`` for everything to be fetched.
        bucket: Largest bucket in bytes, if not the usual one.
    """
    params, targets = engine(size, declare)
    proof = proved(trainers, {rank: t.layout for rank, t in targets.items()}, trainer_node)
    apply(proof, trainers, targets, bucket or BUCKET_BYTES)
    return params


def engine(size: int, declare: Callable[[int], Declaration]) -> tuple[list[Params], dict[RolloutRank, Targets]]:
    """Return the parameters of each rank of an engine, full of NaN, and what they need."""
    declarations = [declare(k) for k in range(size)]
    params = [poisoned(declaration) for declaration in declarations]
    ranks = [RolloutRank(EngineId("E0"), EngineRank(k)) for k in range(size)]
    return params, {rank: targets_of(p, d, str(rank)) for rank, p, d in zip(ranks, params, declarations, strict=True)}


def proved(
    trainers: Sequence[Held], layouts: Mapping[RolloutRank, Layout], trainer_node: str | Sequence[str] = "a"
) -> CoverageProof:
    """Return the proof that trainers cover an engine on node ``a``."""
    nodes = [trainer_node] * len(trainers) if isinstance(trainer_node, str) else trainer_node
    places = [f"{node}/t{r}" for r, node in enumerate(nodes)]
    topology = topology_of(places, {"E0": [f"a/e{k}" for k in range(len(layouts))]})
    return prove_coverage(topology, [layout for layout, _ in trainers], layouts)


def apply(proof: CoverageProof, trainers: Sequence[Held], targets: Mapping[RolloutRank, Targets], bucket: int) -> None:
    """Plan node ``a``, fetch what is remote, and copy into every rank's parameters."""
    plan = plan_node(proof, NodeId("a"), bucket)
    landing = fetched(plan, trainers)
    for rank, ranked in plan.ranks.items():
        memory = {
            (row, 0): landing if isinstance(source, LandingSource) else trainers[source.rank][1]
            for row, source in enumerate(ranked.sources)
        }
        copies = CopyPlan(ranked.copies, targets[rank].buffers, memory)
        assert ranked.nbytes == copies.run({row: 0 for row, _ in memory})


def fetched(plan: NodePlan, trainers: Sequence[Held]) -> Payload:
    """Return the landing after all buckets."""
    landing = bytearray([POISON]) * plan.fetch.landing_nbytes
    assert all(isinstance(source, TrainerSource) for source in plan.fetch.sources)
    sources: list[Any] = [trainers[source.rank][1] for source in plan.fetch.sources]
    for b in plan.fetch.buckets:
        carry(plan.fetch.gather, range(b.first_row, b.last_row), sources, [landing])
    return np.frombuffer(landing, np.uint8)


def poisoned(declaration: Declaration) -> Params:
    """Return parameters as declared, full of NaN."""
    return {
        name: torch.full(found.shape, float("nan"), dtype=getattr(torch, found.dtype))
        for name, found in declaration.parameters().items()
    }


def differing(params: Params, expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the parameters that are not equal, element for element, to what is expected."""
    assert set(params) == set(expected)
    return [name for name, tensor in expected.items() if not torch.equal(params[name], tensor)]
