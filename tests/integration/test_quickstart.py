"""The quickstart of the README, run as it is written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from weightd.daemon.children import Children
from weightd.daemon.local_nodes import LocalNodes

pytestmark = [pytest.mark.processes, pytest.mark.timeout(270)]  # two processes import torch anew, twice

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


def test_the_engine_ends_with_the_trainers_numbers_and_so_it_does_again(folder: Path) -> None:
    home = folder / "q"
    shutil.copytree(QUICKSTART, home)
    nodes = LocalNodes(folder / "n", ("a",))
    config = nodes.config("a").read_text(encoding="utf-8").splitlines()
    ports = [line for line in config if line.startswith(("control", "bulk"))]  # free ones instead of the default
    nodes.config("a").write_text("\n".join([(home / "weightd.toml").read_text(encoding="utf-8"), *ports]))
    environ = {**os.environ, "WEIGHTD_SOCKET": "quickstart-run", "OMP_NUM_THREADS": "1"}
    with Children(folder / "logs") as children:
        serve = [sys.executable, "-m", "weightd.daemon.cli", "serve", "--config", str(nodes.config("a"))]
        children.start("daemon", serve, cwd=folder)
        for committed in (0, 3):  # the daemon stays; the second pair of processes goes on where the first one ended
            trainer, engine = pair_of_ranks(home, environ, folder)
            published = [line.removeprefix("published ") for line in trainer]
            assert published == [line.removeprefix("serving ") for line in engine]
            assert [line.partition(":")[0] for line in published] == [str(committed + n) for n in (1, 2, 3)]
            assert len({line.partition(":")[2] for line in published}) == 3, "each step changed the weights"


def pair_of_ranks(home: Path, environ: dict[str, str], cwd: Path) -> tuple[list[str], list[str]]:
    """Run trainer and engine side by side to their ends and return what each printed."""
    ranks = [
        subprocess.Popen([sys.executable, str(home / script)], env=environ, stdout=subprocess.PIPE, text=True, cwd=cwd)
        for script in ("trainer.py", "engine.py")
    ]
    try:
        trainer, engine = (rank.communicate(timeout=120)[0].splitlines() for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0, 0]
    return trainer, engine
