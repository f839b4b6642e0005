"""DeepSpeed's real steps in live memory, under every ZeRO stage."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hooks.live_deepspeed_ranks import CASES, LIMIT_S, WORLD

pytestmark = [pytest.mark.processes, pytest.mark.net, pytest.mark.timeout(LIMIT_S + 60)]

Verdicts = list[dict[str, list[str]]]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Verdicts:
    """Run all cases once: importing DeepSpeed takes as long as all of them."""
    folder = tmp_path_factory.mktemp("deepspeed")
    # DeepSpeed 0.19 calls functions that torch 2.13 deprecates.
    command = [sys.executable, "-W", "ignore", "-m", "tests.hooks.live_deepspeed_ranks", str(folder)]
    with (folder / "log").open("w") as log:
        parent = subprocess.Popen(
            command, cwd=Path(__file__).parents[2], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = parent.wait(LIMIT_S + 30)
        finally:
            if parent.poll() is None:
                os.killpg(parent.pid, signal.SIGKILL)
                parent.wait(5)
    assert code == 0, (folder / "log").read_text()[-4000:]
    found: Verdicts = json.loads((folder / "verdicts.json").read_text())
    return found


@pytest.mark.parametrize("case", CASES)
def test_steps_write_the_memory_that_engines_read(verdicts: Verdicts, case: str) -> None:
    """Every element equals DeepSpeed's export, before and after two steps; given back, nothing writes it any more."""
    assert [rank[case] for rank in verdicts] == [[]] * WORLD
