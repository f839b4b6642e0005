"""An error is the same class with the same text on the other side of a socket."""

from __future__ import annotations

import msgspec
import pytest

from tests.golden_text import check_golden
from weightd.core.errors import (
    ConfigError,
    InternalInvariantBroken,
    Refused,
    UnknownRemoteError,
    WeightdError,
    WireError,
    binary_size,
    error_from_wire,
    flatten,
    ranges,
    some,
)

CONFIG = ConfigError("node", "a b", "must hold no space", "weightd.toml")
INTERNAL = InternalInvariantBroken("J3", "commit v6 after v7")


def crossed(error: WeightdError) -> WeightdError:
    data = msgspec.msgpack.encode(error.to_wire())
    return error_from_wire(msgspec.msgpack.decode(data, type=WireError))


@pytest.mark.parametrize("error", [CONFIG, INTERNAL, Refused("run r", (CONFIG, INTERNAL), "nothing was sent")])
def test_class_fields_and_text_survive_the_wire(error: WeightdError) -> None:
    again = crossed(error)

    assert type(again) is type(error)
    assert again.fields() == error.fields()
    assert str(again) == str(error)


def test_an_unknown_code_keeps_its_text_and_its_code() -> None:
    again = error_from_wire(WireError("E_TOMORROW", {"x": 1}, "E_TOMORROW: the sky\n  is falling"))

    assert isinstance(again, UnknownRemoteError)
    assert str(again) == "E_TOMORROW: the sky\n  is falling"


def test_known_code_with_other_fields_keeps_its_text() -> None:
    again = error_from_wire(WireError("E_CONFIG", {"field": 3}, "E_CONFIG: something newer"))

    assert isinstance(again, UnknownRemoteError)
    assert str(again) == "E_CONFIG: something newer"


def test_a_report_flattens_to_its_violations() -> None:
    inner = Refused("inner", (INTERNAL,), "")

    assert flatten([CONFIG, Refused("outer", (inner, CONFIG), "")]) == (CONFIG, INTERNAL, CONFIG)


def test_lists_ranges_and_sizes_in_texts() -> None:
    assert some(range(10)) == "[0, 1, 2, 3, 4, 5, 6, 7 and 2 more]"
    assert ranges([15, 6, 7, 14, 3]) == "3, 6-7, 14-15"
    assert ranges([]) == "none"
    assert (binary_size(0), binary_size(1023), binary_size(1 << 40)) == ("0 B", "1023 B", "1.0 TiB")


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("E_CONFIG", CONFIG),
        ("E_INTERNAL", INTERNAL),
        ("E_REMOTE", UnknownRemoteError("E_TOMORROW", "E_TOMORROW: the sky")),
        ("E_REFUSED", Refused("run r", (CONFIG, INTERNAL), "nothing was sent; engines still serve v6")),
    ],
)
def test_exact_texts(name: str, error: WeightdError) -> None:
    check_golden(f"errors/{name}", str(error))
