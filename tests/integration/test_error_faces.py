"""Errors of the daemon, the session and the journal as a trainer and an engine meet them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.contract.test_bulk import HANDSHAKE_NBYTES, proxy
from tests.integration.cluster import Cluster, Rank, all_answer, all_do, attach_all, attached, eventually
from weightd.daemon.bulk.tcp_frames import HEAD, TAIL
from weightd.link.faults import MemoryExhausted
from weightd.trainer_hooks import Publisher

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

ENGINES = {"E0": 2}
JOURNAL_BYTES = 8192
"""Room for what an attach writes (term and epoch), none for the preallocation of a commit."""


def trainers_of(cluster: Cluster, run: str) -> list[Rank]:
    return [cluster.trainer(0, 2, "a", run=run, engines=ENGINES), cluster.trainer(1, 2, "b", run=run)]


def engines_of(cluster: Cluster, run: str) -> list[Rank]:
    return [cluster.engine("E0", 0, 2, "a", run=run), cluster.engine("E0", 1, 2, "b", run=run)]


def refused_at_attach(folder: Path, limits: dict[str, int]) -> list[list[str]]:
    with Cluster(folder, limits=limits, attach_s=6.0) as cluster:
        answers = attach_all([*trainers_of(cluster, "run"), *engines_of(cluster, "run")])
        assert all(a.error is not None for a in answers)
        return [a.codes for a in answers]


def test_a_bucket_smaller_than_an_element(module_folder: Path) -> None:
    assert refused_at_attach(module_folder / "bucket", {"bucket_bytes": 1}) == [["E_BUDGET"]] * 4


def test_a_landing_larger_than_its_budget(module_folder: Path) -> None:
    assert refused_at_attach(module_folder / "landing", {"memory_budget_bytes": 1}) == [["E_MEMORY_BUDGET"]] * 4


@pytest.fixture(scope="module")
def cluster(module_folder: Path) -> Iterator[Cluster]:
    with Cluster(module_folder / "shared", attach_s=5.0, collect_s=2.0) as started:
        yield started


def test_an_engine_whose_run_nobody_leads(cluster: Cluster) -> None:
    [answer] = attach_all([cluster.engine("E0", 0, 2, "a", run="leaderless")])

    assert answer.codes == ["E_NO_LEADER"]
    assert "leaderless" in answer.text


def test_a_version_that_one_rank_never_publishes(cluster: Cluster) -> None:
    trainers, engines = trainers_of(cluster, "late"), engines_of(cluster, "late")
    attached(trainers, engines)
    trainers[0].ask("publish", version=1)

    waiting = trainers[0].fails("wait", version=1)
    assert waiting.codes == ["E_DEADLINE"]
    assert "trainer 1 (node b) to publish v1" in waiting.text
    assert "collect_s" in waiting.text
    assert [e.ask("version") for e in engines] == [0, 0]


def test_an_engine_rank_that_refuses_to_pause(cluster: Cluster) -> None:
    trainers, engines = trainers_of(cluster, "pause"), engines_of(cluster, "pause")
    attached(trainers, engines)
    all_do(trainers, "publish", version=1)
    all_do(engines, "receive", version=1)
    engines[1].ask("refuse_pause", version=2)
    all_do(trainers, "publish", version=2)
    raised = all_answer(engines, "receive", version=2)
    assert raised[1].codes == ["E_CONFIG"]  # what its own callback raised

    waiting = [t.fails("wait", version=2) for t in trainers]
    for answer in waiting:
        assert "E_APPLY" in answer.codes, answer.text
        assert "is not wanted here" in answer.text
    assert all_do(engines, "differing", contents=1) == [[], []]  # nothing was written


def test_a_journal_without_room(module_folder: Path) -> None:
    """The record of a decision must have its place before any engine is paused."""
    with Cluster(module_folder / "journal") as cluster:
        trainers, engines = trainers_of(cluster, "run"), engines_of(cluster, "run")
        attached(trainers, engines)
        cluster.let_files_grow_to("a", JOURNAL_BYTES)
        all_do(trainers, "publish", version=1)

        for answer in [t.fails("wait", version=1) for t in trainers]:
            assert answer.codes == ["E_JOURNAL"], answer.text
            assert "File too large" in answer.text
        assert [e.ask("version") for e in engines] == [0, 0]
        assert all_do(engines, "called_back") == [[], []]  # nobody was paused


def test_bytes_that_change_between_nodes(module_folder: Path) -> None:
    """A bucket that differs twice fails the version; engines keep what they serve, and the next one arrives."""
    cluster = Cluster(module_folder / "flipped")
    config = cluster.nodes.config("b")
    found = re.search(r'\[peers\."a"\]\ncontrol = "[^"]+"\nbulk = "127\.0\.0\.1:(\d+)"', config.read_text())
    assert found is not None
    through = int(found[1])
    flipping = [True]

    def flip(_passed: int, data: bytearray) -> bool:
        if flipping[0] and len(data) > HANDSHAKE_NBYTES + HEAD.size + TAIL.size:
            data[len(data) // 2] ^= 1
        return True

    with proxy(through, flip) as port:
        config.write_text(config.read_text().replace(f'bulk = "127.0.0.1:{through}"', f'bulk = "127.0.0.1:{port}"'))
        with cluster:
            trainers, engines = trainers_of(cluster, "run"), engines_of(cluster, "run")
            attached(trainers, engines)
            all_do(trainers, "publish", version=1)
            for answer in [t.fails("wait", version=1) for t in trainers]:
                assert answer.codes == ["E_DIGEST"], answer.text
                assert "node a" in answer.text
            assert [e.ask("version") for e in engines] == [0, 0]

            flipping[0] = False
            all_do(trainers, "publish", version=2)
            assert all_do(engines, "receive", version=2) == [2, 2]
            assert all_do(engines, "differing", contents=2) == [[], []]


def test_a_damaged_journal_is_said_to_who_attaches(module_folder: Path) -> None:
    """A decision may be lost in it: nobody takes part until somebody has looked."""
    with Cluster(module_folder / "damaged", ("a",), attach_s=5.0) as cluster:
        journal = module_folder / "damaged" / "a" / "state" / "runs" / "run" / "node.journal"
        journal.parent.mkdir(parents=True)
        journal.write_bytes(b"no journal at all")
        [answer] = attach_all([cluster.trainer(0, 1, "a", engines={"E0": 1})])

        assert answer.codes == ["E_JOURNAL_FILE"]
        assert str(journal) in answer.text

        journal.unlink()
        trainer, engine = cluster.trainer(0, 1, "a", engines={"E0": 1}), cluster.engine("E0", 0, 1, "a")
        attached([trainer], [engine])


def test_a_paused_rank_whose_leader_is_gone(module_folder: Path) -> None:
    with Cluster(module_folder / "undecided") as cluster:
        trainers = trainers_of(cluster, "run")
        slow, waiting = cluster.engine("E0", 0, 2, "a", run="run", dwell_s=3.0), engines_of(cluster, "run")[1]
        attached(trainers, [slow, waiting])
        all_do(trainers, "publish", version=1)
        for rank in (slow, waiting):
            rank.tell("receive", version=1)
        eventually(lambda: waiting_state(cluster) == "paused", "rank 1 waits for rank 0 to pause")
        cluster.kill_daemon("a")

        answer = waiting.answer()
        assert answer.codes == ["E_UNDECIDED"], answer.text
        assert "node a" in answer.text
        assert waiting.ask("version") == 0


def waiting_state(cluster: Cluster) -> str:
    ranks: dict[str, dict[str, str]] = cluster.status("b")["node"]["ranks"]
    return ranks["E0[1]"]["state"]


def test_slots_that_no_host_has_memory_for() -> None:
    """Asked of the host before it is taken: nothing is killed for it, and nothing is left behind."""
    rows = 1 << 38
    shard = torch.zeros(1, dtype=torch.uint8).expand(rows)
    publisher = Publisher.from_shards(
        [("w", (rows,), (0,), (rows,), shard)], run="huge", rank=0, world=1, engines={"E0": 1}
    )

    with pytest.raises(MemoryExhausted, match=r"256\.0 GiB"):
        publisher.attach()
