"""Every rule of a version's life on the leader: given these reports, this is what becomes of it."""

import msgspec

from tests.fakes.leader_bench import LIMITS, A, B, FakeRank, LeaderBench, codes, key, rank
from weightd.core.roster.topology import EngineDecl, Roster
from weightd.core.session.faults import ApplyFailed, JournalFailed
from weightd.core.units import NO_KEY, Boot, TrainerRank, Version
from weightd.core.wire.messages import FetchState, LostRank, SlotState

E00, E01, E10 = rank("E0", 0), rank("E0", 1), rank("E1", 0)
T0, T1 = TrainerRank(0), TrainerRank(1)


# ------------------------------------------------------------ COLLECTING


def test_the_lowest_undecided_version_is_first_in_hand() -> None:
    bench = LeaderBench().ready()
    bench.ranks[T0].slots = (SlotState(0, key(3), 2, "layout-0"), SlotState(1, key(2), 2, "layout-0"))

    bench.say(A)

    assert ("collecting", key(2)) == (bench.stage, bench.told().key)


def test_versions_that_differ_fail_at_once_and_name_who_has_what() -> None:
    bench = LeaderBench().ready().publish(0, key(1))

    bench.publish(1, key(2))

    report = bench.failure(key(1))
    assert ["E_REFUSED", "E_VERSION_SKEW"] == codes(report)
    assert "version 1 was published by 1 of 2 trainer ranks, 1 published another one instead" in report.text
    assert "trainer 1: v2/" in report.text
    assert ("collecting", key(2)) == (bench.stage, bench.told().key)


def test_a_rank_that_is_ahead_with_its_other_slot_is_no_skew() -> None:
    bench = LeaderBench().ready()
    bench.ranks[T0].slots = (SlotState(0, key(1), 2, "layout-0"), SlotState(1, key(2), 2, "layout-0"))
    bench.say(A)

    bench.publish(1, key(1))

    assert ("fetching", key(1)) == (bench.stage, bench.told().key)


def test_a_late_publish_that_others_have_gone_past_does_not_hold_up_the_version_in_hand() -> None:
    """Found by random schedules: the late bytes held the slot that their rank needed for the version in hand."""
    bench = LeaderBench().ready().publish(0, key(2))
    assert ("collecting", key(2)) == (bench.stage, bench.told().key)

    bench.publish(1, key(1))

    assert ["E_REFUSED", "E_VERSION_SKEW"] == codes(bench.failure(key(1)))
    assert [(1, 0, key(1))] == [(int(r.rank), r.slot, r.key) for r in bench.told().release]
    assert ("collecting", key(2)) == (bench.stage, bench.told().key)


def test_a_number_that_does_not_grow_is_refused_by_name_and_its_slot_is_free() -> None:
    bench = LeaderBench().ready().commit(1).commit(2)

    bench.publish(1, key(1, count=7), slot=1)

    report = bench.failure(key(1, count=7))
    assert "E_VERSION" == report.code
    assert {"group": "trainer 1", "got": 1, "expected_base": 2, "next_version": 3} == report.fields
    assert (1, 1, key(1, count=7)) in {(int(r.rank), r.slot, r.key) for r in bench.told().release}
    assert "idle" == bench.stage

    bench.ranks[T1].slots = tuple(s for s in bench.ranks[T1].slots if s.key != key(1, count=7))
    bench.say(B)

    assert () == bench.told().failures


def test_a_late_slot_of_a_failed_attempt_is_answered_with_its_report() -> None:
    bench = LeaderBench().ready().publish(0, key(1)).pass_time(LIMITS.collect_s + 1)
    assert "E_DEADLINE" in codes(bench.failure(key(1)))

    bench.publish(1, key(1))

    assert "idle" == bench.stage
    assert (1, 0, key(1)) in {(int(r.rank), r.slot, r.key) for r in bench.told().release}
    assert "E_DEADLINE" in codes(bench.failure(key(1)))


def test_a_failed_version_may_be_published_again_as_the_next_attempt() -> None:
    bench = LeaderBench().ready().publish(0, key(1)).pass_time(LIMITS.collect_s + 1)

    bench.publish(0, key(1, 2)).publish(1, key(1, 2)).fetched().apply("E0").apply("E1")

    assert key(1, 2) == bench.told().committed.key
    assert () == bench.told().failures


def test_a_failed_attempt_stays_failed_after_a_restart_of_the_leader() -> None:
    first = LeaderBench().ready().publish(0, key(1)).pass_time(LIMITS.collect_s + 1)
    second = LeaderBench(journal=first.replayed())
    second.ranks = first.ranks

    second.lead().say().say().publish(1, key(1))

    assert "idle" == second.stage
    assert "E_DEADLINE" in codes(second.failure(key(1)))


def test_a_rank_that_does_not_publish_is_named_when_collect_s_is_over() -> None:
    bench = LeaderBench().ready().publish(0, key(1))

    bench.pass_time(LIMITS.collect_s + 1)

    report = bench.failure(key(1))
    assert "trainer 1 (node b) to publish v1" in report.text
    assert "waited 60 s of 60 s in stage collecting" in report.text
    assert "collect_s (now 60 s)" in report.text


def test_bytes_of_another_layout_than_the_epochs_fail_the_version() -> None:
    bench = LeaderBench().ready().publish(0, key(1))

    bench.publish(1, key(1), digest="other-layout")

    report = bench.failure(key(1))
    assert ["E_REFUSED", "E_LAYOUT_SKEW"] == codes(report)
    assert "trainer rank 1 has layout other-layout, epoch 1 was planned with layout-1" in report.text


def test_a_trainer_rank_that_dies_before_it_published_fails_the_version_and_pauses_the_run() -> None:
    bench = LeaderBench().ready().publish(0, key(1))

    bench.die(T1)

    report = bench.failure(key(1))
    assert ["E_REFUSED", "E_RANK_LOST"] == codes(report)
    assert "trainer 1 (node b, pid 1001)" in report.text
    assert "paused" == bench.stage
    paused = bench.told().paused
    assert paused is not None
    assert "E_PAUSED" == paused.code
    assert "trainer 1 is lost: killed by signal 9" in paused.text


def test_a_trainer_rank_that_dies_after_it_published_does_not_hold_the_version_back() -> None:
    bench = LeaderBench().ready().collect(1)

    bench.die(T1).fetched().apply("E0").apply("E1").acknowledge("E0").acknowledge("E1")

    assert key(1) == bench.told().committed.key
    assert "paused" == bench.stage


def test_a_paused_run_refuses_publishes_by_name_and_goes_on_when_the_rank_is_back() -> None:
    bench = LeaderBench().ready().commit(1)
    bench.die(T1)
    assert "paused" == bench.stage
    assert bench.machine.stage_deadline() is None

    bench.publish(0, key(2), slot=0)
    assert ["E_REFUSED", "E_PAUSED"] == codes(bench.failure(key(2)))
    bench.attach(T1, boot=555).say().say()

    assert "idle" == bench.stage
    assert bench.told().paused is None
    assert 2 == bench.epoch().epoch


def test_a_required_engine_that_is_lost_pauses_the_run_after_the_version() -> None:
    bench = LeaderBench(Roster(2, (EngineDecl("E0", 2), EngineDecl("E1", 1, required=True)))).ready().prepare(1)

    bench.die(E10).apply("E0")
    assert "committed" == bench.stage
    bench.acknowledge("E0")

    assert "paused" == bench.stage
    assert ("E0",) == bench.told().committed.engines
    bench.attach(E10, boot=555).say().say()
    assert "idle" == bench.stage


def test_bytes_of_an_earlier_start_of_the_trainer_are_abandoned_by_name() -> None:
    bench = LeaderBench().ready()

    bench.publish(1, key(4, boot=77))

    assert "E_NEW_TERM" == bench.failure(key(4, boot=77)).code
    assert (1, 0, key(4, boot=77)) in {(int(r.rank), r.slot, r.key) for r in bench.told().release}
    assert "idle" == bench.stage


# ------------------------------------------------------------ FETCHING


def test_every_node_is_waited_for_those_with_no_bytes_too() -> None:
    bench = LeaderBench().ready().collect(1)
    bench.nodes[A].fetch = FetchState(key(1), bench.told().op, 0, 0, complete=True)
    bench.say(A)
    assert "fetching" == bench.stage

    bench.nodes[B].fetch = FetchState(key(1), bench.told().op, 0, 0, complete=True)
    bench.say(B)

    assert "prepared" == bench.stage


def test_a_fetch_that_counts_short_is_not_complete() -> None:
    bench = LeaderBench().ready().collect(1).fetched(A)

    bench.nodes[B].fetch = FetchState(key(1), bench.told().op, 50, 49, complete=True)
    bench.say(B)

    assert "fetching" == bench.stage


def test_an_acknowledgement_of_another_op_counts_for_nothing() -> None:
    bench = LeaderBench().ready().collect(1).fetched(A)

    bench.nodes[B].fetch = FetchState(key(1), type(bench.told().op)(bench.told().op - 1), 50, 50, complete=True)
    bench.say(B)

    assert "fetching" == bench.stage


def test_a_fetch_that_fails_fails_the_version_with_its_own_text() -> None:
    bench = LeaderBench().ready().collect(1)
    error = JournalFailed("stands for a transfer", "digest of bucket 7 differs", 0).to_wire()

    bench.nodes[B].fetch = FetchState(key(1), bench.told().op, 50, 20, complete=False, error=error)
    bench.say(B)

    assert "digest of bucket 7 differs" in bench.failure(key(1)).text
    assert "idle" == bench.stage


def test_a_fetch_without_progress_is_ended_and_the_node_named_with_its_bytes() -> None:
    bench = LeaderBench().ready().collect(1).fetched(A)
    bench.nodes[B].fetch = FetchState(key(1), bench.told().op, 50, 20, complete=False)

    bench.pass_time(LIMITS.fetch_stall_s + 2)

    report = bench.failure(key(1))
    assert "node b to hold v1 (20 of 50 bytes)" in report.text
    assert "fetch_stall_s (now 20 s)" in report.text


def test_the_stall_clock_stands_still_while_a_node_may_come_back() -> None:
    limits = msgspec.structs.replace(LIMITS, restart_s=60.0)
    bench = LeaderBench(limits=limits).ready().collect(1).fetched(A)
    bench.nodes[B].silent = True

    bench.pass_time(LIMITS.fetch_stall_s + 10)
    assert "fetching" == bench.stage
    bench.nodes[B].silent = False
    bench.fetched(B)

    assert "prepared" == bench.stage


def test_a_trainer_node_that_stays_silent_fails_the_version() -> None:
    bench = LeaderBench().ready().collect(1).fetched(A)
    bench.nodes[B].silent = True

    bench.pass_time(LIMITS.heartbeat_timeout_s + LIMITS.restart_s + 2)

    assert "trainer 1 is lost in stage fetching of version 1: node b is silent" in bench.failure(key(1)).text
    assert "paused" == bench.stage


def test_a_version_fails_before_prepared_and_engines_hear_nothing_of_it() -> None:
    bench = LeaderBench().ready().commit(1)
    resumed = bench.orders()

    bench.collect(2).pass_time(LIMITS.fetch_stall_s + 2)

    assert resumed == bench.orders()
    assert "engines still serve v1" in bench.failure(key(2)).text


def test_a_report_does_not_say_that_engines_serve_where_none_is_up() -> None:
    bench = LeaderBench().ready().commit(1)
    bench.die(E00).die(E10)

    bench.publish(0, key(2)).pass_time(LIMITS.collect_s + 1)

    assert "last committed is v1; no engine serves it" in bench.failure(key(2)).text
    assert "still serve" not in bench.failure(key(2)).text


def test_an_engine_that_was_not_told_to_write_may_serve_again_should_the_version_fail() -> None:
    bench = LeaderBench().ready().commit(1).prepare(2)

    bench.all_in("E0", "refused", base=key(1))

    error = bench.order("E0").error
    assert error is not None
    assert "only a complete apply frees it, unless version 2 fails for every engine" in error.text


# ------------------------------------------------------------ PREPARED, APPLYING


def test_an_engine_is_told_to_write_only_when_all_its_ranks_are_paused_for_this_op() -> None:
    bench = LeaderBench().ready().prepare(1)
    bench.state(E00, "paused")
    assert "pause" == bench.order("E0").order

    stale = bench.ranks[E01].report
    bench.ranks[E01].report = msgspec.structs.replace(stale, state="paused", key=key(1), op=stale.op)
    bench.say(B)
    assert "pause" == bench.order("E0").order

    bench.state(E01, "paused")

    assert "write" == bench.order("E0").order
    assert "applying" == bench.stage


def test_done_takes_the_planned_bytes_of_every_rank() -> None:
    bench = LeaderBench().ready().prepare(1).apply("E1").all_in("E0", "paused")
    bench.state(E00, "applied")

    bench.state(E01, "applied", applied_nbytes=99)

    assert "fence" == bench.order("E0").order
    error = bench.order("E0").error
    assert error is not None
    assert "E_POISONED" == error.code
    assert "99 B (99) of 100 B (100) bytes were copied" in error.text


def test_no_engine_resumes_before_the_decision_over_all() -> None:
    bench = LeaderBench().ready().commit(1).prepare(2)

    bench.apply("E1")

    assert {"E0": "pause", "E1": "write"} == bench.orders()
    assert key(1) == bench.told().committed.key


def test_no_rank_resumes_before_all_of_its_engine_hold_the_commit() -> None:
    bench = LeaderBench().ready().prepare(1).apply("E0").apply("E1")

    bench.state(E00, "applied", committed=key(1), base=key(1))
    assert "commit" == bench.order("E0").order
    bench.state(E01, "applied", committed=key(1), base=key(1))

    assert "resume" == bench.order("E0").order


def test_a_rank_that_dies_before_write_leaves_its_engines_others_on_the_old_version() -> None:
    bench = LeaderBench().ready().commit(1).prepare(2)
    bench.state(E00, "paused")

    bench.die(E01)
    assert "abort" == bench.order("E0").order
    bench.apply("E1")

    assert ("E1",) == bench.told().committed.engines
    assert key(2) == bench.told().committed.key


def test_a_rank_that_dies_after_write_has_the_others_fenced_and_the_other_engine_commits() -> None:
    bench = LeaderBench().ready().commit(1).prepare(2).all_in("E0", "paused").apply("E1")

    bench.die(E01)
    assert "fence" == bench.order("E0").order
    assert "applying" == bench.stage
    bench.state(E00, "fenced", base=NO_KEY)

    assert ("committed", ("E1",)) == (bench.stage, bench.told().committed.engines)
    error = bench.order("E0").error
    assert error is not None
    assert "E0[1] is lost in stage writing of version 2: killed by signal 9" in error.text


def test_an_engine_is_excluded_only_after_it_answered_the_fence() -> None:
    bench = LeaderBench().ready().commit(1).prepare(2).apply("E1").state(E00, "paused")

    bench.pass_time(LIMITS.apply_wait_s)
    assert "fence" == bench.order("E0").order
    assert "applying" == bench.stage
    bench.state(E00, "fenced")
    assert "applying" == bench.stage
    bench.state(E01, "fenced")

    assert ("committed", ("E1",)) == (bench.stage, bench.told().committed.engines)
    error = bench.order("E0").error
    assert error is not None
    assert "E0[1] to pause" in error.text
    assert "apply_wait_s (now 40 s)" in error.text
    assert "it served v1 before" in error.text


def test_an_engine_that_does_not_answer_the_fence_is_severed_after_restart_s() -> None:
    bench = LeaderBench().ready().prepare(1).apply("E1").state(E00, "paused").pass_time(LIMITS.apply_wait_s)

    bench.pass_time(LIMITS.restart_s - 2)
    assert "applying" == bench.stage
    bench.pass_time(3)

    assert "committed" == bench.stage
    assert not bench.machine.state.turns[E00.engine].up

    bench.state(E00, "fenced").state(E01, "fenced")

    assert bench.machine.state.turns[E00.engine].up


def test_a_node_that_is_silent_is_given_restart_s_and_then_its_engine_is_fenced_and_severed() -> None:
    limits = msgspec.structs.replace(LIMITS, apply_stall_s=15.0)
    bench = LeaderBench(limits=limits).ready().prepare(1).all_in("E0", "paused").state(E00, "applied")
    bench.nodes[B].silent = True

    bench.pass_time(LIMITS.heartbeat_timeout_s + LIMITS.restart_s - 2)
    assert "write" == bench.order("E0").order
    bench.pass_time(4)
    assert "fence" == bench.order("E0").order
    bench.state(E00, "fenced", base=NO_KEY).pass_time(LIMITS.restart_s + 1)

    # nobody is live: the version commits with nobody, and is retained
    assert (key(1), ()) == (bench.told().committed.key, bench.told().committed.engines)


def test_a_refused_pause_fences_the_engine_with_its_bytes_intact() -> None:
    bench = LeaderBench().ready().commit(1).prepare(2).apply("E1").state(E00, "paused")

    why = JournalFailed("stands for a callback", "cannot pause now", 1).to_wire()
    bench.state(E01, "refused", base=key(1), error=why)
    bench.state(E00, "fenced", base=key(1)).state(E01, "fenced", base=key(1))

    assert ("E1",) == bench.told().committed.engines
    error = bench.order("E0").error
    assert error is not None
    assert "cannot pause now" in error.text


def test_a_rank_that_tears_has_its_engine_fenced() -> None:
    bench = LeaderBench().ready().prepare(1).apply("E1").all_in("E0", "paused")

    bench.state(E01, "torn")

    assert "fence" == bench.order("E0").order


def test_a_copy_without_progress_is_ended_by_its_own_clock() -> None:
    bench = LeaderBench().ready().prepare(1).apply("E1").all_in("E0", "paused")
    bench.state(E00, "applied").state(E01, "applying", applied_nbytes=30)

    bench.pass_time(LIMITS.apply_stall_s + 2)

    error = bench.order("E0").error
    assert error is not None
    assert "apply_stall_s (now 30 s)" in error.text
    assert "E0[1] to apply" in error.text


def test_a_copy_that_goes_on_and_on_is_ended_by_apply_s() -> None:
    limits = msgspec.structs.replace(LIMITS, apply_s=20.0)
    bench = LeaderBench(limits=limits).ready().prepare(1).apply("E1").all_in("E0", "paused").state(E00, "applied")

    for nbytes in range(1, 25):
        bench.state(E01, "applying", applied_nbytes=nbytes).pass_time(1.0)

    error = bench.order("E0").error
    assert error is not None
    assert "apply_s (now 20 s)" in error.text


def test_what_a_rank_says_of_its_own_apply_is_said_once() -> None:
    bench = LeaderBench().ready().commit(1).prepare(2)
    said = ApplyFailed("E0[1]", Version(2), "its pause callback raised RuntimeError: boom", 0, 16).to_wire()

    bench.state(E01, "refused", base=key(1), error=said)

    error = bench.order("E0").error
    assert error is not None
    assert error.text.count("E_APPLY") == 1
    assert "its pause callback raised RuntimeError: boom" in error.text


def test_an_engine_that_is_done_and_tears_before_the_decision_is_fenced() -> None:
    bench = LeaderBench().ready().prepare(1).apply("E1")

    bench.state(E10, "torn")

    assert {"E0": "pause", "E1": "fence"} == bench.orders()


def test_a_version_that_no_living_engine_took_fails_and_aborts_all() -> None:
    bench = LeaderBench().ready().commit(1).prepare(2)
    bench.all_in("E0", "refused", base=key(1)).all_in("E1", "refused", base=key(1))
    bench.all_in("E0", "fenced", base=key(1)).all_in("E1", "fenced", base=key(1))

    assert "failed" == bench.stage
    assert {"E0": "abort", "E1": "abort"} == bench.orders()
    assert ["E_REFUSED", "E_APPLY", "E_APPLY"] == codes(bench.failure(key(2)))
    slots = {(int(r.rank), r.key) for r in bench.told().release}
    assert not {k for _, k in slots} & {key(2)}

    bench.all_in("E0", "serving", base=key(1)).all_in("E1", "serving", base=key(1))

    assert "idle" == bench.stage
    assert {(0, key(2)), (1, key(2))} <= {(int(r.rank), r.key) for r in bench.told().release}
    assert key(1) not in {r.key for r in bench.told().release}


def test_a_failed_versions_slots_are_kept_while_a_rank_may_still_read_them() -> None:
    bench = LeaderBench().ready().prepare(1).all_in("E0", "paused").all_in("E1", "paused")
    bench.all_in("E0", "torn").all_in("E1", "torn").all_in("E0", "fenced").all_in("E1", "fenced")
    assert "failed" == bench.stage
    bench.state(E00, "torn").state(E10, "torn")

    bench.pass_time(LIMITS.restart_s - 1)
    assert () == bench.told().release
    bench.pass_time(2)

    assert "idle" == bench.stage
    assert {key(1)} == {r.key for r in bench.told().release}


def test_a_version_that_is_complete_with_no_live_engine_commits_for_nobody() -> None:
    bench = LeaderBench().ready()
    bench.die(E00).die(E01).die(E10).say().say()

    bench.collect(1).fetched()

    assert "idle" == bench.stage
    assert [()] == [r["engines"] for r in bench.records("commit")]
    assert key(1) == bench.told().committed.key


def test_leave_is_answered_by_left_for_the_whole_engine_and_the_pause_stands() -> None:
    bench = LeaderBench().ready().commit(1).prepare(2)
    bench.state(E00, "paused", leave=True)
    assert "left" == bench.order("E0").order

    bench.state(E00, "serving", base=key(1))
    assert "left" == bench.order("E0").order
    bench.state(E01, "serving", base=key(1))
    assert "pause" == bench.order("E0").order

    bench.all_in("E0", "paused")

    assert "write" == bench.order("E0").order


def test_leave_is_answered_by_write_when_all_are_paused() -> None:
    bench = LeaderBench().ready().prepare(1).state(E01, "paused")

    bench.state(E00, "paused", leave=True)

    assert "write" == bench.order("E0").order


def _left_behind() -> LeaderBench:
    """Return a run in which E0 was fenced from version 2, and version 3 is prepared."""
    bench = LeaderBench().ready().commit(1).prepare(2).apply("E1")
    bench.all_in("E0", "refused", base=key(1)).all_in("E0", "fenced", base=key(1)).acknowledge("E1")
    return bench.prepare(3)


def test_an_engine_that_missed_a_commit_is_fenced_where_others_leave() -> None:
    """Found by random schedules: it went back to its base and served v1 beside an engine that served v2."""
    bench = _left_behind()

    bench.state(E00, "paused", base=key(1), leave=True)
    error = bench.order("E0").error
    assert "fence" == bench.order("E0").order
    assert error is not None
    assert "E_POISONED" == error.code
    bench.all_in("E0", "fenced", base=key(1))

    assert "pause" == bench.order("E0").order


def test_an_engine_that_missed_a_commit_is_fenced_where_others_are_aborted() -> None:
    bench = _left_behind()
    bench.all_in("E0", "refused", base=key(1)).all_in("E1", "refused", base=key(2))
    bench.all_in("E0", "fenced", base=key(1)).all_in("E1", "fenced", base=key(2))

    assert "failed" == bench.stage
    assert {"E0": "fence", "E1": "abort"} == bench.orders()

    bench.state(E10, "serving", base=key(2)).all_in("E0", "fenced", base=key(1))

    assert "idle" == bench.stage


# ------------------------------------------------------------ COMMITTED


def test_the_version_before_is_kept_until_every_live_engine_acknowledged() -> None:
    bench = LeaderBench().ready().commit(1).prepare(2).apply("E0").apply("E1").acknowledge("E0")

    assert () == bench.told().release
    assert {key(1), key(2)} == set(bench.told().retained)

    bench.acknowledge("E1")

    assert {key(1)} == {r.key for r in bench.told().release}
    assert (key(2),) == bench.told().retained


def test_an_engine_that_does_not_acknowledge_is_severed_and_resumes_when_it_does() -> None:
    bench = LeaderBench().ready().commit(1).prepare(2).apply("E0").apply("E1").acknowledge("E0")

    bench.pass_time(LIMITS.commit_ack_s + 1)
    assert "idle" == bench.stage
    assert not bench.machine.state.turns[E10.engine].up
    assert "commit" == bench.order("E1").order
    bench.acknowledge("E1")

    assert "resume" == bench.order("E1").order
    assert bench.machine.state.turns[E10.engine].up


def test_a_rank_that_dies_after_the_decision_does_not_hold_back_its_engines_others() -> None:
    bench = LeaderBench().ready().prepare(1).apply("E0").apply("E1").acknowledge("E1")
    bench.state(E00, "applied", committed=key(1), base=key(1))

    bench.die(E01)

    assert "idle" == bench.stage
    assert not any(t.up for e, t in bench.machine.state.turns.items() if e == "E0")


def test_a_slot_is_released_only_as_the_report_shows_it() -> None:
    bench = LeaderBench().ready().commit(1).commit(2)
    assert {(0, 1, key(1)), (1, 1, key(1))} == {(int(r.rank), r.slot, r.key) for r in bench.told().release}

    bench.ranks[T0].slots = tuple(s for s in bench.ranks[T0].slots if s.key != key(1))
    bench.say(A)

    assert {(1, 1, key(1))} == {(int(r.rank), r.slot, r.key) for r in bench.told().release}


def test_ended_processes_slots_are_released_like_others() -> None:
    bench = LeaderBench().ready().commit(1)
    bench.die(T1)
    bench.ranks[TrainerRank(1)], ended = FakeRank(Boot(555), B, 2), bench.ranks[T1]
    bench.say().say()
    bench.ranks[T1].slots = ended.slots

    assert key(1) not in {r.key for r in bench.told().release}


def test_losses_of_earlier_incarnations_mean_nothing_to_later_ones() -> None:
    bench = LeaderBench().ready()

    bench.nodes[B].lost = (LostRank("E1[0]", Boot(4711), "killed long ago"),)
    bench.say(B)

    assert E10 in bench.machine.state.members.here


# ------------------------------------------------------------ an orderly stop


def test_a_daemon_that_stops_begins_and_prepares_nothing() -> None:
    begun, idle = LeaderBench().ready().publish(0, key(1)), LeaderBench().ready()
    for bench in (begun, idle):
        bench.machine.drain(bench.now)
    begun.publish(1, key(1)).fetched()
    idle.publish(0, key(1))

    assert ("fetching", "idle") == (begun.stage, idle.stage)


def test_a_version_that_is_given_up_names_whom_it_waited_for() -> None:
    bench = LeaderBench().ready().prepare(1)
    bench.machine.drain(bench.now)
    bench.pass_time(3.0)
    bench._run(bench.machine.give_up(3.0, bench.now))

    report = bench.failure(key(1))
    assert ["E_REFUSED", "E_DEADLINE"] == codes(report)
    assert "drain_s" in report.text
    assert "E0[0] to pause" in report.text
    assert {"abort"} == set(bench.orders().values())


def test_a_decision_that_is_being_written_is_not_given_up() -> None:
    bench = LeaderBench().ready().commit(1)
    bench._run(bench.machine.give_up(3.0, bench.now))

    assert key(1) == bench.told().committed.key
    assert () == bench.told().failures
