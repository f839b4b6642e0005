"""A daemon that is stopped in order: a version that engines stand in is decided first, or fails by name."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest

from tests.integration.cluster import Cluster, Rank, all_do, attached, eventually

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

STOP_S = 12.0


def prepared(cluster: Cluster, dwell_s: float, waits_for: tuple[int, ...]) -> tuple[list[Rank], list[Rank]]:
    """Return a trainer and an engine of two ranks on nodes a and b; version 1 is prepared, some ranks receive it."""
    trainers = [cluster.trainer(0, 1, "a", engines={"E0": 2})]
    engines = [cluster.engine("E0", k, 2, node, dwell_s=dwell_s) for k, node in enumerate("ab")]
    attached(trainers, engines)
    all_do(trainers, "publish", version=1)
    eventually(lambda: cluster.status()["leader"]["stage"] == "prepared", "version 1 is prepared")
    for k in waits_for:
        engines[k].tell("receive", version=1)
    state = "pausing" if dwell_s else "paused"
    for k in waits_for:
        node = "ab"[k]
        eventually(partial(is_in, cluster, node, f"E0[{k}]", state), f"E0[{k}] is {state}")
    return trainers, engines


def is_in(cluster: Cluster, node: str, rank: str, state: str) -> bool:
    return bool(cluster.status(node)["node"]["ranks"][rank]["state"] == state)


def stopped(cluster: Cluster, node: str) -> tuple[int | None, str]:
    """Return a daemon's exit status and the end of its log, once it has ended."""
    child = cluster.children[cluster.nodes.child_name(node)]
    return child.wait(STOP_S), child.log_tail(40)


def test_a_prepared_version_is_committed_before_its_leader_stops(folder: Path) -> None:
    with Cluster(folder, drain_s=8.0) as cluster:
        trainers, engines = prepared(cluster, 1.5, (0, 1))
        trainers[0].tell("wait", version=1)
        cluster.kill_daemon("a", signal.SIGTERM)

        assert trainers[0].answer().value == 1
        assert [e.answer().value for e in engines] == [1, 1]
        status, log = stopped(cluster, "a")
        assert status == 0, log
        assert "gives a version up" not in log
        assert all_do(engines, "differing", contents=1) == [[], []]


def test_a_version_that_is_not_decided_in_time_fails_by_name(folder: Path) -> None:
    with Cluster(folder, drain_s=1.0, apply_wait_s=30.0, barrier_s=30.0) as cluster:
        trainers, engines = prepared(cluster, 0.0, (0,))
        trainers[0].tell("wait", version=1)
        cluster.kill_daemon("a", signal.SIGTERM)

        waiting = trainers[0].answer()
        assert waiting.codes == ["E_DEADLINE"], waiting.text
        assert "E0[1] to pause" in waiting.text
        assert "drain_s" in waiting.text
        status, log = stopped(cluster, "a")
        assert status == 0, log
        assert "gives a version up" in log
        assert "E0[1] to pause" in log
        assert engines[0].answer(30.0).error is not None  # it goes on waiting, until its leader is missed
        assert engines[0].ask("differing", contents=0) == []


def test_a_daemon_with_nothing_in_hand_stops_at_once(folder: Path) -> None:
    with Cluster(folder, ("a",), drain_s=60.0) as cluster:
        trainer, engine = cluster.trainer(0, 1, "a", engines={"E0": 1}), cluster.engine("E0", 0, 1, "a")
        attached([trainer], [engine])
        cluster.kill_daemon("a", signal.SIGTERM)
        status, log = stopped(cluster, "a")

        assert status == 0, log


def test_a_second_signal_does_not_wait(folder: Path) -> None:
    with Cluster(folder, drain_s=60.0, apply_wait_s=90.0, barrier_s=90.0) as cluster:
        prepared(cluster, 0.0, (0,))
        cluster.kill_daemon("a", signal.SIGTERM)
        child = cluster.children[cluster.nodes.child_name("a")]
        eventually(lambda: '"stopping"' in child.log_tail(40), "the first signal is noted")
        cluster.kill_daemon("a", signal.SIGTERM)
        status, log = stopped(cluster, "a")

        assert status == 0, log
        assert '"stops at once"' in log
