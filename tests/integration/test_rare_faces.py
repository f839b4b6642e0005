"""Errors that take two faults, or a fault of a neighbour, as a trainer, an engine or another node meets them."""

from __future__ import annotations

import re
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.cluster import HOOK_DEADLINES, Cluster, Rank, all_do, attach_all, attached
from weightd.core.errors import MoreViolations, Refused, WeightdError
from weightd.core.plan.node_plan import Bucket
from weightd.core.units import Attempt, Boot, NodeId, Version, VersionKey
from weightd.core.wire.faults import TicketRefused
from weightd.daemon.bulk.port import FetchJob, Stop, new_token
from weightd.daemon.bulk.tcp import TcpBulkClient
from weightd.rollout_hooks.receiver import Receiver
from weightd.trainer_hooks import Publisher

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


def started_run(cluster: Cluster) -> tuple[list[Rank], list[Rank]]:
    """Return two trainer ranks and an engine of two ranks on nodes a and b, attached."""
    trainers = [cluster.trainer(0, 2, "a", engines={"E0": 2}), cluster.trainer(1, 2, "b")]
    engines = [cluster.engine("E0", k, 2, node) for k, node in enumerate("ab")]
    attached(trainers, engines)
    return trainers, engines


def test_a_version_of_another_layout_than_was_planned(folder: Path) -> None:
    with Cluster(folder) as cluster:
        trainers, engines = started_run(cluster)
        trainers[1].ask("change_layout", digest="0123456789abcdef" * 2)
        all_do(trainers, "publish", version=1)

        for answer in [t.fails("wait", version=1) for t in trainers]:
            assert answer.codes == ["E_LAYOUT_SKEW"], answer.text
            assert (answer.fields("E_LAYOUT_SKEW")["rank"], answer.fields("E_LAYOUT_SKEW")["version"]) == (1, 1)
        assert all_do(engines, "called_back") == [[], []]  # nobody was paused


def test_bytes_of_a_leader_that_is_no_more(folder: Path) -> None:
    """Rank 1 publishes while the leading node is down; the next leader cannot know these bytes."""
    with Cluster(folder, restart_s=12.0) as cluster:
        trainers, engines = started_run(cluster)
        cluster.kill_daemon("a")
        trainers[1].ask("publish", version=1)
        trainers[0].kill()
        cluster.start_daemon("a")
        anew = cluster.again(trainers[0])
        attached([anew])

        answer = trainers[1].fails("wait", version=1)
        assert answer.codes == ["E_NEW_TERM"], answer.text
        assert answer.fields("E_NEW_TERM")["next_version"] >= 1
        next_version = max(all_do([anew, trainers[1]], "next_version"))
        all_do([anew, trainers[1]], "publish", version=next_version)
        assert all_do(engines, "receive", version=next_version) == [next_version] * 2


def test_a_node_that_does_not_know_whom_to_fetch_from(folder: Path) -> None:
    cluster = Cluster(folder, "abc")
    config = cluster.nodes.config("b")
    config.write_text(re.sub(r'\[peers\."c"\]\n.*\n.*\n', "", config.read_text()))
    with cluster:
        ranks = [
            cluster.trainer(0, 2, "a", engines={"E0": 1}),
            cluster.trainer(1, 2, "c"),
            cluster.engine("E0", 0, 1, "b"),
        ]
        for answer in attach_all(ranks):
            assert answer.codes == ["E_PEER_UNKNOWN"], answer.text
            assert "add [peers.c] to the configuration of node b" in answer.text


ROSTER = """
nodes = {a = ["g0", "g1"], b = ["g2"]}
trainer_slots = ["g0"]
engines = [{id = "E0", slots = ["g1"]}, {id = "E1", slots = ["g2"]}]
"""


def test_ranks_in_other_places_than_their_roster_file_says(folder: Path) -> None:
    """On node a, where E0 belongs and E1 does not; both are refused by themselves, and nobody else is."""
    (folder / "roster.toml").write_text(ROSTER)
    with Cluster(folder, ("a",), attach_s=4.0) as cluster:
        trainer = cluster.trainer(0, 1, "a", slot="g0", engines=folder / "roster.toml")
        device = cluster.engine("E0", 0, 1, "a", slot="g7")
        node = cluster.engine("E1", 0, 1, "a", slot="g2")
        waiting, on_device, on_node = attach_all([trainer, device, node])

        assert on_device.codes == ["E_GPU_MISMATCH"], on_device.text
        assert on_node.codes == ["E_NODE_MISMATCH"], on_node.text
        assert waiting.codes == ["E_RANK_MISSING"] * 2, waiting.text


MANY = 60


def test_more_violations_than_a_message_carries(folder: Path) -> None:
    """One row of each of 60 tensors is missing: the report names the first, and counts the others."""
    with Cluster(folder, ("a",)) as cluster, ThreadPoolExecutor(2) as threads:
        socket = cluster.nodes.socket("a")
        shards = [(f"w{n:02d}", (2, 3), (0, 0), (1, 3), torch.zeros(1, 3)) for n in range(MANY)]
        params = {f"w{n:02d}": torch.zeros(2, 3) for n in range(MANY)}
        publisher = Publisher.from_shards(
            shards, run="run", rank=0, world=1, engines={"E0": 1}, socket=socket, deadlines=HOOK_DEADLINES
        )
        receiver = Receiver(
            params, run="run", engine="E0", k=0, size=1, slot="gpu-1", socket=socket, deadlines=HOOK_DEADLINES
        )
        calls: list[Future[Any]] = [threads.submit(publisher.attach), threads.submit(receiver.attach)]

        for error in [call.exception(25) for call in calls]:
            assert isinstance(error, Refused)
            *shown, last = error.violations
            assert isinstance(last, MoreViolations)
            assert last.code == "E_MORE"
            assert len(shown) + last.count == MANY
            assert last.by_code == {"E_ELEM_UNCOVERED": last.count}
            assert f"{MANY} violations" in str(error)


def test_a_ticket_that_nobody_gave(folder: Path) -> None:
    with Cluster(folder, ("a",)) as cluster:
        port = re.search(r'^bulk = "127\.0\.0\.1:(\d+)"', cluster.nodes.config("a").read_text(), re.MULTILINE)
        assert port is not None
        job = FetchJob(
            sender=NodeId("a"),
            receiver=NodeId("b"),
            host="127.0.0.1",
            port=int(port[1]),
            ticket=7,
            token=new_token(),
            key=VersionKey(Version(1), Attempt(Boot(1), 1)),
            buckets=[Bucket(0, NodeId("a"), 0, 64, 0, 1)],
            of=1,
            landing=np.zeros(64, np.uint8),
            streams=1,
            deadline_at=time.monotonic() + 10.0,
            fetch_s=10.0,
            stall_s=5.0,
        )
        with pytest.raises(WeightdError) as raised:
            TcpBulkClient().fetch(job, Stop(), lambda _: None)

        assert isinstance(raised.value, TicketRefused)
        assert raised.value.code == "E_TICKET"
        assert not job.landing.any()
        assert cluster.nodes.status("a")["verdict"] == "ok"
