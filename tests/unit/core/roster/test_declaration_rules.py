"""What is no topology at all, and what sizes alone can tell."""

from typing import Any

import pytest

from tests.rosters import a_sizes_roster, a_table, table_verdict
from weightd.core.errors import WeightdError
from weightd.core.roster.judge import judge_declared
from weightd.core.roster.topology import EngineDecl, Roster


def values(found: tuple[WeightdError, ...]) -> list[tuple[str, Any]]:
    assert {e.code for e in found} <= {"E_ROSTER"}
    return [(e.fields()["field"], e.fields()["value"]) for e in found]


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"reserved_trainer_ranks": [5]}, [("reserved_trainer_ranks", 5)]),
        ({"reserved_trainer_ranks": [-1, 7]}, [("reserved_trainer_ranks", -1), ("reserved_trainer_ranks", 7)]),
        ({"reserved_trainer_ranks": [4]}, [("reserved_trainer_ranks", 4)]),
        ({"trainer_slots": [0, 1, 2, 3, 3]}, [("trainer_slots", 3)]),
        ({"trainer_slots": [0, 1, 2, 3, 9]}, [("trainer_slots", 9)]),
        ({"trainer_slots": []}, [("trainer_slots", 0)]),
        ({"nodes": {"n0": [0, 1, 2], "n1": [2, 3, 4]}}, [("nodes", 2)]),
        ({"nodes": {"n0": [0, 1, 2, 2], "n1": [3, 4]}}, [("nodes", 2)]),
        ({"nodes": {"n0": [0, 1, 2], "n1": [3, 4, "2"]}}, [("nodes", 2)]),
        ({"engines": [{"id": "E0", "slots": [0, 1]}, {"id": "E0", "slots": [2, 3, 4]}]}, [("engines", "E0")]),
    ],
)
def test_no_topology(changes: dict[str, Any], expected: list[tuple[str, Any]]) -> None:
    assert values(table_verdict(a_table(**changes))) == expected


def test_reserved_and_covered_names_slot_and_engine() -> None:
    (error,) = table_verdict(a_table(reserved_trainer_ranks=[3]))

    assert "reserved, yet its slot 3 is in engine E0" in str(error)


def test_reserved_and_covered_counts_as_covered() -> None:
    """Ranks 0-2 are covered, 2 is reserved besides, 3 is reserved, 4 is left: 3 + 1 + 1 = 5."""
    table = a_table(engines=[{"id": "E0", "slots": [0, 1, 2]}], reserved_trainer_ranks=[2, 3])
    found = {e.code: e.fields() for e in table_verdict(table)}

    assert set(found) == {"E_ROSTER", "E_UNCOVERED"}
    assert [found["E_UNCOVERED"][n] for n in ("covered", "reserved", "uncovered")] == [3, 1, 1]


def test_reserved_twice_is_reserved_once() -> None:
    table = a_table(engines=[{"id": "E0", "slots": [0, 1, 2]}], reserved_trainer_ranks=[3, 3])
    (error,) = table_verdict(table)

    assert [error.fields()[n] for n in ("covered", "reserved", "uncovered")] == [3, 1, 1]


def test_a_slip_in_trainer_slots_is_reported_once_beside_what_stands_without_it() -> None:
    table = a_table(trainer_slots=[0, 1, 2, 3, 3], engines=[{"id": "E0", "slots": [0, 1, 1, 9]}])

    assert [e.code for e in table_verdict(table)] == ["E_ROSTER", "E_OUT_OF_WORLD", "E_OVERLAP"]


def test_an_engine_of_no_slots() -> None:
    table = a_table(engines=[{"id": "E0", "slots": [0, 1, 2, 3, 4]}, {"id": "E1", "slots": []}])
    (error,) = table_verdict(table)

    assert error.fields() == {"engine": "E1", "count": 0}


def test_all_uncovered_without_any_engine() -> None:
    (error,) = table_verdict(a_table(engines=[]))

    assert [error.fields()[n] for n in ("covered", "uncovered", "engines")] == [0, 5, "0 engines = 0"]


def test_declared_lengths_have_to_agree() -> None:
    roster = Roster(
        3,
        (EngineDecl("E0", 2, (0, 1, 2)),),
        mode="colocated",
        nodes={"n0": (0, 1, 2)},
        trainer_slots=(0, 1),
    )
    shape, value = judge_declared(roster)

    assert shape.fields() == {"engine": "E0", "count": 2, "slots": 3}
    assert (value.code, value.fields()["field"], value.fields()["value"]) == ("E_ROSTER", "trainer_slots", 2)


def test_sizes_that_cannot_cover_the_world_are_refused_before_anybody_attaches() -> None:
    """Field report: spans [4] declared for a world of 8; the report shows 8, 1 and 4."""
    (error,) = judge_declared(a_sizes_roster(8, 4))

    assert [error.fields()[n] for n in ("world", "covered", "uncovered", "ranks")] == [8, 4, 4, ()]
    assert error.fields()["engines"] == "1 engine x 4 = 4"


def test_sizes_beyond_the_world() -> None:
    (error,) = judge_declared(a_sizes_roster(8, 4, 6, reserved=(0,)))

    assert (error.code, error.fields()["value"]) == ("E_ROSTER", "1 engine x 4 + 1 engine x 6 = 10")
    assert "1 reserved + 10 in engines are 3 more than the 8 trainer ranks" in str(error)


@pytest.mark.parametrize("roster", [a_sizes_roster(8, 4, 4), a_sizes_roster(8, 3, 3, reserved=(0, 5))])
def test_sizes_that_add_up(roster: Roster) -> None:
    assert judge_declared(roster) == ()


@pytest.mark.parametrize("mode", ["disaggregated", "mixed"])
def test_sizes_say_nothing_where_engines_may_be_off_trainer_slots(mode: str) -> None:
    assert judge_declared(a_sizes_roster(8, 3, mode=mode)) == ()


def test_faults_of_a_roster_of_sizes() -> None:
    roster = Roster(0, (EngineDecl("E0", 0), EngineDecl("E0", 2)), reserved=(1,), mode="colocated")

    assert [(e.code, e.fields().get("field")) for e in judge_declared(roster)] == [
        ("E_SHAPE", None),
        ("E_ROSTER", "engines"),
        ("E_ROSTER", "reserved_trainer_ranks"),
        ("E_ROSTER", "trainer_slots"),
    ]
