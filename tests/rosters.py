"""Rosters and registrations for tests, small and uneven unless a test says otherwise."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from msgspec import structs

from weightd.core.errors import Refused, WeightdError
from weightd.core.roster.declared import RosterFile, roster_from_mapping
from weightd.core.roster.judge import judge
from weightd.core.roster.topology import EngineDecl, Registration, Roster, Topology
from weightd.core.units import Boot, EngineId, EngineRank, NodeId, RolloutRank, SlotName, TrainerRank


def a_table(**changes: Any) -> dict[str, Any]:
    """Return a sound roster table: nodes of 3 and 2 slots, an engine of 3 over both, an engine of 2 on the first."""
    table: dict[str, Any] = {
        "nodes": {"n0": [0, 1, 2], "n1": [3, 4]},
        "trainer_slots": [0, 1, 2, 3, 4],
        "engines": [{"id": "E0", "slots": [1, 2, 3]}, {"id": "E1", "slots": [0, 4]}],
        "mode": "colocated",
    }
    return {**table, **changes}


def a_file(**changes: Any) -> RosterFile:
    """Return the roster file of ``a_table``."""
    return roster_from_mapping(a_table(**changes))


def sizes_only(roster: Roster) -> Roster:
    """Return a roster as trainer rank 0 declares it: world and sizes, nodes and slots left to be measured."""
    engines = tuple(structs.replace(engine, slots=None) for engine in roster.engines)
    return structs.replace(roster, engines=engines, nodes=None, trainer_slots=None)


def a_sizes_roster(world: int, *sizes: int, **changes: Any) -> Roster:
    """Return a roster of sizes only, engines named E0, E1, …; colocated unless said otherwise."""
    engines = tuple(EngineDecl(f"E{i}", size) for i, size in enumerate(sizes))
    return Roster(world, engines, **{"mode": "colocated", **changes})


def live(file: RosterFile) -> tuple[Registration, ...]:
    """Return the registrations of a file as live ones, each of a process of its own from pid 1001."""
    return tuple(replace(r, pid=1001 + i) for i, r in enumerate(file.registrations()))


def trainer(rank: int, node: str, slot: str, world: int, pid: int = 501, boot: int = 1) -> Registration:
    """Return the registration of a trainer rank."""
    return Registration(TrainerRank(rank), world, NodeId(node), SlotName(slot), pid, Boot(boot))


def rollout(engine: str, k: int, node: str, slot: str, size: int, pid: int = 701, boot: int = 1) -> Registration:
    """Return the registration of a rollout rank."""
    return Registration(a_rank(engine, k), size, NodeId(node), SlotName(slot), pid, Boot(boot))


def a_rank(engine: str, k: int) -> RolloutRank:
    """Return a rollout rank."""
    return RolloutRank(EngineId(engine), EngineRank(k))


def verdict(file: RosterFile) -> tuple[WeightdError, ...]:
    """Return the violations of a file, none where it is accepted."""
    return violations_of(file.roster, file.registrations())


def table_verdict(table: Mapping[str, Any]) -> tuple[WeightdError, ...]:
    """Return the violations of a table, from reading it or from judging it."""
    try:
        return verdict(roster_from_mapping(table))
    except Refused as report:
        return report.violations


def violations_of(
    roster: Roster, registrations: tuple[Registration, ...], waited_s: float | None = None
) -> tuple[WeightdError, ...]:
    """Return the violations that ``judge`` reports, none where it returns a topology."""
    try:
        judge(roster, registrations, waited_s)
    except Refused as report:
        return report.violations
    return ()


def topology(file: RosterFile) -> Topology:
    """Return the topology of a sound file."""
    return judge(file.roster, file.registrations())
