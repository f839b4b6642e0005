"""The leader's machine on the normal path, effect by effect, and who leads at all."""

from tests.fakes.leader_bench import LIMITS, A, B, LeaderBench, codes, key, rank
from weightd.core.roster.topology import EngineDecl, Roster
from weightd.core.session import events as ev
from weightd.core.session.faults import JournalFailed
from weightd.core.session.records import replay
from weightd.core.units import NO_KEY, Boot, NodeId, Term, TrainerRank, Version
from weightd.core.wire.messages import FetchState, NodeReport, Recovered, SlotState


def kinds(effects: list[ev.LeaderEffect]) -> list[str]:
    """Return effects by kind, notes left out."""
    return [type(e).__name__ for e in effects if not isinstance(e, ev.Note)]


def test_a_new_leader_asks_its_peers_and_journals_a_term_above_all_that_answer() -> None:
    bench = LeaderBench()
    bench.answers_recover = False

    asked = bench.machine.start(bench.now)
    answer = Recovered(B, Term(6), key(4), Version(5))
    told = bench.handle(ev.PeerRecovered(answer, Boot(11)))

    assert [ev.AskPeer(B)] == asked
    assert ["JournalLeader", "TellNode", "TellNode"] == kinds(told)
    assert [{"type": "term", "term": 7, "leader": "a"}] == bench.journal
    assert 7 == bench.machine.term
    assert ("attaching", key(4), 6) == (bench.told().stage, bench.told().committed.key, bench.told().next_version)


def test_nothing_is_told_before_the_term_is_journaled() -> None:
    bench = LeaderBench(peers=())
    bench.answers_journal = False

    effects = bench.machine.start(bench.now)

    assert ["JournalLeader"] == kinds(effects)
    assert 0 == bench.machine.term


def test_a_silent_peer_is_waited_for_and_then_barred_until_it_answers() -> None:
    bench = LeaderBench()
    bench.answers_recover = False
    bench.lead()
    bench.nodes[B].silent = True

    bench.pass_time(9.0)
    before = bench.machine.term
    bench.pass_time(2.0)
    told = {e.node for e in bench.effects if isinstance(e, ev.TellNode)}
    bench.nodes[B].silent = False
    bench.say(B)

    assert 0 == before
    assert 1 == bench.machine.term
    assert {A} == told
    assert bench.machine.state.view.report(B) is None

    bench.handle(ev.PeerRecovered(Recovered(B, Term(0), NO_KEY, Version(8)), Boot(11)))
    bench.say(B)

    assert bench.machine.state.view.report(B) is not None
    assert 9 == bench.machine.state.ledger.next_version


def test_a_barred_peer_that_knows_an_equal_term_has_a_higher_one_taken() -> None:
    bench = LeaderBench()
    bench.answers_recover = False
    bench.lead().pass_time(11.0)
    bench.attach(TrainerRank(0))

    bench.handle(ev.PeerRecovered(Recovered(B, Term(1), NO_KEY), Boot(11)))

    assert 2 == bench.machine.term
    assert bench.stopped is None


def test_a_higher_term_stops_the_leader() -> None:
    bench = LeaderBench().ready()

    effects = bench.handle(ev.HigherTermSeen(Term(2), B))

    assert [ev.StopLeading("term 2 is led by node b")] == effects
    assert bench.machine.next_deadline() is None
    assert bench.handle(ev.HigherTermSeen(Term(3), B)) == []


def test_its_own_term_is_no_reason_to_stop() -> None:
    bench = LeaderBench().ready()

    bench.handle(ev.HigherTermSeen(Term(1), A))
    bench.handle(ev.HigherTermSeen(Term(0), B))

    assert bench.stopped is None


def test_attach_proves_plans_and_adopts_one_epoch() -> None:
    bench = LeaderBench().lead()
    bench.attach()
    bench.say()

    assert 1 == kinds(bench.effects).count("ProveEpoch")
    assert ["term", "epoch"] == [r["type"] for r in bench.journal]
    assert (1, "idle") == (bench.epoch().epoch, bench.told().stage)
    assert [0, 1] == [p.rank for p in bench.epoch().trainers]
    assert ["E0[0]", "E0[1]", "E1[0]"] == [f"{p.engine}[{p.k}]" for p in bench.epoch().receivers]
    assert bench.told().next_epoch is None


def test_a_live_slot_is_free_with_the_decision_and_others_as_ever() -> None:
    bench = LeaderBench().ready()
    bench.ranks[TrainerRank(1)].live = True
    bench.prepare(1).apply("E0")
    assert () == bench.told().release

    bench.apply("E1")

    assert "committed" == bench.stage
    assert [(1, 1, key(1))] == [(int(r.rank), r.slot, r.key) for r in bench.told().release]
    assert (key(1),) == bench.told().retained


def test_a_live_slot_is_free_once_its_version_has_failed() -> None:
    bench = LeaderBench().ready()
    bench.ranks[TrainerRank(1)].live = True
    bench.collect(1)
    bench.pass_time(LIMITS.fetch_stall_s + 1)

    assert [(1, 1, key(1))] == [(int(r.rank), r.slot, r.key) for r in bench.told().release][-1:]


def test_a_version_from_publish_to_release() -> None:
    """The whole normal path; each stage begins with what ends the one before."""
    bench = LeaderBench().ready().commit(1)
    stages: list[str] = []

    bench.publish(0, key(2), 0)
    stages.append(bench.stage)
    bench.publish(1, key(2), 0)
    stages.append(bench.stage)
    bench.fetched(A)
    stages.append(bench.stage)
    bench.fetched(B)
    stages.append(bench.stage)
    assert {"E0": "pause", "E1": "pause"} == bench.orders()
    bench.all_in("E1", "paused")
    stages.append(bench.stage)
    assert {"E0": "pause", "E1": "write"} == bench.orders()
    bench.all_in("E1", "applied").apply("E0")
    stages.append(bench.stage)
    assert {"E0": "commit", "E1": "commit"} == bench.orders()
    assert () == bench.told().release
    bench.acknowledge("E1")
    assert {"E0": "commit", "E1": "resume"} == bench.orders()
    bench.acknowledge("E0")
    stages.append(bench.stage)

    assert ["collecting", "fetching", "fetching", "prepared", "applying", "committed", "idle"] == stages
    assert ["start", "prepared", "commit"] == [r["type"] for r in bench.journal[-3:]]
    assert [(0, 1, key(1)), (1, 1, key(1))] == [(int(r.rank), r.slot, r.key) for r in bench.told().release]
    assert (key(2),) == bench.told().retained
    assert 3 == bench.told().next_version
    assert key(2) == bench.replayed().committed.key


def test_the_whole_effects_of_one_report() -> None:
    """A publish on the last rank: a note and the new goal to every node, nothing else."""
    bench = LeaderBench().ready()
    bench.publish(0, key(1))

    effects = bench.handle(ev.NodeReported(_published(bench, 1), bench.nodes[B].boot))

    goal = bench.told()
    assert [ev.TellNode(A, goal), ev.TellNode(B, goal)] == [e for e in effects if not isinstance(e, ev.Note)]
    assert ["stage fetching"] == [e.what for e in effects if isinstance(e, ev.Note)]


def _published(bench: LeaderBench, version: int) -> NodeReport:
    bench.ranks[TrainerRank(1)].slots = (SlotState(0, key(version), 2, "layout-1"),)
    return bench.report(B)


def test_prepared_is_journaled_before_any_pause() -> None:
    bench = LeaderBench().ready().collect(1).fetched(A)
    bench.answers_journal = False

    effects = bench.handle(_fetched_on_b(bench))

    assert ["JournalLeader"] == kinds(effects)
    assert "fetching" == bench.stage
    assert {} == bench.orders()


def _fetched_on_b(bench: LeaderBench) -> ev.NodeReported:
    bench.nodes[B].fetch = FetchState(bench.told().key, bench.told().op, 50, 50, complete=True)
    return ev.NodeReported(bench.report(B), bench.nodes[B].boot)


def test_a_commit_is_journaled_before_anyone_is_told() -> None:
    bench = LeaderBench().ready().prepare(1).apply("E0").all_in("E1", "paused")
    bench.answers_journal = False

    bench.all_in("E1", "applied")

    assert "applying" == bench.stage
    assert {"E0": "write", "E1": "write"} == bench.orders()
    assert NO_KEY == bench.told().committed.key


def test_a_full_disk_refuses_the_version_before_any_pause_and_then_stops_the_leader() -> None:
    bench = LeaderBench().ready().collect(1).fetched(A)
    bench.disk_error = JournalFailed("a record", "no space left on device", 0).to_wire()

    bench.fetched(B)

    assert bench.stopped is not None
    assert bench.stopped.startswith("journal: failed was not written")
    assert "pause" not in bench.orders().values()


def test_a_disk_that_fails_once_refuses_only_that_version() -> None:
    bench = LeaderBench().ready().publish(0, key(1))
    bench.disk_error = JournalFailed("a record", "input/output error", 0).to_wire()
    bench.answers_journal = False
    bench.publish(1, key(1))
    bench.fetched()
    open_ = max(e.token for e in bench.effects if isinstance(e, ev.JournalLeader))
    bench.answers_journal, error, bench.disk_error = True, bench.disk_error, None

    bench.handle(ev.LeaderJournaled(open_, error))

    assert bench.stopped is None
    assert "E_JOURNAL" in codes(bench.failure(key(1)))
    assert "idle" == bench.stage


def test_a_failed_commit_record_ends_the_leader() -> None:
    bench = LeaderBench().ready().prepare(1).apply("E0").all_in("E1", "paused")
    bench.disk_error = JournalFailed("a record", "no space left on device", 0).to_wire()

    bench.all_in("E1", "applied")

    assert bench.stopped is not None
    assert bench.stopped.startswith("journal: committed")


def test_a_journal_that_never_answers_ends_the_leader() -> None:
    bench = LeaderBench().ready().collect(1)
    bench.answers_journal = False

    bench.fetched().pass_time(11.0)

    assert bench.stopped is not None
    assert "no answer" in bench.stopped


def test_a_restarted_leader_knows_its_commit_and_goes_on_above_it() -> None:
    first = LeaderBench().ready().commit(1).commit(2)
    second = LeaderBench(journal=replay(first.journal))
    second.ranks = first.ranks

    second.lead().say().say()

    assert 2 == second.machine.term
    assert 2 == second.machine.state.epochs.adopted.epoch if second.machine.state.epochs.adopted else None
    assert {"E0": True, "E1": True} == {str(e): t.up for e, t in second.machine.state.turns.items()}
    assert 3 == second.told().next_version


def test_an_engine_that_missed_a_commit_is_fenced_before_it_counts_as_up() -> None:
    first = LeaderBench().ready().commit(1).commit(2)
    second = LeaderBench(journal=replay(first.journal))
    second.ranks = first.ranks
    stale = second.ranks[rank("E1", 0)]
    stale.report = type(stale.report)("serving", base=key(1), committed=key(1))

    second.lead().say().say()

    assert "fence" == second.order("E1").order
    assert not second.machine.state.turns[second.order("E1").engine].up

    second.state(rank("E1", 0), "fenced", base=key(1))

    assert second.machine.state.turns[second.order("E1").engine].up


def test_an_engine_that_applied_a_commit_it_was_not_told_of_is_told_now() -> None:
    first = LeaderBench().ready().commit(1).prepare(2).apply("E0").apply("E1")
    second = LeaderBench(journal=replay(first.journal))
    second.ranks = first.ranks

    second.lead().say().say()
    assert {"E0": "commit", "E1": "commit"} == second.orders()
    second.acknowledge("E0").acknowledge("E1")

    assert {"E0": "resume", "E1": "resume"} == second.orders()
    assert all(t.up for t in second.machine.state.turns.values())


def test_a_commit_that_only_nodes_know_is_taken_over_and_journaled() -> None:
    bench = LeaderBench()
    bench.nodes[B].committed = key(4)
    bench.nodes[B].highest = Version(5)

    bench.lead().attach()

    assert [(4, (100, 1))] == [r["key"] for r in bench.records("commit")]
    assert 6 == bench.told().next_version


def test_it_wakes_at_once_when_it_is_new_then_with_every_beat() -> None:
    bench = LeaderBench()
    assert 0.0 == bench.machine.next_deadline()

    bench.ready()

    assert bench.now + 1.0 == bench.machine.next_deadline()


def test_a_new_start_of_trainer_rank_0_is_another_terms_business() -> None:
    bench = LeaderBench().ready()

    bench.die(TrainerRank(0)).attach(TrainerRank(0), boot=777)

    assert bench.stopped is not None
    assert "started anew" in bench.stopped


def test_a_goal_is_repeated_with_every_heartbeat_and_not_between() -> None:
    bench = LeaderBench().ready()
    before = len(bench.effects)

    bench.say()
    quiet = kinds(bench.effects[before:])
    bench.now += 1.0
    beat = kinds(bench.machine.on_deadline(bench.now))

    assert [] == quiet
    assert ["TellNode", "TellNode"] == beat


def test_late_and_doubled_reports_are_dropped_by_their_sequence() -> None:
    bench = LeaderBench().ready()
    old = bench.report(A)
    bench.publish(0, key(1))

    bench.handle(ev.NodeReported(old, bench.nodes[A].boot, 1))

    assert 1 == bench.machine.state.view.late_reports
    assert "collecting" == bench.stage


def test_a_report_of_an_earlier_boot_of_a_node_is_dropped() -> None:
    bench = LeaderBench().ready()
    old, old_boot = bench.report(B), bench.nodes[B].boot
    bench.nodes[B].boot = Boot(99)
    bench.say(B)

    bench.handle(ev.NodeReported(old, old_boot, 10_000))

    assert 1 == bench.machine.state.view.late_reports


def test_status_names_stage_peers_age_and_deadline() -> None:
    bench = LeaderBench().ready().publish(0, key(1)).pass_time(5.0)

    status = bench.machine.status(bench.now)

    assert ("collecting", 1, 5.0) == (status["stage"], status["version"], status["age_s"])
    assert ["trainer 1 (node b) to publish v1"] == status["waiting_for"]
    assert 55.0 == status["next_deadline_s"]


def test_a_roster_that_cannot_stand_is_refused_with_every_fault_at_once() -> None:
    bench = LeaderBench(roster=Roster(2, (EngineDecl("E0", 0),), reserved=(7,)))

    bench.lead().attach(TrainerRank(0))

    assert ["E_REFUSED", "E_SHAPE", "E_ROSTER"] == codes(bench.refusal("trainer 0"))


def test_unconfigured_nodes_have_no_part_in_the_run() -> None:
    bench = LeaderBench(peers=(A,)).lead()

    bench.attach()

    assert bench.machine.state.view.report(NodeId("b")) is None
