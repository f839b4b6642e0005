"""A roster as a table: its keys, its types, its shorthands, and what it says of registrations."""

from typing import Any

import pytest

from tests.rosters import a_file, a_rank, a_table, table_verdict, verdict
from weightd.core.errors import Refused
from weightd.core.roster.declared import CASE_KEYS, ROSTER_KEYS, roster_from_mapping
from weightd.core.roster.topology import EngineDecl
from weightd.core.roster.violations import UnknownKeys

EIGHT: dict[str, Any] = {
    "nodes": {"n0": [0, 1, 2, 3], "n1": [4, 5, 6, 7]},
    "trainer_slots": [0, 1, 2, 3, 4, 5, 6, 7],
    "mode": "colocated",
}


def test_defaults() -> None:
    table = a_table()
    del table["mode"]
    file = roster_from_mapping(table)

    assert file.roster.engines == (EngineDecl("E0", 3, (1, 2, 3)), EngineDecl("E1", 2, (0, 4)))
    assert file.roster.nodes == {"n0": (0, 1, 2), "n1": (3, 4)}
    assert file.roster.trainer_slots == (0, 1, 2, 3, 4)
    assert (file.roster.world, file.roster.mode, file.roster.reserved) == (5, "disaggregated", ())
    assert (file.roster.strict_tiling, file.roster.allow_mixed_engine) == (False, False)
    assert (file.absent, file.duplicate, file.previous) == ((), (), ())


def test_every_key_is_read() -> None:
    file = a_file(
        reserved_trainer_ranks=[4],
        mode="mixed",
        strict_tiling=True,
        allow_mixed_engine=True,
        absent=[{"engine": "E0", "k": 1}],
        duplicate=[{"engine": "E1", "k": 0}],
        previous_epoch=[{"id": "E9", "slots": [4]}],
    )

    assert (file.roster.reserved, file.roster.mode) == ((4,), "mixed")
    assert (file.roster.strict_tiling, file.roster.allow_mixed_engine) == (True, True)
    assert (file.absent, file.duplicate) == ((a_rank("E0", 1),), (a_rank("E1", 0),))
    assert file.previous == (EngineDecl("E9", 1, (4,)),)


@pytest.mark.parametrize("key", CASE_KEYS)
def test_what_a_case_says_of_itself_is_ignored(key: str) -> None:
    assert roster_from_mapping(a_table(**{key: "anything"})) == a_file()


@pytest.mark.parametrize(
    "changes, keys",
    [
        ({"reserved": [1]}, ("reserved",)),
        ({"title ": "x", "Mode": "mixed"}, ("title ", "Mode")),
        ({"engines": [{"id": "E0", "slots": [0]}, {"id": "E1", "slot": [1]}]}, ("engines[1].slot",)),
        ({"engines": [{"id": "E0", "slots": [0], "required": True}]}, ("engines[0].required",)),
        ({"engines": {"counts": [4], "offset": [0]}}, ("engines.offset",)),
        ({"absent": [{"engine": "E0", "rank": 1}]}, ("absent[0].rank",)),
        ({"duplicate": [{"engine": "E0", "k": 1, "pid": 7}]}, ("duplicate[0].pid",)),
        ({"previous_epoch": [{"id": "E0", "slots": [], "size": 0}]}, ("previous_epoch[0].size",)),
        ({"modes": "", "absent": [{"x": 1}], "engines": {"y": 1}}, ("modes", "engines.y", "absent[0].x")),
    ],
)
def test_unknown_keys_are_named_and_nothing_is_judged(changes: dict[str, Any], keys: tuple[str, ...]) -> None:
    with pytest.raises(UnknownKeys) as error:
        roster_from_mapping(a_table(**changes))

    assert (error.value.keys, error.value.allowed, error.value.exit_code) == (keys, ROSTER_KEYS, 2)


@pytest.mark.parametrize(
    "changes, field, value",
    [
        ({"nodes": [0, 1]}, "nodes", "[0,1]"),
        ({"nodes": {"n0": 3}}, "nodes", '{"n0":3}'),
        ({"nodes": {"n0": [0.5]}}, "nodes", '{"n0":[0.5]}'),
        ({"trainer_slots": [0, True]}, "trainer_slots", "[0,true]"),
        ({"trainer_slots": "0-4"}, "trainer_slots", "0-4"),
        ({"engines": 4}, "engines", 4),
        ({"engines": [{"id": "E0"}]}, "engines", '[{"id":"E0"}]'),
        ({"engines": [["E0", [0]]]}, "engines", '[["E0",[0]]]'),
        ({"engines": [{"id": 0, "slots": [0]}]}, "engines", '[{"id":0,"slots":[0]}]'),
        ({"engines": {"counts": [4]}}, "engines", '{"counts":[4]}'),
        ({"engines": {"counts": 4, "offsets": 0}}, "engines", '{"counts":4,"offsets":0}'),
        ({"engines": {"total_slots": 4}}, "engines", '{"total_slots":4}'),
        ({"engines": {}}, "engines", "{}"),
        ({"engines": {"counts": [1], "offsets": [0], "base": "slots"}}, "base", "slots"),
        ({"reserved_trainer_ranks": ["4"]}, "reserved_trainer_ranks", '["4"]'),
        ({"mode": "Colocated"}, "mode", "Colocated"),
        ({"strict_tiling": 1}, "strict_tiling", 1),
        ({"allow_mixed_engine": "yes"}, "allow_mixed_engine", "yes"),
        ({"absent": {"engine": "E0", "k": 1}}, "absent", '{"engine":"E0","k":1}'),
        ({"absent": [{"engine": "E0", "k": 3}]}, "absent", "E0[3]"),
        ({"absent": [{"engine": "E0", "k": -1}]}, "absent", "E0[-1]"),
        ({"duplicate": [{"engine": "E7", "k": 0}]}, "duplicate", "E7[0]"),
        ({"previous_epoch": {"counts": [4], "offsets": [0]}}, "previous_epoch", '{"counts":[4],"offsets":[0]}'),
        ({"base": "rollout"}, "base", "rollout"),
        ({"counts": [1]}, "counts", "[1]"),
        ({"mode": None}, "mode", "null"),
        ({"mode": {1, 2}.__class__}, "mode", "<class 'set'>"),
    ],
)
def test_wrong_value_is_named(changes: dict[str, Any], field: str, value: object) -> None:
    (error,) = table_verdict(a_table(**changes))

    assert error.code == "E_ROSTER"
    assert [error.fields()[n] for n in ("field", "value")] == [field, value]


@pytest.mark.parametrize("key", ["nodes", "trainer_slots", "engines"])
def test_missing_key_is_named(key: str) -> None:
    table = a_table()
    del table[key]
    (error,) = table_verdict(table)

    assert [error.fields()[n] for n in ("field", "value", "why")] == [key, "(missing)", "a roster needs it"]


def test_all_wrong_values_stand_in_one_report() -> None:
    with pytest.raises(Refused) as report:
        roster_from_mapping({"trainer_slots": 3, "engines": "E0", "mode": 7}, "roster x.toml")

    assert [e.fields()["field"] for e in report.value.violations] == ["nodes", "trainer_slots", "engines", "mode"]
    assert report.value.subject == "roster x.toml"


def test_long_values_are_cut() -> None:
    (error,) = table_verdict(a_table(trainer_slots=[[i] for i in range(1000)]))

    assert len(error.fields()["value"]) == 80
    assert error.fields()["value"].startswith("[[0],[1],")
    assert error.fields()["value"].endswith("...")


def test_base_trainer_may_be_said_where_slots_are_listed() -> None:
    assert a_file(base="trainer") == a_file()


def test_shorthand_stands_inside_engines_or_beside_nothing() -> None:
    inside = roster_from_mapping({**EIGHT, "engines": {"counts": [4, 4], "offsets": [0, 4]}})
    beside = roster_from_mapping({**EIGHT, "counts": [4, 4], "offsets": [0, 4]})
    with_base = roster_from_mapping({**EIGHT, "base": "trainer", "engines": {"total_slots": 8, "per_engine": 4}})

    assert inside.roster.engines == (EngineDecl("E0", 4, (0, 1, 2, 3)), EngineDecl("E1", 4, (4, 5, 6, 7)))
    assert beside == inside
    assert with_base == inside


def test_key_inside_and_beside_is_refused() -> None:
    table = {**EIGHT, "base": "trainer", "engines": {"total_slots": 8, "per_engine": 4, "base": "rollout"}}

    assert [e.fields()["field"] for e in table_verdict(table)] == ["base"]


def test_shorthand_that_cannot_be_expanded_is_reported_alone() -> None:
    table = {**EIGHT, "engines": {"total_slots": 7, "per_engine": 2}, "reserved_trainer_ranks": [9]}

    assert [e.code for e in table_verdict(table)] == ["E_REMAINDER"]


def test_shorthand_of_the_rollout_slice() -> None:
    """Trainers on 1 and 2 of n0: the rollout slice is 0, 3, 4, 5, 6, 7 in the nodes' order."""
    shorthand = {"counts": [4, 2], "offsets": [0, 4], "base": "rollout"}
    table = {**EIGHT, "trainer_slots": [1, 2], "mode": "disaggregated", "engines": shorthand}
    file = roster_from_mapping(table)

    assert [e.slots for e in file.roster.engines] == [(0, 3, 4, 5), (6, 7)]
    assert verdict(file) == ()


def test_shorthand_counts_trainer_ranks_and_not_slots() -> None:
    table = {**EIGHT, "trainer_slots": [7, 6, 5, 4, 3, 2, 1, 0], "engines": {"counts": [2, 6], "offsets": [0, 2]}}

    assert [e.slots for e in roster_from_mapping(table).roster.engines] == [(7, 6), (5, 4, 3, 2, 1, 0)]


def test_shorthand_with_a_reserved_gap() -> None:
    table = {**EIGHT, "engines": {"counts": [4, 2], "offsets": [0, 6]}, "reserved_trainer_ranks": [4, 5]}
    file = roster_from_mapping(table)

    assert [e.slots for e in file.roster.engines] == [(0, 1, 2, 3), (6, 7)]
    assert verdict(file) == ()


def test_shorthand_beyond_the_trainer_ranks_is_out_of_world() -> None:
    table = {**EIGHT, "engines": {"counts": [4, 4], "offsets": [0, 6]}}
    outside, uncovered = table_verdict(table)

    assert [outside.fields()[n] for n in ("engine", "start", "end", "world", "excess")] == ["E1", 6, 10, 8, 2]
    assert outside.fields()["outside"] == ("trainer slot 8", "trainer slot 9")
    assert uncovered.fields()["ranks"] == (4, 5)


def test_shorthand_never_falls_on_a_slot_that_bears_the_number() -> None:
    """Trainer ranks 0-3 on slots 0-3 of 8: offset 4 is no trainer rank, though there is a slot 4."""
    table = {**EIGHT, "trainer_slots": [0, 1, 2, 3], "engines": {"counts": [4, 2], "offsets": [0, 4]}}

    assert [(e.code, e.fields()["excess"]) for e in table_verdict(table)] == [("E_OUT_OF_WORLD", 2)]


def test_huge_shorthand_is_refused_before_it_is_expanded() -> None:
    (error,) = table_verdict({**EIGHT, "engines": {"total_slots": 10**12, "per_engine": 10**6}})

    assert [error.fields()[n] for n in ("field", "value")] == ["engines", 10**12]


def test_registrations_sit_where_they_are_declared() -> None:
    file = a_file(absent=[{"engine": "E0", "k": 1}], duplicate=[{"engine": "E0", "k": 2}])
    found = file.registrations()
    engine = [(r.who, r.size, r.node, r.slot, r.boot) for r in found[5:]]

    assert [(r.who, r.size, r.slot) for r in found[:5]] == [(r, 5, str(r)) for r in range(5)]
    assert engine == [
        (a_rank("E0", 0), 3, "n0", "1", 1),
        (a_rank("E0", 2), 3, "n1", "3", 1),
        (a_rank("E1", 0), 2, "n0", "0", 1),
        (a_rank("E1", 1), 2, "n1", "4", 1),
        (a_rank("E0", 2), 3, "n1", "3", 2),
    ]


def test_three_claims_of_one_rank() -> None:
    (error,) = verdict(a_file(duplicate=[{"engine": "E0", "k": 2}] * 2))

    assert [error.fields()[n] for n in ("k", "registered", "expected", "nodes")] == [2, 5, 3, ("n1", "n1", "n1")]


def test_absent_and_there_twice_is_refused() -> None:
    (error,) = table_verdict(a_table(absent=[{"engine": "E0", "k": 1}], duplicate=[{"engine": "E0", "k": 1}]))

    assert error.fields()["why"] == "also listed as duplicate"


def test_duplicate_on_no_node_is_told_so() -> None:
    table = a_table(engines=[{"id": "E0", "slots": [0, 9]}], duplicate=[{"engine": "E0", "k": 1}], mode="disaggregated")
    error = next(e for e in table_verdict(table) if e.code == "E_RANK_DUP")

    assert error.fields()["nodes"] == ("no node", "no node")


def test_stale_is_what_the_epoch_before_had_and_this_one_has_not() -> None:
    """E0 keeps k 0, moves k 1 and loses k 3; E9 is gone; E1 is unchanged and not named."""
    file = a_file(
        previous_epoch=[
            {"id": "E0", "slots": [1, 4, 3, 2]},
            {"id": "E1", "slots": ["0", 4]},
            {"id": "E9", "slots": ["x"]},
        ]
    )

    assert [(s.engine, s.k, s.slots) for s in file.stale()] == [("E0", (1, 3), (4, 2)), ("E9", (0,), ("x",))]
    assert verdict(file) == ()


def test_labels_keep_their_kind() -> None:
    file = a_file(nodes={"n0": [0, 1, 2], "n1": [3, 4, "gpu-x"]})

    assert list(file.labels().items()) == [*((str(i), i) for i in range(5)), ("gpu-x", "gpu-x")]
