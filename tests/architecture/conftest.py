"""Copies of the project in which a test may plant a mistake."""

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("core", "link", "daemon", "trainer_hooks", "rollout_hooks")


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's own folder."""
    return ROOT


@pytest.fixture(scope="session")
def folders() -> tuple[str, ...]:
    """The five top-level folders, each of them ``weightd.<name>`` when imported."""
    return FOLDERS


@pytest.fixture
def twin(tmp_path: Path) -> Path:
    """A copy of what makes the distribution, without what builds and checkers leave behind."""
    return make_twin(tmp_path / "twin")


@pytest.fixture(scope="module")
def module_twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same copy, made once for a module whose tests do not change it."""
    return make_twin(tmp_path_factory.mktemp("module") / "twin")


def make_twin(target: Path) -> Path:
    """Copy the five folders, ``src`` with its links, the unit files and the project's files to ``target``."""
    target.mkdir(parents=True)
    leavings = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*_cache")
    for name in (*FOLDERS, "src", "systemd"):
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=leavings)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, target / name)
    return target
