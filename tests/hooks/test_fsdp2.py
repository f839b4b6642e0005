"""FSDP2 in all its layouts against torch's own ``full_tensor()``, on eight real ranks.

All cases run in one set of processes: most of the time is starting it.  Each is published before a step, behind a
forward (where parameters may be gathered) and behind a step, and taken by engines of 1, 3 and 4 ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.hooks.delivery import differing, poisoned
from tests.hooks.fsdp2_models import CASES, WORLD, declaration, expected
from tests.hooks.fsdp2_ranks import ATTACH_S, LIMIT_S, THROUGH_DAEMONS, file_of, truth_of
from tests.integration.cluster import DEADLINES, Cluster
from weightd.core.session.deadlines import Deadlines
from weightd.daemon.local_nodes import short_folder
from weightd.rollout_hooks.receiver import Receiver

ENGINE = 3

Verdicts = list[dict[str, list[str]]]

pytestmark = [pytest.mark.processes, pytest.mark.net, pytest.mark.timeout(300)]


class Job:
    """Eight trainer ranks and the daemons of two nodes."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.folder, self.cluster = folder, cluster
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        sockets = [str(cluster.nodes.socket(node)) for node in ("a", "b")]
        with (folder / "ranks.log").open("w") as log:
            self.ranks = subprocess.Popen(
                [sys.executable, "-m", "tests.hooks.fsdp2_ranks", str(port), str(folder), *sockets],
                cwd=Path(__file__).parents[2],
                stderr=log,
                start_new_session=True,
            )

    def until(self, path: Path) -> None:
        """Return once a file is there; fail if the ranks end without it."""
        end = time.monotonic() + LIMIT_S
        while not path.exists():
            ended = self.ranks.poll() is not None or time.monotonic() > end
            assert not ended, f"no {path.name}:\n{(self.folder / 'ranks.log').read_text()[-4000:]}"
            time.sleep(0.05)

    def end(self) -> None:
        """End all ranks, wherever they are."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.ranks.pid, signal.SIGKILL)
        self.ranks.wait(5)

    def verdicts(self) -> Verdicts:
        """Return what each rank found."""
        path = self.folder / "verdicts.json"
        self.until(path)
        found: Verdicts = json.loads(path.read_text())
        return found


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    folder = short_folder("wd-")
    waits: dict[str, Any] = {**DEADLINES, "attach_s": ATTACH_S, "apply_wait_s": 30.0, "collect_s": 30.0}
    with Cluster(folder, **waits) as cluster:
        running = Job(folder, cluster)
        try:
            yield running
        finally:
            running.end()


@pytest.fixture(scope="module")
def verdicts(job: Job) -> Verdicts:
    return job.verdicts()


@pytest.mark.parametrize("case", list(CASES))
def test_engines_get_what_full_tensor_says(verdicts: Verdicts, case: str) -> None:
    assert [rank[case] for rank in verdicts] == [[]] * WORLD


def test_partial_is_refused_by_name(verdicts: Verdicts) -> None:
    texts = {text for rank in verdicts for text in rank["partial"]}

    assert len(texts) == 1
    assert "E_PLACEMENT: layer.weight cannot be described: placement" in next(iter(texts))
    assert "Partial" in next(iter(texts))


@pytest.mark.parametrize("name", THROUGH_DAEMONS)
def test_through_daemons_of_two_nodes(job: Job, verdicts: Verdicts, name: str) -> None:
    """Eight trainer ranks on two nodes, three engine ranks on the first; two versions, a step between them."""
    case = CASES[name]
    declared = [declaration(case, ENGINE, k) for k in range(ENGINE)]
    params = [poisoned(d) for d in declared]
    receivers = [
        Receiver(
            params[k],
            run=f"run-{THROUGH_DAEMONS.index(name)}",
            engine="E0",
            k=k,
            size=ENGINE,
            slot=f"e{k}",
            socket=job.cluster.nodes.socket("a"),
            layout=declared[k],
            deadlines=Deadlines(attach_s=ATTACH_S),
        )
        for k in range(ENGINE)
    ]
    with ThreadPoolExecutor(ENGINE) as pool:
        list(pool.map(lambda r: r.attach(), receivers))
        try:
            for version in (1, 2):
                assert [version] * ENGINE == list(pool.map(lambda r: r.receive(timeout_s=60.0), receivers))
                truth = truth_of(file_of(job.folder, name, version))
                for k in range(ENGINE):
                    assert [] == differing(params[k], expected(case, truth, ENGINE, k))
        finally:
            list(pool.map(lambda r: r.close(), receivers))
