"""One rank against the roster: what its hello alone can get wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from weightd.core.roster.roster_error import split_rank
from weightd.core.roster.seating import Seat, declared_seats
from weightd.core.roster.violations import GpuMismatch, NodeMismatch, RankDuplicate, RankUnknown
from weightd.core.units import RolloutRank, TrainerRank

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from weightd.core.errors import WeightdError
    from weightd.core.roster.topology import EngineDecl, Registration, Roster, SlotLabel


def check_hello(roster: Roster, registration: Registration, present: Iterable[Registration]) -> WeightdError | None:
    """Return what keeps a rank from being registered, or None.

    The first fault only: a rank of an unknown engine has no declared slot to be compared with.

    Args:
        roster: The declared roster.
        registration: The rank that says hello, as measured.
        present: The live registrations of the run.  An entry of the same process is
            the rank itself, saying hello again.
    """
    fault = check_declared(roster, registration, declared_seats(roster))
    if fault is not None:
        return fault
    others = [r for r in present if not same_process(r, registration)]
    rivals = [r for r in others if r.who == registration.who]
    return duplicate(roster, [*rivals, registration], [*others, registration]) if rivals else None


def check_declared(roster: Roster, registration: Registration, seats: Mapping[str, Seat]) -> WeightdError | None:
    """Return how a rank differs from its declaration, whoever else is there.

    Args:
        roster: The declared roster.
        registration: The rank.
        seats: ``declared_seats(roster)``, which is the same for every rank.
    """
    engine = engine_of(roster, registration.who)
    name, number = split_rank(registration.who)
    expected = expected_size(roster, registration.who)
    if name is not None and engine is None:
        return _unknown(roster, registration, "engine")
    if not 0 <= number < expected:
        return _unknown(roster, registration, "number")
    if registration.size != expected:
        return _unknown(roster, registration, "size")
    label = declared_label(roster, registration.who)
    if label is None:
        return None
    node = seats[str(label)].node
    if node is not None and node != registration.node:
        return NodeMismatch(name, number, node, registration.node, registration.pid)
    if str(label) != registration.slot:
        return GpuMismatch(name, number, registration.node, str(label), registration.slot, registration.pid)
    return None


def duplicate(roster: Roster, claimants: list[Registration], present: Iterable[Registration]) -> RankDuplicate:
    """Return the error for several live claimants of one declared rank.

    Args:
        roster: The declared roster.
        claimants: The registrations of that rank, at least two.
        present: All live registrations, the claimants included.
    """
    who = claimants[0].who
    name, number = split_rank(who)
    # A file names no process, and a list of zeros would look as if it did.
    pids = tuple(r.pid for r in claimants) if all(r.pid for r in claimants) else ()
    registered = sum(split_rank(r.who)[0] == name for r in present)
    nodes = tuple(str(r.node) or "no node" for r in claimants)
    return RankDuplicate(name, number, expected_size(roster, who), registered, nodes, pids)


def engine_of(roster: Roster, who: TrainerRank | RolloutRank) -> EngineDecl | None:
    """Return the declared engine of a rollout rank; None for a trainer rank or an unknown engine."""
    if not isinstance(who, RolloutRank):
        return None
    return next((engine for engine in roster.engines if engine.id == who.engine), None)


def expected_size(roster: Roster, who: TrainerRank | RolloutRank) -> int:
    """Return the declared size of the engine of a rank, or the world; 0 for an unknown engine."""
    if not isinstance(who, RolloutRank):
        return roster.world
    engine = engine_of(roster, who)
    return 0 if engine is None else engine.size


def declared_label(roster: Roster, who: TrainerRank | RolloutRank) -> SlotLabel | None:
    """Return the declared slot of a rank, or None where none is declared."""
    if isinstance(who, RolloutRank):
        engine = engine_of(roster, who)
        slots, number = (None, 0) if engine is None else (engine.slots, int(who.k))
    else:
        slots, number = roster.trainer_slots, int(who)
    return slots[number] if slots is not None and number < len(slots) else None


def same_process(one: Registration, other: Registration) -> bool:
    """Return whether two registrations are of one process that says the same rank."""
    return (one.who, one.node, one.pid, one.boot) == (other.who, other.node, other.pid, other.boot)


def _unknown(roster: Roster, registration: Registration, reason: Literal["engine", "number", "size"]) -> RankUnknown:
    """Return the error for a rank that the roster does not have."""
    name, number = split_rank(registration.who)
    return RankUnknown(
        name,
        number,
        reason,
        expected_size(roster, registration.who),
        registration.size,
        registration.node,
        registration.pid,
        tuple(engine.id for engine in roster.engines),
    )
