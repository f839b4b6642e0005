"""A trainer that forked a child, as for a data loader, and is killed: the child keeps nobody from noticing."""

from __future__ import annotations

import multiprocessing.connection
import os
import time
from pathlib import Path

import pytest

from tests.integration.cluster import Cluster, Rank, attached, eventually
from tests.integration.ranks import TrainerRank, TrainerSpec, obey

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

CHILD_S = 30.0
AT_ONCE_S = 3.0
"""On two busy cores; the child lives ten times as long."""


class ForkingTrainer(TrainerRank):
    """Forks children that do nothing."""

    def fork(self) -> int:
        """Fork one and return its pid."""
        pid = os.fork()
        if pid == 0:
            time.sleep(CHILD_S)
            os._exit(0)
        return pid


def trainer(pipe: multiprocessing.connection.Connection, spec: TrainerSpec) -> None:
    """Be a trainer rank."""
    obey(pipe, lambda: ForkingTrainer(spec))


def test_the_death_of_a_process_that_had_forked_is_noticed_at_once(folder: Path) -> None:
    with Cluster(folder, ("a",)) as cluster:
        spec = TrainerSpec(cluster.nodes.socket("a"), 0, 1, engines={"E0": 1})
        rank: Rank = cluster.start("trainer 0", spec, trainer)
        engine = cluster.engine("E0", 0, 1)
        attached([rank], [engine])
        rank.ask("publish")
        assert engine.ask("receive") == 1
        child = rank.ask("fork")
        try:
            rank.kill()
            eventually(lambda: cluster.status()["leader"]["stage"] == "paused", "its death is noticed", AT_ONCE_S)
        finally:
            os.kill(child, 9)

        successor = cluster.trainer(0, 1, engines={"E0": 1})
        attached([successor])
        successor.ask("publish", version=2)
        assert engine.ask("receive", version=2) == 2
