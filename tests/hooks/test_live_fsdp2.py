"""FSDP2's real steps in live memory: eight ranks, every kind of mesh."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hooks.forks import free_port
from tests.hooks.fsdp2_models import WORLD
from tests.hooks.live_fsdp2_ranks import LIMIT_S, LIVE_CASES

pytestmark = [pytest.mark.processes, pytest.mark.net, pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 90)]

Verdicts = list[dict[str, list[str]]]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Verdicts:
    """Run all cases once."""
    folder = tmp_path_factory.mktemp("fsdp2")
    command = [sys.executable, "-W", "ignore", "-m", "tests.hooks.live_fsdp2_ranks", str(free_port()), str(folder)]
    with (folder / "log").open("w") as log:
        parent = subprocess.Popen(
            command, cwd=Path(__file__).parents[2], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = parent.wait(LIMIT_S + 60)
        finally:
            if parent.poll() is None:
                os.killpg(parent.pid, signal.SIGKILL)
                parent.wait(5)
    assert code == 0, (folder / "log").read_text()[-4000:]
    found: Verdicts = json.loads((folder / "verdicts.json").read_text())
    return found


@pytest.mark.parametrize("case", LIVE_CASES)
def test_steps_write_the_memory_that_engines_read(verdicts: Verdicts, case: str) -> None:
    """Every element equals ``full_tensor()``, before and behind two steps; given back, nothing writes it any more."""
    assert [rank[case] for rank in verdicts] == [[]] * WORLD
