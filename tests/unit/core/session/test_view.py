"""Who is here, away or gone, by the last report of each node."""

from tests.fakes.leader_bench import A, B, LeaderBench, key, rank
from weightd.core.session.deadlines import Deadlines
from weightd.core.session.view import Presence, View, follows, rank_name
from weightd.core.units import Boot, Op, Term, TrainerRank
from weightd.core.wire.messages import LostRank

LIMITS = Deadlines(heartbeat_timeout_s=5.0, restart_s=10.0)
E01 = rank("E0", 1)


def view_of(bench: LeaderBench, at: float = 100.0) -> View:
    """Return a view that has heard both nodes of a bench."""
    view = View(LIMITS, at)
    for node, fake in bench.nodes.items():
        view.take(bench.report(node), fake.boot, 1, at)
    return view


def attached() -> LeaderBench:
    """Return a bench with every rank attached."""
    return LeaderBench().lead().attach()


def test_a_rank_that_its_node_shows_is_here() -> None:
    bench = attached()

    assert "here" == view_of(bench).rank(E01, B, bench.ranks[E01].boot, 101.0).kind


def test_a_rank_of_a_silent_node_is_away_and_then_gone_and_did_not_die() -> None:
    bench = attached()
    view, boot = view_of(bench), bench.ranks[E01].boot

    kinds = [view.rank(E01, B, boot, t).kind for t in (105.0, 105.1, 114.9, 115.0)]

    assert ["here", "away", "away", "gone"] == kinds
    assert not view.rank(E01, B, boot, 115.0).died
    assert "node b is silent since 15.0 s" == view.rank(E01, B, boot, 115.0).why


def test_a_node_that_was_never_heard_is_away_from_the_beginning() -> None:
    view = View(LIMITS, 100.0)

    assert ["away", "gone"] == [view.node(A, t).kind for t in (101.0, 115.0)]


def test_a_process_that_was_seen_to_end_is_gone_at_once() -> None:
    bench = attached()
    boot = bench.ranks[E01].boot
    bench.die(E01, "killed by signal 9")

    assert Presence("gone", 0.0, "killed by signal 9", died=True) == view_of(bench).rank(E01, B, boot, 100.0)


def test_a_loss_of_another_incarnation_is_none() -> None:
    bench = attached()
    bench.nodes[B].lost = (LostRank("E0[1]", Boot(1), "long ago"),)

    assert "here" == view_of(bench).rank(E01, B, bench.ranks[E01].boot, 100.0).kind


def test_a_hook_that_does_not_come_back_to_its_restarted_daemon_is_given_restart_s() -> None:
    bench = attached()
    view, boot = view_of(bench), bench.ranks[E01].boot
    registration = bench.machine.state.members.here[E01].registration
    del bench.ranks[E01]
    for at in (101.0, 105.0, 110.9, 111.0):
        view.take(bench.report(B), Boot(99), int(at * 10), at)
        view.note_missing([registration], at)
        kind = view.rank(E01, B, boot, at).kind
        assert ("gone" if at >= 111.0 else "away") == kind


def test_a_process_that_another_replaced_is_gone() -> None:
    bench = attached()
    old = bench.ranks[E01].boot
    bench.ranks[E01].boot = Boot(4242)

    presence = view_of(bench).rank(E01, B, old, 100.0)

    assert ("gone", True) == (presence.kind, presence.died)


def test_the_slots_of_an_ended_process_are_still_seen() -> None:
    bench = attached().publish(1, key(1))
    boot = bench.ranks[TrainerRank(1)].boot
    bench.ranks[TrainerRank(1)].alive = False
    view = view_of(bench)

    assert view.rank(TrainerRank(1), B, boot, 100.0).died
    slot = view.slot_with(TrainerRank(1), B, boot, key(1))
    assert slot is not None
    assert 0 == slot.slot
    assert view.slot_with(TrainerRank(1), B, boot, key(2)) is None
    assert all(w != 1 for _, e in view.entries() if (w := getattr(e, "rank", None)) is not None)


def test_older_reports_and_those_of_earlier_boots_are_dropped() -> None:
    bench = attached()
    view = View(LIMITS, 100.0)
    report = bench.report(B)

    taken = [view.take(report, Boot(b), s, 100.0) for b, s in ((1, 5), (1, 5), (1, 4), (1, 6), (2, 1), (1, 9), (2, 0))]

    assert [True, False, False, True, True, False, True] == taken
    assert 3 == view.late_reports


def test_a_report_follows_a_term_by_its_floor() -> None:
    bench = attached()

    assert follows(bench.report(A), Term(1))
    assert not follows(bench.report(A), Term(2))
    assert (1, Op(0)) == bench.report(A).floor[:2]


def test_names_of_ranks() -> None:
    assert ["trainer 3", "E0[1]"] == [rank_name(TrainerRank(3)), rank_name(E01)]
