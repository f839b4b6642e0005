"""Journals: what is written is what is read, and what a machine knows after reading."""

import msgspec
import pytest

from tests.fakes.leader_bench import key
from weightd.core.errors import WireError
from weightd.core.roster.topology import Roster
from weightd.core.session.records import (
    AnyRecord,
    Committed,
    EpochTaken,
    Failed,
    Fenced,
    Held,
    JournalState,
    NodeJournalState,
    Prepared,
    Started,
    TermTaken,
    from_plain,
    replay,
    replay_node,
    to_plain,
)
from weightd.core.units import EngineId, Epoch, NodeId, Op, Term, Version
from weightd.core.wire.messages import CommitNote, EpochSpec, VersionFailed

E0, E1 = EngineId("E0"), EngineId("E1")
SPEC = EpochSpec(Epoch(3), Roster(1, ()), (), (), 1 << 20)
ERROR = WireError("E_DEADLINE", {}, "too late")
RECORDS: list[AnyRecord] = [
    TermTaken(Term(2), NodeId("a")),
    EpochTaken(SPEC, (("E0", 0, 100),)),
    Started(key(1), Op(1), Epoch(3)),
    Prepared(key(1), Op(1), Epoch(3)),
    Failed(key(1), ERROR),
    Committed(key(2), (E0, E1)),
    Held(key(2)),
    Fenced(E1, key(2), Op(4)),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_a_record_is_read_as_it_was_written(record: AnyRecord) -> None:
    packed = msgspec.msgpack.encode(to_plain(record))

    assert record == from_plain(msgspec.msgpack.decode(packed))


def test_an_unknown_record_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        from_plain({"type": "rumour", "key": (1, (1, 1))})


def plain(*records: AnyRecord) -> list[dict[str, object]]:
    """Return records as a journal stores them."""
    return [to_plain(r) for r in records]


def test_an_empty_journal_knows_nothing() -> None:
    assert JournalState() == replay([])
    assert NodeJournalState() == replay_node([])


def test_a_version_that_was_prepared_and_not_decided_is_in_hand() -> None:
    state = replay(plain(RECORDS[0], RECORDS[1], Started(key(1), Op(1), Epoch(3)), Prepared(key(1), Op(1), Epoch(3))))

    assert (Term(2), SPEC, key(1), True, Version(1)) == (
        state.term,
        state.epoch,
        state.in_hand,
        state.prepared,
        state.highest,
    )
    assert (("E0", 0, 100),) == state.rank_nbytes


def test_a_commit_decides_and_drops_failures_at_or_below_it() -> None:
    records: list[AnyRecord] = [
        Started(key(1), Op(1), Epoch(3)),
        Failed(key(1), ERROR),
        Started(key(1, 2), Op(2), Epoch(3)),
        Failed(key(5), ERROR),
        Committed(key(1, 2), (E0,)),
    ]

    state = replay(plain(*records))

    assert CommitNote(key(1, 2), (E0,)) == state.committed
    assert (VersionFailed(key(5), ERROR),) == state.failures
    assert not state.prepared
    assert 0 == state.in_hand.version


def test_two_commits_of_one_key_name_the_engines_of_both() -> None:
    state = replay(plain(Committed(key(2), (E0,)), Committed(key(2), (E1, E0))))

    assert CommitNote(key(2), (E0, E1)) == state.committed


def test_a_lower_commit_changes_nothing() -> None:
    state = replay(plain(Committed(key(2), (E0,)), Committed(key(1), (E1,))))

    assert CommitNote(key(2), (E0,)) == state.committed


def test_a_node_knows_its_leader_its_commit_and_the_highest_version() -> None:
    records: list[AnyRecord] = [
        TermTaken(Term(2), NodeId("a")),
        TermTaken(Term(5), NodeId("c")),
        Held(key(9)),
        Committed(key(7), (E0,)),
        Committed(key(6), (E0,)),
        Fenced(E1, key(8), Op(3)),
    ]

    state = replay_node(plain(*records))

    assert NodeJournalState(Term(5), NodeId("c"), CommitNote(key(7), (E0,)), Version(9)) == state
