"""The receiver's states: every order in every state that it can meet."""

import pytest

from weightd.core.errors import WireError
from weightd.core.units import NO_KEY, Attempt, Boot, Epoch, Op, Term, Version, VersionKey
from weightd.core.wire.messages import Order, ReceiverGoal, ReceiverState, SourceSlot
from weightd.rollout_hooks.state import Deliver, Raise, ReceiverMachine, RunCopy, RunPause, RunResume, Step

SOURCES = (SourceSlot(3, 1, 8),)
WHY = WireError("E_X", {}, "because")
NONE = Version(0)


def key(version: int, count: int = 1) -> VersionKey:
    return VersionKey(Version(version), Attempt(Boot(5), count))


def goal(order: Order, version: int = 1, op: int = 1, term: int = 1, count: int = 1, **more: object) -> ReceiverGoal:
    named = key(version, count) if version else NO_KEY
    sources = SOURCES if order == "write" else ()
    fields: dict[str, object] = {"term": Term(term), "epoch": Epoch(1), "plan_digest": "p", "op": Op(op), "key": named}
    return ReceiverGoal(**{**fields, "order": order, "sources": sources, **more})  # type: ignore[arg-type]


def machine() -> ReceiverMachine:
    found = ReceiverMachine()
    found.plan_built("p", 100)
    return found


def step(m: ReceiverMachine, above: int = 0, at_least: int | None = None) -> Step | None:
    return m.next_step(Version(above), None if at_least is None else Version(at_least))


# Functions, so that a type checker does not take the last answer for the next one.
def servable(m: ReceiverMachine) -> bool:
    return m.servable


def stopping(m: ReceiverMachine) -> bool:
    return m.stopping


def state_of(m: ReceiverMachine) -> str:
    return m.report().state


def paused(m: ReceiverMachine, version: int = 1, op: int = 1) -> ReceiverMachine:
    m.entered()
    m.goal_arrived(goal("pause", version, op))
    if step(m, above=99) is not None:
        m.pause_done()
    assert state_of(m) == "paused"
    return m


def applied(m: ReceiverMachine, version: int = 1, op: int = 1) -> ReceiverMachine:
    paused(m, version, op)
    m.goal_arrived(goal("write", version, op))
    assert step(m) == RunCopy(key(version), SOURCES)
    m.copy_done(100)
    assert state_of(m) == "applied"
    return m


def serving(m: ReceiverMachine, version: int = 1, op: int = 1) -> ReceiverMachine:
    applied(m, version, op)
    m.goal_arrived(goal("resume", version, op))
    assert step(m) == RunResume(key(version))
    m.resume_done()
    assert state_of(m) == "serving"
    return m


def told(m: ReceiverMachine) -> tuple[ReceiverState, VersionKey, VersionKey, VersionKey, int]:
    r = m.report()
    return r.state, r.key, r.base, r.committed, r.op


def test_way_of_a_version() -> None:
    m = machine()

    assert told(m) == ("unready", NO_KEY, NO_KEY, NO_KEY, 0)
    m.entered()
    m.goal_arrived(goal("pause"))
    assert step(m) == RunPause(key(1))
    assert told(m) == ("pausing", key(1), NO_KEY, NO_KEY, 1)
    m.pause_done()
    assert told(m) == ("paused", key(1), NO_KEY, NO_KEY, 1)
    m.goal_arrived(goal("write"))
    assert step(m) == RunCopy(key(1), SOURCES)
    assert told(m) == ("applying", key(1), NO_KEY, NO_KEY, 1)
    m.copy_done(100)
    assert told(m) == ("applied", key(1), NO_KEY, NO_KEY, 1)
    assert m.report().applied_nbytes == 100
    m.goal_arrived(goal("commit"))
    assert told(m) == ("applied", key(1), key(1), key(1), 1)
    assert step(m) is None
    assert not servable(m)
    m.goal_arrived(goal("resume"))
    assert step(m) == RunResume(key(1))
    m.resume_done()
    assert told(m) == ("serving", NO_KEY, key(1), key(1), 1)
    assert servable(m)
    assert step(m) == Deliver(Version(1))


def test_resume_alone_says_that_it_is_committed() -> None:
    """The commit before it may have been lost; a goal says all."""
    m = applied(machine())
    m.goal_arrived(goal("resume"))

    assert told(m) == ("serving", NO_KEY, key(1), key(1), 1)


def test_no_order_is_followed_outside_of_receive() -> None:
    m = machine()
    m.goal_arrived(goal("pause"))

    assert step(m) is None
    assert state_of(m) == "unready"
    m.entered()
    assert step(m) == RunPause(key(1))


def test_no_order_is_followed_over_another_plan() -> None:
    m = machine()
    m.entered()
    m.goal_arrived(goal("pause", plan_digest="another"))

    assert step(m) is None
    m.plan_built("another", 100)
    assert step(m) == RunPause(key(1))


def test_served_version_is_delivered_at_once_and_once() -> None:
    m = serving(machine())

    assert step(m) == Deliver(Version(1))
    assert step(m, above=1) is None
    assert step(m, above=1, at_least=1) == Deliver(Version(1))
    assert step(m, at_least=2) is None


def test_delivery_comes_before_the_next_pause() -> None:
    m = serving(machine())
    m.goal_arrived(goal("pause", 2, 2))

    assert step(m) == Deliver(Version(1))


def test_commit_is_acknowledged_while_a_callback_runs() -> None:
    m = serving(machine())
    m.goal_arrived(goal("pause", 2, 2))
    assert step(m, above=1) == RunPause(key(2))
    m.goal_arrived(goal("commit", 3, 3))

    assert m.report().committed == key(3)


def test_refused_pause_leaves_the_bytes_alone() -> None:
    m = serving(machine())
    m.goal_arrived(goal("pause", 2, 2))
    step(m, above=1)
    m.pause_failed(WHY)

    assert told(m) == ("refused", key(2), key(1), key(1), 2)
    assert m.report().error == WHY
    assert step(m, above=1) is None, "the same order is not tried again"
    m.goal_arrived(goal("abort", 2, 2))
    assert told(m) == ("serving", NO_KEY, key(1), key(1), 2)
    assert servable(m)


def test_fence_after_an_own_refusal_is_raised_only_once() -> None:
    """``receive()`` raised what the callback raised; a second error would put this rank out of step with the others."""
    m = serving(machine())
    m.goal_arrived(goal("pause", 2, 2))
    step(m, above=1)
    m.pause_failed(WHY)
    m.departed()
    m.goal_arrived(goal("fence", 2, 2, error=WHY))
    m.entered()

    assert state_of(m) == "fenced"
    assert step(m, above=1) is None


def test_abort_before_the_write_resumes() -> None:
    m = paused(serving(machine()), 2, 2)
    m.goal_arrived(goal("abort", 2, 2))

    assert told(m) == ("serving", NO_KEY, key(1), key(1), 2)
    assert not servable(m), "its callback has not resumed it yet"
    assert step(m, above=1) == RunResume(key(1))
    m.resume_done()
    assert servable(m)
    assert step(m, above=1) is None


def test_abort_answers_for_a_rank_that_never_paused() -> None:
    """The leader counts the answers of all ranks, those that were elsewhere included."""
    m = serving(machine())
    m.goal_arrived(goal("abort", 2, 2))

    assert told(m) == ("serving", NO_KEY, key(1), key(1), 2)


def test_abort_of_applied_bytes_is_torn() -> None:
    m = applied(serving(machine()), 2, 2)
    m.goal_arrived(goal("abort", 2, 2, error=WHY))

    assert told(m) == ("torn", NO_KEY, NO_KEY, key(1), 2)
    assert step(m) == Raise(key(2), "torn", NO_KEY, WHY)
    assert step(m) is None


def test_abort_stops_a_copy() -> None:
    m = paused(serving(machine()), 2, 2)
    m.goal_arrived(goal("write", 2, 2))
    step(m)
    assert not stopping(m)
    m.goal_arrived(goal("abort", 2, 2))
    assert stopping(m)
    m.copy_stopped()

    assert told(m)[:3] == ("torn", key(2), NO_KEY)
    assert isinstance(step(m), Raise)


def test_abort_cannot_undo_a_commit() -> None:
    m = applied(machine())
    m.goal_arrived(goal("commit"))
    m.goal_arrived(goal("abort"))

    assert state_of(m) == "applied"
    assert m.base == key(1)


def test_torn_rank_takes_part_in_the_next_version() -> None:
    m = applied(serving(machine()), 2, 2)
    m.goal_arrived(goal("abort", 2, 2))
    step(m)
    m.goal_arrived(goal("pause", 3, 3))

    assert step(m) is None, "its pause callback ran already"
    assert state_of(m) == "paused"
    m.goal_arrived(goal("write", 3, 3))
    assert isinstance(step(m), RunCopy)
    m.copy_done(100)
    m.goal_arrived(goal("resume", 3, 3))
    assert step(m, above=1) == RunResume(key(3))


def test_failed_copy_is_torn_and_not_tried_again() -> None:
    m = paused(machine())
    m.goal_arrived(goal("write"))
    step(m)
    m.copy_failed(WHY)

    assert state_of(m) == "torn"
    assert step(m) == Raise(key(1), "torn", NO_KEY, WHY)
    assert step(m) is None
    m.goal_arrived(goal("write"))
    assert step(m) is None


def test_fence_of_a_rank_that_never_came() -> None:
    """A slow rank holds back its engine; it learns at its next call why it serves nothing."""
    m = serving(machine())
    m.departed()
    m.goal_arrived(goal("fence", 2, 2, error=WHY))

    assert told(m) == ("fenced", key(2), key(1), key(1), 2)
    assert not servable(m)
    m.entered()
    assert step(m, above=1) == Raise(key(2), "fenced", key(1), WHY)
    assert step(m, above=1) is None


def missed(m: ReceiverMachine) -> ReceiverMachine:
    """Was fenced while nobody was in ``receive()``, and is called now."""
    m.goal_arrived(goal("fence", 1, 1, error=WHY))
    m.entered()
    return m


def test_a_missed_version_is_told_once_no_other_is_in_hand() -> None:
    m = missed(machine())
    m.goal_arrived(goal("idle", 0, 1, stage="collecting"))
    assert step(m) is None

    m.goal_arrived(goal("idle", 0, 1, stage="idle"))
    assert isinstance(told := step(m), Raise)
    assert told.error == WHY


@pytest.mark.parametrize("stage", ["", "collecting"])
def test_a_missed_version_does_not_make_a_rank_miss_the_next(stage: str) -> None:
    m = missed(machine())
    m.goal_arrived(goal("idle", 0, 1, stage="fetching"))
    assert step(m) is None
    m.goal_arrived(goal("pause", 2, 2, stage=stage))
    assert step(m) == RunPause(key(2))
    m.pause_done()
    m.goal_arrived(goal("write", 2, 2))
    assert isinstance(step(m), RunCopy)
    m.copy_done(100)
    m.goal_arrived(goal("commit", 2, 2))
    m.goal_arrived(goal("resume", 2, 2))
    assert step(m) == RunResume(key(2))
    m.resume_done()
    assert step(m) == Deliver(Version(2))


def test_what_fails_in_a_call_is_raised_by_it_at_once() -> None:
    m = machine()
    m.entered()
    m.goal_arrived(goal("fence", 1, 1, error=WHY, stage="applying"))
    assert isinstance(step(m), Raise)


def test_fence_without_a_cause_is_no_news_for_a_rank_that_did_nothing() -> None:
    m = machine()
    m.entered()
    m.goal_arrived(goal("fence", 0, 2))

    assert state_of(m) == "fenced"
    assert step(m) is None
    m.goal_arrived(goal("pause", 2, 3))
    assert step(m) == RunPause(key(2))


def test_fence_is_acknowledged_after_the_callback() -> None:
    m = serving(machine())
    m.goal_arrived(goal("pause", 2, 2))
    step(m, above=1)
    m.goal_arrived(goal("fence", 2, 2))
    assert state_of(m) == "pausing"
    m.pause_done()

    assert state_of(m) == "fenced"


def test_fence_ends_when_the_version_fails_and_the_base_is_whole() -> None:
    m = serving(machine())
    m.goal_arrived(goal("fence", 2, 2, error=WHY))
    m.goal_arrived(goal("abort", 2, 2))

    assert told(m) == ("serving", NO_KEY, key(1), key(1), 2)
    assert step(m, above=1) is None


def test_repeated_fence_of_a_newer_op_is_acknowledged() -> None:
    m = serving(machine())
    m.goal_arrived(goal("fence", 2, 2))
    m.goal_arrived(goal("fence", 2, 3))

    assert m.report().op == 3


def test_fenced_after_apply_still_holds_the_bytes() -> None:
    """A late commit of whole bytes makes them count; nothing is copied twice."""
    m = applied(serving(machine()), 2, 2)
    m.goal_arrived(goal("fence", 2, 2))
    assert state_of(m) == "fenced"
    m.goal_arrived(goal("write", 2, 3))
    assert told(m) == ("applied", key(2), NO_KEY, key(1), 3)
    assert m.report().applied_nbytes == 100
    m.goal_arrived(goal("commit", 2, 3))

    assert told(m) == ("applied", key(2), key(2), key(2), 3)


def test_write_of_held_bytes_needs_no_callback() -> None:
    m = serving(machine())
    m.departed()
    m.goal_arrived(goal("write", 1, 2))
    assert told(m) == ("applied", key(1), key(1), key(1), 2)
    m.goal_arrived(goal("resume", 1, 2))

    assert told(m) == ("serving", NO_KEY, key(1), key(1), 2)
    assert servable(m)


def test_leave_is_granted_and_the_pause_stands_for_the_next_call() -> None:
    m = paused(serving(machine()), 2, 2)
    m.ask_leave()
    assert m.report().leave
    m.goal_arrived(goal("left", 2, 2))
    assert told(m) == ("serving", NO_KEY, key(1), key(1), 2)
    assert not m.report().leave
    assert step(m, above=1) == RunResume(key(1))
    m.resume_done()
    m.goal_arrived(goal("pause", 2, 2))
    assert step(m, above=1) is None, "this call is about to end"
    m.departed()
    m.entered()

    assert step(m, above=1) == RunPause(key(2))


def test_all_ranks_leave_and_those_that_did_not_ask_go_on_waiting() -> None:
    m = paused(serving(machine()), 2, 2)
    m.goal_arrived(goal("left", 2, 2))
    assert step(m, above=1) == RunResume(key(1))
    m.resume_done()
    m.goal_arrived(goal("pause", 2, 2))

    assert step(m, above=1) == RunPause(key(2))


def test_rank_that_never_paused_answers_left_too() -> None:
    m = serving(machine())
    m.goal_arrived(goal("left", 2, 2))

    assert told(m) == ("serving", NO_KEY, key(1), key(1), 2)


def test_write_ends_the_wish_to_leave() -> None:
    m = paused(machine())
    m.ask_leave()
    m.goal_arrived(goal("write"))

    assert isinstance(step(m), RunCopy)
    assert not m.report().leave


def test_torn_rank_that_left_is_paused_again() -> None:
    m = applied(serving(machine()), 2, 2)
    m.goal_arrived(goal("abort", 2, 2))
    step(m)
    paused(m, 3, 3)
    m.goal_arrived(goal("left", 3, 3))
    assert state_of(m) == "torn"
    m.goal_arrived(goal("pause", 3, 3))
    step(m)

    assert state_of(m) == "paused"


def test_newer_pause_ends_an_older_apply() -> None:
    m = paused(serving(machine()), 2, 2)
    m.goal_arrived(goal("write", 2, 2))
    step(m)
    m.goal_arrived(goal("pause", 2, 3))
    assert stopping(m)
    m.copy_stopped()
    assert step(m) is None

    assert told(m) == ("paused", key(2), NO_KEY, key(1), 3)


def test_newer_pause_of_applied_bytes() -> None:
    m = applied(serving(machine()), 2, 2)
    m.goal_arrived(goal("pause", 3, 3))
    step(m)

    assert told(m) == ("paused", key(3), NO_KEY, key(1), 3)


@pytest.mark.parametrize("order", ["pause", "fence", "abort"])
def test_order_below_the_floor_is_ignored(order: Order) -> None:
    m = serving(machine(), 2, 7)
    m.goal_arrived(goal(order, 1, 6))

    assert told(m) == ("serving", NO_KEY, key(2), key(2), 7)
    assert step(m, above=2) is None
    m.goal_arrived(goal(order, 3, 9, term=0))
    assert told(m) == ("serving", NO_KEY, key(2), key(2), 7)


def test_ops_count_within_a_term() -> None:
    m = serving(machine(), 2, 7)
    m.goal_arrived(goal("pause", 3, 1, term=2))

    assert step(m, above=2) == RunPause(key(3))
    assert m.report().op == 1


def test_steps_come_one_at_a_time() -> None:
    m = machine()
    m.entered()
    m.goal_arrived(goal("pause"))
    step(m)

    assert step(m) is None
    assert m.under_way


def test_write_without_a_pause_is_not_followed() -> None:
    """A restarted rank knows nothing of the pause that its predecessor answered."""
    m = machine()
    m.entered()
    m.goal_arrived(goal("write"))

    assert step(m) is None
    assert state_of(m) == "unready"
