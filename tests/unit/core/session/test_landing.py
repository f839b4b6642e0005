"""Two halves and one fetch."""

from tests.fakes.leader_bench import key
from weightd.core.session.events import FetchAdvanced, FetchEnded, StartFetch, StopFetch
from weightd.core.session.faults import JournalFailed
from weightd.core.session.landing import Landing
from weightd.core.units import Epoch, Op

E1, E2 = Epoch(1), Epoch(2)
ERROR = JournalFailed("stands for any error", "as a test wants it", 0).to_wire()


def holding(landing: Landing, version: int, op: int, epoch: Epoch = E1) -> None:
    """Let a landing come to hold a version."""
    landing.want(epoch, key(version), Op(op), 50, set(landing.held()))
    ended = landing.end(FetchEnded(key(version), Op(op), 8))
    assert ended is not None
    landing.complete(ended)


def test_a_version_is_wanted_once() -> None:
    landing = Landing()

    assert [StartFetch(E1, key(1), Op(1), 0)] == landing.want(E1, key(1), Op(1), 50, set())
    assert [] == landing.want(E1, key(1), Op(1), 50, set())


def test_another_version_stops_the_fetch_that_runs() -> None:
    landing = Landing()
    landing.want(E1, key(1), Op(1), 50, set())

    assert [StopFetch(key(1), Op(1)), StartFetch(E1, key(2), Op(3), 0)] == landing.want(E1, key(2), Op(3), 50, set())


def test_kept_halves_are_not_written_and_both_kept_means_waiting() -> None:
    landing = Landing()
    holding(landing, 1, 1)
    holding(landing, 2, 3)

    assert [] == landing.want(E1, key(3), Op(5), 50, {key(1), key(2)})
    assert [StartFetch(E1, key(3), Op(5), 0)] == landing.want(E1, key(3), Op(5), 50, {key(2)})


def test_a_half_counts_only_for_the_epoch_that_planned_it() -> None:
    landing = Landing()
    holding(landing, 1, 1)

    assert 0 == landing.holds(E1, key(1))
    assert landing.holds(E2, key(1)) is None
    assert landing.whole(E2, key(1)) is None


def test_progress_and_ends_of_another_op_count_for_nothing() -> None:
    landing = Landing()
    landing.want(E1, key(1), Op(1), 50, set())
    landing.advance(FetchAdvanced(key(1), Op(9), 40))

    assert landing.end(FetchEnded(key(1), Op(9), 8)) is None
    assert landing.fetch is not None
    assert 0 == landing.fetch.received_nbytes


def test_a_fetch_that_was_given_up_while_it_was_recorded_is_not_held() -> None:
    landing = Landing()
    landing.want(E1, key(1), Op(1), 50, set())
    ended = landing.end(FetchEnded(key(1), Op(1), 8))
    assert ended is not None
    landing.stop()

    landing.complete(ended)

    assert () == landing.held()


def test_while_bytes_are_recorded_nothing_else_is_fetched() -> None:
    landing = Landing()
    landing.want(E1, key(1), Op(1), 50, set())
    landing.end(FetchEnded(key(1), Op(1), 8))

    assert [] == landing.want(E1, key(2), Op(3), 50, set())

    landing.refuse(key(1), ERROR)

    assert [StartFetch(E1, key(2), Op(3), 0)] == landing.want(E1, key(2), Op(3), 50, set())


def test_what_is_held_already_stops_a_fetch() -> None:
    landing = Landing()
    holding(landing, 1, 1)
    landing.want(E1, key(2), Op(3), 50, {key(1)})

    assert [StopFetch(key(2), Op(3))] == landing.want(E1, key(1), Op(5), 50, {key(1)})
