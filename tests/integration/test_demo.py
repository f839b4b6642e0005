"""``weightd demo``, as a newcomer types it: every byte compared, then a rank is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]  # eight processes import torch, on two busy cores


def test_the_demo_shows_what_it_is_to_show(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "weightd.daemon.cli", "demo", "--json"],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"]
    assert {rank: [v["version"] for v in versions if v["equal"]] for rank, versions in found["compared"].items()} == {
        f"E0-{k}": [1, 2, 3] for k in range(4)
    }
    assert [v["alpha"] for v in found["versions"]] == [1.0, 1.0, 1.0]
    assert all(v["wire_nbytes"] > 0 and v["applied_nbytes"] == v["needed_nbytes"] for v in found["versions"])
    assert sorted(found["refusals"]) == sorted({*(f"trainer-{r}" for r in range(4)), *(f"E0-{k}" for k in range(3))})
    for refusal in found["refusals"].values():
        assert "engine E0: 3 registered + 1 missing = 4 rollout ranks" in refusal["text"]
    assert "version 3 committed" in done.stderr, "progress while it runs"
    assert list(folder.glob("weightd*")) == [], "nothing is left behind"
