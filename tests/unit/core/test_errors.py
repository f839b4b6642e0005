"""An error is the same class with the same text on the other side of a socket."""

from __future__ import annotations

import msgspec
import pytest

from tests.golden_text import check_golden
from weightd.core.errors import (
    WIRE_VIOLATIONS,
    ConfigError,
    InternalInvariantBroken,
    MoreViolations,
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
from weightd.core.plan.violations import BlockCut
from weightd.core.roster.declaration_violations import RosterShape

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
    assert again.code == "E_TOMORROW"
    assert str(again) == "E_TOMORROW: the sky\n  is falling"
    assert str(crossed(again)) == str(again)
    assert crossed(again).code == "E_TOMORROW"


def test_known_code_with_other_fields_keeps_its_text() -> None:
    again = error_from_wire(WireError("E_CONFIG", {"field": 3}, "E_CONFIG: something newer"))

    assert isinstance(again, UnknownRemoteError)
    assert str(again) == "E_CONFIG: something newer"


def test_a_report_flattens_to_its_violations() -> None:
    inner = Refused("inner", (INTERNAL,), "")

    assert flatten([CONFIG, Refused("outer", (inner, CONFIG), "")]) == (CONFIG, INTERNAL, CONFIG)


def test_a_report_of_thousands_travels_with_its_count_and_stays_the_same_when_sent_on() -> None:
    report = Refused("run r", (INTERNAL, *[ConfigError(f"f{i}", "", "x") for i in range(5000)]), "nothing was sent")
    once = crossed(report)

    assert isinstance(once, Refused)
    assert str(once).splitlines()[0] == "E_REFUSED: run r refused: 5001 violations"
    assert isinstance(once.violations[-1], MoreViolations)
    assert (len(once.violations), once.violations[-1].by_code) == (
        WIRE_VIOLATIONS + 1,
        {"E_CONFIG": 5001 - WIRE_VIOLATIONS},
    )
    assert str(crossed(once)) == str(once)
    assert len(msgspec.msgpack.encode(report.to_wire())) < 64 << 10
    assert len(report.violations) == 5001


def test_two_classes_of_one_code_are_told_apart_by_their_fields() -> None:
    for error in (BlockCut("w", 0, 128, 100), RosterShape(counts=2, offsets=1)):
        assert type(crossed(error)) is type(error)
        assert str(crossed(error)) == str(error)


def test_lists_ranges_and_sizes_in_texts() -> None:
    assert some(range(10)) == "[0, 1, 2, 3, 4, 5, 6, 7 and 2 more]"
    assert ranges([15, 6, 7, 14, 3]) == "3, 6-7, 14-15"
    assert ranges([]) == "none"
    assert (binary_size(0), binary_size(1023), binary_size(1 << 40)) == ("0 B", "1023 B", "1.0 TiB")


@pytest.mark.parametrize(
    "name, error",
    [
        ("E_CONFIG", CONFIG),
        ("E_INTERNAL", INTERNAL),
        ("E_MORE", MoreViolations(4288, {"E_ELEM_UNCOVERED": 4200, "E_NAME": 88})),
        ("E_REMOTE", UnknownRemoteError("E_TOMORROW", "E_TOMORROW: the sky")),
        ("E_REFUSED", Refused("run r", (CONFIG, INTERNAL), "nothing was sent; engines still serve v6")),
    ],
)
def test_exact_texts(name: str, error: WeightdError) -> None:
    check_golden(f"errors/{name}", str(error))
