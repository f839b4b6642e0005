"""The token bucket: bursts pass, floods do not, silence refills, memory is bounded."""

from weightd.daemon.control import limits
from weightd.daemon.control.limits import RateLimit


def test_a_burst_passes_and_then_the_rate_holds() -> None:
    rates = RateLimit(rate=2.0, burst=5.0)

    assert [True] * 5 + [False] == [rates.allows(b"a", 10.0) for _ in range(6)]
    assert [True, False] == [rates.allows(b"a", 10.5) for _ in range(2)]
    assert [True] * 5 + [False] == [rates.allows(b"a", 99.0) for _ in range(6)]


def test_peers_have_buckets_of_their_own() -> None:
    rates = RateLimit(rate=1.0, burst=1.0)

    assert [True, True, False] == [rates.allows(peer, 1.0) for peer in (b"a", b"b", b"a")]


def test_a_refused_message_costs_nothing() -> None:
    rates = RateLimit(rate=1.0, burst=1.0)
    rates.allows(b"a", 0.0)
    for _ in range(100):
        rates.allows(b"a", 0.5)

    assert rates.allows(b"a", 1.01)


def test_the_longest_silent_peer_is_forgotten() -> None:
    rates = RateLimit(rate=0.001, burst=1.0)
    rates.allows(b"old", 0.0)
    for n in range(limits.MAX_RATED_PEERS):
        rates.allows(b"%d" % n, 1.0)

    assert rates.allows(b"old", 2.0)
    assert not rates.allows(b"%d" % (limits.MAX_RATED_PEERS - 1), 2.0)
