"""A thread that has a job is watched until it ends; an idle one owes nothing."""

from __future__ import annotations

import threading

import pytest

from weightd.daemon import workers
from weightd.daemon.workers import allowance_for, goes_on, in_worker, stuck, working


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(workers, "time", made)
    return made


def test_a_job_without_progress_is_stuck_and_says_so(clock: Clock) -> None:
    with working("writing a journal"):
        clock.now += 10.0
        assert [] == stuck(10.0)
        clock.now += 2.0
        found = stuck(10.0)

    assert ["writing a journal: no progress for 12 s, limit 10 s"] == [str(s) for s in found]
    assert [] == stuck(0.0)


def test_progress_is_counted_from_its_last_sign(clock: Clock) -> None:
    with working("fetching"):
        clock.now += 9.0
        goes_on()
        clock.now += 9.0

        assert [] == stuck(10.0)


def test_a_large_job_has_longer(clock: Clock) -> None:
    with working("making a landing", allowance_for(64 << 30)):
        clock.now += 1000.0
        assert [] == stuck(10.0)
        clock.now += 100.0
        assert 1 == len(stuck(10.0))


def test_a_job_within_a_job_gives_it_back_fresh(clock: Clock) -> None:
    with working("outer"):
        clock.now += 9.0
        with working("inner"):
            clock.now += 9.0
            assert ["inner"] == [s.what for s in stuck(5.0)]
        assert [] == stuck(5.0)
        clock.now += 6.0
        assert ["outer"] == [s.what for s in stuck(5.0)]


def test_progress_of_one_thread_is_none_of_anothers(clock: Clock) -> None:
    with working("hangs"):
        clock.now += 9.0
        other = threading.Thread(target=goes_on)
        other.start()
        other.join()

        assert ["hangs"] == [s.what for s in stuck(5.0)]


def test_a_job_that_fails_has_ended(clock: Clock) -> None:
    with pytest.raises(ValueError, match="full"), working("writing"):
        raise ValueError("disk full")
    clock.now += 9.0

    assert [] == stuck(5.0)


@pytest.mark.anyio
async def test_a_call_in_a_worker_is_a_job_while_it_runs(anyio_backend: str) -> None:
    def seen(limit_s: float) -> list[str]:
        return [s.what for s in stuck(limit_s)]

    assert ["looking"] == await in_worker("looking", seen, -1.0)
    assert [] == seen(-1.0)
