"""A DeepSpeed trainer of TP 2 x DP 2 into an engine of TP 4 over two nodes, every byte, before a step and behind it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import Cluster
from tests.integration.deepspeed_ranks import RUN_S, RUNS, SETTINGS, SIZE, VERSIONS, Run

LIMIT_S = 560.0
"""For all runs: 75 s on two cores, six minutes where these are shared by a dozen busy processes."""

pytestmark = [pytest.mark.processes, pytest.mark.net, pytest.mark.timeout(LIMIT_S + 60)]

CUT = {
    "layers.0.down.weight",
    "layers.0.gate_up.weight",
    "layers.0.o_proj.weight",
    "layers.0.qkv_proj.bias",
    "layers.0.qkv_proj.weight",
    "layers.0.up.bias",
    "layers.0.up.weight",
}
"""What AutoTP cuts, and so what is wrong everywhere if its ranks are taken for each other."""

Verdicts = dict[str, dict[str, Any]]
"""By run and rank."""


@pytest.fixture(scope="module")
def verdicts(module_folder: Path) -> Verdicts:
    """Make all runs under the same two daemons, and gather what every rank found."""
    with Cluster(module_folder, attach_s=RUN_S / 2, collect_s=30.0, fetch_s=30.0, apply_wait_s=30.0) as cluster:
        sockets = [str(cluster.nodes.socket(node)) for node in ("a", "b")]
        # DeepSpeed 0.19 calls functions that torch 2.13 deprecates.
        command = [sys.executable, "-W", "ignore", "-m", "tests.integration.deepspeed_ranks", str(module_folder)]
        with (module_folder / "ranks.log").open("w") as log:
            ranks = subprocess.Popen(
                [*command, *sockets],
                cwd=Path(__file__).parents[2],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = ranks.wait(LIMIT_S)
            finally:
                if ranks.poll() is None:
                    os.killpg(ranks.pid, signal.SIGKILL)
                    ranks.wait(5)
        assert code == 0, (module_folder / "ranks.log").read_text()[-4000:]
    who = [f"trainer-{r}" for r in range(4)] + [f"engine-{k}" for k in range(SIZE)]
    return {run.name: {w: json.loads((module_folder / run.verdict(w)).read_text()) for w in who} for run in RUNS}


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_byte_of_every_engine_rank_is_deepspeeds_own(verdicts: Verdicts, setting: str) -> None:
    nothing: list[str] = []
    whole = dict.fromkeys(["attach", *map(str, VERSIONS)], nothing)
    expected: dict[str, Any] = {f"trainer-{r}": nothing for r in range(4)} | {f"engine-{k}": whole for k in range(SIZE)}

    assert verdicts[Run(setting, False).name] == expected


@pytest.mark.parametrize("setting", SETTINGS)
def test_ranks_of_tensor_parallelism_taken_for_each_other_are_noticed(verdicts: Verdicts, setting: str) -> None:
    """Shapes, coverage and digests are as ever then: only the bytes say it, and all of them are looked at."""
    found = verdicts[Run(setting, True).name]

    assert [found[f"trainer-{r}"] for r in range(4)] == [[]] * 4
    for k in range(SIZE):
        assert {v: set(found[f"engine-{k}"][str(v)]) for v in VERSIONS} == dict.fromkeys(VERSIONS, CUT)
