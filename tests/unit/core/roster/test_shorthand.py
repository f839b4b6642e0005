import pytest

from weightd.core.roster.shorthand import (
    CountsAndOffsets,
    EqualEngines,
    Shorthand,
    base_slots,
    expand,
    shorthand_faults,
)


@pytest.mark.parametrize(
    "shorthand, faults",
    [
        (CountsAndOffsets((4, 4), (0,)), [{"counts": 2, "offsets": 1}]),
        (CountsAndOffsets((), (0,)), [{"counts": 0, "offsets": 1}]),
        (CountsAndOffsets((0, 8), (0, 0)), [{"engine": "E0", "count": 0}]),
        (
            CountsAndOffsets((2, -3, 0), (0, 1)),
            [{"counts": 3, "offsets": 2}, {"engine": "E1", "count": -3}, {"engine": "E2", "count": 0}],
        ),
        (EqualEngines(10, 4), [{"total": 10, "per_engine": 4, "remainder": 2}]),
        (EqualEngines(3, 4), [{"total": 3, "per_engine": 4, "remainder": 3}]),
        (EqualEngines(8, 0), [{"engine": "E0", "count": 0}]),
        (EqualEngines(0, 4), [{"engine": "E0", "count": 0}]),
        (EqualEngines(8, -2), [{"engine": "E0", "count": -2}]),
        (EqualEngines(8, 4), []),
        (CountsAndOffsets((4, 1), (0, 6)), []),
        (EqualEngines(2, 1), []),
    ],
)
def test_what_cannot_be_expanded(shorthand: Shorthand, faults: list[dict[str, object]]) -> None:
    assert [fault.fields() for fault in shorthand_faults(shorthand)] == faults


def test_negative_offset() -> None:
    (error,) = shorthand_faults(CountsAndOffsets((2, 2), (0, -1)))

    assert [error.fields()[n] for n in ("field", "value")] == ["offsets", -1]


def test_equal_engines_lie_one_after_the_other() -> None:
    engines = expand(EqualEngines(6, 3), "rollout", (5, "b", 7, 1, 0))

    assert [(e.id, e.size, e.slots) for e in engines] == [("E0", 3, (5, "b", 7)), ("E1", 3, (1, 0, "rollout slot 5"))]


def test_base_of_trainers_is_in_rank_order_and_of_rollout_in_the_nodes_order() -> None:
    nodes: dict[str, tuple[int | str, ...]] = {"n0": (3, 1, "a"), "n1": (0, 2)}

    assert base_slots("trainer", nodes, (2, 3)) == (2, 3)
    assert base_slots("rollout", nodes, ("3", 2)) == (1, "a", 0)
