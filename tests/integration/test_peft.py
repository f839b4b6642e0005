"""Merged LoRA weights of two FSDP2 ranks into an engine that calls them otherwise, through a real daemon."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.cluster import Cluster
from tests.integration.peft_ranks import LIMIT_S, VERSIONS

pytestmark = [pytest.mark.processes, pytest.mark.net, pytest.mark.timeout(2 * LIMIT_S + 30)]


def test_engine_holds_what_peft_merges_under_its_own_names(tmp_path: Path) -> None:
    with Cluster(tmp_path, ("a",), attach_s=30.0, collect_s=30.0) as cluster:
        command = [sys.executable, "-W", "ignore", "-m", "tests.integration.peft_ranks", str(tmp_path)]
        with (tmp_path / "ranks.log").open("w") as log:
            ranks = subprocess.Popen(
                [*command, str(cluster.nodes.socket("a"))],
                cwd=Path(__file__).parents[2],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = ranks.wait(2 * LIMIT_S)
            finally:
                if ranks.poll() is None:
                    os.killpg(ranks.pid, signal.SIGKILL)
                    ranks.wait(5)
    assert code == 0, (tmp_path / "ranks.log").read_text()[-4000:]

    assert {str(v): [] for v in VERSIONS} == json.loads((tmp_path / "found.json").read_text())
