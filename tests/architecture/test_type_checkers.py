"""Both type checkers look into every folder: an error planted there is reported.

Through the links of ``src/weightd`` pyright finds no file and reports success; a checker that sees nothing is worse
than none.  So a wrong module is planted in a copy of every folder that holds Python.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

# The second mistake shows only to a checker that follows the import through a link into another folder.
PLANTED = """\
from weightd.core.planted_number import NUMBER

own: int = "text"
followed: str = NUMBER
"""
WRONG_LINES = (3, 4)


class Garden(NamedTuple):
    """A copy of the folders alone, and the wrong modules in it, by their paths below the copy."""

    root: Path
    modules: tuple[str, ...]

    def mistakes(self) -> list[tuple[str, int]]:
        return sorted((module, line) for module in self.modules for line in WRONG_LINES)

    def check(self, checker: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", checker, *arguments]
        return subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def garden(root: Path, folders: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Garden:
    copy = tmp_path_factory.mktemp("garden").resolve()
    shutil.copy2(root / "pyproject.toml", copy)
    shutil.copytree(root / "src", copy / "src", symlinks=True, ignore=shutil.ignore_patterns("*.egg-info"))
    modules = []
    for folder in {path.parent for top in (*folders, "tests") for path in (root / top).rglob("*.py")}:
        place = copy / folder.relative_to(root)
        place.mkdir(parents=True, exist_ok=True)
        if (folder / "__init__.py").exists():
            (place / "__init__.py").touch()
        (place / "planted.py").write_text(PLANTED)
        modules.append(str(place.relative_to(copy) / "planted.py"))
    (copy / "core" / "planted_number.py").write_text("NUMBER: int = 5\n")
    return Garden(copy, tuple(modules))


def test_mypy_reports_every_planted_error(garden: Garden) -> None:
    result = garden.check("mypy", "--output=json", "--cache-dir=/dev/null", f"--python-executable={sys.executable}")

    found = [json.loads(row) for row in result.stdout.splitlines() if row.startswith("{")]
    assert 1 == result.returncode, result.stdout + result.stderr
    assert garden.mistakes() == sorted((row["file"].removeprefix("src/weightd/"), row["line"]) for row in found)


def test_pyright_reports_every_planted_error(garden: Garden) -> None:
    result = garden.check("pyright", "--outputjson", f"--pythonpath={sys.executable}")

    found = [row for row in json.loads(result.stdout)["generalDiagnostics"] if row["severity"] == "error"]
    places = [(str(Path(row["file"]).relative_to(garden.root)), row["range"]["start"]["line"] + 1) for row in found]
    assert 1 == result.returncode, result.stdout + result.stderr
    assert garden.mistakes() == sorted(places)
