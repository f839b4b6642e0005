"""Who sits on which slot, before anybody has judged whether that may be so.

A ``Seating`` can hold every fault that a roster can have: a slot claimed
twice, a slot on no node, a trainer rank in no engine.  It has one maker for
each form of a roster: declared slots, or measured registrations.  The rules in
``placement_rules`` look at it and never at its origin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightd.core.roster.topology import Place, Registration, Roster, SlotLabel, Topology
from weightd.core.units import EngineId, EngineRank, NodeId, RolloutRank, SlotName, TrainerRank

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True)
class Seat:
    """One slot.  Two seats of a seating are the same slot exactly when they are equal.

    Attributes:
        label: How texts call it: as declared, or ``node/slot`` where measured.
        name: The device or declared place.
        node: Its node, None where it is on none.
        order: Its number in the global order of slots; a label for ranges, no address.
    """

    label: SlotLabel
    name: SlotName
    node: NodeId | None
    order: int


@dataclass(frozen=True, slots=True)
class Seating:
    """The seat of every rank.

    Attributes:
        trainers: Seat of trainer rank r at position r.
        engines: Engine name with the seat of rank k at position k, in the declared order.
        node_slots: Number of slots of each node.
    """

    trainers: tuple[Seat, ...]
    engines: tuple[tuple[EngineId, tuple[Seat, ...]], ...]
    node_slots: dict[NodeId, int]

    @property
    def trainer_of(self) -> dict[Seat, TrainerRank]:
        """The trainer rank that each seat hosts; the lowest where several claim it."""
        return {seat: TrainerRank(r) for r, seat in reversed(list(enumerate(self.trainers)))}


def declared_seats(roster: Roster) -> dict[str, Seat]:
    """Return the seat of every slot that a roster speaks of, by the text of its label.

    A live rank says its slot as text, so ``3`` and ``"3"`` are one slot.  Numbers
    are their own place in the global order where all labels are numbers; names
    are numbered as declared, first those of the nodes, then those on no node.
    """
    nodes = roster.nodes or {}
    node_of = {str(s): NodeId(n) for n, slots in reversed(nodes.items()) for s in slots}
    labels: dict[str, SlotLabel] = {}
    for label in _labels_of(roster):
        labels.setdefault(str(label), label)
    numbered = all(isinstance(label, int) for label in labels.values())
    return {
        key: Seat(label, SlotName(key), node_of.get(key), label if numbered and isinstance(label, int) else position)
        for position, (key, label) in enumerate(labels.items())
    }


def declared_seating(roster: Roster) -> Seating | None:
    """Return the seating that a roster declares, or None where it declares sizes only."""
    if roster.nodes is None or roster.trainer_slots is None:
        return None
    if any(engine.slots is None for engine in roster.engines):
        return None
    seats = declared_seats(roster)
    return Seating(
        tuple(seats[str(label)] for label in roster.trainer_slots),
        tuple((EngineId(e.id), tuple(seats[str(label)] for label in e.slots or ())) for e in roster.engines),
        {NodeId(node): len({str(s) for s in slots}) for node, slots in roster.nodes.items()},
    )


def measured_seating(roster: Roster, present: Mapping[TrainerRank | RolloutRank, Registration]) -> Seating | None:
    """Return the seating that was measured, or None while a declared rank is absent.

    The slots of a node are those that hold a rank of the run: more of it was not measured.
    """
    if any(who not in present for who in expected_ranks(roster)):
        return None
    places = {who: Place(r.node, r.slot) for who, r in present.items()}
    return _seating_of_places(
        tuple(places[TrainerRank(r)] for r in range(roster.world)),
        tuple(
            (EngineId(e.id), tuple(places[RolloutRank(EngineId(e.id), EngineRank(k))] for k in range(e.size)))
            for e in roster.engines
        ),
    )


def seating_of(topology: Topology) -> Seating:
    """Return a judged topology as a seating, for what is counted in both."""
    return _seating_of_places(topology.trainers, tuple(topology.engines.items()))


def topology_of(seating: Seating, roster: Roster) -> Topology:
    """Return the topology of a seating in which no rule found a fault: every seat is on a node."""
    return Topology(
        tuple(_place(seat) for seat in seating.trainers),
        {engine: tuple(_place(seat) for seat in seats) for engine, seats in seating.engines},
        frozenset(TrainerRank(r) for r in roster.reserved),
        roster.mode,
    )


def expected_ranks(roster: Roster) -> tuple[TrainerRank | RolloutRank, ...]:
    """Return every declared rank: the trainer's, then each engine's by k.

    Of several engines of one id, which is a fault of its own, the first counts.
    """
    ranks: list[TrainerRank | RolloutRank] = [TrainerRank(r) for r in range(roster.world)]
    sizes: dict[str, int] = {}
    for engine in roster.engines:
        sizes.setdefault(engine.id, engine.size)
    for name, size in sizes.items():
        ranks += (RolloutRank(EngineId(name), EngineRank(k)) for k in range(size))
    return tuple(ranks)


def _labels_of(roster: Roster) -> Iterable[SlotLabel]:
    """Yield every label of a roster, those of the nodes first."""
    for slots in (roster.nodes or {}).values():
        yield from slots
    yield from roster.trainer_slots or ()
    for engine in roster.engines:
        yield from engine.slots or ()


def _seating_of_places(trainers: tuple[Place, ...], engines: tuple[tuple[EngineId, tuple[Place, ...]], ...]) -> Seating:
    """Return the seating of places, numbered in sorted order."""
    places = {*trainers, *(p for _, ps in engines for p in ps)}
    ordered = sorted(places, key=lambda p: (p.node, p.slot))
    seats = {p: Seat(str(p), p.slot, p.node, order) for order, p in enumerate(ordered)}
    node_slots: dict[NodeId, int] = {}
    for place in ordered:
        node_slots[place.node] = node_slots.get(place.node, 0) + 1
    return Seating(
        tuple(seats[p] for p in trainers), tuple((e, tuple(seats[p] for p in ps)) for e, ps in engines), node_slots
    )


def _place(seat: Seat) -> Place:
    """Return where a seat is."""
    assert seat.node is not None, "a seat on no node is E_OUT_OF_WORLD or E_ROSTER and never gets here"
    return Place(seat.node, seat.name)
