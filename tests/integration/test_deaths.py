"""Processes that are killed in the middle: those that wait are told by code, and engines keep what they served."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cluster import DEADLINES, Cluster, Rank, all_answer, all_do, attached, eventually

pytestmark = pytest.mark.processes

ENGINES = {"E0": 2}
MARGIN_S = 4.0
"""Above a limit, for two busy cores."""


@pytest.fixture
def cluster(folder: Path) -> Iterator[Cluster]:
    with Cluster(folder) as started:
        yield started


def serving_version_1(cluster: Cluster, dwell_s: float = 0.0) -> tuple[list[Rank], list[Rank]]:
    """Return two trainer ranks and an engine on two nodes, serving version 1."""
    trainers = [
        cluster.trainer(0, 2, "a", engines=ENGINES),
        cluster.trainer(1, 2, "b"),
    ]
    engines = [cluster.engine("E0", k, 2, node, dwell_s=dwell_s) for k, node in enumerate("ab")]
    attached(trainers, engines)
    all_do(trainers, "publish", version=1)
    assert all_do(engines, "receive", version=1) == [1, 1]
    all_do(trainers, "wait", version=1)
    return trainers, engines


def assert_still_serve_1(engines: list[Rank]) -> None:
    assert all_do(engines, "version") == [1] * len(engines)
    assert all_do(engines, "differing", contents=1) == [[]] * len(engines)
    all_do(engines, "assert_servable")


def publishes(trainer: Rank, version: int) -> bool:
    """Return whether a publish was taken; the only error allowed is that the run is paused."""
    trainer.tell("publish", version=version)
    answer = trainer.answer()
    assert answer.codes in ([], ["E_PAUSED"]), answer.text
    return answer.error is None


def test_a_trainer_rank_dies_before_it_published(cluster: Cluster) -> None:
    trainers, engines = serving_version_1(cluster)
    trainers[0].ask("publish", version=2)
    trainers[1].kill()
    began = time.monotonic()

    answer = trainers[0].fails("wait", version=2)

    assert time.monotonic() - began < DEADLINES["restart_s"] + MARGIN_S
    assert "E_RANK_LOST" in answer.codes, answer.text
    assert "trainer 1" in answer.text
    assert "v1" in answer.text, "it says what is still served"
    assert_still_serve_1(engines)


def test_an_engine_rank_dies_before_it_paused(cluster: Cluster) -> None:
    """Its engine is down and keeps the old version; the trainer is not held up."""
    trainers, engines = serving_version_1(cluster)
    engines[1].kill()
    all_do(trainers, "publish", version=2)

    assert all_do(trainers, "wait", version=2) == [2, 2]
    assert_still_serve_1(engines[:1])


def test_an_engine_rank_dies_while_its_engine_is_paused(cluster: Cluster) -> None:
    """Nobody has written yet: the other rank keeps version 1, is told why, and the trainer is not held up."""
    trainers, engines = serving_version_1(cluster, dwell_s=1.0)
    all_do(trainers, "publish", version=2)
    engines[0].tell("receive", version=2, timeout_s=4.0)
    engines[1].tell("receive", version=2)
    eventually(lambda: cluster.status()["leader"]["stage"] == "prepared", "the engine is asked to pause")
    time.sleep(0.3)
    engines[1].kill()

    assert all_do(trainers, "wait", version=2) == [2, 2]
    answer = engines[0].answer()
    assert answer.codes, "version 2 is not served by half an engine"
    assert_still_serve_1(engines[:1])


def test_a_daemon_dies_when_all_bytes_have_arrived(cluster: Cluster) -> None:
    """Version 2 is whole on both nodes and no rank has paused: node b goes, and nobody serves half of it."""
    trainers, engines = serving_version_1(cluster)
    all_do(trainers, "publish", version=2)
    eventually(lambda: cluster.status()["leader"]["stage"] == "prepared", "version 2 is prepared")
    cluster.kill_daemon("b")

    trainers[0].tell("wait", version=2)
    engines[0].tell("receive", version=2, timeout_s=1.0)
    decided, left = trainers[0].answer(), engines[0].answer()

    assert decided.value == 2 or "E_RANK_LOST" in decided.codes, decided.text
    assert left.codes, "version 2 is not served by half an engine"
    assert engines[0].ask("version") == 1
    assert all_do(engines, "differing", contents=1) == [[]] * 2


def test_the_daemon_of_an_engine_rank_dies_before_all_have_published(cluster: Cluster) -> None:
    """Node b is gone while version 2 is on its way: nobody hangs, and nobody says that version 2 is served."""
    trainers, engines = serving_version_1(cluster)
    cluster.kill_daemon("b")
    trainers[0].ask("publish", version=2)
    began = time.monotonic()

    waiting = trainers[0].fails("wait", version=2)
    cut_off = trainers[1].fails("publish", version=2)
    orphan = engines[1].fails("receive", timeout_s=DEADLINES["restart_s"] + MARGIN_S)

    assert time.monotonic() - began < 2 * (DEADLINES["restart_s"] + DEADLINES["heartbeat_timeout_s"] + MARGIN_S)
    assert "E_RANK_LOST" in waiting.codes, waiting.text
    assert cut_off.codes == ["E_PEER_GONE"], cut_off.text
    assert orphan.codes[0] in ("E_PEER_GONE", "E_RECEIVE"), orphan.text
    assert engines[0].ask("version") == 1
    assert engines[0].ask("differing", contents=1) == []
    assert engines[1].ask("differing", contents=1) == []


def test_the_leading_daemon_dies(cluster: Cluster) -> None:
    trainers, engines = serving_version_1(cluster)
    cluster.kill_daemon("a")

    for answer in all_answer([trainers[0], engines[0]], "close"):
        assert answer.error is None, "leaving a daemon that is gone is no error"
    engines[1].tell("receive", version=2, timeout_s=DEADLINES["heartbeat_timeout_s"] + 1.5)
    waiting = engines[1].answer()
    assert waiting.codes == ["E_RECEIVE"], waiting.text
    assert "stage unknown, waiting for node a, which leads and is not heard for" in waiting.text
    assert engines[1].ask("differing", contents=1) == []


def test_a_trainer_rank_that_died_comes_back(cluster: Cluster) -> None:
    """The run pauses, says so, and goes on under the next number once the rank has attached again."""
    trainers, engines = serving_version_1(cluster)
    trainers[1].kill()
    eventually(lambda: cluster.status()["leader"]["stage"] == "paused", "the run is paused", 10.0)
    assert "E_PAUSED" in trainers[0].fails("publish", version=2).codes

    trainers[1] = cluster.again(trainers[1])
    trainers[1].ask("attach")
    trainers[1].ask("publish", version=2)
    # Rank 0 learns with the next repeat that the run goes on.
    eventually(lambda: publishes(trainers[0], 2), "rank 0 may publish again", 5.0)
    assert all_do(engines, "receive", version=2) == [2, 2]
    assert all_do(engines, "differing", contents=2) == [[]] * 2
