"""``weightd plan --layouts`` as a user runs it: exported layouts in a folder, and a roster file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.golden_text import check_golden
from weightd.core.layout.boxes import Pieces
from weightd.core.layout.build import LayoutBuilder
from weightd.core.layout.columns import Layout
from weightd.core.layout.files import LayoutFile, encode_file
from weightd.core.units import EngineId, EngineRank, RolloutRank, TrainerRank
from weightd.daemon.cli import main

ROSTER = {
    "nodes": {"a": [0, 1], "b": [2, 3]},
    "trainer_slots": [0, 1],
    "engines": [{"id": "E0", "slots": [2, 3]}],
    "reserved_trainer_ranks": [],
    "mode": "disaggregated",
}


def shard(start: int, rows: int, kind: str) -> Layout:
    b = LayoutBuilder()
    b.add_piece(
        b.add_tensor("w", (18, 4), "bfloat16"), b.add_buffer("w", rows * 8, "bfloat16", kind), (start, 0), (rows, 4)
    )
    return b.build()


def export(folder: Path, who: TrainerRank | RolloutRank, size: int, layout: Layout, name: str = "") -> None:
    file = LayoutFile(who, size, layout)
    (folder / (name or file.name)).write_bytes(encode_file(file))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A roster and the layouts of 2 trainer ranks of 9 rows, 2 rollout ranks of 10 and 8."""
    (tmp_path / "roster.json").write_text(json.dumps(ROSTER))
    for r in range(2):
        export(tmp_path, TrainerRank(r), 2, shard(9 * r, 9, "slot"))
    for k, (start, rows) in enumerate([(0, 10), (10, 8)]):
        export(tmp_path, RolloutRank(EngineId("E0"), EngineRank(k)), 2, shard(start, rows, "param"))
    return tmp_path


def run(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as left:
        main(["plan", str(folder / "roster.json"), "--layouts", str(folder), *options])
    assert isinstance(left.value.code, int)
    return left.value.code, capsys.readouterr().out


def test_bytes_per_link_and_rank_and_peak_memory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(folder, capsys, "--json")

    plan: dict[str, Any] = json.loads(out)["plan"]
    assert code == 0
    assert plan["links"] == [{"source": "a", "target": "b", "nbytes": 144, "buckets": 1}]
    assert [(r["rank"], r["nbytes"], r["remote"]) for r in plan["ranks"]] == [("E0[0]", 80, 80), ("E0[1]", 64, 64)]
    assert (plan["owned"], plan["used"], plan["declared_unused"]) == (72, 72, 0)
    # Node a holds two slots of 72 bytes twice, node b a landing of 144 twice.
    assert [(n["node"], n["peak_nbytes"]) for n in plan["nodes"]] == [("a", 288), ("b", 288)]


def test_the_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(folder, capsys)

    assert code == 0
    check_golden("plan/layouts", out.rstrip("\n"))


def test_missing_and_foreign_files_are_all_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "E0-1.layout").unlink()
    export(folder, TrainerRank(1), 4, shard(9, 9, "slot"))
    (folder / "trainer-0.layout").write_bytes(b"weights")

    code, out = run(folder, capsys, "--json")

    errors = json.loads(out)["errors"]
    assert code == 1
    assert [e["code"] for e in errors] == ["E_LAYOUT_FILES", "E_LAYOUT_MESSAGE", "E_LAYOUT_FILE_RANK"]
    assert errors[0]["fields"]["missing"] == ["E0-1.layout"]
    assert (errors[0]["fields"]["expected"], errors[0]["fields"]["found"]) == (4, 3)
    assert "trainer-0.layout: the file does not begin with" in errors[1]["text"]
    assert "trainer rank 1 of 4, expected trainer rank 1 of 2" in errors[2]["text"]


def test_a_gap_is_refused_with_its_numbers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export(folder, TrainerRank(1), 2, shard(10, 8, "slot"))

    code, out = run(folder, capsys, "--json")

    [error] = json.loads(out)["errors"]
    assert code == 1
    assert (error["code"], error["fields"]["count"], error["fields"]["needed_by"]) == ("E_ELEM_UNCOVERED", 4, ["E0[0]"])


HALVED = 15
"""Dimensions of 2: single elements on both sides may meet in 2**29 pairs, twice what is listed."""


def grains(kind: str) -> Layout:
    """Every element of a tensor as a piece of its own."""
    count = 1 << HALVED
    number = np.arange(count, dtype=np.int64)
    start = number[:, None] >> np.arange(HALVED, dtype=np.int64)[::-1] & 1
    zero, one = np.zeros((count, HALVED), np.int64), np.ones((count, HALVED), np.int64)
    b = LayoutBuilder()
    b.add_tensor("w", (2,) * HALVED, "uint8")
    b.add_buffer("w", count, "uint8", kind)
    b.add_pieces(Pieces(zero[:, 0], start, one, one, zero[:, 0], number, zero))
    return b.build()


def test_pieces_too_many_to_meet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    roster = {"nodes": {"a": [0, 1]}, "trainer_slots": [0], "engines": [{"id": "E0", "slots": [1]}]}
    (tmp_path / "roster.json").write_text(json.dumps(roster))
    export(tmp_path, TrainerRank(0), 1, grains("slot"))
    export(tmp_path, RolloutRank(EngineId("E0"), EngineRank(0)), 1, grains("param"))

    with pytest.raises(SystemExit) as left:
        main(["plan", str(tmp_path / "roster.json"), "--layouts", str(tmp_path)])

    assert left.value.code == 1
    assert "E_LAYOUT_OPERATION: intersect: 32768 and 32768 pieces" in capsys.readouterr().out
