"""Errors of the daemon, the session and the journal as a trainer and an engine meet them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
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


def through_a_proxy(cluster: Cluster, change: Callable[[int, bytearray], bool]) -> AbstractContextManager[int]:
    """Let node b fetch from node a through a proxy; the cluster has not started yet."""
    config = cluster.nodes.config("b")
    found = re.search(r'\[peers\."a"\]\ncontrol = "[^"]+"\nbulk = "127\.0\.0\.1:(\d+)"', config.read_text())
    assert found is not None
    return proxy(int(found[1]), change)


def reconfigured(cluster: Cluster, node: str, *changes: tuple[str, str]) -> None:
    config = cluster.nodes.config(node)
    for pattern, value in changes:
        text, count = re.subn(pattern, value, config.read_text())
        assert count == 1, pattern
        config.write_text(text)


def fails_between_nodes(cluster: Cluster, change: Callable[[int, bytearray], bool], *changes: tuple[str, str]) -> str:
    """Return the one code with which version 1 fails while node a's bytes to node b are changed so."""
    with through_a_proxy(cluster, change) as port:
        at_a = r'(\[peers\."a"\]\ncontrol = "[^"]+"\nbulk = "127\.0\.0\.1:)\d+'
        reconfigured(cluster, "b", (at_a, rf"\g<1>{port}"), *changes)
        with cluster:
            trainers, engines = trainers_of(cluster, "run"), engines_of(cluster, "run")
            attached(trainers, engines)
            all_do(trainers, "publish", version=1)
            failed = [t.fails("wait", version=1) for t in trainers]
            assert failed[0].codes == failed[1].codes
            assert len(failed[0].codes) == 1, failed[0].text
            assert "node a" in failed[0].text
            assert [e.ask("version") for e in engines] == [0, 0]
            assert all_do(engines, "called_back") == [[], []]  # nobody was paused
            return failed[0].codes[0]


def is_payload(data: bytearray) -> bool:
    return len(data) > HANDSHAKE_NBYTES + HEAD.size + TAIL.size


def test_bytes_that_change_between_nodes(module_folder: Path) -> None:
    def flip(_passed: int, data: bytearray) -> bool:
        if is_payload(data):
            data[len(data) // 2] ^= 1
        return True

    assert fails_between_nodes(Cluster(module_folder / "flipped"), flip) == "E_DIGEST"


def test_streams_that_end_early_for_as_long_as_a_fetch_may_take(module_folder: Path) -> None:
    def cut(_passed: int, data: bytearray) -> bool:
        return not is_payload(data)

    cluster = Cluster(module_folder / "cut")
    assert fails_between_nodes(cluster, cut, (r"\nfetch_s = [\d.]+", "\nfetch_s = 1.0")) == "E_PEER_LOST"


def test_a_stream_that_says_no_more(module_folder: Path) -> None:
    silent = threading.Event()

    def stall(_passed: int, data: bytearray) -> bool:
        return not is_payload(data) or silent.wait(20.0)

    cluster = Cluster(module_folder / "stalled")
    try:
        code = fails_between_nodes(cluster, stall, (r"\nfetch_stall_s = [\d.]+", "\nfetch_stall_s = 1.0"))
    finally:
        silent.set()
    assert code == "E_TRANSFER_DEADLINE"


def test_a_slot_that_is_written_after_it_was_published(module_folder: Path) -> None:
    with Cluster(module_folder / "stale") as cluster:
        trainers, engines = trainers_of(cluster, "run"), engines_of(cluster, "run")
        attached(trainers, engines)
        trainers[0].ask("publish", version=1)
        trainers[0].ask("begin_to_overwrite")
        trainers[1].ask("publish", version=1)

        for answer in [t.fails("wait", version=1) for t in trainers]:
            assert answer.codes == ["E_STALE_SOURCE"], answer.text
            assert "trainer 0" in answer.text
        assert [e.ask("version") for e in engines] == [0, 0]


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
