"""What is counted of a topology: coverage, placement, pairs, and the conservation identities.

The identities are printed so that a reader can add them up; I1 and I2 are
also checked, because a count that does not add up is our fault and must not
pass for a roster's.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from weightd.core.errors import InternalInvariantBroken
from weightd.core.roster.roster_error import plural
from weightd.core.roster.seating import Seat, Seating, seating_of
from weightd.core.units import EngineId, EngineRank, TrainerRank

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightd.core.roster.topology import Mode, NodeShard, Placement, Topology


class CoverageCounts(NamedTuple):
    """Both sides of conservation identity I1, each of its numbers counted by itself.

    ``covered + reserved + uncovered + source_only == world`` and
    ``memberships == covered + excess + without_trainer + on_no_node``.

    Attributes:
        world: Trainer ranks W.
        covered: Distinct trainer ranks in at least one engine.
        reserved: Trainer ranks declared to be in no engine, and in none.
        uncovered: Trainer ranks in no engine and not reserved; 0 in a disaggregated run.
        source_only: The same in a disaggregated run, where it is no fault.
        memberships: Sum of the engine sizes.
        excess: Memberships of a slot beyond its first.
        without_trainer: Slots of engines that are on a node and host no trainer rank.
        on_no_node: Slots of engines that are on no node.
    """

    world: int
    covered: int
    reserved: int
    uncovered: int
    source_only: int
    memberships: int
    excess: int
    without_trainer: int
    on_no_node: int


class SlotPair(NamedTuple):
    """A rollout rank and the trainer rank on the same slot."""

    k: EngineRank
    trainer_rank: TrainerRank


def coverage_of(seating: Seating, reserved: Iterable[int], mode: Mode) -> CoverageCounts:
    """Return the counts of a seating, faulty or not.

    Raises:
        InternalInvariantBroken: The counts do not add up.
    """
    claims = Counter(seat for _, seats in seating.engines for seat in seats)
    trainer_seats = set(seating.trainers)
    free = uncovered_ranks(seating, ())
    held = set(free) & {TrainerRank(r) for r in reserved}
    left = len(free) - len(held)
    counts = CoverageCounts(
        world=len(seating.trainers),
        covered=sum(seat in claims for seat in seating.trainers),
        reserved=len(held),
        uncovered=0 if mode == "disaggregated" else left,
        source_only=left if mode == "disaggregated" else 0,
        memberships=sum(len(seats) for _, seats in seating.engines),
        excess=sum(claims.values()) - len(claims),
        without_trainer=sum(seat.node is not None and seat not in trainer_seats for seat in claims),
        on_no_node=sum(seat.node is None and seat not in trainer_seats for seat in claims),
    )
    check_i1(counts)
    return counts


def coverage_counts(topology: Topology) -> CoverageCounts:
    """Return the counts of a topology."""
    return coverage_of(seating_of(topology), topology.reserved, topology.mode)


def uncovered_ranks(seating: Seating, reserved: Iterable[int]) -> tuple[TrainerRank, ...]:
    """Return the trainer ranks whose seat no engine has and that are not reserved."""
    claimed = {seat for _, seats in seating.engines for seat in seats}
    spared = set(reserved)
    return tuple(TrainerRank(r) for r, seat in enumerate(seating.trainers) if seat not in claimed and r not in spared)


def check_i1(counts: CoverageCounts) -> None:
    """Check conservation identity I1, on the side of the trainer and on that of the engines.

    Raises:
        InternalInvariantBroken: A rank or a membership was counted twice or not at all.
    """
    ranks = counts.covered + counts.reserved + counts.uncovered + counts.source_only
    slots = counts.covered + counts.excess + counts.without_trainer + counts.on_no_node
    if ranks != counts.world or slots != counts.memberships:
        raise InternalInvariantBroken("I1", str(counts))


def check_i2(topology: Topology) -> None:
    """Check conservation identity I2: the node shards of an engine are disjoint and add up to its size.

    Raises:
        InternalInvariantBroken: A rank is in no node shard or in two.
    """
    for engine, places in topology.engines.items():
        ranks = sorted(k for shard in topology.group(engine) for k in shard.ranks)
        if ranks != list(range(len(places))):
            raise InternalInvariantBroken("I2", f"{engine} of {len(places)} has node shards with ranks {ranks}")


def groups(topology: Topology) -> dict[EngineId, tuple[NodeShard, ...]]:
    """Return the node shards of every engine, ordered by their heads."""
    return {engine: topology.group(engine) for engine in topology.engines}


def placement(topology: Topology) -> dict[EngineId, Placement]:
    """Return whether all, none or some of the slots of each engine host a trainer rank."""
    hosting = set(topology.trainers)
    return {
        engine: placement_class(sum(place in hosting for place in places), len(places))
        for engine, places in topology.engines.items()
    }


def placement_class(hosting: int, size: int) -> Placement:
    """Return the placement of an engine with ``hosting`` of ``size`` slots on trainer slots."""
    if hosting == 0:
        return "remote"
    return "colocated" if hosting == size else "mixed"


def pairs(topology: Topology) -> dict[EngineId, tuple[SlotPair, ...]]:
    """Return which rollout rank shares its slot with which trainer rank.

    By identity of the slot, never by position: devices may be permuted between the two sides.
    """
    rank_of = {place: TrainerRank(r) for r, place in enumerate(topology.trainers)}
    return {
        engine: tuple(SlotPair(EngineRank(k), rank_of[place]) for k, place in enumerate(places) if place in rank_of)
        for engine, places in topology.engines.items()
    }


def identities(topology: Topology) -> tuple[str, ...]:
    """Return the two legal countings of the engines' slots as lines; their sums are equal.

    They are engines by size and node shards by size.  Mixing the two (one engine
    counted with the size of one of its node shards) is how an engine over several
    nodes was once refused.
    """
    shards = [len(shard.ranks) for engine in topology.engines for shard in topology.group(engine)]
    return (
        count_identity("engine", (len(places) for places in topology.engines.values())),
        count_identity("node shard", shards),
    )


def count_identity(noun: str, sizes: Iterable[int]) -> str:
    """Return a counting by size as one line, sizes in the order of their first appearance.

    >>> count_identity("engine", [4, 6, 6])
    '1 engine x 4 + 2 engines x 6 = 16'
    """
    counted = Counter(sizes)
    terms = [f"{plural(number, noun)} x {size}" for size, number in counted.items()]
    return f"{' + '.join(terms) or plural(0, noun)} = {sum(size * number for size, number in counted.items())}"


def hosting_split(seating: Seating, seats: tuple[Seat, ...]) -> tuple[tuple[Seat, ...], tuple[Seat, ...]]:
    """Return the seats that host a trainer rank, and those that host none."""
    hosting = set(seating.trainers)
    return tuple(s for s in seats if s in hosting), tuple(s for s in seats if s not in hosting)
