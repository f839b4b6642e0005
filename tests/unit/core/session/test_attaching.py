"""Ranks that come, stay away, or are not wanted; epochs that are proved, planned and adopted, or not."""

import msgspec

from tests.fakes.leader_bench import LIMITS, PLACES, A, B, FakeRank, LeaderBench, codes, rank
from weightd.core.roster.topology import EngineDecl, Roster
from weightd.core.session.faults import JournalFailed
from weightd.core.units import Boot, TrainerRank
from weightd.core.wire.messages import Planned


def test_absentees_are_named_and_everybody_is_refused_with_the_full_report() -> None:
    bench = LeaderBench().lead()
    bench.attach(TrainerRank(0), TrainerRank(1), rank("E0", 0))

    bench.pass_time(LIMITS.attach_s + 1)

    assert ["E0[0]", "trainer 0", "trainer 1"] == bench.refused()
    report = bench.refusal("E0[0]")
    assert ["E_REFUSED", "E_RANK_MISSING", "E_RANK_MISSING"] == codes(report)
    assert "engine E0: 1 registered + 1 missing = 2 rollout ranks within 30.0 s" in report.text
    assert "never attached" in report.text
    assert {} == bench.machine.state.members.here
    assert [] == bench.records("epoch")


def test_a_rank_that_attached_and_died_is_not_said_to_have_never_attached() -> None:
    bench = LeaderBench().lead()
    bench.attach(TrainerRank(0), TrainerRank(1), rank("E0", 0), rank("E1", 0)).say()
    bench.die(rank("E1", 0), "killed by signal 9").say()

    bench.pass_time(LIMITS.attach_s + 1)

    report = bench.refusal("trainer 0").text
    assert "k 0 attached and is gone" in report
    assert "on node b: killed by signal 9" in report
    assert 1 == report.count("never attached"), report  # E0[1]


def test_a_declared_node_is_named_for_an_absentee() -> None:
    roster = Roster(
        1,
        (EngineDecl("E0", 1, ("gpu-7",)),),
        nodes={"a": ("slot-0",), "b": ("gpu-7",)},
        trainer_slots=("slot-0",),
    )
    bench = LeaderBench(roster).lead()
    bench.attach(TrainerRank(0))

    bench.pass_time(LIMITS.attach_s + 1)

    assert "declared on b" in bench.refusal("trainer 0").text


def test_a_corrected_reattach_works_and_starts_the_clock_anew() -> None:
    bench = LeaderBench().lead()
    bench.attach(TrainerRank(0), TrainerRank(1))
    bench.pass_time(LIMITS.attach_s + 1)
    bench.ranks.clear()
    bench.pass_time(LIMITS.attach_s + 5)  # nobody is there: no clock runs, nothing is refused
    assert [] == bench.refused()

    bench.attach(boot=None)
    bench.say().say()

    assert "idle" == bench.stage


def test_a_corrected_reattach_may_bring_another_roster() -> None:
    bench = LeaderBench().lead()
    bench.attach(TrainerRank(0), TrainerRank(1), rank("E1", 0))
    bench.pass_time(LIMITS.attach_s + 1)
    bench.ranks.clear()
    bench.say()

    bench.roster = Roster(2, (EngineDecl("E1", 1),))
    bench.attach(TrainerRank(1), rank("E1", 0)).attach(TrainerRank(0), boot=321)
    bench.say().say()

    assert "idle" == bench.stage
    assert 321 == bench.told().attempt_boot


def test_a_rank_that_is_there_without_its_layout_is_named_at_the_deadline() -> None:
    bench = LeaderBench().lead()
    for who in PLACES:
        bench.attach(who)
        bench.ranks[who].ready = who != rank("E0", 1)
        bench.say()
    bench.pass_time(LIMITS.attach_s + 1)

    report = bench.refusal("trainer 0")
    assert ["E_REFUSED", "E_DEADLINE"] == codes(report)
    assert "layout and memory of E0[1]" in report.text


def test_a_duplicate_newcomer_is_refused_alone() -> None:
    bench = LeaderBench().ready()
    first = bench.ranks[rank("E1", 0)]
    bench.ranks[rank("E1", 0)] = FakeRank(Boot(999), A, 1)
    bench.say(A)
    bench.ranks[rank("E1", 0)] = first

    assert ["E_RANK_DUP"] == codes(bench.refusal("E1[0]"))
    assert "idle" == bench.stage

    bench.say().collect(1)

    assert "fetching" == bench.stage


def test_an_unknown_engine_and_a_wrong_world_are_refused_alone() -> None:
    bench = LeaderBench().ready()
    bench.ranks[rank("E9", 0)] = FakeRank(Boot(901), A, 1)
    bench.ranks[TrainerRank(5)] = FakeRank(Boot(902), A, 8)

    bench.say(A)

    assert ["E_RANK_UNKNOWN"] == codes(bench.refusal("E9[0]"))
    assert ["E_RANK_UNKNOWN"] == codes(bench.refusal("trainer 5"))
    assert "idle" == bench.stage


def test_a_new_job_may_declare_another_world_and_its_ranks_wait_for_its_rank_0() -> None:
    """Session.md 2.4: engines and other ranks of the new job often greet first; the old roster is not theirs."""
    bench = LeaderBench().ready()
    bench.die(TrainerRank(0)).die(TrainerRank(1)).say()
    bench.ranks[rank("E9", 0)] = FakeRank(Boot(901), A, 1)
    bench.ranks[TrainerRank(2)] = FakeRank(Boot(902), A, 3)
    bench.say()
    assert [] == bench.refused()
    assert "paused" == bench.stage

    roster = Roster(3, (EngineDecl("E9", 1),))
    bench.ranks[TrainerRank(0)] = FakeRank(Boot(777), A, 3, roster=roster)
    bench.say()

    assert bench.stopped is not None
    assert "started anew" in bench.stopped


def test_a_refusal_is_forgotten_once_the_node_shows_the_rank_no_more() -> None:
    bench = LeaderBench().ready()
    bench.ranks[rank("E9", 0)] = FakeRank(Boot(901), A, 1)
    bench.say(A)
    assert ["E9[0]"] == bench.refused()

    del bench.ranks[rank("E9", 0)]
    bench.say(A)

    assert [] == bench.refused()


def test_a_newcomer_waits_while_the_rank_it_replaces_may_only_be_away() -> None:
    """Two processes of one rank: nobody is refused before it is known which one lives."""
    bench = LeaderBench().ready()
    bench.nodes[B].silent = True
    bench.pass_time(7.0)
    bench.ranks[rank("E1", 0)] = FakeRank(Boot(555), A, 1)
    bench.say(A)
    assert [] == bench.refused()

    bench.pass_time(10.0)

    assert Boot(555) == bench.machine.state.members.here[rank("E1", 0)].registration.boot


def test_coverage_that_cannot_be_proved_is_everybodys_report_at_the_first_epoch() -> None:
    bench = LeaderBench().lead()
    bench.proof_error = JournalFailed("stands for a proof", "3 of 5 rows have no source", 0).to_wire()

    bench.attach()

    assert 5 == len(bench.refused())
    assert "3 of 5 rows have no source" in bench.refusal("E0[1]").text
    assert [] == bench.records("epoch")


def test_a_late_joiner_that_fails_its_proof_is_refused_alone() -> None:
    bench = LeaderBench().ready().commit(1)
    bench.die(rank("E1", 0)).say().say()
    bench.proof_error = JournalFailed("stands for a proof", "unknown names", 0).to_wire()

    bench.attach(rank("E1", 0), boot=555)

    assert ["E1[0]"] == bench.refused()
    assert ["E0", "E0"] == [p.engine for p in bench.epoch().receivers]

    bench.proof_error = None
    bench.collect(2)

    assert "fetching" == bench.stage


def test_a_node_that_plans_something_else_is_named() -> None:
    bench = LeaderBench().lead()
    bench.nodes_plan = False
    bench.attach()
    bench.nodes[A].planned = (Planned(bench.machine.state.epochs.upcoming.spec.epoch, "plan-a"),)  # type: ignore[union-attr]
    bench.nodes[B].planned = (msgspec.structs.replace(bench.nodes[A].planned[0], digest="another"),)

    bench.say()

    report = bench.refusal("trainer 0")
    assert ["E_REFUSED", "E_PLAN_DIGEST"] == codes(report)
    assert "node b planned another, the leader plan-b" in report.text


def test_nodes_that_do_not_plan_in_time_are_named() -> None:
    limits = msgspec.structs.replace(LIMITS, plan_s=10.0)
    bench = LeaderBench(limits=limits).lead()
    bench.nodes_plan = False

    bench.attach().pass_time(11.0)

    report = bench.refusal("trainer 0")
    assert ["E_REFUSED", "E_DEADLINE"] == codes(report)
    assert "waited for [node a, node b]" in report.text
    assert "plan_s (now 10 s)" in report.text


def test_an_engine_that_restarts_comes_in_with_a_new_epoch_and_is_not_up_before_it_answered() -> None:
    bench = LeaderBench().ready().commit(1)

    bench.die(rank("E1", 0)).say().say()
    assert (2, ["E0[0]", "E0[1]"]) == (
        bench.epoch().epoch,
        [f"{p.engine}[{p.k}]" for p in bench.epoch().receivers],
    )
    assert ["E1"] == [p.engine for p in bench.epoch().down]
    bench.attach(rank("E1", 0), boot=555).say().say()

    assert 3 == bench.epoch().epoch
    assert "fence" == bench.order("E1").order
    turn = bench.machine.state.turns[rank("E1", 0).engine]
    assert not turn.up

    bench.state(rank("E1", 0), "fenced")
    bench.prepare(2).apply("E0").apply("E1").acknowledge("E0").acknowledge("E1")

    assert bench.machine.state.turns[rank("E1", 0).engine].up
    assert ("E0", "E1") == bench.records("commit")[-1]["engines"]


def test_an_epoch_in_planning_is_waited_for_before_the_next_version() -> None:
    bench = LeaderBench().ready()
    bench.nodes_plan = False
    bench.prepare(1).apply("E0").apply("E1").die(rank("E1", 0))
    bench.acknowledge("E0")
    assert "idle" == bench.stage

    bench.collect(2)
    assert "idle" == bench.stage
    assert ("epoch 2 in planning",) == bench.machine.state.waiting

    bench.nodes_plan = True
    bench.pass_time(1.0).say()

    assert "fetching" == bench.stage
    assert 2 == bench.epoch().epoch


def test_an_epoch_is_bound_for_as_long_as_a_version_is_in_hand() -> None:
    bench = LeaderBench().ready().collect(1)

    bench.die(rank("E1", 0)).say()

    assert 1 == bench.epoch().epoch

    bench.fetched().apply("E0").acknowledge("E0")

    assert (2, "idle") == (bench.epoch().epoch, bench.stage)


def test_a_straggling_joiner_is_refused_by_itself() -> None:
    bench = LeaderBench().ready().commit(1)
    bench.die(rank("E0", 0)).die(rank("E0", 1)).say().say()
    bench.attach(rank("E0", 0), boot=555)

    bench.pass_time(LIMITS.attach_s + 1)

    report = bench.refusal("E0[0]")
    assert ["E_REFUSED", "E_RANK_MISSING"] == codes(report)
    assert "engine E0: 1 registered + 1 missing = 2 rollout ranks" in report.text
    assert "idle" == bench.stage


def test_a_rank_whose_engine_lost_another_is_no_straggler() -> None:
    """However long ago it attached, it waits for the other to come back, and is not in the other's way."""
    bench = LeaderBench().ready().commit(1)
    bench.pass_time(LIMITS.attach_s + 1)
    bench.die(rank("E0", 1)).say().say()

    bench.pass_time(LIMITS.attach_s + 1)

    assert "E0[0]" not in bench.refused()
    assert {"E1"} == {p.engine for p in bench.epoch().receivers}

    bench.attach(rank("E0", 1), boot=555).say().say()

    assert {"E0", "E1"} == {p.engine for p in bench.epoch().receivers}


def test_the_first_epoch_needs_every_rank_but_those_of_engines_the_journal_says_are_down() -> None:
    first = LeaderBench().ready().commit(1)
    first.die(rank("E1", 0)).say().say()
    second = LeaderBench(journal=first.replayed())
    second.ranks = dict(first.ranks)

    second.lead().say().say()

    assert "idle" == second.stage
    assert {"E0"} == {p.engine for p in second.epoch().receivers}
