"""The clock of waits for progress."""

from weightd.core.session.clocks import stall_clock


def test_it_expires_without_progress() -> None:
    clock = stall_clock(10.0, 100.0)

    assert [False, False, True] == [clock.expired(0, held=False, now=t) for t in (101.0, 109.9, 110.0)]


def test_progress_starts_it_anew_and_less_than_before_is_none() -> None:
    clock = stall_clock(10.0, 100.0)
    clock.expired(5, held=False, now=108.0)

    assert not clock.expired(5, held=False, now=117.9)
    assert clock.expired(3, held=False, now=118.0)


def test_it_stands_still_while_someone_may_come_back() -> None:
    clock = stall_clock(10.0, 100.0)
    clock.expired(0, held=False, now=105.0)
    clock.expired(0, held=True, now=145.0)

    assert 150.0 == clock.ends_at
    assert not clock.expired(0, held=False, now=149.9)
    assert clock.expired(0, held=False, now=150.0)
