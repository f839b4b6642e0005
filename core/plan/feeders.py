"""Who feeds given rows of one tensor on one rank, and over which way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from weightd.core.plan.planner import feeding
from weightd.core.plan.violations import Region
from weightd.core.units import TrainerRank

if TYPE_CHECKING:
    from weightd.core.plan.proof import CoverageProof
    from weightd.core.roster.topology import Place, Topology
    from weightd.core.units import RolloutRank

Way = Literal["same slot", "same node", "remote"]


class Feeder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who feeds a box of a tensor on a rank."""

    region: Region
    trainer_rank: int
    node: str
    way: Way


def way_between(topology: Topology, trainer: TrainerRank, place: Place) -> Way:
    """Return how bytes of a trainer rank come to a place."""
    theirs = topology.trainers[trainer]
    if theirs == place:
        return "same slot"
    return "same node" if theirs.node == place.node else "remote"


def feeders(
    proof: CoverageProof, rank: RolloutRank, name: str, rows: tuple[int, int] | None = None
) -> tuple[Feeder, ...]:
    """Return who feeds a tensor, or its rows ``[rows[0], rows[1])``, on a rollout rank.

    Args:
        proof: The proof; the choice of sources is made again, as the planner makes it.
        rank: A rollout rank that was proved.
        name: Name of the tensor, or an alias of it, as the rank declares it.
        rows: Rows along dimension 0; all by default.

    Returns:
        Boxes in order, each with its source; empty where the rank needs none of them.

    Raises:
        KeyError: The rank declares no such name.
    """
    layout = proof.rollout_layouts[rank]
    canonical = dict(layout.aliases).get(name, name)
    listed = {t.name: row for row, t in enumerate(layout.tensors)}
    number = int(proof.catalog.target_numbers[rank][listed[canonical]])
    place = proof.topology.place(rank)
    ranks, fed = feeding(proof, place.node)
    mine = np.flatnonzero((fed.tensor == number) & (fed.rank == ranks.index(rank)))
    n = len(layout.tensors[listed[canonical]].shape)
    found = []
    for row in mine.tolist():
        start, extent, step = (c[row, :n].tolist() for c in (fed.meets.start, fed.meets.extent, fed.meets.step))
        if rows is not None and n:
            skipped = max(0, -(-(rows[0] - start[0]) // step[0]))
            extent[0] = min(extent[0], -(-(rows[1] - start[0]) // step[0])) - skipped
            start[0] += skipped * step[0]
        if n == 0 or extent[0] > 0:
            trainer = TrainerRank(int(fed.trainer[row]))
            region = Region(tuple(start), tuple(extent), tuple(step))
            node = proof.topology.trainers[trainer].node
            found.append(Feeder(region, trainer, node, way_between(proof.topology, trainer, place)))
    return tuple(sorted(found, key=lambda f: f.region.start))


def explain_feeders(rank: RolloutRank, name: str, shape: tuple[int, ...], fed: tuple[Feeder, ...]) -> str:
    """Return the answer of ``feeders`` as a text."""
    if not fed:
        return f"{name} on {rank}: the rank needs none of it"
    lines = [f"  {f.region.text(shape)} from trainer rank {f.trainer_rank} on {f.node} ({f.way})" for f in fed]
    return "\n".join([f"{name} on {rank}: {sum(f.region.numel for f in fed)} elements", *lines])
