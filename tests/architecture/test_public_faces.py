"""Each error code is met through the public face, by a test that the table names and that says the code."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

from tests.architecture.public_faces import MET, UNMET
from tests.architecture.test_docs import codes
from weightd.core.errors import known_codes

ROOT = Path(__file__).parents[2]


@lru_cache
def module_of(path: str) -> tuple[str, ast.Module]:
    text = (ROOT / path).read_text(encoding="utf-8")
    return text, ast.parse(text)


def named_in(where: str) -> str:
    """Return the source of a test, with that of the tables at the top of its module that it is run over."""
    path, _, name = where.partition("::")
    text, module = module_of(path)
    lines = text.splitlines()
    tests = [n for n in module.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == name]
    assert len(tests) == 1, f"{where} is no test"
    first = min([tests[0].lineno, *(d.lineno for d in tests[0].decorator_list)])
    source = "\n".join(lines[first - 1 : tests[0].end_lineno])
    tables = [n for n in module.body if isinstance(n, ast.Assign | ast.AnnAssign) and _name_of(n) in words(source)]
    return "\n".join([source, *("\n".join(lines[t.lineno - 1 : t.end_lineno]) for t in tables)])


def _name_of(node: ast.Assign | ast.AnnAssign) -> str:
    target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
    return target.id if isinstance(target, ast.Name) else ""


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def test_every_code_is_in_the_table_once() -> None:
    assert set() == MET.keys() & UNMET.keys()
    assert sorted(codes()) == sorted([*MET, *UNMET])


@pytest.mark.parametrize("code", MET)
def test_its_test_says_the_code(code: str) -> None:
    said = words(named_in(MET[code]))

    assert said & {code, *(error.__name__ for error in known_codes()[code])}, MET[code]


def test_every_reason_is_one() -> None:
    assert [] == [code for code, why in UNMET.items() if len(why.split()) < 5]
