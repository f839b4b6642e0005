"""Cases of the topology specification that speak of registrations, with live ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import Cluster, Rank, all_do, attach_all, attached, eventually, value_of

pytestmark = pytest.mark.processes

CASES = {
    case["id"]: case
    for case in json.loads((Path(__file__).parents[1] / "data" / "topology_cases.json").read_text(encoding="utf-8"))
}
ATTACH_S = 10.0
JUDGED_FROM_THE_FILE = ("absent", "duplicate", "previous_epoch")
"""Keys that stand for registrations where there are none; here there are."""


@pytest.fixture
def cluster(folder: Path) -> Iterator[Cluster]:
    with Cluster(folder, ("n0", "n1"), attach_s=ATTACH_S) as started:
        yield started


def roster_file(folder: Path, case: dict[str, Any], name: str = "roster", **changes: Any) -> str:
    """Write the roster of a case, as a user would, and return its path."""
    roster = {key: value for key, value in (case | changes).items() if key not in JUDGED_FROM_THE_FILE}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(roster), encoding="utf-8")
    return str(path)


def node_of(case: dict[str, Any], slot: int) -> str:
    """Return the node of a slot."""
    return next(str(node) for node, slots in case["nodes"].items() if slot in slots)


def start_trainers(cluster: Cluster, case: dict[str, Any], roster: str) -> list[Rank]:
    """Start every trainer rank on its declared slot."""
    slots = case["trainer_slots"]
    return [
        cluster.trainer(r, len(slots), node_of(case, slot), slot=str(slot), engines=roster)
        for r, slot in enumerate(slots)
    ]


def start_engines(cluster: Cluster, case: dict[str, Any], engines: Sequence[dict[str, Any]]) -> dict[str, list[Rank]]:
    """Start every engine rank on its declared slot, but those that the case calls absent."""
    absent = [(a["engine"], a["k"]) for a in case.get("absent", ())]
    return {
        e["id"]: [
            cluster.engine(e["id"], k, len(e["slots"]), node_of(case, slot), slot=str(slot))
            for k, slot in enumerate(e["slots"])
            if (e["id"], k) not in absent
        ]
        for e in engines
    }


def expected_error(case: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the one code that a case expects, with its fields."""
    (error,) = case["expect"]["errors"]
    return error["code"], error["fields"]


def attached_names(cluster: Cluster) -> set[str]:
    """Return every hook that has greeted and is ready, on any node."""
    return {h["who"] for node in cluster.nodes.names for h in cluster.nodes.status(node)["hooks"] if h["ready"]}


def measured_groups(cluster: Cluster) -> dict[str, list[dict[str, Any]]]:
    """Return every engine's node shards as the daemons measured them: which hook attached where, on which slot."""
    found: dict[str, dict[str, dict[int, int]]] = {}
    for node in cluster.nodes.names:
        for hook in cluster.nodes.status(node)["hooks"]:
            engine, _, k = hook["who"].removesuffix("]").partition("[")
            if k:
                found.setdefault(engine, {}).setdefault(node, {})[int(k)] = int(hook["slot"])
    return {
        engine: [
            {"node": node, "slots": [ks[k] for k in sorted(ks)], "k": sorted(ks)}
            for node, ks in sorted(shards.items(), key=lambda item: min(item[1]))
        ]
        for engine, shards in sorted(found.items())
    }


def test_t20_fifteen_of_sixteen_register(cluster: Cluster, tmp_path: Path) -> None:
    case = CASES["T20"]
    roster = roster_file(tmp_path, case)
    ranks = start_trainers(cluster, case, roster) + start_engines(cluster, case, case["engines"])["E0"]
    assert len(ranks) == 31

    answers = attach_all(ranks, 20.0)

    code, fields = expected_error(case)
    for answer in answers:
        assert answer.codes == [code], answer
        assert {name: answer.fields(code)[name] for name in fields} == fields
        assert f"15 registered + 1 missing = 16 rollout ranks within {answer.fields(code)['waited_s']} s" in answer.text
    assert len({answer.text for answer in answers}) == 1, "everybody is told the same"


def test_t21_two_live_workers_claim_the_same_rank(cluster: Cluster, tmp_path: Path) -> None:
    case = CASES["T21"]
    trainers = start_trainers(cluster, case, roster_file(tmp_path, case))
    engines = start_engines(cluster, case, case["engines"])["E0"]
    (twice,) = case["duplicate"]
    k = twice["k"]
    slot = case["engines"][0]["slots"][k]
    attached(trainers, engines)
    second = cluster.engine("E0", k, 8, node_of(case, slot), slot=str(slot))

    answer = second.fails("attach")

    code, fields = expected_error(case)
    assert answer.codes == [code]
    assert {name: answer.fields(code)[name] for name in fields} == fields
    assert str(second.pid) in answer.text
    assert str(engines[k].pid) in answer.text
    # The first one is not disturbed.
    all_do(trainers, "publish", version=1)
    assert all_do(engines, "receive", version=1) == [1] * 8
    assert all_do(engines, "differing", contents=1) == [[]] * 8


def test_t23_the_second_epoch_shrinks_an_engine(cluster: Cluster, tmp_path: Path) -> None:
    """Slots 6 and 7 leave E1; the trainer attaches again with the new roster, and E0 stays where it is."""
    case = CASES["T23"]
    before = roster_file(tmp_path, case, "before", engines=case["previous_epoch"], reserved_trainer_ranks=[])
    trainers = start_trainers(cluster, case, before)
    old = start_engines(cluster, case, case["previous_epoch"])
    attached(trainers, old["E0"], old["E1"])
    all_do(trainers, "publish", version=1)
    assert all_do([*old["E0"], *old["E1"]], "receive") == [1] * 8
    all_do(trainers, "wait", version=1)

    all_do([*old["E1"], *trainers], "close")
    after = roster_file(tmp_path, case, "after")
    trainers = start_trainers(cluster, case, after)
    new = start_engines(cluster, case, case["engines"][1:])["E1"]
    # The engine first: an E1 of two ranks is in no roster yet, and waits for trainer rank 0 to bring the one it is in.
    all_do([*trainers, *new], "prepare")
    for rank in new:
        rank.tell("attach")
    eventually(lambda: {"E1[0]", "E1[1]"} <= attached_names(cluster), "both ranks of the new E1 have greeted")
    for rank in trainers:
        rank.tell("attach")
    for rank in [*trainers, *new]:
        value_of(rank.answer())
    engines = [*old["E0"], *new]
    assert all_do(trainers, "next_version") == [2] * 8
    all_do(trainers, "publish", version=2)
    assert all_do(engines, "receive", version=2) == [2] * 6
    assert all_do(engines, "differing", contents=2) == [[]] * 6

    assert measured_groups(cluster) == case["expect"]["groups"]


def test_t28_ranks_interleaved_over_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    case = CASES["T28"]
    trainers = start_trainers(cluster, case, roster_file(tmp_path, case))
    engines = start_engines(cluster, case, case["engines"])
    ranks = [*engines["E0"], *engines["E1"]]
    attached(trainers, ranks)

    assert measured_groups(cluster) == case["expect"]["groups"]
    all_do(trainers, "publish", version=1)
    assert all_do(ranks, "receive", version=1) == [1] * 16
    assert all_do(ranks, "differing", contents=1) == [[]] * 16
