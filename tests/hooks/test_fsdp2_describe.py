"""FSDP2 layouts against torch's own ``full_tensor()``, on four real ranks."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hooks.fsdp2_ranks import CASES

WORLD = 4
LIMIT_S = 240.0

Verdicts = list[dict[str, list[str]]]

pytestmark = [pytest.mark.processes, pytest.mark.net, pytest.mark.timeout(260)]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Verdicts:
    """Run all cases once: most of the time is importing torch four times."""
    folder = tmp_path_factory.mktemp("fsdp2")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tests.hooks.fsdp2_ranks"]
    root = Path(__file__).parents[2]
    ranks = [
        subprocess.Popen([*command, str(rank), str(WORLD), str(port), str(folder)], cwd=root) for rank in range(WORLD)
    ]
    try:
        codes = [rank.wait(LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * WORLD
    found: Verdicts = json.loads((folder / "verdicts.json").read_text())
    return found


@pytest.mark.parametrize("case", list(CASES))
def test_every_rank_holds_what_full_tensor_says(verdicts: Verdicts, case: str) -> None:
    assert [rank[case] for rank in verdicts] == [[]] * WORLD


def test_partial_is_refused_by_name(verdicts: Verdicts) -> None:
    texts = {text for rank in verdicts for text in rank["partial"]}

    assert len(texts) == 1
    assert "E_PLACEMENT: layer.weight cannot be described: placement" in next(iter(texts))
    assert "Partial" in next(iter(texts))
