"""A node's machine: whom it follows, what it holds, what it tells its hooks and its leader."""

import msgspec

from tests.fakes.leader_bench import E0, A, B, key
from tests.fakes.node_bench import (
    E01_BOOT,
    ENGINE,
    LIMITS,
    RANK_PLAN,
    T1_BOOT,
    TRAINER,
    NodeBench,
    epoch,
    order,
    release,
)
from weightd.core.session import events as ev
from weightd.core.session.faults import JournalFailed
from weightd.core.session.records import NodeJournalState
from weightd.core.units import NO_EPOCH, NO_KEY, NO_TERM, Boot, Epoch, Op, Term, TrainerRank, Version, VersionKey
from weightd.core.wire.messages import (
    CommitNote,
    EngineHello,
    EngineOrder,
    PublisherReport,
    RanksRefused,
    ReceiverReport,
    ReceiverState,
    Recovered,
    SlotRelease,
    SlotState,
    SourceSlot,
    TrainerHello,
    VersionFailed,
)

ERROR = JournalFailed("stands for any error", "as a test wants it", 0).to_wire()


def of(effects: list[ev.NodeEffect], *types: type) -> list[ev.NodeEffect]:
    """Return the effects of some types."""
    return [e for e in effects if isinstance(e, types)]


# ------------------------------------------------------------ whom it follows


def test_a_higher_term_is_journaled_before_anything_of_it_is_done() -> None:
    bench = NodeBench().attach()
    bench.answers_journal = False

    effects = bench.goal("attaching")

    assert [{"type": "term", "term": 1, "leader": "a"}] == [e.record for e in effects if isinstance(e, ev.JournalNode)]
    assert [] == of(effects, ev.TellLeader, ev.TellHook)

    after = bench.handle(ev.NodeJournaled(1))

    assert [A] == [e.leader for e in after if isinstance(e, ev.TellLeader)]
    assert 1 == bench.machine.term


def test_a_term_that_cannot_be_journaled_is_not_followed_and_tried_again() -> None:
    bench = NodeBench()
    bench.disk_error = ERROR
    bench.goal("attaching")
    bench.goal("attaching")
    assert 0 == bench.machine.term

    bench.disk_error = None
    bench.now += 2.0
    bench.goal("attaching")

    assert 1 == bench.machine.term


def test_a_lower_term_is_answered_by_who_leads_now() -> None:
    bench = NodeBench()
    bench.term = Term(5)
    bench.goal("attaching")
    bench.term = Term(4)

    effects = bench.goal("idle")

    assert [ev.AnswerSuperseded(A, Term(5), A)] == effects


def test_a_second_leader_of_the_same_term_is_answered_too() -> None:
    bench = NodeBench()
    bench.goal("attaching")

    effects = bench.goal("attaching", leader=B)

    assert [ev.AnswerSuperseded(B, Term(1), A)] == effects


def test_a_goal_that_is_older_than_one_that_was_read_is_answered_and_not_acted_on() -> None:
    bench = NodeBench().ready()
    bench.goal("fetching", key(1), 3, retained=(key(1),))
    bench.seq -= 2

    effects = bench.goal("idle", NO_KEY)

    assert 1 == len(of(effects, ev.TellLeader))
    assert [] == of(effects, ev.StopFetch)
    assert 1 == bench.machine.following.late_goals


def test_a_goal_below_the_floor_is_late_whatever_its_sequence_says() -> None:
    bench = NodeBench().ready()
    bench.goal("applying", key(1), 4)

    bench.goal("fetching", key(1), 3)

    assert "applying" == bench.machine.status(bench.now)["stage"]
    assert 1 == bench.machine.following.late_goals


def test_a_restarted_node_answers_lower_terms_from_its_journal() -> None:
    bench = NodeBench(NodeJournalState(Term(7), A, CommitNote(key(4), (E0,)), Version(5)))

    effects = bench.goal("idle")

    assert [ev.AnswerSuperseded(A, Term(7), A)] == effects
    assert Recovered(B, Term(7), key(4), Version(5)) == bench.machine.recovered()


def test_recover_is_answered_with_the_highest_version_ever_told() -> None:
    bench = NodeBench().ready()

    bench.goal("collecting", key(9), 3)

    assert Recovered(B, Term(1), NO_KEY, Version(9)) == bench.machine.recovered()


# ------------------------------------------------------------ hooks and the report


def test_a_report_shows_who_is_attached_and_what_each_said() -> None:
    bench = NodeBench().ready()

    bench.publish(key(1))

    report = bench.report()
    assert [(1, T1_BOOT, True, True, (key(1),))] == [
        (int(t.rank), t.boot, t.ready, t.alive, tuple(s.key for s in t.slots)) for t in report.trainers
    ]
    assert [("E0", 1, E01_BOOT, True, "unready")] == [
        (str(r.engine), int(r.k), r.boot, r.ready, r.report.state) for r in report.receivers
    ]
    assert ("layout-1", "layout-e1") == report.stored


def test_a_receiver_is_ready_only_once_it_said_its_state() -> None:
    bench = NodeBench()
    bench.goal("attaching")

    bench.handle(ev.HookGreeted(ENGINE, _engine_hello(), E01_BOOT))
    bench.handle(ev.HookReady(ENGINE))

    assert [False] == [r.ready for r in bench.report().receivers]


def _engine_hello() -> EngineHello | TrainerHello:
    bench = NodeBench().attach()
    return bench.machine.attached.hooks[ENGINE].hello


def test_a_lost_hook_is_named_with_its_incarnation_and_why() -> None:
    bench = NodeBench().ready()

    bench.handle(ev.HookLost(ENGINE, "killed by signal 9"))
    bench.greet_engine(session=7, boot=Boot(302))
    bench.handle(ev.HookLost(7, "", orderly=True))

    assert [("E0[1]", E01_BOOT, "killed by signal 9"), ("E0[1]", Boot(302), "it left in order")] == [
        (x.who, x.boot, x.why) for x in bench.report().lost
    ]


def test_the_same_process_with_another_session_is_the_same_hook() -> None:
    bench = NodeBench().ready()
    bench.publish(key(1))

    bench.handle(ev.HookGreeted(9, bench.machine.attached.hooks[TRAINER].hello, T1_BOOT))
    bench.handle(ev.HookLost(TRAINER, "socket closed"))

    report = bench.report()
    assert [(T1_BOOT, (key(1),))] == [(t.boot, tuple(s.key for s in t.slots)) for t in report.trainers]
    assert () == report.lost


def test_an_older_report_of_a_hook_is_dropped() -> None:
    bench = NodeBench().ready()
    bench.handle(ev.HookReported(ENGINE, ReceiverReport("serving", plan_digest=RANK_PLAN), 5))

    bench.handle(ev.HookReported(ENGINE, ReceiverReport("unready"), 4))

    assert "serving" == bench.report().receivers[0].report.state


def test_progress_is_told_with_the_heartbeat_and_not_by_itself() -> None:
    bench = NodeBench().ready()
    bench.goal("fetching", key(1), 3, retained=(key(1),))

    advanced = bench.handle(ev.FetchAdvanced(key(1), Op(3), 20))
    beat = bench.pass_time(1)

    assert [] == of(advanced, ev.TellLeader)
    assert [20] == [e.report.fetch.received_nbytes for e in beat if isinstance(e, ev.TellLeader) and e.report.fetch]


def test_a_goal_is_told_on_change_and_repeated_until_the_state_answers_it() -> None:
    bench = NodeBench().ready()
    told = bench.goal("prepared", key(1), 4, engines=order("pause", key(1), 4))
    again = bench.pass_time(1)
    bench.engine(ReceiverReport("pausing", key(1), op=Op(4), plan_digest=RANK_PLAN))
    answered = bench.pass_time(1)

    def to_engine(effects: list[ev.NodeEffect]) -> int:
        return len([e for e in effects if isinstance(e, ev.TellHook) and e.session == ENGINE])

    assert [1, 1, 0] == [to_engine(told), to_engine(again), to_engine(answered)]


def test_a_refused_hook_is_told_and_vanishes_from_the_report() -> None:
    bench = NodeBench().ready()

    bench.goal("idle", refused=(RanksRefused((("E0[1]", E01_BOOT),), ERROR),))
    bench.engine(ReceiverReport("unready"))

    assert [(ENGINE, "E_JOURNAL"), (ENGINE, "E_JOURNAL")] == bench.refusals()
    assert () == bench.report().receivers


def test_a_refused_process_that_comes_again_waits_until_the_leader_has_dropped_the_refusal() -> None:
    """Else the answer to its first try would be the answer to its second."""
    bench = NodeBench().ready()
    bench.goal("idle", refused=(RanksRefused((("E0[1]", E01_BOOT),), ERROR),))
    bench.handle(ev.HookLost(ENGINE, "closed"))
    bench.greet_engine(session=8)
    assert () == bench.report().receivers

    bench.goal("idle", refused=())

    assert [E01_BOOT] == [r.boot for r in bench.report().receivers]
    assert [(ENGINE, "E_JOURNAL")] == bench.refusals()


# ------------------------------------------------------------ epochs


def test_an_epoch_is_planned_once_and_adopted_when_both_are_there() -> None:
    bench = NodeBench().attach()

    asked = bench.goal("attaching", next_epoch=epoch())
    again = bench.goal("attaching", next_epoch=msgspec.structs.replace(epoch(), plans=()))
    bench.plan()
    adopted = bench.goal("idle", epoch=epoch(), next_epoch=None)

    assert [ev.PlanEpoch(epoch())] == of(asked, ev.PlanEpoch)
    assert [] == of(again, ev.PlanEpoch)
    assert [(Epoch(1), "node-plan", 50)] == [(p.epoch, p.digest, p.fetch_nbytes) for p in bench.report().planned]
    assert [ev.AdoptEpoch(Epoch(1))] == of(adopted, ev.AdoptEpoch)


def test_an_epoch_that_was_adopted_while_this_node_was_away_is_planned_then() -> None:
    bench = NodeBench().attach()

    asked = bench.goal("idle", epoch=epoch())
    planned = bench.plan()

    assert [ev.PlanEpoch(epoch())] == of(asked, ev.PlanEpoch)
    assert [ev.AdoptEpoch(Epoch(1))] == of(planned, ev.AdoptEpoch)


def test_a_plan_that_fails_is_reported_with_its_error() -> None:
    bench = NodeBench().attach()
    bench.goal("attaching", next_epoch=epoch())

    bench.plan(error=ERROR)

    assert [ERROR] == [p.error for p in bench.report().planned]


def test_hooks_have_joined_once_their_incarnation_is_in_the_adopted_epoch() -> None:
    bench = NodeBench().attach()
    bench.goal("attaching", next_epoch=epoch())
    assert NO_EPOCH == bench.told_publisher().epoch
    bench.plan()

    bench.goal("idle", epoch=epoch(), next_epoch=None)

    assert (Term(1), Epoch(1)) == (bench.told_publisher().term, bench.told_publisher().epoch)
    told = bench.told_receiver()
    assert (Epoch(1), RANK_PLAN, 77) == (told.epoch, told.plan_digest, told.plan_nbytes)


def test_orders_reach_no_incarnation_that_is_not_in_the_epoch_but_those_that_end_something() -> None:
    bench = NodeBench().attach()
    bench.goal("attaching", next_epoch=epoch(engine_boot=Boot(999)))
    bench.plan()
    bench.goal("prepared", key(1), 4, epoch=epoch(engine_boot=Boot(999)), engines=order("pause", key(1), 4))
    assert "idle" == bench.told_receiver().order

    bench.engine(ReceiverReport("paused", key(1), op=Op(3), plan_digest=RANK_PLAN))
    bench.goal("failed", key(1), 4, engines=order("abort", key(1), 4))

    assert "abort" == bench.told_receiver().order


# ------------------------------------------------------------ bytes


def test_a_version_is_fetched_recorded_and_only_then_complete() -> None:
    bench = NodeBench().ready()
    begun = bench.goal("fetching", key(1), 3, retained=(key(1),))
    bench.answers_journal = False
    ended = bench.handle(ev.FetchEnded(key(1), Op(3), generation=8, wire_nbytes=60))

    assert [ev.StartFetch(Epoch(1), key(1), Op(3), 0)] == of(begun, ev.StartFetch)
    assert [{"type": "complete", "key": (1, (100, 1))}] == [e.record for e in ended if isinstance(e, ev.JournalNode)]
    fetch = bench.machine.report().fetch
    assert fetch is not None
    assert not fetch.complete

    token = [e.token for e in ended if isinstance(e, ev.JournalNode)][-1]
    bench.handle(ev.NodeJournaled(token))

    fetch = bench.report().fetch
    assert fetch is not None
    assert (True, 50, 50, 60) == (fetch.complete, fetch.received_nbytes, fetch.planned_nbytes, fetch.wire_nbytes)
    assert (key(1),) == bench.report().held


def test_the_half_of_the_last_commit_is_never_written() -> None:
    bench = NodeBench().ready().fetch(key(1), 3)
    bench.goal("idle", committed=CommitNote(key(1), (E0,)), retained=(key(1),))

    second = bench.goal("fetching", key(2), 5, retained=(key(1), key(2)))
    bench.handle(ev.FetchEnded(key(2), Op(5), generation=10))
    bench.goal("idle", committed=CommitNote(key(2), (E0,)), retained=(key(2),))
    third = bench.goal("fetching", key(3), 7, retained=(key(2), key(3)))

    assert [1] == [e.half for e in second if isinstance(e, ev.StartFetch)]
    assert [0] == [e.half for e in third if isinstance(e, ev.StartFetch)]


def test_a_half_that_a_local_rank_may_still_read_is_not_written() -> None:
    bench = NodeBench().ready().fetch(key(1), 3)
    bench.goal("idle", committed=CommitNote(key(1), (E0,)), retained=(key(1),))
    bench.publish(key(1), key(2))
    bench.fetch(key(2), 5)
    bench.goal("applying", key(2), 6, engines=order("write", key(2), 6))
    bench.engine(ReceiverReport("applying", key(2), op=Op(6), plan_digest=RANK_PLAN))

    blocked = bench.goal("fetching", key(3), 7, engines=order("abort", key(2), 6), retained=(key(1), key(3)))
    free = bench.engine(ReceiverReport("torn", op=Op(6), plan_digest=RANK_PLAN))

    assert [] == of(blocked, ev.StartFetch)
    assert [ev.StartFetch(Epoch(1), key(3), Op(7), 1)] == of(free, ev.StartFetch)


def test_a_fetch_that_failed_is_told_and_begun_again_only_for_another_op() -> None:
    bench = NodeBench().ready()
    bench.goal("fetching", key(1), 3, retained=(key(1),))
    bench.handle(ev.FetchEnded(key(1), Op(3), 0, ERROR))
    same = bench.goal("fetching", key(1), 3)
    fetch = bench.report().fetch
    again = bench.goal("fetching", key(1, 2), 5, retained=(key(1, 2),))

    assert fetch is not None
    assert ERROR == fetch.error
    assert [] == of(same, ev.StartFetch)
    assert [ev.StartFetch(Epoch(1), key(1, 2), Op(5), 0)] == of(again, ev.StartFetch)


def test_a_fetch_whose_version_is_over_is_stopped() -> None:
    bench = NodeBench().ready()
    bench.goal("fetching", key(1), 3, retained=(key(1),))

    effects = bench.goal("failed", key(1), 3)

    assert [ev.StopFetch(key(1), Op(3))] == of(effects, ev.StopFetch)


def test_bytes_that_could_not_be_recorded_are_not_vouched_for() -> None:
    bench = NodeBench().ready()
    bench.goal("fetching", key(1), 3, retained=(key(1),))
    bench.disk_error = ERROR

    bench.handle(ev.FetchEnded(key(1), Op(3), generation=8))

    fetch = bench.report().fetch
    assert fetch is not None
    assert (False, ERROR) == (fetch.complete, fetch.error)
    assert () == bench.report().held


def test_a_write_is_passed_on_with_every_local_source_and_its_generation() -> None:
    bench = NodeBench().ready()
    bench.publish(NO_KEY, key(1))
    bench.fetch(key(1), 3)

    bench.goal("applying", key(1), 4, engines=order("write", key(1), 4))

    told = bench.told_receiver()
    assert ("write", Op(4), key(1)) == (told.order, told.op, told.key)
    assert (SourceSlot(-1, 0, 8), SourceSlot(1, 1, 4)) == told.sources


def test_a_write_waits_paused_until_every_source_is_whole() -> None:
    bench = NodeBench().ready()
    bench.publish(key(1))

    bench.goal("applying", key(1), 4, engines=order("write", key(1), 4), retained=(key(1),))
    assert "pause" == bench.told_receiver().order
    bench.handle(ev.FetchEnded(key(1), Op(4), generation=8))

    assert "write" == bench.told_receiver().order


def test_a_write_waits_until_the_rank_has_built_the_epochs_plan() -> None:
    bench = NodeBench().ready()
    bench.publish(key(1))
    bench.engine(ReceiverReport("paused", key(1), op=Op(4), plan_digest="the plan before"))
    bench.fetch(key(1), 3)

    bench.goal("applying", key(1), 4, engines=order("write", key(1), 4))
    assert "pause" == bench.told_receiver().order
    bench.engine(ReceiverReport("paused", key(1), op=Op(4), plan_digest=RANK_PLAN))

    assert "write" == bench.told_receiver().order


def test_a_commit_is_journaled_before_a_hook_hears_of_it() -> None:
    bench = NodeBench().ready()
    bench.publish(key(1))
    bench.fetch(key(1), 3)
    bench.goal("applying", key(1), 4, engines=order("write", key(1), 4))
    bench.answers_journal = False

    effects = bench.goal(
        "committed", key(1), 4, engines=order("commit", key(1), 4), committed=CommitNote(key(1), (E0,))
    )

    assert ["commit"] == [e.record["type"] for e in effects if isinstance(e, ev.JournalNode)]
    assert "write" == bench.told_receiver().order
    assert NO_KEY == bench.told_publisher().committed
    assert NO_KEY == bench.report().committed

    token = [e.token for e in effects if isinstance(e, ev.JournalNode)][-1]
    bench.handle(ev.NodeJournaled(token))

    assert ("commit", key(1)) == (bench.told_receiver().order, bench.told_receiver().committed)
    assert key(1) == bench.told_publisher().committed
    assert key(1) == bench.report().committed


def test_a_fence_is_journaled() -> None:
    bench = NodeBench().ready()

    bench.goal("applying", key(1), 4, engines=order("fence", key(1), 4))
    bench.goal("applying", key(1), 4, engines=order("fence", key(1), 4))

    assert [{"type": "fence", "engine": "E0", "key": (1, (100, 1)), "op": 4}] == [
        r for r in bench.journal if r["type"] == "fence"
    ]


# ------------------------------------------------------------ slots


def test_a_slot_is_free_only_once_the_nodes_own_readers_have_ended() -> None:
    bench = NodeBench().ready()
    bench.publish(key(1), key(2))
    bench.handle(ev.ReadersChanged(key(1), 2))

    bench.goal("idle", committed=CommitNote(key(2), ()), release=(release(key(1), 0),), retained=(key(2),))
    assert () == bench.told_publisher().release
    bench.handle(ev.ReadersChanged(key(1), 1))
    assert () == bench.told_publisher().release
    bench.handle(ev.ReadersChanged(key(1), 0))

    assert [(0, key(1))] == [(r.slot, r.key) for r in bench.told_publisher().release]


def test_a_release_of_other_bytes_than_the_slot_holds_is_not_passed_on() -> None:
    bench = NodeBench().ready()
    bench.publish(key(3), key(2))

    bench.goal("idle", committed=CommitNote(key(2), ()), release=(release(key(1), 0),))

    assert () == bench.told_publisher().release


def test_a_slot_that_was_given_free_is_not_readable_any_more() -> None:
    bench = NodeBench().ready()
    bench.publish(key(1))
    bench.goal("collecting", key(1), 3, retained=(key(1),))
    assert {TrainerRank(1): SlotState(0, key(1), 2, "layout-1")} == bench.machine.readable(key(1))

    bench.goal("idle", release=(release(key(1), 0),))

    assert {} == bench.machine.readable(key(1))


# ------------------------------------------------------------ live memory


def moved(bench: NodeBench, name: VersionKey) -> list[ev.NodeEffect]:
    """Let the live trainer rank show a copy of what its first slot holds."""
    return bench.publish(name, name)


def writing(state: ReceiverState, name: VersionKey, op: int) -> ReceiverReport:
    """Return the state of the engine rank."""
    return ReceiverReport(state, name, op=Op(op), plan_digest=RANK_PLAN)


def test_bytes_that_moved_are_read_from_the_later_slot_and_the_earlier_one_is_free_at_once() -> None:
    bench = NodeBench().ready(live=True)
    bench.publish(key(1))
    bench.goal("fetching", key(1), 3, retained=(key(1),))
    assert () == bench.told_publisher().release

    moved(bench, key(1))

    assert (SlotRelease(0, key(1)),) == bench.told_publisher().release
    assert {TrainerRank(1): SlotState(1, key(1), 4, "layout-1")} == bench.machine.readable(key(1))


def test_two_slots_of_a_rank_that_is_not_live_are_never_free_by_themselves() -> None:
    bench = NodeBench().ready()
    bench.publish(key(1), key(1))
    bench.goal("fetching", key(1), 3, retained=(key(1),))

    assert () == bench.told_publisher().release


def test_a_slot_that_moved_is_held_while_a_rank_that_was_told_it_may_read() -> None:
    bench = NodeBench().ready(live=True)
    bench.publish(key(1))
    bench.fetch(key(1), 3)
    bench.engine(writing("paused", key(1), 4))
    bench.goal("applying", key(1), 4, engines=order("write", key(1), 4))
    assert SourceSlot(1, 0, 2) in bench.told_receiver().sources

    moved(bench, key(1))
    bench.engine(writing("applying", key(1), 4))

    assert SourceSlot(1, 1, 4) in bench.told_receiver().sources
    assert () == bench.told_publisher().release

    bench.engine(writing("applied", key(1), 4))

    assert (SlotRelease(0, key(1)),) == bench.told_publisher().release


def test_a_rank_that_reads_the_copy_does_not_hold_the_slot_that_moved() -> None:
    bench = NodeBench().ready(live=True)
    bench.publish(key(1))
    bench.fetch(key(1), 3)
    moved(bench, key(1))
    bench.engine(writing("paused", key(1), 4))
    bench.goal("applying", key(1), 4, engines=order("write", key(1), 4))

    assert SourceSlot(1, 1, 4) in bench.told_receiver().sources
    assert (SlotRelease(0, key(1)),) == bench.told_publisher().release


def test_a_rank_that_says_that_it_applies_holds_the_slot_although_nobody_here_told_it() -> None:
    """The daemon was started anew in mid-copy."""
    bench = NodeBench().ready(live=True)
    bench.publish(key(1))
    bench.engine(writing("applying", key(1), 4))
    moved(bench, key(1))
    bench.goal("idle", committed=CommitNote(key(1), ()), release=(release(key(1), 0), release(key(1), 1)))

    assert () == bench.told_publisher().release


def test_who_fetches_from_a_slot_that_moved_is_cut_off_and_holds_it_until_then() -> None:
    bench = NodeBench().ready(live=True)
    bench.publish(key(1))
    bench.goal("fetching", key(1), 3, retained=(key(1),))
    here = frozenset({(TrainerRank(1), 0)})
    bench.handle(ev.ReadersChanged(key(1), 2, here))

    assert [ev.EndServing(key(1), TrainerRank(1), 0)] == of(moved(bench, key(1)), ev.EndServing)
    assert () == bench.told_publisher().release

    after = bench.handle(ev.ReadersChanged(key(1), 1, frozenset({(TrainerRank(1), 1)})))

    assert [] == of(after, ev.EndServing)
    assert (SlotRelease(0, key(1)),) == bench.told_publisher().release


def test_only_the_version_in_hand_and_retained_ones_are_readable() -> None:
    bench = NodeBench().ready()
    bench.publish(key(1), key(2))

    bench.goal("collecting", key(1), 3, retained=(key(1),))

    assert [TrainerRank(1)] == list(bench.machine.readable(key(1)))
    assert {} == bench.machine.readable(key(2))
    assert {} == bench.machine.readable(NO_KEY)


def test_slots_outlive_the_process_and_go_by_name() -> None:
    bench = NodeBench().ready()
    bench.publish(key(1), NO_KEY)
    bench.goal("collecting", key(1), 3, retained=(key(1),))

    bench.handle(ev.HookLost(TRAINER, "killed by signal 9"))

    (entry,) = bench.report().trainers
    assert (False, (key(1),)) == (entry.alive, tuple(s.key for s in entry.slots))
    assert [TrainerRank(1)] == list(bench.machine.readable(key(1)))

    bench.goal("idle", release=(release(key(1), 0),))

    assert () == bench.report().trainers


def test_a_slot_that_was_free_when_its_process_ended_is_not_kept() -> None:
    bench = NodeBench().ready()
    bench.publish(key(1))
    bench.goal("idle", committed=CommitNote(key(2), ()), release=(release(key(1), 0),))

    bench.handle(ev.HookLost(TRAINER, "killed by signal 9"))

    assert () == bench.report().trainers


# ------------------------------------------------------------ nobody leads


def test_without_a_leader_a_hook_is_refused_after_attach_s() -> None:
    bench = NodeBench().attach()

    bench.pass_time(LIMITS.attach_s - 1)
    early = bench.refusals()
    bench.pass_time(2)

    assert [] == early
    assert [(TRAINER, "E_NO_LEADER"), (ENGINE, "E_NO_LEADER")] == bench.refusals()


def test_a_leader_that_falls_silent_is_told_after_restart_s_and_an_applied_rank_is_undecided() -> None:
    bench = NodeBench().ready()
    bench.publish(key(1))
    bench.fetch(key(1), 3)
    bench.goal("applying", key(1), 4, engines=order("write", key(1), 4))
    bench.engine(ReceiverReport("applied", key(1), op=Op(4), applied_nbytes=100, plan_digest=RANK_PLAN))

    bench.pass_time(LIMITS.heartbeat_timeout_s + LIMITS.restart_s - 1)
    assert Term(1) == bench.told_publisher().term
    bench.pass_time(2)

    paused, error = bench.told_publisher().paused, bench.told_receiver().error
    assert NO_TERM == bench.told_publisher().term
    assert paused is not None
    assert "E_NO_LEADER" == paused.code
    assert error is not None
    assert "version 1 is undecided: E0[1] is applied and node a was not heard" in error.text

    bench.goal("committed", key(1), 4, engines=order("commit", key(1), 4), committed=CommitNote(key(1), (E0,)))

    assert (Term(1), None) == (bench.told_publisher().term, bench.told_publisher().paused)
    assert bench.told_receiver().error is None


def test_hooks_hear_for_how_long_their_leader_is_silent_instead_of_a_stage_that_may_be_over() -> None:
    bench = NodeBench().ready()
    bench.goal("fetching", key(1), 3, waiting_for="node a to hold v1, 1 of 4 s")
    assert ("fetching", "node a to hold v1, 1 of 4 s") == _shown(bench)

    bench.pass_time(7)
    assert ("", "node a, which leads and is not heard for 7 s") == _shown(bench)
    bench.pass_time(LIMITS.restart_s)
    assert ("", "node a, which leads and is not heard for 17 s") == _shown(bench)
    assert bench.told_publisher().waiting_for == bench.told_receiver().waiting_for

    bench.goal("fetching", key(1), 3)
    assert ("fetching", "node a to hold v1, 1 of 4 s") == _shown(bench)


def _shown(bench: NodeBench) -> tuple[str, str]:
    return bench.told_receiver().stage, bench.told_receiver().waiting_for


def test_a_rank_that_comes_new_does_not_hear_the_orders_that_ended_its_predecessor() -> None:
    """Its first receive() raised that the engine is fenced since a version that it never was in."""
    bench = NodeBench().ready()
    bench.handle(ev.HookLost(ENGINE, "killed by signal 9"))
    fenced = EngineOrder(E0, "fence", Op(4), key(1), ERROR)
    bench.goal("committed", key(1), 4, engines=(fenced,))

    bench.greet_engine(9, Boot(999))

    told = bench.told_receiver(9)
    assert ("idle", None) == (told.order, told.error)


def test_failures_reach_every_publisher() -> None:
    bench = NodeBench().ready()

    bench.goal("idle", failures=(VersionFailed(key(1), ERROR),))

    assert (VersionFailed(key(1), ERROR),) == bench.told_publisher().failures


def test_a_machine_with_nobody_to_tell_anything_sleeps() -> None:
    bench = NodeBench()
    assert bench.machine.next_deadline() is None

    bench.attach()

    assert bench.machine.next_deadline() is not None


def test_status_shows_ranks_stage_and_what_is_held() -> None:
    bench = NodeBench().ready()
    bench.publish(key(1))
    bench.fetch(key(1), 3)

    status = bench.machine.status(bench.now)

    assert ("fetching", 1, ["v1/0064.1"]) == (status["stage"], status["version"], status["holds"])
    ranks = status["ranks"]
    assert isinstance(ranks, dict)
    assert {"trainer 1", "E0[1]"} == set(ranks)


def test_a_publisher_that_says_nothing_holds_nothing() -> None:
    bench = NodeBench().ready()

    bench.handle(ev.HookReported(TRAINER, PublisherReport(())))

    assert () == bench.report().trainers[0].slots


def test_events_of_unknown_sessions_change_nothing() -> None:
    bench = NodeBench().ready()
    before = bench.machine.report()

    bench.handle(ev.HookReady(99))
    bench.handle(ev.HookReported(99, PublisherReport(())))
    bench.handle(ev.HookLost(99, "gone"))

    assert before == bench.machine.report()
