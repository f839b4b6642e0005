"""One hello against a roster: refused at the door, by the first thing that is wrong with it."""

from dataclasses import replace

import pytest

from tests.golden_text import check_error_is_whole
from tests.rosters import a_file, a_sizes_roster, live, rollout, trainer
from weightd.core.roster.hello import check_hello
from weightd.core.roster.topology import Registration
from weightd.core.units import Boot

ROSTER = a_file().roster


@pytest.mark.parametrize("registration", live(a_file()))
def test_declared_rank_is_welcome(registration: Registration) -> None:
    others = [r for r in live(a_file()) if r.who != registration.who]

    assert check_hello(ROSTER, registration, others) is None


@pytest.mark.parametrize(
    "registration, code, facts",
    [
        (trainer(0, "n0", "0", 8), "E_RANK_UNKNOWN", {"reason": "size", "trainer_rank": 0, "expected": 5, "size": 8}),
        (trainer(5, "n0", "0", 5), "E_RANK_UNKNOWN", {"reason": "number", "trainer_rank": 5, "expected": 5}),
        (trainer(-1, "n0", "0", 5), "E_RANK_UNKNOWN", {"reason": "number", "trainer_rank": -1}),
        (rollout("E2", 0, "n0", "0", 2), "E_RANK_UNKNOWN", {"reason": "engine", "engines": ("E0", "E1")}),
        (rollout("E1", 2, "n0", "0", 2), "E_RANK_UNKNOWN", {"reason": "number", "engine": "E1", "k": 2}),
        (rollout("E1", 0, "n0", "0", 3), "E_RANK_UNKNOWN", {"reason": "size", "expected": 2, "size": 3}),
        (rollout("E0", 2, "n0", "3", 3), "E_NODE_MISMATCH", {"k": 2, "declared_node": "n1", "measured_node": "n0"}),
        (trainer(4, "n0", "4", 5), "E_NODE_MISMATCH", {"trainer_rank": 4, "declared_node": "n1"}),
        (rollout("E0", 2, "n1", "4", 3), "E_GPU_MISMATCH", {"k": 2, "expected_slot": "3", "got_slot": "4"}),
        (trainer(1, "n0", "2", 5), "E_GPU_MISMATCH", {"trainer_rank": 1, "expected_slot": "1", "got_slot": "2"}),
    ],
)
def test_wrong_hello(registration: Registration, code: str, facts: dict[str, object]) -> None:
    error = check_hello(ROSTER, registration, ())

    assert error is not None
    assert error.code == code
    assert facts.items() <= error.fields().items()
    assert f"pid {registration.pid} on {registration.node}" in str(error)
    check_error_is_whole(error)


def test_second_live_process_of_one_rank() -> None:
    present = live(a_file())
    error = check_hello(ROSTER, rollout("E0", 2, "n1", "3", 3, pid=4802, boot=77), present)

    assert error is not None
    assert error.fields() == {
        "role": "rollout",
        "engine": "E0",
        "k": 2,
        "expected": 3,
        "registered": 4,
        "nodes": ("n1", "n1"),
        "pids": (1008, 4802),
        "runs": (),
    }


def test_ranks_of_equal_number_are_no_duplicates() -> None:
    roster = a_sizes_roster(2, 1, 1)
    present = [trainer(0, "n0", "a", 2), rollout("E0", 0, "n0", "a", 1)]

    assert check_hello(roster, rollout("E1", 0, "n0", "b", 1), present) is None
    assert check_hello(roster, trainer(1, "n0", "b", 2), present) is None


def test_repeated_hello_of_one_process_is_no_duplicate() -> None:
    present = live(a_file())

    assert check_hello(ROSTER, present[6], present) is None


@pytest.mark.parametrize("change", [{"pid": 4}, {"boot": Boot(9)}])
def test_another_process_or_incarnation_is_a_duplicate(change: dict[str, int]) -> None:
    present = live(a_file())
    error = check_hello(ROSTER, replace(present[6], **change), present)  # type: ignore[arg-type]

    assert error is not None
    assert error.code == "E_RANK_DUP"


def test_pids_are_named_only_if_all_are_known() -> None:
    present = a_file().registrations()
    error = check_hello(ROSTER, replace(present[6], pid=4802, boot=Boot(9)), present)

    assert error is not None
    assert error.fields()["pids"] == ()


def test_sizes_roster_takes_any_node_and_slot() -> None:
    assert check_hello(a_sizes_roster(2, 1), trainer(1, "n9", "anything", 2), ()) is None
