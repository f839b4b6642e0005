"""The invariants find what is broken; each is broken here once by hand."""

import pytest

from tests.fakes.leader_bench import LeaderBench, key, rank
from weightd.core.errors import InternalInvariantBroken
from weightd.core.session.invariants import RankFacts, WorldFacts, check_world, leader_faults, lease_fault, world_faults
from weightd.core.session.turns import Phase
from weightd.core.units import NO_KEY, EngineId, VersionKey
from weightd.core.wire.messages import CommitNote, ReceiverReport, ReceiverState

E0, E1 = EngineId("E0"), EngineId("E1")


def facts(
    who: str, k: int, state: ReceiverState, name: VersionKey, content: VersionKey | None, *, servable: bool = True
) -> RankFacts:
    """Return a rank in a base state, or in one about ``name``."""
    base = name if state == "serving" else NO_KEY
    about = NO_KEY if state == "serving" else name
    return RankFacts(rank(who, k), ReceiverReport(state, about, base), content, servable)


def world(bench: LeaderBench, *ranks: RankFacts, commits: tuple[CommitNote, ...] = ()) -> list[str]:
    """Return what is broken."""
    return world_faults(WorldFacts(bench.machine, ranks, commits or (bench.told().committed,)))


def test_a_run_in_order_breaks_nothing() -> None:
    bench = LeaderBench().ready().commit(1)

    ranks = [facts("E0", k, "serving", key(1), key(1)) for k in (0, 1)] + [facts("E1", 0, "serving", key(1), key(1))]

    assert [] == world(bench, *ranks)
    check_world(WorldFacts(bench.machine, ranks, (bench.told().committed,)))


@pytest.mark.parametrize(
    "rule,ranks",
    [
        ("J2", [facts("E0", 0, "serving", key(9), key(9))]),
        ("a rank reports what it has not", [facts("E0", 0, "serving", key(1), None)]),
        ("a rank reports what it has not", [facts("E0", 0, "applied", key(2), key(1), servable=False)]),
        (
            "J5",
            [facts("E0", 0, "serving", key(1), key(1)), facts("E0", 1, "applying", key(2), None, servable=False)],
        ),
        (
            "J7",
            [
                *(facts("E0", k, "serving", key(1), key(1)) for k in (0, 1)),
                facts("E1", 0, "serving", key(2), key(2)),
            ],
        ),
    ],
)
def test_a_broken_rule_is_found_by_name(rule: str, ranks: list[RankFacts]) -> None:
    bench = LeaderBench().ready().commit(1)
    commits = (CommitNote(key(1), (E0, E1)), CommitNote(key(2), (E1,)))

    found = world(bench, *ranks, commits=commits)

    assert [rule] == [f.split(":")[0] for f in found]
    with pytest.raises(InternalInvariantBroken, match=rule):
        check_world(WorldFacts(bench.machine, ranks, commits))


@pytest.mark.parametrize(
    "commits",
    [
        (CommitNote(key(2), ()), CommitNote(key(1), ())),
        (CommitNote(key(2), ()), CommitNote(key(2, 2), ())),
    ],
)
def test_commits_that_fall_or_repeat_a_number_are_found(commits: tuple[CommitNote, ...]) -> None:
    assert ["J3"] == [f.split(":")[0] for f in world(LeaderBench().ready(), commits=commits)]


def test_two_versions_in_the_hands_of_engines_are_found() -> None:
    bench = LeaderBench().ready().prepare(1).all_in("E0", "paused").all_in("E1", "paused")
    bench.machine.state.turns[E1].key = key(7)

    assert ["J1"] == [f.split(":")[0] for f in leader_faults(bench.machine)]


def test_a_count_against_another_set_is_found() -> None:
    bench = LeaderBench().ready().prepare(1)
    del bench.machine.state.turns[E0].seats[rank("E0", 1)]

    assert ["J9"] == [f.split(":")[0] for f in leader_faults(bench.machine)]


def test_bytes_that_do_not_add_up_are_found() -> None:
    bench = LeaderBench().ready().prepare(1).apply("E0")
    bench.machine.state.turns[E0].planned[rank("E0", 1)] = 101
    assert Phase.DONE is bench.machine.state.turns[E0].phase

    assert ["I5"] == [f.split(":")[0] for f in leader_faults(bench.machine)]


def test_memory_under_lease_is_named() -> None:
    assert lease_fault(NO_KEY, key(1), key(2), NO_KEY) is None
    assert lease_fault(key(3), key(1), key(2), NO_KEY) is None
    for name in (key(1), key(2), key(0)):
        fault = lease_fault(name, key(1), key(2), key(0))
        assert fault is not None
        assert fault.startswith(f"J4: {name}")
