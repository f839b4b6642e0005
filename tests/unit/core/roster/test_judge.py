"""Registrations against a roster: the cases that speak of live ranks, with live ranks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.rosters import (
    a_file,
    a_rank,
    a_sizes_roster,
    live,
    rollout,
    sizes_only,
    topology,
    trainer,
    violations_of,
)
from weightd.core.errors import Refused, WeightdError
from weightd.core.roster.counts import groups, pairs
from weightd.core.roster.declared import RosterFile, roster_from_mapping
from weightd.core.roster.judge import judge
from weightd.core.roster.topology import EngineDecl, Place, Roster
from weightd.core.units import EngineId, NodeId, SlotName, TrainerRank

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[3] / "data" / "topology_cases.json").read_text())
FILES = {
    case["id"]: roster_from_mapping(case)
    for case in CASES
    if {e["code"] for e in case["expect"].get("errors", ())} <= {"E_RANK_MISSING", "E_RANK_DUP"}
}
SOUND = [name for name in FILES if name not in ("T20", "T21")]


def case_file(name: str) -> RosterFile:
    return roster_from_mapping(next(case for case in CASES if case["id"] == name))


def codes(found: tuple[WeightdError, ...]) -> list[str]:
    return [e.code for e in found]


@pytest.mark.parametrize("name", SOUND)
def test_sizes_alone_measure_what_slots_declare(name: str) -> None:
    """Every accepted case again as trainer rank 0 declares it: sizes, and the rest measured from live ranks."""
    file = FILES[name]
    measured = judge(sizes_only(file.roster), live(file), waited_s=1.0)

    assert measured == topology(file)


@pytest.mark.parametrize("name", SOUND)
def test_live_ranks_confirm_declared_slots(name: str) -> None:
    assert judge(FILES[name].roster, live(FILES[name])) == topology(FILES[name])


@pytest.mark.parametrize("declared", [True, False])
def test_missing_rank_after_the_deadline(declared: bool) -> None:
    file = case_file("T20")
    roster = file.roster if declared else sizes_only(file.roster)
    (error,) = violations_of(roster, live(file), waited_s=300.04)

    assert error.fields() == {
        "role": "rollout",
        "engine": "E0",
        "expected": 16,
        "registered": 15,
        "missing_k": [13],
        "node": "n1" if declared else "never attached",
        "by_node": {"n1": [13]} if declared else {},
        "waited_s": 300.0,
    }


@pytest.mark.parametrize("declared", [True, False])
def test_two_live_ranks_of_one_number(declared: bool) -> None:
    file = case_file("T21")
    roster = file.roster if declared else sizes_only(file.roster)
    (error,) = violations_of(roster, live(file))

    assert error.fields() == {
        "role": "rollout",
        "engine": "E0",
        "k": 3,
        "expected": 8,
        "registered": 9,
        "nodes": ("n0", "n0"),
        "pids": (1012, 1017),
        "runs": (),
    }


def test_permuted_devices_pair_by_slot() -> None:
    file = case_file("T22")
    shared = pairs(judge(sizes_only(file.roster), live(file)))[EngineId("E0")]

    assert [(p.k, p.trainer_rank) for p in shared] == [(0, 2), (1, 3), (2, 0), (3, 1)]


def test_same_slot_name_on_two_nodes_is_two_slots() -> None:
    """Devices are numbered from 0 on every node: a pair shares node and slot."""
    ranks = [
        trainer(0, "n0", "0", 2),
        trainer(1, "n1", "0", 2),
        rollout("E0", 0, "n1", "0", 2),
        rollout("E0", 1, "n0", "0", 2),
    ]
    judged = judge(a_sizes_roster(2, 2), ranks)

    assert [(p.k, p.trainer_rank) for p in pairs(judged)[EngineId("E0")]] == [(0, 1), (1, 0)]
    assert judged.trainers == (Place(NodeId("n0"), SlotName("0")), Place(NodeId("n1"), SlotName("0")))


def test_interleaved_ranks_are_grouped_by_measured_node() -> None:
    file = case_file("T28")
    shards = groups(judge(sizes_only(file.roster), live(file)))[EngineId("E1")]

    assert [(s.node, s.ranks) for s in shards] == [("n0", (0, 2, 4, 6)), ("n1", (1, 3, 5, 7))]


def test_measured_faults_name_slots_with_their_node() -> None:
    """Trainers on n0/a, n0/b, n1/a; E0 takes n0/b twice; E1 takes n1/c, where no trainer is."""
    ranks = [
        *(
            trainer(r, node, slot, 3, pid=501 + r)
            for r, (node, slot) in enumerate([("n0", "a"), ("n0", "b"), ("n1", "a")])
        ),
        rollout("E0", 0, "n0", "b", 2, pid=701),
        rollout("E0", 1, "n0", "b", 2, pid=702),
        rollout("E1", 0, "n1", "c", 1),
    ]
    overlap, mixed, uncovered = violations_of(a_sizes_roster(3, 2, 1), tuple(ranks))

    assert overlap.fields() == {"slots": ("n0/b",), "engines": ("E0", "E0")}
    assert mixed.fields()["without_trainer"] == ("n1/c",)
    assert uncovered.fields()["by_node"] == {"n0": (0,), "n1": (2,)}


def test_two_trainer_ranks_measured_on_one_slot() -> None:
    ranks = (trainer(0, "n0", "a", 2), trainer(1, "n0", "a", 2, pid=502), rollout("E0", 0, "n0", "b", 1))
    (error,) = violations_of(a_sizes_roster(2, 1, reserved=(1,)), ranks)

    assert (error.code, error.fields()["value"]) == ("E_ROSTER", "n0/a")
    assert "one slot for trainer ranks 0 and 1" in str(error)


def test_measured_nodes_hold_what_was_measured_under_strict_tiling() -> None:
    ranks = tuple(trainer(r, f"n{r // 2}", f"{r}", 4) for r in range(4)) + tuple(
        rollout("E0", k, f"n{(k + 1) // 2}", f"{k + 1}", 3) for k in range(3)
    )
    (error,) = violations_of(a_sizes_roster(4, 3, reserved=(0,), strict_tiling=True), ranks)

    assert [error.fields()[n] for n in ("slots_per_node", "shard_sizes")] == [2, (1, 2)]


def test_missing_ranks_of_trainer_and_engine_are_two_errors() -> None:
    ranks = (trainer(0, "n0", "a", 3), rollout("E0", 1, "n0", "a", 2))
    first, second = violations_of(a_sizes_roster(3, 2, reserved=(2,)), ranks, waited_s=5)

    assert [first.fields()[n] for n in ("role", "expected", "registered", "missing_ranks", "node", "waited_s")] == [
        "trainer",
        3,
        1,
        [1, 2],
        "never attached",
        5,
    ]
    assert [second.fields()[n] for n in ("engine", "expected", "registered", "missing_k")] == ["E0", 2, 1, [0]]


def test_missing_ranks_are_told_by_declared_node() -> None:
    file = a_file(absent=[{"engine": "E0", "k": 0}, {"engine": "E0", "k": 2}, {"engine": "E1", "k": 0}])
    first, second = violations_of(file.roster, live(file))

    assert [first.fields()[n] for n in ("missing_k", "node", "by_node")] == [[0, 2], "n0, n1", {"n0": [0], "n1": [2]}]
    assert [second.fields()[n] for n in ("missing_k", "node", "registered")] == [[0], "n0", 1]


def test_sizes_that_cannot_cover_are_told_beside_missing_ranks() -> None:
    found = violations_of(a_sizes_roster(3, 2), (trainer(0, "n0", "a", 3),))

    assert codes(found) == ["E_UNCOVERED", "E_RANK_MISSING", "E_RANK_MISSING"]


def test_ranks_that_are_not_of_the_roster_are_all_named() -> None:
    file = a_file()
    strangers = (rollout("E7", 0, "n0", "0", 1), trainer(5, "n0", "0", 5), rollout("E0", 0, "n0", "1", 4, boot=9))
    found = violations_of(file.roster, (*live(file), *strangers))

    assert [(e.code, e.fields().get("reason")) for e in found] == [
        ("E_RANK_UNKNOWN", "engine"),
        ("E_RANK_UNKNOWN", "number"),
        ("E_RANK_UNKNOWN", "size"),
        ("E_RANK_DUP", None),
    ]


def test_misplaced_rank_is_not_called_missing_as_well() -> None:
    file = a_file()
    moved = [replace(r, node=NodeId("n1")) if r.who == a_rank("E0", 1) else r for r in live(file)]
    (error,) = violations_of(file.roster, tuple(moved))

    assert [error.fields()[n] for n in ("k", "declared_node", "measured_node")] == [1, "n0", "n1"]


def test_one_process_that_registers_twice_is_one() -> None:
    file = a_file()

    assert judge(file.roster, [*live(file), *live(file)]) == topology(file)


def test_engines_of_one_id_by_sizes_are_one_fault() -> None:
    roster = Roster(2, (EngineDecl("E0", 1), EngineDecl("E0", 1)), mode="disaggregated")
    ranks = (trainer(0, "n0", "a", 2), trainer(1, "n0", "b", 2), rollout("E0", 0, "n0", "c", 1))

    assert [(e.code, e.fields()["field"]) for e in violations_of(roster, ranks)] == [("E_ROSTER", "engines")]


def test_slots_without_nodes_are_compared_by_name() -> None:
    roster = Roster(1, (EngineDecl("E0", 1, ("gpu-b",)),), mode="disaggregated")
    right = (trainer(0, "n0", "gpu-a", 1), rollout("E0", 0, "n0", "gpu-b", 1))
    (error,) = violations_of(roster, (right[0], rollout("E0", 0, "n0", "gpu-c", 1)))

    assert judge(roster, right).place(TrainerRank(0)) == Place(NodeId("n0"), SlotName("gpu-a"))
    assert [error.fields()[n] for n in ("node", "expected_slot", "got_slot")] == ["n0", "gpu-b", "gpu-c"]


def test_report_says_what_was_refused_and_what_it_means() -> None:
    with pytest.raises(Refused) as report:
        judge(a_sizes_roster(1, 1), (), 5.0, subject="run grpo-7")

    assert str(report.value).startswith("E_REFUSED: run grpo-7 refused: 2 violations\n")
    assert str(report.value).endswith("\n  no epoch starts with this roster; engines keep what they serve")


def test_reserved_ranks_and_mode_reach_the_topology() -> None:
    judged = topology(a_file(engines=[{"id": "E0", "slots": [0, 1, 2, 3]}], reserved_trainer_ranks=[4]))

    assert (judged.reserved, judged.mode, judged.nodes) == (frozenset({4}), "colocated", ("n0", "n1"))
