"""The status document's verdict and text, and the version table over a real leader's machine."""

from __future__ import annotations

import json
from typing import Any

from tests.fakes.leader_bench import LeaderBench
from weightd.daemon.status.document import encode_document, verdict_of
from weightd.daemon.status.text import status_text
from weightd.daemon.status.versions import VersionTable

UP = {"phase": "up", "up": True, "version": 3}


def leader(**changed: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "term": 1,
        "epoch": 2,
        "stage": "idle",
        "version": None,
        "committed": 3,
        "next_version": 4,
        "waiting_for": [],
        "next_deadline_s": None,
        "paused": None,
        "engines": {"E0": UP},
        "ranks": {"trainer 0": "a", "E0[0]": "b"},
    }
    return plain | changed


def document(lead: dict[str, Any] | None, versions: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {
        "verdict": "ok",
        "node": "a",
        "pid": 7,
        "up_s": 12.0,
        "hooks": [],
        "landing_nbytes": 0,
        "landing_limit_nbytes": 1 << 30,
        "peers": {"b": {"control": "127.0.0.1:7710", "heard_s_ago": 0.2}},
        "runs": {"grpo-7": {"leader": lead, "node": {"leader": "b"}, "versions": versions or []}},
    }


def verdict(lead: dict[str, Any] | None, heard_s_ago: float | None = 0.2) -> str:
    return verdict_of({"r": {"leader": lead}}, {"b": {"heard_s_ago": heard_s_ago}}, 5.0)


def test_the_verdict_is_the_first_thing_to_look_at() -> None:
    assert verdict(leader()) == "ok"
    assert verdict(None) == "ok"
    assert (
        verdict(leader(paused="E_PAUSED: trainer 1 is lost\n  more")) == "run r is paused: E_PAUSED: trainer 1 is lost"
    )
    assert verdict(leader(engines={"E0": {"phase": "fenced", "up": False}})) == "run r: engine E0 is fenced"
    assert verdict(leader(), heard_s_ago=7.0) == "node b is silent for 7.0 s"
    assert verdict(leader(), heard_s_ago=None) == "node b was never heard"


def test_a_run_that_everybody_left_is_no_cause_for_concern() -> None:
    left = leader(ranks={}, paused="E_PAUSED: trainer 0 left in order", engines={"E0": {"phase": "up", "up": False}})

    assert verdict(left, heard_s_ago=None) == "ok"
    assert "run grpo-7, term 1: nobody is attached, last committed v3" in status_text(document(left))


def test_the_text_says_what_is_in_hand_and_whom_it_waits_for() -> None:
    text = status_text(
        document(
            leader(
                stage="collecting",
                version=4,
                waiting_for=["trainer 3 (node b) to publish v4"],
                next_deadline_s=12.5,
                engines={"E0": UP, "E1": {"phase": "fenced", "up": False, "version": 2, "cause": "it was killed"}},
            )
        )
    ).splitlines()

    assert text[0] == "ok"
    assert "run grpo-7, term 1, epoch 2, stage collecting v4, committed v3, next v4" in text
    assert "  waiting for trainer 3 (node b) to publish v4, 12.5 s left" in text
    assert "  engine E1: fenced, v2, it was killed" in text


def test_the_text_names_the_ranks_of_which_nothing_is_retained() -> None:
    text = status_text(document(leader(live=[f"trainer {r}" for r in range(10)]))).splitlines()

    named = ", ".join(f"trainer {r}" for r in range(8))
    assert f"  live memory: {named} and 2 more; their pieces are not retained behind a version's decision" in text
    assert "live memory" not in status_text(document(leader()))


def test_a_node_that_does_not_lead_says_who_does() -> None:
    assert "run grpo-7, led by node b" in status_text(document(None))


def test_a_committed_version_has_its_seconds_bytes_and_ratios() -> None:
    bench = LeaderBench().ready()
    table = VersionTable(4)

    def look() -> None:
        table.observe(bench.machine, bench.now, 300, 1000.0)

    look()
    bench.collect(1)
    look()
    bench.now += 2.0
    bench.fetched()
    look()
    bench.now += 1.0
    for engine in ("E0", "E1"):
        bench.all_in(engine, "paused")
    look()
    for engine in ("E0", "E1"):
        bench.apply(engine)
        look()
    rows = table.document()

    assert [r["version"] for r in rows] == [1]
    needed = sum(bench.machine.state.epochs.rank_nbytes.values())
    assert (rows[0]["stage"], rows[0]["needed_nbytes"]) == ("committed", needed)
    assert rows[0]["update_s"] == 3.0
    assert rows[0]["copied_nbytes"] == rows[0]["applied_nbytes"] + 300
    assert rows[0]["kappa"] == round(rows[0]["copied_nbytes"] / needed, 4)
    assert rows[0]["floor_s"] == max(bench.machine.state.epochs.rank_nbytes.values()) / 1000.0


def test_only_the_newest_rows_are_kept() -> None:
    bench = LeaderBench().ready()
    table = VersionTable(2)
    for version in (1, 2, 3):
        bench.collect(version)
        table.observe(bench.machine, bench.now, 0, 0.0)
        bench.commit(version)
        table.observe(bench.machine, bench.now, 0, 0.0)

    assert [r["version"] for r in table.document()] == [2, 3]


def test_a_document_too_long_for_a_message_is_cut_and_says_so() -> None:
    whole = document(leader(), versions=[{"version": n, "label": "x" * 50} for n in range(200)])
    whole["hooks"] = [{"who": f"trainer {n}", "pid": n} for n in range(200)]

    assert json.loads(encode_document(whole)) == whole
    cut = json.loads(encode_document(whole, 9000))
    assert (cut["runs"]["grpo-7"]["versions"], len(cut["hooks"])) == ([], 200)
    assert cut["cut"][0] == "versions of runs"
    assert "left out: versions of runs" in status_text(cut)
    short = encode_document(whole, 900)
    assert len(short) <= 900
    assert json.loads(short)["verdict"] == "ok"
    assert json.loads(short)["cut"][:2] == ["versions of runs", "hooks"]
