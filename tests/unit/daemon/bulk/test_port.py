"""Stopping a fetch, from any thread and at any time."""

from weightd.daemon.bulk.port import TOKEN_BYTES, Grant, Stop, new_token


def test_a_stop_closes_what_is_waited_on_once() -> None:
    stop, closed = Stop(), []
    stop.on_set(lambda: closed.append("early"))

    stop.set()
    stop.set()
    stop.on_set(lambda: closed.append("late"))

    assert ["early", "late"] == closed
    assert stop.is_set


def test_tokens_are_long_and_never_the_same() -> None:
    tokens = {new_token() for _ in range(100)}

    assert 100 == len(tokens)
    assert {TOKEN_BYTES} == {len(token) for token in tokens}


def test_secrets_are_not_in_texts() -> None:
    grant = Grant(7, b"secret-token", "node-b", None, 0.0)  # type: ignore[arg-type]

    assert "secret" not in repr(grant)
