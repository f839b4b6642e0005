"""What a declared roster has to keep by itself: names, numbers and lengths that can be a topology at all."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightd.core.errors import WeightdError
from weightd.core.roster.counts import count_identity
from weightd.core.roster.violations import RosterShape, RosterValue, TrainerRanksUncovered

if TYPE_CHECKING:
    from weightd.core.roster.seating import Seating
    from weightd.core.roster.topology import Roster, SlotLabel


@dataclass(frozen=True, slots=True)
class DeclarationFaults:
    """The faults of a declaration, by what they make impossible to judge.

    Attributes:
        engines: Sizes, names and reserved ranks.
        trainers: Trainer slots; without sound ones coverage and placement mean nothing.
        nodes: Nodes; without sound ones node shards mean nothing.
    """

    engines: tuple[WeightdError, ...]
    trainers: tuple[WeightdError, ...]
    nodes: tuple[WeightdError, ...]

    @property
    def all(self) -> tuple[WeightdError, ...]:
        """Every fault."""
        return (*self.engines, *self.trainers, *self.nodes)


def declaration_faults(roster: Roster, seating: Seating | None) -> DeclarationFaults:
    """Return what is wrong with a declaration by itself.

    Args:
        roster: The declaration.
        seating: Its declared seating, or the measured one, or None while neither is known.
    """
    return DeclarationFaults(
        (*_engine_faults(roster), *_reserved_faults(roster, seating)),
        _trainer_faults(roster, seating),
        _node_faults(roster),
    )


def uncovered_by_size(roster: Roster) -> tuple[WeightdError, ...]:
    """Return the verdict on coverage that sizes alone allow, before any rank attached.

    Only a colocated run allows one: each rank of an engine sits on the slot of
    one trainer rank, so sizes and reserved ranks have to add up to the world.
    """
    if roster.mode != "colocated" or roster.world < 1 or any(engine.size < 1 for engine in roster.engines):
        return ()
    sizes = [engine.size for engine in roster.engines]
    reserved = len({r for r in roster.reserved if 0 <= r < roster.world})
    left = roster.world - sum(sizes) - reserved
    line = count_identity("engine", sizes)
    if left < 0:
        why = f"{reserved} reserved + {sum(sizes)} in engines are {-left} more than the {roster.world} trainer ranks"
        return (RosterValue("engines", line, why),)
    if left == 0:
        return ()
    return (TrainerRanksUncovered(roster.world, sum(sizes), sum(sizes), reserved, left, (), {}, line),)


def _engine_faults(roster: Roster) -> tuple[WeightdError, ...]:
    """Return engines of no rank, with another number of slots than ranks, or of one name."""
    faults: list[WeightdError] = []
    for engine in roster.engines:
        if engine.size < 1:
            faults.append(RosterShape(engine=engine.id, count=engine.size))
        elif engine.slots is not None and len(engine.slots) != engine.size:
            faults.append(RosterShape(engine=engine.id, count=engine.size, slots=len(engine.slots)))
    names = Counter(engine.id for engine in roster.engines)
    faults += [RosterValue("engines", name, f"{n} engines of one id") for name, n in names.items() if n > 1]
    return tuple(faults)


def _reserved_faults(roster: Roster, seating: Seating | None) -> tuple[WeightdError, ...]:
    """Return reserved ranks outside the world, and those that an engine covers."""
    faults: list[WeightdError] = []
    engines_on = {seat: engine for engine, seats in seating.engines for seat in seats} if seating else {}
    for r in sorted(set(roster.reserved)):
        if not 0 <= r < roster.world:
            why = f"outside the world of {roster.world}, whose ranks count from 0"
            faults.append(RosterValue("reserved_trainer_ranks", r, why))
        elif seating and r < len(seating.trainers) and seating.trainers[r] in engines_on:
            seat = seating.trainers[r]
            why = f"reserved, yet its slot {seat.label} is in engine {engines_on[seat]}"
            faults.append(RosterValue("reserved_trainer_ranks", r, why))
    return tuple(faults)


def _trainer_faults(roster: Roster, seating: Seating | None) -> tuple[WeightdError, ...]:
    """Return a world without ranks, slots that two trainer ranks share, and slots on no node."""
    faults: list[WeightdError] = []
    if roster.world < 1:
        faults.append(RosterValue("trainer_slots", roster.world, "trainer ranks; a run has at least 1"))
    if roster.trainer_slots is not None and len(roster.trainer_slots) != roster.world:
        why = f"slots for a world of {roster.world}: one for each trainer rank"
        faults.append(RosterValue("trainer_slots", len(roster.trainer_slots), why))
    ranks_on: dict[SlotLabel, list[int]] = {}
    for r, seat in enumerate(seating.trainers if seating else ()):
        ranks_on.setdefault(seat.label, []).append(r)
        if seat.node is None:
            faults.append(RosterValue("trainer_slots", seat.label, f"the slot of trainer rank {r} is on no node"))
    for label, ranks in ranks_on.items():
        if len(ranks) > 1:
            why = f"one slot for trainer ranks {' and '.join(map(str, ranks))}"
            faults.append(RosterValue("trainer_slots", label, why))
    return tuple(faults)


def _node_faults(roster: Roster) -> tuple[WeightdError, ...]:
    """Return slots that are listed on two nodes, or twice on one."""
    nodes_of: dict[str, tuple[SlotLabel, list[str]]] = {}
    for node, slots in (roster.nodes or {}).items():
        for label in slots:
            nodes_of.setdefault(str(label), (label, []))[1].append(node)
    return tuple(
        RosterValue("nodes", label, f"the slot is listed on {' and on '.join(nodes)}")
        for label, nodes in nodes_of.values()
        if len(nodes) > 1
    )
