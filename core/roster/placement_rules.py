"""The rules that a seating has to keep: no slot twice, none outside, modes kept, nobody left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from weightd.core.errors import WeightdError
from weightd.core.roster.counts import count_identity, coverage_of, hosting_split, placement_class, uncovered_ranks
from weightd.core.roster.seating import Seat, Seating
from weightd.core.roster.topology import Roster
from weightd.core.roster.violations import (
    EngineOutOfWorld,
    EnginePlacement,
    NodeTiling,
    SlotsOverlap,
    TrainerRanksUncovered,
)

if TYPE_CHECKING:
    from weightd.core.units import NodeId

Rule = Callable[[Seating, Roster], tuple[WeightdError, ...]]


def outside_engines(seating: Seating, _roster: Roster) -> tuple[WeightdError, ...]:
    """Return each engine that has slots on no node."""
    found: list[WeightdError] = []
    world = sum(seating.node_slots.values())
    for engine, seats in seating.engines:
        outside = sorted({s for s in seats if s.node is None}, key=lambda s: s.order)
        if outside:
            orders = [s.order for s in seats]
            labels = tuple(s.label for s in outside)
            count = len(set(seats))
            found.append(EngineOutOfWorld(engine, min(orders), max(orders) + 1, world, len(outside), count, labels))
    return tuple(found)


def overlaps(seating: Seating, _roster: Roster) -> tuple[WeightdError, ...]:
    """Return the slots that are claimed more than once, one error for each set of claimants."""
    claimants: dict[Seat, list[str]] = {}
    for engine, seats in seating.engines:
        for seat in seats:
            claimants.setdefault(seat, []).append(engine)
    shared: dict[tuple[str, ...], list[Seat]] = {}
    for seat in sorted(claimants, key=lambda s: s.order):
        if len(claimants[seat]) > 1:
            shared.setdefault(tuple(claimants[seat]), []).append(seat)
    return tuple(SlotsOverlap(tuple(s.label for s in seats), engines) for engines, seats in shared.items())


def misplaced_engines(seating: Seating, roster: Roster) -> tuple[WeightdError, ...]:
    """Return each engine whose placement the mode does not allow.

    An engine with slots on no node is left to ``outside_engines``: where it would
    be placed is not known.
    """
    found: list[WeightdError] = []
    for engine, seats in seating.engines:
        hosting, bare = hosting_split(seating, seats)
        if any(s.node is None for s in seats) or not seats:
            continue
        allowed = {
            "colocated": {"colocated"},
            "disaggregated": {"remote"},
            "mixed": {"colocated", "remote"},
        }[roster.mode]
        if roster.allow_mixed_engine and roster.mode != "disaggregated":
            allowed = allowed | {"mixed"}
        if placement_class(len(hosting), len(seats)) not in allowed:
            found.append(
                EnginePlacement(engine, tuple(s.label for s in hosting), tuple(s.label for s in bare), roster.mode)
            )
    return tuple(found)


def untiled_engines(seating: Seating, roster: Roster) -> tuple[WeightdError, ...]:
    """Return, under ``strict_tiling``, each engine in several nodes that does not fill them."""
    if not roster.strict_tiling:
        return ()
    found: list[WeightdError] = []
    for engine, seats in seating.engines:
        sizes = _shard_sizes(seats)
        if sizes is None or len(sizes) < 2 or all(seating.node_slots[n] == m for n, m in sizes.items()):
            continue
        capacity = tuple(seating.node_slots[n] for n in sizes)
        per_node = capacity[0] if len(set(capacity)) == 1 else capacity
        found.append(NodeTiling(engine, len(seats), per_node, tuple(sizes.values())))
    return tuple(found)


def uncovered(seating: Seating, roster: Roster) -> tuple[WeightdError, ...]:
    """Return the trainer ranks in no engine and not reserved, where the mode wants one of both."""
    counts = coverage_of(seating, roster.reserved, roster.mode)
    if not counts.uncovered:
        return ()
    ranks = uncovered_ranks(seating, roster.reserved)
    by_node: dict[str, tuple[int, ...]] = {}
    for r in ranks:
        node = seating.trainers[r].node
        assert node is not None, "coverage is judged once every trainer slot is on a node"
        by_node[node] = (*by_node.get(node, ()), int(r))
    return (
        TrainerRanksUncovered(
            world=counts.world,
            memberships=counts.memberships,
            covered=counts.covered,
            reserved=counts.reserved,
            uncovered=counts.uncovered,
            ranks=tuple(int(r) for r in ranks),
            by_node=by_node,
            engines=count_identity("engine", (len(seats) for _, seats in seating.engines)),
            excess=counts.excess,
            without_trainer=counts.without_trainer,
            on_no_node=counts.on_no_node,
        ),
    )


RULES_OF_ENGINES: tuple[Rule, ...] = (outside_engines, overlaps)
"""Rules that stand whatever else is wrong."""

RULES_OF_TRAINERS: tuple[Rule, ...] = (misplaced_engines, uncovered)
"""Rules that mean nothing while trainer slots are declared wrongly: one slip would be reported thrice."""


def _shard_sizes(seats: tuple[Seat, ...]) -> dict[NodeId, int] | None:
    """Return the sizes of an engine's node shards by smallest k, or None if a seat is on no node."""
    sizes: Counter[NodeId] = Counter()
    for seat in seats:
        if seat.node is None:
            return None
        sizes[seat.node] += 1
    return dict(sizes)
