from __future__ import annotations

import numpy as np
import pytest

from weightd.core.layout.progressions import meet

Triple = tuple[int, int, int]


def _meet(a: Triple, b: Triple) -> Triple:
    columns = [np.array([v], np.int64) for v in (*a, *b)]
    start, extent, step = meet(*columns)
    return int(start[0]), int(extent[0]), int(step[0])


@pytest.mark.parametrize(
    "a,b,expected",
    [
        ((0, 5, 1), (3, 4, 1), (3, 2, 1)),
        ((0, 9, 2), (3, 5, 3), (6, 2, 6)),  # 0,2..16 and 3,6,9,12,15: 6 and 12
        ((1, 5, 4), (1, 5, 6), (1, 2, 12)),  # 1,5..17 and 1,7,13,19,25
        ((7, 1, 1), (1, 5, 3), (7, 1, 1)),
        ((2, 4, 5), (0, 18, 1), (2, 4, 5)),
    ],
)
def test_common_members(a: Triple, b: Triple, expected: Triple) -> None:
    assert expected == _meet(a, b)
    assert expected == _meet(b, a)


@pytest.mark.parametrize(
    "a,b",
    [
        ((0, 5, 1), (5, 4, 1)),
        ((0, 9, 2), (1, 9, 2)),  # even and odd never meet
        ((0, 2, 2), (4, 3, 3)),  # 0,2 ends before 4
        ((0, 2, 6), (3, 2, 9)),  # 0,6 and 3,12: steps share 3, first common member would be 12
    ],
)
def test_nothing_in_common_has_extent_zero(a: Triple, b: Triple) -> None:
    assert 0 == _meet(a, b)[1]
    assert 0 == _meet(b, a)[1]


def test_largest_admitted_steps_do_not_overflow() -> None:
    """Steps of 2**31 - 1 and 2**31 - 3 are coprime; their product is just below 2**62."""
    p, q = 2**31 - 1, 2**31 - 3
    start = 2**39

    assert (start, 1, 1) == _meet((start, 500, p), (start, 500, q))
    assert 0 == _meet((start, 500, p), (start + 1, 500, q))[1]
    assert (start + 3 * q, 1, 1) == _meet((start + 3 * q - 4 * p, 5, p), (start, 500, q))
    assert (250 * p, 1, 1) == _meet((0, 300, p), (250 * p - 7 * q, 9, q))


def test_whole_columns_equal_sets_of_numbers() -> None:
    rng = np.random.default_rng(5)
    a, b = ([rng.integers(0, 9, 400), rng.integers(1, 7, 400), rng.integers(1, 7, 400)] for _ in range(2))

    start, extent, step = meet(*a, *b)

    for i in range(400):
        both = set(range(99)) & _members(*(c[i] for c in a)) & _members(*(c[i] for c in b))
        assert both == _members(start[i], extent[i], step[i])


def _members(start: int, extent: int, step: int) -> set[int]:
    return {int(start + i * step) for i in range(extent)}
