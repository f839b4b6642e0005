"""``weightd plan`` on rosters and layouts that cannot stand: each is refused by its code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rosters import a_table
from weightd.core.layout.build import LayoutBuilder
from weightd.core.layout.columns import Layout
from weightd.core.layout.files import LayoutFile, encode_file
from weightd.core.units import EngineId, EngineRank, RolloutRank, TrainerRank
from weightd.daemon.cli import main


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    """Return the codes with which the command refuses."""
    with pytest.raises(SystemExit) as left:
        main(["plan", *argv, "--json"])
    assert left.value.code == 1
    return [e["code"] for e in json.loads(capsys.readouterr().out)["errors"]]


def engines(*slots: list[Any]) -> list[dict[str, Any]]:
    return [{"id": f"E{i}", "slots": listed} for i, listed in enumerate(slots)]


ROSTERS: dict[str, dict[str, Any]] = {
    "E_UNCOVERED": {"engines": engines([1, 2, 3])},
    "E_OVERLAP": {"engines": engines([1, 2, 3], [0, 4, 3])},
    "E_OUT_OF_WORLD": {"engines": engines([1, 2, 3], [0, 4, 9])},
    "E_MIXED": {"mode": "disaggregated"},
    "E_NODE_TILING": {"strict_tiling": True},
    "E_REMAINDER": {"engines": {"base": "trainer", "total_slots": 5, "per_engine": 2}},
    "E_SHAPE": {"engines": {"base": "trainer", "counts": [2, 3], "offsets": [0]}},
    "E_ROSTER": {"reserved_trainer_ranks": [7]},
}


@pytest.mark.parametrize("code", ROSTERS)
def test_a_roster_that_cannot_stand(code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    roster = tmp_path / "roster.json"
    roster.write_text(json.dumps(a_table(**ROSTERS[code])))

    assert code in refused(capsys, str(roster))


def rows_of_w(kind: str, *boxes: tuple[int, int], dtype: str = "float32", width: int = 4) -> Layout:
    """Return a layout of some rows of one tensor, each box in a buffer of its own."""
    b = LayoutBuilder()
    tensor = b.add_tensor("w", (18, width), dtype)
    for n, (start, rows) in enumerate(boxes):
        buffer = b.add_buffer(f"w.{n}", rows * width * 4, dtype, kind)
        b.add_piece(tensor, buffer, (start, 0), (rows, width))
    return b.build()


def same_memory_twice() -> Layout:
    """Return a layout whose two boxes would be written to the same bytes."""
    b = LayoutBuilder()
    tensor, buffer = b.add_tensor("w", (18, 4), "float32"), b.add_buffer("w", 18 * 16, "float32", "param")
    for start, offset in ((0, 0), (10, 4)):
        b.add_piece(tensor, buffer, (start, 0), (10 if start == 0 else 8, 4), offset=offset)
    return b.build()


Layouts = Callable[[], tuple[Layout, Layout, Layout]]
"""Of trainer ranks 0 and 1, and of the engine's one rank."""

LAYOUTS: dict[str, Layouts] = {
    "E_DESCRIPTION": lambda: (
        rows_of_w("slot", (0, 9)),
        rows_of_w("slot", (9, 9)),
        rows_of_w("param", (0, 18), dtype="int32"),
    ),
    "E_ELEM_AMBIGUOUS": lambda: (rows_of_w("slot", (0, 10)), rows_of_w("slot", (9, 9)), rows_of_w("param", (0, 18))),
    "E_ELEM_UNCOVERED": lambda: (rows_of_w("slot", (0, 8)), rows_of_w("slot", (9, 9)), rows_of_w("param", (0, 18))),
    "E_SRC_UNUSED": lambda: (rows_of_w("slot", (0, 9)), rows_of_w("slot", (9, 9)), rows_of_w("param", (0, 17))),
    "E_TARGET_OVERLAP": lambda: (rows_of_w("slot", (0, 9)), rows_of_w("slot", (9, 9)), same_memory_twice()),
}


@pytest.mark.parametrize("code", LAYOUTS)
def test_layouts_that_do_not_cover(code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    roster = {"nodes": {"a": [0, 1, 2]}, "trainer_slots": [0, 1], "engines": [{"id": "E0", "slots": [2]}]}
    (tmp_path / "roster.json").write_text(json.dumps(roster))
    ranks: list[TrainerRank | RolloutRank] = [
        TrainerRank(0),
        TrainerRank(1),
        RolloutRank(EngineId("E0"), EngineRank(0)),
    ]
    for who, layout in zip(ranks, LAYOUTS[code](), strict=True):
        file = LayoutFile(who, 1 if isinstance(who, RolloutRank) else 2, layout)
        (tmp_path / file.name).write_bytes(encode_file(file))

    assert refused(capsys, str(tmp_path / "roster.json"), "--layouts", str(tmp_path)) == [code]


def test_a_layout_file_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is there, but reading it fails: here because it is the process's own memory at an address of nothing."""
    roster = {"nodes": {"a": [0, 1]}, "trainer_slots": [0], "engines": [{"id": "E0", "slots": [1]}]}
    (tmp_path / "roster.json").write_text(json.dumps(roster))
    for name in ("trainer-0.layout", "E0-0.layout"):
        (tmp_path / name).symlink_to("/proc/self/mem")

    codes = refused(capsys, str(tmp_path / "roster.json"), "--layouts", str(tmp_path))
    assert codes == ["E_LAYOUT_FILE_READ"] * 2
