"""What is decided, and which numbers may follow."""

from tests.fakes.leader_bench import RANK0_BOOT, LeaderBench, key
from weightd.core.session.ledger import Ledger
from weightd.core.session.records import JournalState
from weightd.core.units import NO_KEY, EngineId, Term, Version
from weightd.core.wire.messages import CommitNote

E0, E1 = EngineId("E0"), EngineId("E1")


def ledger(**known: object) -> Ledger:
    """Return the ledger of a journal."""
    return Ledger(JournalState(**known), RANK0_BOOT)  # type: ignore[arg-type]


def test_numbers_grow_above_the_last_commit_and_above_what_others_started() -> None:
    assert 1 == ledger().next_version
    assert 8 == ledger(committed=CommitNote(key(7), (E0,)), highest=Version(7)).next_version
    assert 10 == ledger(committed=CommitNote(key(7), (E0,)), highest=Version(9)).next_version


def test_a_version_in_hand_of_the_same_start_of_the_trainer_goes_on_under_its_number() -> None:
    book = ledger(in_hand=key(8), highest=Version(8), committed=CommitNote(key(7), ()))

    book.raise_floor(Version(8))

    assert 8 == book.next_version


def test_a_version_in_hand_of_another_start_is_passed_over() -> None:
    assert 9 == ledger(in_hand=key(8, boot=5), highest=Version(8)).next_version


def test_a_commit_of_an_earlier_leader_is_learnt_once_and_its_engines_add_up() -> None:
    book = ledger()

    learnt = [
        book.learn_commit(NO_KEY, (E0,)),
        book.learn_commit(key(3), (E0,)),
        book.learn_commit(key(3), (E1,)),
        book.learn_commit(key(3), (E0,)),
        book.learn_commit(key(2), (E0,)),
    ]

    assert [False, True, True, False, False] == learnt
    assert CommitNote(key(3), (E0, E1)) == book.committed


def test_bytes_of_an_earlier_start_that_were_decided_long_ago_are_only_released() -> None:
    bench = LeaderBench().ready().commit(1).commit(2)

    bench.publish(1, key(1, boot=5), slot=1)

    assert () == bench.told().failures
    assert (1, 1, key(1, boot=5)) in {(int(r.rank), r.slot, r.key) for r in bench.told().release}
    assert [] == bench.machine.state.ledger.stray(bench.machine.state.view, Term(1))
