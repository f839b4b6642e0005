"""The floors of the house: import-linter's contracts hold, and each of them can fail."""

import subprocess
import sys
from pathlib import Path

import pytest


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the packages of ``folder``, not on the installed ones."""
    code = "import sys; sys.path.insert(0, 'src'); from importlinter.cli import lint_imports_command as run; run()"
    command = [sys.executable, "-c", code, "--no-cache", "--no-logo", "pyproject.toml"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_contracts_hold(root: Path) -> None:
    result = lint_imports(root)

    assert 0 == result.returncode, result.stdout + result.stderr


@pytest.mark.parametrize(
    "place, line, contract",
    [
        ("core/planted.py", "X = 1", "Inside core"),
        ("core/units.py", "import zmq", "core reaches no socket"),
        ("core/session/planted.py", "import time", "core reaches no socket"),
        ("core/layout/planted.py", "import weightd.core.session", "Inside core"),
        ("core/roster/planted.py", "import weightd.core.plan", "Inside core"),
        ("core/plan/planted.py", "import weightd.core.wire", "Inside core"),
        ("core/plan/planted.py", "import weightd.link", "Floors"),
        ("link/planted.py", "import weightd.daemon", "Floors"),
        ("link/planted.py", "import anyio", "no event loop"),
        ("daemon/planted.py", "import weightd.rollout_hooks", "Floors"),
        ("trainer_hooks/planted.py", "import weightd.rollout_hooks", "Floors"),
        ("rollout_hooks/planted.py", "import asyncio", "no event loop"),
    ],
)
def test_a_planted_import_breaks_its_contract(twin: Path, place: str, line: str, contract: str) -> None:
    with (twin / place).open("a") as module:
        module.write(f"\n{line}\n")

    result = lint_imports(twin)

    broken = [row for row in result.stdout.splitlines() if row.endswith("BROKEN") and contract in row]
    assert 1 == result.returncode, result.stdout + result.stderr
    assert broken, result.stdout
