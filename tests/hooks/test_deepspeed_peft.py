"""Merged LoRA weights and single adapters of a PEFT model that DeepSpeed cuts, by the same code as everywhere."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hooks.deepspeed_peft import LIMIT_S, STAGES, WORLD

Found = list[dict[str, dict[str, list[str]]]]

pytestmark = [pytest.mark.processes, pytest.mark.net, pytest.mark.timeout(2 * LIMIT_S + 60)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Run both stages once."""
    folder = tmp_path_factory.mktemp("deepspeed-peft")
    command = [sys.executable, "-W", "ignore", "-m", "tests.hooks.deepspeed_peft", str(folder)]
    with (folder / "log").open("w") as log:
        parent = subprocess.Popen(
            command, cwd=Path(__file__).parents[2], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = parent.wait(2 * LIMIT_S + 30)
        finally:
            if parent.poll() is None:
                os.killpg(parent.pid, signal.SIGKILL)
                parent.wait(5)
    assert code == 0, (folder / "log").read_text()[-4000:]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("stage", STAGES)
def test_o35_published_is_what_peft_merges_and_saves(found: Found, stage: int) -> None:
    nothing: list[str] = []

    assert [rank[str(stage)] for rank in found] == [{"merged": nothing, "names": nothing, "adapter": nothing}] * WORLD
