"""Placement and coverage of declared slots: the edges that the cases leave out."""

from typing import Any

import pytest

from tests.rosters import a_table, table_verdict
from weightd.core.errors import WeightdError
from weightd.core.roster import violations as v


def engines(*slots: list[Any]) -> list[dict[str, Any]]:
    return [{"id": f"E{i}", "slots": listed} for i, listed in enumerate(slots)]


def facts(error: WeightdError, *names: str) -> list[Any]:
    return [error.fields()[name] for name in names]


def test_sound_table_has_no_violation() -> None:
    assert table_verdict(a_table()) == ()


@pytest.mark.parametrize(
    "mode, opted_in, slots, refused",
    [
        ("colocated", False, [1, 2, 5], True),
        ("colocated", True, [1, 2, 5], False),
        ("colocated", True, [5, 6], True),
        ("colocated", False, [5, 6], True),
        ("mixed", False, [1, 2, 5], True),
        ("mixed", True, [1, 2, 5], False),
        ("mixed", False, [5, 6], False),
        ("mixed", False, [1, 2], False),
        ("disaggregated", False, [5, 6], False),
        ("disaggregated", False, [1, 5], True),
        ("disaggregated", True, [1, 5], True),
        ("disaggregated", False, [1, 2], True),
    ],
)
def test_placement_against_mode(mode: str, opted_in: bool, slots: list[int], refused: bool) -> None:
    """An engine on slots 1 and 2 (trainers 0-4 sit on 0-4), on 5 and 6 (no trainers), or on both."""
    table = a_table(
        nodes={"n0": [0, 1, 2], "n1": [3, 4, 5, 6]},
        mode=mode,
        allow_mixed_engine=opted_in,
        engines=engines(slots),
        reserved_trainer_ranks=[r for r in range(5) if r not in slots],
    )
    found = table_verdict(table)

    assert [e.code for e in found] == (["E_MIXED"] if refused else [])
    if refused:
        assert facts(found[0], "engine", "with_trainer", "without_trainer", "mode") == [
            "E0",
            tuple(s for s in slots if s < 5),
            tuple(s for s in slots if s >= 5),
            mode,
        ]


def test_engine_out_of_world_is_not_called_mixed() -> None:
    found = table_verdict(a_table(engines=engines([0, 1, 9], [2, 3, 4])))

    assert [e.code for e in found] == ["E_OUT_OF_WORLD"]
    assert facts(found[0], "engine", "start", "end", "world", "excess") == ["E0", 0, 10, 5, 1]


def test_world_of_out_of_world_counts_slots_and_not_trainer_ranks() -> None:
    table = a_table(nodes={"n0": [0, 1, 2], "n1": [3, 4, 5, 6]}, mode="mixed", engines=engines([0, 1, 2, 3, 4], [6, 7]))
    (error,) = table_verdict(table)

    assert facts(error, "engine", "start", "end", "world", "excess") == ["E1", 6, 8, 7, 1]


def test_named_slots_are_numbered_in_declared_order() -> None:
    table = a_table(
        nodes={"n0": ["a", "b"], "n1": ["c"]},
        trainer_slots=["a", "b", "c"],
        engines=engines(["b", "x", "y"], ["a", "c"]),
    )
    (error,) = table_verdict(table)

    assert facts(error, "engine", "start", "end", "world", "excess") == ["E0", 1, 5, 3, 2]
    assert "on no node: x, y" in str(error)


def test_slot_twice_in_one_engine_is_an_overlap() -> None:
    (error,) = table_verdict(a_table(engines=engines([0, 1, 1], [2, 3, 4])))

    assert error.code == "E_OVERLAP"
    assert facts(error, "slots", "engines") == [(1,), ("E0", "E0")]


def test_overlaps_are_told_apart_by_their_claimants() -> None:
    """0 and 3 by E0 and E1, 1 by all three, 2 by E1 and E2."""
    found = table_verdict(a_table(engines=engines([0, 1, 3], [0, 1, 2, 3], [1, 2, 4])))

    assert [facts(e, "slots", "engines") for e in found] == [
        [(0, 3), ("E0", "E1")],
        [(1,), ("E0", "E1", "E2")],
        [(2,), ("E1", "E2")],
    ]


def test_number_and_text_name_the_same_slot() -> None:
    (error,) = table_verdict(a_table(engines=engines([0, 1, 2], ["2", 3, 4])))

    assert facts(error, "slots", "engines") == [(2,), ("E0", "E1")]


def test_overlap_is_an_error_in_every_mode() -> None:
    table = a_table(nodes={"n0": [0, 1, 2], "n1": [3, 4, 5]}, mode="disaggregated", engines=engines([5], [5]))

    assert [e.code for e in table_verdict(table)] == ["E_OVERLAP"]


@pytest.mark.parametrize(
    "slots, tiling",
    [
        ([[0, 1], [2, 3, 4]], [("E1", 3, (3, 2), (1, 2))]),
        ([[2, 3], [0, 1, 4]], [("E0", 2, (3, 2), (1, 1)), ("E1", 3, (3, 2), (2, 1))]),
        ([[0, 1], [2], [3, 4]], []),
        ([[4, 3, 2, 1, 0]], []),
    ],
)
def test_strict_tiling_on_unequal_nodes(slots: list[list[int]], tiling: list[tuple[object, ...]]) -> None:
    found = table_verdict(a_table(engines=engines(*slots), strict_tiling=True))

    assert [tuple(facts(e, "engine", "count", "slots_per_node", "shard_sizes")) for e in found] == tiling
    assert table_verdict(a_table(engines=engines(*slots))) == ()


def test_equal_nodes_are_one_number() -> None:
    nodes = {"n0": [0, 1], "n1": [2, 3], "n2": [4, 5, 6]}
    table = a_table(nodes=nodes, engines=engines([0, 1, 2], [3, 4]), strict_tiling=True)

    assert [e.fields().get("slots_per_node") for e in table_verdict(table)] == [2, (2, 3)]


def test_tiling_is_silent_on_an_engine_out_of_world() -> None:
    found = table_verdict(a_table(engines=engines([2, 3, 9], [0, 1, 4]), strict_tiling=True))

    assert [(e.code, e.fields()["engine"]) for e in found] == [("E_OUT_OF_WORLD", "E0"), ("E_NODE_TILING", "E1")]


def test_uncovered_counts_both_sides_of_the_identity() -> None:
    """E0 has 1 slot twice, 1 off trainers, 1 on no node: 6 memberships, 3 covered of 5."""
    table = a_table(
        nodes={"n0": [0, 1, 2], "n1": [3, 4, 5]},
        mode="mixed",
        engines=engines([0, 1, 1, 2, 5, 9]),
        allow_mixed_engine=True,
    )
    found = {e.code: e for e in table_verdict(table)}
    counted = found["E_UNCOVERED"]

    assert set(found) == {"E_OVERLAP", "E_OUT_OF_WORLD", "E_UNCOVERED"}
    assert facts(counted, "world", "covered", "reserved", "uncovered") == [5, 3, 0, 2]
    assert facts(counted, "memberships", "excess", "without_trainer", "on_no_node") == [6, 1, 1, 1]
    assert facts(counted, "ranks", "by_node") == [(3, 4), {"n1": (3, 4)}]


def test_nobody_is_uncovered_in_a_disaggregated_run() -> None:
    table = a_table(nodes={"n0": [0, 1, 2], "n1": [3, 4, 5]}, mode="disaggregated", engines=engines([5]))

    assert table_verdict(table) == ()


def test_uncovered_by_node_follows_slots_and_not_numbers() -> None:
    table = a_table(trainer_slots=[4, 0, 3, 1, 2], engines=engines([1]))
    (error,) = table_verdict(table)

    assert facts(error, "ranks", "by_node") == [(0, 1, 2, 4), {"n1": (0, 2), "n0": (1, 4)}]


def test_all_kinds_stand_in_one_report() -> None:
    table = a_table(
        nodes={"n0": [0, 1, 2], "n1": [3, 4, 5]},
        engines=engines([0, 1], [1, 9], [5], [2, 3]),
        strict_tiling=True,
        reserved_trainer_ranks=[7],
        absent=[{"engine": "E3", "k": 1}],
        duplicate=[{"engine": "E0", "k": 0}],
    )

    assert [type(e) for e in table_verdict(table)] == [
        v.RosterValue,
        v.EngineOutOfWorld,
        v.SlotsOverlap,
        v.NodeTiling,
        v.EnginePlacement,
        v.TrainerRanksUncovered,
        v.RankDuplicate,
        v.RanksMissing,
    ]
