"""Documents name what exists: paths, symbols, error codes, settings and the quickstart's lines."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import msgspec
import pytest

import weightd
from weightd.core.errors import known_codes
from weightd.core.session.deadlines import Deadlines
from weightd.daemon.config import Limits

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "bench" / "README.md",
    ROOT / "examples" / "README.md",
    ROOT / "systemd" / "README.md",
]

TICKED = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#]+)\)")
PATH = re.compile(r"\w[\w.-]*(/[\w.-]+)*/?\Z")
MODULE = re.compile(r"weightd(?!\.(toml|service|socket|sysusers|tmpfiles)\Z)(\.\w+)+\Z")
CODE = re.compile(r"\bE_[A-Z0-9_]+")
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)

MADE_LATER = {"fd.sock", "control.sock", "pip.conf", "quickstart-run", "quickstart-state"}
"""Files that a user or a running daemon has."""


@pytest.fixture(params=DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def document(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


def test_paths_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    ticked = [t for t in TICKED.findall(text) if PATH.match(t) and ("/" in t or t.endswith((".py", ".md", ".toml")))]
    named = [t for t in ticked if not t.startswith("/") and Path(t).name not in MADE_LATER]
    linked = [t for t in LINK.findall(text) if "://" not in t]

    near = (ROOT, document.parent, ROOT / "examples" / "quickstart")
    assert [] == [t for t in named if not any((base / t).exists() for base in near)]
    assert [] == [t for t in linked if not (document.parent / t).exists()]


def test_modules_exist(document: Path) -> None:
    named = {t for t in TICKED.findall(document.read_text(encoding="utf-8")) if MODULE.match(t)}

    assert [] == sorted(name for name in named if not exists(name))


def exists(dotted: str) -> bool:
    """Return whether a dotted name is a module or something in one."""
    module, _, attribute = dotted.rpartition(".")
    try:
        importlib.import_module(dotted)
    except ModuleNotFoundError:
        try:
            return hasattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError:
            return False
    return True


def test_methods_exist(document: Path) -> None:
    """``Publisher.describe`` and the like are found on the classes that users meet."""
    from weightd.core.layout.build import LayoutBuilder
    from weightd.link.memory import Pool
    from weightd.rollout_hooks.receiver import Receiver
    from weightd.trainer_hooks.publisher import Publisher

    classes = {c.__name__: c for c in (Publisher, Receiver, LayoutBuilder, Pool)}
    named = [t.partition("(")[0].split(".") for t in TICKED.findall(document.read_text(encoding="utf-8"))]
    pairs = {(parts[0], parts[1]) for parts in named if len(parts) == 2 and parts[0] in classes}

    assert [] == sorted(f"{c}.{m}" for c, m in pairs if not hasattr(classes[c], m))


def test_codes_exist(document: Path) -> None:
    named = set(CODE.findall(document.read_text(encoding="utf-8")))

    assert set() == named - codes()


def test_every_code_is_explained() -> None:
    first_cells = re.findall(
        r"^\| `(E_\w+)` \|", (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"), re.MULTILINE
    )

    assert sorted(codes()) == sorted(first_cells)


BASES = {"E_WEIGHTD", "E_ELEMENT", "E_LAYOUT", "E_PLAN"}
"""Codes of classes that only their subclasses are raised of."""


def test_every_code_has_a_golden_text() -> None:
    golden = {path.name.partition(".")[0].partition("-")[0] for path in (ROOT / "tests" / "golden").rglob("E_*.txt")}

    assert set() == codes() - BASES - golden


def codes() -> set[str]:
    """Return every code of weightd's own errors; a class registers its code when its module is imported."""
    for module in pkgutil.walk_packages(weightd.__path__, "weightd."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return {code for code, made in known_codes().items() if any(ours(error) for error in made)}


def ours(error: type[Exception]) -> bool:
    """Return whether a class is not one that a test has made."""
    return error.__module__.startswith("weightd.")


def test_every_setting_is_explained() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    settings = {f.name for table in (Deadlines, Limits) for f in msgspec.structs.fields(table)}

    assert set() == {name for name in settings if f"`{name}`" not in text}
    for name in ("node", "runtime_dir", "state_dir", "control", "bulk", "secret_key_file", "allowed_uids", "log_level"):
        assert f"`{name}`" in text


def test_the_quickstart_is_the_example() -> None:
    """The README's blocks are the files that a test runs, but for their docstring."""
    blocks = [code for language, code in BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8")) if language]
    quickstart = ROOT / "examples" / "quickstart"
    files = [(quickstart / name).read_text(encoding="utf-8") for name in ("weightd.toml", "trainer.py", "engine.py")]

    assert [re.sub(r'\A""".*?"""\n\n', "", text) for text in files] == blocks
