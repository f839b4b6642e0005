"""An engine rank that ends in the middle of the copy into its parameters: half a version is served by nobody."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.cluster import START_S, Cluster, Rank, all_do, attached, eventually

pytestmark = pytest.mark.processes

LIMITS = {"restart_s": 1.5, "heartbeat_timeout_s": 1.0, "apply_stall_s": 2.0, "commit_ack_s": 2.0}
MARGIN_S = 4.0
"""Above a limit, for two busy cores."""
FOR_EVER_S = 60.0


@pytest.fixture
def cluster(folder: Path) -> Iterator[Cluster]:
    with Cluster(folder, ("a", "b"), None, **LIMITS) as started:
        yield started


def serving_version_1(cluster: Cluster) -> tuple[list[Rank], list[Rank], Rank]:
    """Return a trainer rank on each node, the two ranks of E0 and the one of E1, all serving version 1."""
    trainers = [cluster.trainer(0, 2, "a", engines={"E0": 2, "E1": 1}), cluster.trainer(1, 2, "b")]
    halves = [cluster.engine("E0", k, 2, node) for k, node in enumerate("ab")]
    other = cluster.engine("E1", 0, 1, "a")
    all_do(halves, "copy_slowly", START_S, pair_s=0.0)
    attached(trainers, halves, [other])
    all_do(trainers, "publish", version=1)
    assert all_do([*halves, other], "receive", version=1) == [1] * 3
    all_do(trainers, "wait", version=1)
    return trainers, halves, other


def in_mid_copy(cluster: Cluster, rank: Rank, node: str) -> None:
    """Return while a rank copies."""

    def look() -> bool:
        return bool(cluster.status(node)["node"]["ranks"][rank.name]["state"] == "applying")

    eventually(look, f"{rank.name} copies")
    time.sleep(0.3)  # so that some of it is written


def phase(cluster: Cluster, engine: str) -> str:
    """Return where the leader sees an engine."""
    return str(cluster.status()["leader"]["engines"][engine]["phase"])


@pytest.mark.parametrize(
    "end, limit_s, left",
    [
        pytest.param(Rank.kill, 0.0, "down", id="killed"),
        pytest.param(Rank.freeze, 2 * LIMITS["restart_s"] + LIMITS["apply_stall_s"], "severed", id="frozen"),
    ],
)
def test_half_a_version_is_served_by_nobody(
    cluster: Cluster, end: Callable[[Rank], None], limit_s: float, left: str
) -> None:
    trainers, halves, other = serving_version_1(cluster)
    survivor, victim = halves
    victim.ask("copy_slowly", pair_s=FOR_EVER_S)
    survivor.ask("copy_slowly", pair_s=0.2)  # killed: both are in their copies; frozen: this one has ended its own
    all_do(trainers, "publish", version=2)
    for rank in (*halves, other):
        rank.tell("receive", version=2)
    in_mid_copy(cluster, victim, "b")
    end(victim)
    began = time.monotonic()

    # The others are not held up for longer than the rank may take to come back, and to answer the fence.
    assert all_do(trainers, "wait", version=2) == [2, 2]
    assert other.answer().value == 2
    torn = survivor.answer()
    assert time.monotonic() - began < limit_s + MARGIN_S
    assert phase(cluster, "E0") == left
    assert other.ask("differing", contents=2) == []
    other.ask("assert_servable")

    # Whoever wrote is torn, and says which rank is the cause.
    assert torn.codes[0] == "E_POISONED", torn.text
    assert "E0[1]" in torn.text
    assert survivor.fails("assert_servable").codes == ["E_NOT_SERVABLE"]
    assert survivor.ask("version") == 0

    # A rank in its place, and the next version: the engine is whole again.
    if end is Rank.freeze:
        victim.kill()
    again = cluster.again(victim)
    survivor.ask("copy_slowly", pair_s=0.0)
    again.ask("attach")
    all_do(trainers, "publish", version=3)
    engines = [survivor, again, other]
    assert all_do(engines, "receive", version=3) == [3] * 3
    assert all_do(engines, "differing", contents=3) == [[]] * 3
    all_do(engines, "assert_servable")
    assert all_do(trainers, "wait", version=3) == [3, 3]
