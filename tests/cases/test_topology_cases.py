"""Every case of the topology specification, through ``weightd plan`` as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.golden_text import unshown
from weightd.core.errors import WireError, error_from_wire
from weightd.daemon.cli import main

Case = dict[str, Any]

CASES: list[Case] = json.loads((Path(__file__).parents[1] / "data" / "topology_cases.json").read_text())
REFUSED = [case for case in CASES if "errors" in case["expect"]]
ACCEPTED = [case for case in CASES if "errors" not in case["expect"]]


def _named(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case["id"] for case in cases])


def run_plan(case: Case, folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    path = folder / "roster.json"
    path.write_text(json.dumps(case))
    with pytest.raises(SystemExit) as left:
        main(["plan", str(path), *options])
    assert isinstance(left.value.code, int)
    return left.value.code, capsys.readouterr().out


def test_all_cases_are_here() -> None:
    assert {f"T{i:02}" for i in range(1, 29)} <= {case["id"] for case in CASES}
    assert len(CASES) == 34
    assert len(REFUSED) == 13


@_named(ACCEPTED)
def test_case_is_accepted_exactly(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run_plan(case, tmp_path, capsys, "--json")
    document = json.loads(out)

    assert code == 0
    assert case["expect"].get("groups", document["groups"]) == document["groups"]
    for name in ("placement", "node_shards", "identities"):
        assert case.get(name, document[name]) == document[name]
    if "pairs" in case["expect"]:
        assert document["pairs"] == {"E0": case["expect"]["pairs"]}


@_named(ACCEPTED)
def test_case_follows_from_its_own_slots(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The parts of the document that a case does not state, counted here from the file by other means."""
    _, out = run_plan(case, tmp_path, capsys, "--json")
    document = json.loads(out)
    rank_on = {slot: r for r, slot in enumerate(case["trainer_slots"])}

    assert list(document["groups"]) == [engine["id"] for engine in case["engines"]]
    assert document["node_shards"] == sum(len(group) for group in document["groups"].values())
    for engine in case["engines"]:
        on_trainers = [slot in rank_on for slot in engine["slots"]]
        shared = [{"k": k, "trainer_rank": rank_on[s]} for k, s in enumerate(engine["slots"]) if s in rank_on]
        placed = "colocated" if all(on_trainers) else "mixed" if any(on_trainers) else "remote"

        assert document["pairs"][engine["id"]] == shared
        assert document["placement"][engine["id"]] == placed
    total = sum(len(engine["slots"]) for engine in case["engines"])
    assert [line.rpartition(" = ")[2] for line in document["identities"]] == [str(total)] * 2


@_named(REFUSED)
def test_case_is_refused_with_all_codes(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run_plan(case, tmp_path, capsys, "--json")
    errors = json.loads(out)["errors"]
    expected = case["expect"]["errors"]

    assert code == 1
    assert [error["code"] for error in errors] == [error["code"] for error in expected]
    for error, wanted in zip(errors, expected, strict=True):
        assert {name: error["fields"][name] for name in wanted["fields"]} == wanted["fields"]
        rebuilt = error_from_wire(WireError(error["code"], error["fields"], error["text"]))
        assert str(rebuilt) == error["text"]
        assert unshown(rebuilt) == []


@_named(REFUSED)
def test_report_for_people_holds_every_text(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run_plan(case, tmp_path, capsys)
    _, out = run_plan(case, tmp_path, capsys, "--json")
    errors = json.loads(out)["errors"]
    count = f"{len(errors)} violation{'s' if len(errors) > 1 else ''}"

    assert code == 1
    assert report.startswith(f"E_REFUSED: roster roster.json refused: {count}\n")
    for error in errors:
        assert error["text"].replace("\n", "\n  ") in report


@_named(ACCEPTED)
def test_text_for_people_names_every_engine(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run_plan(case, tmp_path, capsys)
    _, out = run_plan(case, tmp_path, capsys, "--json")
    document = json.loads(out)

    assert code == 0
    assert set(document["identities"]) <= set(text.splitlines())
    assert all(f"\n{engine} " in text for engine in document["groups"])


def test_stale_slots_of_the_epoch_before_are_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = next(case for case in CASES if case["id"] == "T23")
    code, out = run_plan(case, tmp_path, capsys, "--json")
    (notice,) = json.loads(out)["notices"]
    _, text = run_plan(case, tmp_path, capsys)

    assert code == 0
    assert (notice["engine"], notice["k"], notice["slots"]) == ("E1", [2, 3], [6, 7])
    assert text.splitlines()[-1] == notice["text"]


def test_no_other_case_has_notices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noticed = [c["id"] for c in ACCEPTED if "notices" in json.loads(run_plan(c, tmp_path, capsys, "--json")[1])]

    assert noticed == ["T23"]


@pytest.mark.processes
@pytest.mark.parametrize("wanted, code", [("T04", 0), ("T13", 1)])
def test_command_in_a_process(wanted: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = next(case for case in CASES if case["id"] == wanted)
    _, out = run_plan(case, tmp_path, capsys, "--json")
    command = [sys.executable, "-m", "weightd.daemon.cli", "plan", str(tmp_path / "roster.json"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (code, out, "")


@pytest.mark.processes
def test_plan_loads_no_tensor_and_no_socket_library(tmp_path: Path) -> None:
    path = tmp_path / "roster.json"
    path.write_text(json.dumps(CASES[0]))
    program = (
        "import sys\n"
        "from weightd.daemon.cli import main\n"
        "try:\n"
        f"    main(['plan', {str(path)!r}])\n"
        "except SystemExit as left:\n"
        "    print(left.code, sorted({'torch', 'zmq', 'anyio', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)

    assert done.stdout.splitlines()[-1] == "0 []", done.stderr
