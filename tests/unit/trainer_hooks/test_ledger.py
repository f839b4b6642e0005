"""What a trainer rank knows of versions."""

import msgspec
import pytest

from tests.golden_text import check_golden
from weightd.core.errors import WireError
from weightd.core.session.faults import VersionNotGrowing
from weightd.core.units import NO_KEY, Attempt, Boot, Epoch, Term, TrainerRank, Version, VersionKey
from weightd.core.wire.messages import PublisherGoal, VersionFailed
from weightd.trainer_hooks.faults import OutcomeUnknown
from weightd.trainer_hooks.ledger import Ledger

BOOT = Boot(9)
WHY = WireError("E_X", {}, "because")


def key(version: int, count: int = 1, boot: int = 9) -> VersionKey:
    return VersionKey(Version(version), Attempt(Boot(boot), count))


def goal(committed: int = 0, *failed: VersionKey, term: int = 1, after: int | None = None) -> PublisherGoal:
    return PublisherGoal(
        Term(term),
        Epoch(1),
        BOOT,
        key(committed) if committed else NO_KEY,
        Version(committed + 1 if after is None else after),
        tuple(VersionFailed(k, WHY) for k in failed),
    )


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(TrainerRank(2))


def test_first_version(ledger: Ledger) -> None:
    ledger.goal_arrived(goal())

    assert ledger.next_version == 1
    assert ledger.key_for(None) == key(1)
    assert ledger.key_for(Version(40)) == key(40)


def test_two_publishes_before_anything_is_decided(ledger: Ledger) -> None:
    ledger.goal_arrived(goal())
    ledger.published(ledger.key_for(None))

    assert ledger.key_for(None) == key(2)


def test_refused_publish_has_used_its_number_as_on_the_ranks_that_published(ledger: Ledger) -> None:
    """Otherwise this rank's next step would join what the others published of this one."""
    other = Ledger(TrainerRank(3))
    for rank in (ledger, other):
        rank.goal_arrived(goal())
    ledger.refused(ledger.key_for(None))
    other.published(other.key_for(None))

    assert ledger.next_version == other.next_version == 2
    assert ledger.key_for(None) == other.key_for(None) == key(2)
    assert ledger.key_for(Version(1)) == key(1)  # to repeat it, a rank says so
    for rank in (ledger, other):
        rank.goal_arrived(goal(0, key(1)))
    assert ledger.key_for(None) == other.key_for(None) == key(1, 2)
    ledger.refused(ledger.key_for(None))
    other.published(other.key_for(None))
    assert ledger.key_for(None) == other.key_for(None) == key(2)


def test_nobody_goes_back_to_a_number_that_another_rank_has_gone_past(ledger: Ledger) -> None:
    """Rank 3 was refused version 1 and published version 2: this rank's version 1 failed for it, and 2 is next."""
    why = WireError("E_REFUSED", {}, "because", (WireError("E_VERSION_SKEW", {}, "trainer 3: version 2"),))
    ledger.goal_arrived(goal())
    ledger.published(ledger.key_for(None))
    ledger.goal_arrived(msgspec.structs.replace(goal(), failures=(VersionFailed(key(1), why),)))

    assert ledger.key_for(None) == key(2)
    assert ledger.key_for(Version(1)) == key(1, 2)


def test_number_that_does_not_grow_names_the_one_that_would(ledger: Ledger) -> None:
    ledger.goal_arrived(goal(6))
    with pytest.raises(VersionNotGrowing) as caught:
        ledger.key_for(Version(6))

    assert (caught.value.got, caught.value.expected_base, caught.value.next_version) == (6, 6, 7)


def test_attempt_counts_the_failures_that_were_told(ledger: Ledger) -> None:
    ledger.goal_arrived(goal())
    ledger.published(key(1))
    ledger.goal_arrived(goal(0, key(1)))

    assert ledger.key_for(None) == key(1, 2)
    ledger.published(key(1, 2))
    ledger.goal_arrived(goal(0, key(1), key(1, 2)))
    assert ledger.key_for(Version(1)) == key(1, 3)


def test_failures_of_an_earlier_trainer_count_too(ledger: Ledger) -> None:
    """Its rank 0 had another boot; a rank that starts now is told the same list."""
    ledger.goal_arrived(goal(0, key(1, 1, boot=4), key(1, 2, boot=4)))

    assert ledger.key_for(None) == key(1, 3)


def test_failure_is_that_of_the_own_attempt(ledger: Ledger) -> None:
    ledger.goal_arrived(goal(0, key(1)))
    assert ledger.failure(Version(1)) == WHY
    ledger.published(key(1, 2))

    assert ledger.failure(Version(1)) is None


def test_committed_is_remembered(ledger: Ledger) -> None:
    ledger.goal_arrived(goal(1))
    ledger.goal_arrived(goal(2))

    assert [ledger.committed(Version(v)) for v in (1, 2, 3)] == [True, True, False]


def test_failed_version_below_a_commit_stays_failed(ledger: Ledger) -> None:
    ledger.published(key(1))
    ledger.goal_arrived(goal(0, key(1)))
    ledger.goal_arrived(goal(2))

    assert not ledger.committed(Version(1))
    assert ledger.failure(Version(1)) == WHY


def test_held_version_that_is_not_told_as_failed_was_committed(ledger: Ledger) -> None:
    """The goal in between was lost; a failure would be told for as long as the slot shows."""
    ledger.published(key(3))
    ledger.goal_arrived(goal(4), [key(3), NO_KEY])

    assert ledger.committed(Version(3))


def test_outcome_that_was_never_told(ledger: Ledger) -> None:
    ledger.goal_arrived(goal(5))
    with pytest.raises(OutcomeUnknown) as caught:
        ledger.committed(Version(3))

    check_golden("errors/E_OUTCOME", str(caught.value))


def test_goal_of_a_lower_term_is_ignored(ledger: Ledger) -> None:
    ledger.goal_arrived(goal(5, term=3))
    ledger.goal_arrived(goal(9, term=2))

    assert ledger.next_version == 6


def test_no_leader_is_told_without_forgetting_what_was(ledger: Ledger) -> None:
    ledger.goal_arrived(goal(5))
    ledger.goal_arrived(PublisherGoal(paused=WHY))

    assert (ledger.goal.paused, ledger.goal.committed.version, ledger.next_version) == (WHY, 5, 6)
