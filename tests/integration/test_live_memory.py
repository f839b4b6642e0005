"""An FSDP2 trainer in live memory through real daemons: every byte after real steps, and steps that cannot wait."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.integration import live_ranks
from tests.integration.cluster import HOOK_DEADLINES, Cluster, all_answer, all_do, attached, value_of
from tests.integration.live_ranks import LiveSpec, Values, cut

pytestmark = [pytest.mark.processes, pytest.mark.net, pytest.mark.timeout(120)]


class Live:
    """A live trainer of two ranks on node a, and an engine of two ranks on one or two nodes."""

    def __init__(self, cluster: Cluster, nodes: tuple[str, str] = ("b", "b"), inner: int = 10, **limits: float) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        deadlines = msgspec.structs.replace(HOOK_DEADLINES, **({"step_wait_s": 20.0} | limits))
        sockets = {node: cluster.nodes.socket(node) for node in ("a", "b")}
        self.cluster = cluster
        self.trainers = [
            cluster.start(
                f"trainer {r}",
                LiveSpec(sockets["a"], r, port=port, inner=inner, deadlines=deadlines),
                live_ranks.trainer,
            )
            for r in range(2)
        ]
        self.engines = [
            cluster.start(f"E0[{k}]", LiveSpec(sockets[n], k, inner=inner, deadlines=deadlines), live_ranks.engine)
            for k, n in enumerate(nodes)
        ]
        attached(self.trainers, self.engines)

    def full(self) -> Values:
        """Return what the trainer holds now."""
        return dict(all_do(self.trainers, "full")[0])

    def differing(self, full: Values) -> list[str]:
        """Return what is not the same in the engine."""
        return [
            f"{name} of E0[{k}]"
            for k, found in enumerate(all_do(self.engines, "params"))
            for name, expected in cut(full, k).items()
            if not np.array_equal(expected, found[name])
        ]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as started:
        yield started


@pytest.mark.parametrize("nodes", [("b", "b"), ("a", "b")])
def test_three_versions_with_steps_between_them(cluster: Cluster, nodes: tuple[str, str]) -> None:
    live = Live(cluster, nodes)
    everything = ["down.bias", "down.weight", "emb.weight", "few", "scale", "up.bias", "up.weight"]
    assert sorted(live.trainers[0].ask("in_memory")) == everything
    before: Values = {}
    for version in (1, 2, 3):
        full = live.full()
        assert not before or not np.array_equal(before["up.weight"], full["up.weight"])
        for engine in live.engines:
            engine.tell("receive")
        assert all_do(live.trainers, "publish_and_step") == [version, version]
        assert [value_of(e.answer()) for e in live.engines] == [version, version]
        assert live.differing(full) == []
        assert all_do(live.trainers, "slots") == [[0, 0], [0, 0]]
        before = full


def test_memory_of_its_own_comes_back_and_states_are_loaded_in_place(cluster: Cluster) -> None:
    live = Live(cluster)
    all_do(live.trainers, "reload")
    all_do(live.trainers, "step", times=2)
    assert len(live.trainers[0].ask("in_memory")) == 7
    full = live.full()
    all_do(live.trainers, "close")
    all_do(live.trainers, "step")
    after = live.full()

    assert not np.array_equal(full["up.weight"], after["up.weight"])


def test_a_parameter_in_other_memory_is_published_from_its_old_place(cluster: Cluster) -> None:
    live = Live(cluster, ("a", "b"))
    for version in (1, 2):
        full = live.full()
        for engine in live.engines:
            engine.tell("receive")
        all_do(live.trainers, "publish_and_step")
        assert [value_of(e.answer()) for e in live.engines] == [version, version]
        assert live.differing(full) == []
        all_do(live.trainers, "replace")

    assert live.trainers[0].ask("in_memory") == []
    all_do(live.trainers, "publish")
    assert len(live.trainers[0].ask("in_memory")) == 7


# ------------------------------------------------------------ steps that cannot wait


@pytest.mark.parametrize("nodes", [("b", "b"), ("a", "b")])
def test_an_engine_that_does_not_come_holds_no_step_back_and_gets_the_version_as_it_was(
    cluster: Cluster, nodes: tuple[str, str]
) -> None:
    live = Live(cluster, nodes, step_wait_s=0.5)
    full = live.full()
    all_do(live.trainers, "publish_and_step")
    after = live.full()

    assert all_do(live.trainers, "slots") == [[0, 1], [0, 1]]
    assert not np.array_equal(full["up.weight"], after["up.weight"])

    assert all_do(live.engines, "receive") == [1, 1]
    assert live.differing(full) == []
    all_do(live.trainers, "wait", version=1, until="released")
    assert all_do(live.trainers, "slots") == [[0, 0], [0, 0]]

    for engine in live.engines:
        engine.tell("receive")
    all_do(live.trainers, "publish_and_step")
    assert [value_of(e.answer()) for e in live.engines] == [2, 2]
    assert live.differing(after) == []


def test_a_step_waits_for_who_copies_already(cluster: Cluster) -> None:
    live = Live(cluster, ("a", "a"), step_wait_s=0.2)
    live.engines[0].ask("copy_slowly", pair_s=0.1)
    full = live.full()
    for engine in live.engines:
        engine.tell("receive")
    all_do(live.trainers, "publish_and_step")

    assert [value_of(e.answer()) for e in live.engines] == [1, 1]
    assert live.differing(full) == []


def test_steps_that_never_wait_move_what_is_being_fetched(cluster: Cluster) -> None:
    live = Live(cluster, ("b", "a"), inner=200_000, step_wait_s=0.0)
    for version in (1, 2, 3):
        full = live.full()
        for engine in live.engines:
            engine.tell("receive")
        assert all_do(live.trainers, "publish_and_step") == [version, version]
        assert [value_of(e.answer()) for e in live.engines] == [version, version]
        assert live.differing(full) == []


def test_no_step_is_made_under_a_reader_that_does_not_end(tmp_path: Path) -> None:
    with Cluster(tmp_path, apply_s=25.0, apply_stall_s=25.0) as cluster:
        live = Live(cluster, ("a", "a"), step_wait_s=0.2, restart_s=1.0)
        live.engines[0].ask("copy_slowly", pair_s=0.4)
        full = live.full()
        for engine in live.engines:
            engine.tell("receive")
        refused = all_answer(live.trainers, "publish_and_step")

        assert [a.codes for a in refused] == [["E_LIVE_READ"], ["E_LIVE_READ"]]
        assert "the parameters were not written" in refused[0].text
        assert [value_of(e.answer()) for e in live.engines] == [1, 1]
        assert live.differing(full) == []


def test_parameters_that_are_written_while_they_are_published_are_noticed(cluster: Cluster) -> None:
    live = Live(cluster, ("a", "b"))
    all_do(live.trainers, "publish")
    all_do(live.trainers, "write_without_a_word")
    all_do(live.engines, "receive")
    refused = all_answer(live.trainers, "publish")

    assert [a.codes for a in refused] == [["E_LIVE_WRITTEN"], ["E_LIVE_WRITTEN"]]
    assert "version 1" in refused[0].text


# ------------------------------------------------------------ what it costs


def test_neither_memory_nor_descriptors_grow_over_many_versions(cluster: Cluster) -> None:
    live = Live(cluster, ("a", "b"), inner=20_000)
    for engine in live.engines:
        engine.tell("receive_all", last=50)
    (begun, ended), _ = all_do(live.trainers, "publish_and_step_often", timeout_s=90.0, times=50, warm=10)
    for engine in live.engines:
        assert value_of(engine.answer()) == 50

    assert begun[0] == ended[0]
    assert ended[1] - begun[1] < 6 << 10, f"{begun} to {ended} KiB; a copy that stays would be 20 MiB by now"
