"""DeepSpeed layouts against DeepSpeed's own consolidation, on real ranks, before and after a step."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hooks.deepspeed_ranks import ACCUMULATION, LIMIT_S, WORLDS, cases

pytestmark = [pytest.mark.processes, pytest.mark.net, pytest.mark.timeout(2 * LIMIT_S + 60)]

Verdicts = dict[int, list[dict[str, list[str]]]]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Verdicts:
    """Run all cases once: importing DeepSpeed takes as long as five of them."""
    folder = tmp_path_factory.mktemp("deepspeed")
    # DeepSpeed 0.19 calls functions that torch 2.13 deprecates.
    command = [sys.executable, "-W", "ignore", "-m", "tests.hooks.deepspeed_ranks", str(folder)]
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
    return {tp: json.loads((folder / f"verdicts-{tp}.json").read_text()) for tp in WORLDS}


@pytest.mark.parametrize("tp", WORLDS)
@pytest.mark.parametrize("case", list(cases(1)))
def test_ranks_together_hold_what_deepspeed_exports(verdicts: Verdicts, case: str, tp: int) -> None:
    """Parameters, masters, and masters that are cast, each element equally often, before and after a step."""
    assert [rank[case] for rank in verdicts[tp]] == [[]] * WORLDS[tp]


def test_nothing_is_published_in_the_middle_of_a_step(verdicts: Verdicts) -> None:
    for rank in verdicts[1]:
        before, *during, behind, more_to_come = rank["accumulation"]

        assert (before, behind) == ("published", "published")
        assert len(during) == ACCUMULATION.accumulation - 1
        assert "E_STEP: the trainer is in the middle of a step, 0 are finished: 1 of 3 micro-batches" in during[0]
        assert "2 of 3 micro-batches of the next step are taken" in during[1]
        assert "1 are finished: set_gradient_accumulation_boundary(False) says that more is to come" in more_to_come
