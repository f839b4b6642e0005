"""The exact text of every roster error, and that each shows all its facts and crosses a wire."""

import pytest

from tests.golden_text import check_error_is_whole, check_golden
from tests.rosters import a_file, live, topology
from weightd.core.errors import Refused, WeightdError, known_codes
from weightd.core.roster import violations as v
from weightd.core.roster.explain import explain_topology

MISSING_K = v.RanksMissing("E0", 16, (13,), {"n1": (13,)}, 300.0)

ERRORS: dict[str, WeightdError] = {
    "E_UNCOVERED": v.TrainerRanksUncovered(
        16, 13, 12, 0, 4, (6, 7, 14, 15), {"n0": (6, 7), "n1": (14, 15)}, "1 engine x 13 = 13", without_trainer=1
    ),
    "E_UNCOVERED.sizes": v.TrainerRanksUncovered(8, 4, 4, 1, 3, (), {}, "1 engine x 4 = 4"),
    "E_OVERLAP": v.SlotsOverlap((2, 3), ("E0", "E1")),
    "E_OVERLAP.one_engine": v.SlotsOverlap(("n0/gpu-a",), ("E0", "E0")),
    "E_OUT_OF_WORLD": v.EngineOutOfWorld("E1", 6, 10, 8, 2, 4, (8, 9)),
    "E_MIXED": v.EnginePlacement("E0", (4, 5, 6), (8, 9), "colocated"),
    "E_MIXED.mixed": v.EnginePlacement("E0", (4, 5, 6), (8, 9), "mixed"),
    "E_MIXED.disaggregated": v.EnginePlacement("E0", (4,), (), "disaggregated"),
    "E_REMAINDER": v.Remainder(10, 4, 2),
    "E_NODE_TILING": v.NodeTiling("E0", 12, 8, (8, 4)),
    "E_NODE_TILING.unequal": v.NodeTiling("E0", 9, (8, 4), (6, 3)),
    "E_SHAPE.lengths": v.RosterShape(counts=2, offsets=1),
    "E_SHAPE.count": v.RosterShape(engine="E0", count=0),
    "E_SHAPE.slots": v.RosterShape(engine="E0", count=4, slots=3),
    "E_ROSTER": v.RosterValue("reserved_trainer_ranks", 9, "outside the world of 8, whose ranks count from 0"),
    "E_NODE_MISMATCH": v.NodeMismatch("E0", 3, "n0", "n1", 4711),
    "E_NODE_MISMATCH.trainer": v.NodeMismatch(None, 3, "n0", "n1"),
    "E_GPU_MISMATCH": v.GpuMismatch("E0", 3, "n1", "GPU-5fd4", "GPU-77a0", 4711),
    "E_RANK_MISSING": MISSING_K,
    "E_RANK_MISSING.nodes": v.RanksMissing("E0", 16, (3, 12, 13), {"n0": (3,), "n1": (12, 13)}),
    "E_RANK_MISSING.lost": v.RanksMissing(
        None, 4, (1, 2), {}, 5.0, {"2": "pid 4711 on node b: pid 4711 has ended or closed its socket"}
    ),
    "E_RANK_MISSING.trainer": v.RanksMissing(None, 4, (1, 2), {}, 5.0),
    "E_RANK_DUP": v.RankDuplicate("E0", 3, 8, 9, ("n0", "n1"), (4711, 4802)),
    "E_RANK_DUP.file": v.RankDuplicate("E0", 3, 8, 9, ("n0", "n0"), ()),
    "E_RANK_DUP.trainer": v.RankDuplicate(None, 2, 4, 5, ("n0", "n0"), (4711, 4802)),
    "E_RANK_DUP.runs": v.RankDuplicate("E0", 3, 8, 9, ("n0", "n0"), (4711, 4711), ("grpo-7", "grpo-8")),
    "E_RANK_UNKNOWN.engine": v.RankUnknown("E7", 1, "engine", 0, 4, "n1", 4711, ("E0", "E1")),
    "E_RANK_UNKNOWN.number": v.RankUnknown("E1", 4, "number", 4, 5, "n1", 4711, ("E0", "E1")),
    "E_RANK_UNKNOWN.size": v.RankUnknown(None, 3, "size", 4, 8, "n1", 4711, ("E0", "E1")),
    "E_UNKNOWN_KEY": v.UnknownKeys(("engines[1].slot", "reserved"), ("nodes", "trainer_slots", "engines")),
    "E_ROSTER_FILE": v.RosterFileUnreadable("roster.toml", "Expected '=' after a key (at line 3, column 7)"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_text_of(name: str) -> None:
    check_golden(f"errors/{name}", str(ERRORS[name]))


@pytest.mark.parametrize("name", ERRORS)
def test_every_fact_is_shown_and_crosses_a_wire(name: str) -> None:
    assert ERRORS[name].code == name.partition(".")[0]
    check_error_is_whole(ERRORS[name])


def test_no_roster_error_is_without_a_text_here() -> None:
    roster_codes = {
        code
        for code, kinds in known_codes().items()
        if any(k.__module__.startswith("weightd.core.roster.") for k in kinds)
    }

    assert roster_codes == {error.code for error in ERRORS.values()}
    assert len(roster_codes) == 15


def test_report_of_several() -> None:
    report = Refused(
        "run grpo-7",
        (ERRORS["E_OVERLAP"], MISSING_K),
        "no epoch starts with this roster; engines keep what they serve",
    )

    check_golden("errors/E_REFUSED.roster", str(report))


def test_stale_notice() -> None:
    check_golden("notices/stale", str(v.StaleRegistration("E1", (2, 3), (6, 7))))


def test_explained_topology() -> None:
    file = a_file(reserved_trainer_ranks=[4], engines=[{"id": "E0", "slots": [3, 2, 1]}, {"id": "E1", "slots": [0]}])

    check_golden("explain/topology", explain_topology(topology(file), file.labels()))


def test_fields_of_the_two_rank_spaces_never_share_a_name() -> None:
    engine = {"role": "rollout", "engine": "E0", "k": 3}
    rank = {"role": "trainer", "trainer_rank": 3}

    assert engine.items() <= ERRORS["E_NODE_MISMATCH"].fields().items()
    assert rank.items() <= ERRORS["E_NODE_MISMATCH.trainer"].fields().items()
    assert not {"k", "engine", "number"} & set(ERRORS["E_NODE_MISMATCH.trainer"].fields())
    assert "number" not in ERRORS["E_NODE_MISMATCH"].fields()
    assert "missing_ranks" in ERRORS["E_RANK_MISSING.trainer"].fields()
    assert "missing_k" not in ERRORS["E_RANK_MISSING.trainer"].fields()


def test_live_duplicate_names_both_processes() -> None:
    assert "pid 4711 on n0 and pid 4802 on n1" in str(ERRORS["E_RANK_DUP"])


def test_registrations_of_a_file_have_no_process_ids() -> None:
    file = a_file()

    assert {r.pid for r in file.registrations()} == {0}
    assert len({r.pid for r in live(file)}) == 10
