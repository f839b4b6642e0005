"""The command around the roster: files, exit codes, and where its answer is printed."""

import json
from pathlib import Path

import pytest

from tests.golden_text import check_golden
from tests.rosters import a_table
from weightd.daemon.cli import main

TOML = """
trainer_slots = ["a", "b", "c"]
mode = "colocated"
engines = [{ id = "E0", slots = ["b", "a"] }, { id = "E1", slots = ["c"] }]

[nodes]
gpu-a = ["a"]
gpu-b = ["b", "c"]
"""


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(argv)
    printed = capsys.readouterr()
    assert isinstance(left.value.code, int)
    return left.value.code, printed.out, printed.err


def written(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_toml_roster_with_named_slots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "plan", written(tmp_path, "roster.toml", TOML), "--json")

    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "groups": {
            "E0": [{"node": "gpu-b", "slots": ["b"], "k": [0]}, {"node": "gpu-a", "slots": ["a"], "k": [1]}],
            "E1": [{"node": "gpu-b", "slots": ["c"], "k": [0]}],
        },
        "pairs": {
            "E0": [{"k": 0, "trainer_rank": 1}, {"k": 1, "trainer_rank": 0}],
            "E1": [{"k": 0, "trainer_rank": 2}],
        },
        "placement": {"E0": "colocated", "E1": "colocated"},
        "node_shards": 3,
        "identities": ["1 engine x 2 + 1 engine x 1 = 3", "3 node shards x 1 = 3"],
    }


def test_text_of_a_sound_roster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "plan", written(tmp_path, "roster.toml", TOML))

    assert (code, err) == (0, "")
    check_golden("cli/plan", out.rstrip("\n"))


def test_text_of_a_refused_roster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = a_table(engines=[{"id": "E0", "slots": [0, 1, 1, 9]}])
    code, out, err = run(capsys, "plan", written(tmp_path, "roster.json", json.dumps(table)))

    assert (code, err) == (1, "")
    check_golden("cli/plan.refused", out.rstrip("\n"))


def test_unknown_key_leaves_with_2_and_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "roster.json", json.dumps(a_table(reserved=[1])))
    code, out, err = run(capsys, "plan", path)
    json_code, json_out, json_err = run(capsys, "plan", path, "--json")
    (error,) = json.loads(json_out)["errors"]

    assert (code, out) == (2, "")
    assert err.startswith("E_UNKNOWN_KEY: unknown key in the roster: reserved\n")
    assert (json_code, json_err) == (2, err)
    assert (error["code"], error["fields"]["keys"]) == ("E_UNKNOWN_KEY", ["reserved"])


def test_wrong_type_leaves_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "plan", written(tmp_path, "roster.json", json.dumps(a_table(mode=4))), "--json")

    assert (code, err) == (1, "")
    assert [e["fields"]["field"] for e in json.loads(out)["errors"]] == ["mode"]


@pytest.mark.parametrize(
    "name, text, why",
    [
        ("roster.yaml", "nodes: {}", "its suffix is '.yaml', not .toml or .json"),
        ("roster.json", "{", "Expecting property name"),
        ("roster.json", "[1, 2]", "it holds no table of keys and values"),
        ("roster.json", '{"mode": "mixed", "mode": "colocated"}', "the key 'mode' is there twice in one object"),
        ("roster.json", "[" * 100_000, "recursion"),
        ("roster.toml", "nodes =", "Invalid value"),
        ("roster.toml", '{"nodes": 1}', "Invalid statement"),
    ],
)
def test_unreadable_file_leaves_with_2(
    name: str, text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, name, text)
    code, out, err = run(capsys, "plan", path)

    assert (code, out) == (2, "")
    assert err.startswith(f"E_ROSTER_FILE: cannot read the roster {path}: ")
    assert why in err


def test_absent_file_and_folder_leave_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder.json").mkdir()
    absent = run(capsys, "plan", str(tmp_path / "nowhere.json"))
    folder = run(capsys, "plan", str(tmp_path / "folder.json"))

    assert (absent[0], folder[0]) == (2, 2)
    assert "No such file or directory" in absent[2]
    assert "Is a directory" in folder[2]


def test_bytes_that_are_no_text_leave_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "roster.json").write_bytes(b"\xff\xfe{")
    code, _, err = run(capsys, "plan", str(tmp_path / "roster.json"))

    assert code == 2
    assert "can't decode byte 0xff" in err


def test_missing_argument_leaves_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "plan")

    assert code == 2
    assert "ROSTER" in err
