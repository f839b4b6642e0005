"""From a declared roster and what attached to it, the topology, or the full report.

Everything is looked at before anything is raised, so that one report names
every fault.  A rule is left out only where an earlier fault makes it
meaningless; then it would repeat that fault under another name.

Coverage is judged against registrations: nodes are measured, slots are
identities, and a rank number is never divided by anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from weightd.core.errors import Refused, WeightdError
from weightd.core.roster.counts import check_i2
from weightd.core.roster.declaration_rules import declaration_faults, uncovered_by_size
from weightd.core.roster.hello import check_declared, declared_label, duplicate, expected_size
from weightd.core.roster.placement_rules import RULES_OF_ENGINES, RULES_OF_TRAINERS, untiled_engines
from weightd.core.roster.roster_error import split_rank
from weightd.core.roster.seating import (
    Seating,
    declared_seating,
    declared_seats,
    expected_ranks,
    measured_seating,
    topology_of,
)
from weightd.core.roster.topology import Registration, Roster, Topology
from weightd.core.roster.violations import RanksMissing
from weightd.core.units import RolloutRank, TrainerRank

Present = Mapping[TrainerRank | RolloutRank, Registration]

NOTHING_STARTED = "no epoch starts with this roster; engines keep what they serve"
"""Effect of every refused roster: no byte has moved yet."""


def judge_declared(roster: Roster) -> tuple[WeightdError, ...]:
    """Return every fault that a declaration has whoever attaches.

    With declared nodes and slots these are all rules of placement and coverage.
    With sizes only it is what numbers can say: sizes, names, reserved ranks and,
    in a colocated run, whether sizes add up to the world.
    """
    return _judge_seats(roster, declared_seating(roster))


def judge(
    roster: Roster, registrations: Iterable[Registration], waited_s: float | None = None, subject: str = "roster"
) -> Topology:
    """Return the topology of a roster whose ranks have all attached where they should.

    Args:
        roster: The declared roster.
        registrations: Every live registration; a process that registered twice counts once.
        waited_s: Seconds that ranks had to attach; None where nothing was waited for.
        subject: What the report says was refused, for instance ``run grpo-7``.

    Returns:
        Every declared rank with its place: the declared one, which registrations
        confirm, or the measured one where only sizes are declared.

    Raises:
        Refused: Every violation, of the declaration and of the registrations.
    """
    live = _distinct(registrations)
    known = set(expected_ranks(roster))
    present = {r.who: r for r in reversed(live) if r.who in known}
    seating = declared_seating(roster)
    if seating is None and len({engine.id for engine in roster.engines}) == len(roster.engines):
        seating = measured_seating(roster, present)
    waited = None if waited_s is None else round(waited_s, 1)
    violations = (*_judge_seats(roster, seating), *_judge_ranks(roster, live, present, waited))
    if violations:
        raise Refused(subject, violations, NOTHING_STARTED)
    assert seating is not None, "a missing rank is a violation"
    topology = topology_of(seating, roster)
    check_i2(topology)
    return topology


def _judge_seats(roster: Roster, seating: Seating | None) -> tuple[WeightdError, ...]:
    """Return the faults of the declaration and, as far as seats are known, of the seating."""
    faults = declaration_faults(roster, seating)
    if seating is None:
        return (*faults.all, *uncovered_by_size(roster))
    found = list(faults.all)
    for rule in RULES_OF_ENGINES:
        found += rule(seating, roster)
    if not faults.nodes:
        found += untiled_engines(seating, roster)
    if not faults.trainers:
        for rule in RULES_OF_TRAINERS:
            found += rule(seating, roster)
    return tuple(found)


def _judge_ranks(
    roster: Roster, live: list[Registration], present: Present, waited_s: float | None
) -> tuple[WeightdError, ...]:
    """Return the faults of registrations: misplaced and unknown, duplicate, missing."""
    seats = declared_seats(roster)
    found = [fault for r in live if (fault := check_declared(roster, r, seats)) is not None]
    claims: dict[TrainerRank | RolloutRank, list[Registration]] = {}
    for registration in live:
        claims.setdefault(registration.who, []).append(registration)
    for who, claimants in claims.items():
        if len(claimants) > 1 and who in present:
            found.append(duplicate(roster, claimants, live))
    return (*found, *_missing(roster, present, waited_s))


def _missing(roster: Roster, present: Present, waited_s: float | None) -> tuple[WeightdError, ...]:
    """Return the absent ranks, one error for the trainer and one for each engine."""
    absent: dict[str | None, list[TrainerRank | RolloutRank]] = {}
    for who in expected_ranks(roster):
        if who not in present:
            absent.setdefault(split_rank(who)[0], []).append(who)
    seats = declared_seats(roster)
    found: list[WeightdError] = []
    for engine, ranks in absent.items():
        by_node: dict[str, tuple[int, ...]] = {}
        for who in ranks:
            label = declared_label(roster, who)
            node = None if label is None else seats[str(label)].node
            if node is not None:
                by_node[node] = (*by_node.get(node, ()), split_rank(who)[1])
        numbers = tuple(split_rank(who)[1] for who in ranks)
        found.append(RanksMissing(engine, expected_size(roster, ranks[0]), numbers, by_node, waited_s))
    return tuple(found)


def _distinct(registrations: Iterable[Registration]) -> list[Registration]:
    """Return registrations, those of one process for one rank once."""
    kept: dict[object, Registration] = {}
    for r in registrations:
        kept.setdefault((split_rank(r.who), r.node, r.pid, r.boot), r)
    return list(kept.values())
