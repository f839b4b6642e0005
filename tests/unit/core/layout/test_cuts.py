from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from weightd.core.layout.cuts import (
    balanced_sizes,
    chunk_sizes,
    even_sizes,
    offsets,
    padded_sizes,
    shared_heads,
    span,
    spans,
)
from weightd.core.layout.faults import BadCut

if TYPE_CHECKING:
    from collections.abc import Callable


def test_three_rules_cut_18_over_4_in_three_ways() -> None:
    """Element case L02: one must never stand for another."""
    assert (5, 5, 5, 3) == chunk_sizes(18, 4)
    assert (5, 5, 4, 4) == balanced_sizes(18, 4)
    with pytest.raises(BadCut, match="2 are left over"):
        even_sizes(18, 4)


def test_trailing_ranks_may_be_empty() -> None:
    """Element case L03."""
    assert (2, 2, 1, 0) == chunk_sizes(5, 4)
    assert (1, 1, 1, 0) == balanced_sizes(3, 4)
    assert (0, 0) == chunk_sizes(0, 2)
    assert (6, 6, 6) == even_sizes(18, 3)


def test_only_real_rows_of_a_padded_vocabulary_count() -> None:
    assert (5, 5, 3, 0) == padded_sizes(13, 20, 4)
    assert (5, 5, 5, 5) == padded_sizes(20, 20, 4)
    with pytest.raises(BadCut, match="the padded length 12 is shorter"):
        padded_sizes(13, 12, 4)
    with pytest.raises(BadCut, match="1 are left over"):
        padded_sizes(13, 21, 4)


def test_offsets_and_spans() -> None:
    assert (0, 5, 10, 14) == offsets((5, 5, 4, 4))
    assert ((0, 2), (2, 2), (2, 5)) == spans((2, 0, 3))
    assert () == offsets(())
    assert (10, 14) == span(18, (5, 5, 4, 4), 2)


@pytest.mark.parametrize(
    "sizes,part,why",
    [
        ((5, 5, 4, 3), 0, "they add up to 17"),
        ((9, 10, -1), 0, "a size is negative"),
        ((9, 9), 2, "there is no part 2"),
        ((9, 9), -1, "there is no part -1"),
    ],
)
def test_sizes_that_do_not_cut_the_dimension_are_refused(sizes: tuple[int, ...], part: int, why: str) -> None:
    with pytest.raises(BadCut, match=why):
        span(18, sizes, part)


@pytest.mark.parametrize("rule", [chunk_sizes, balanced_sizes, even_sizes])
def test_no_rank_and_a_negative_length_are_refused(rule: Callable[[int, int], tuple[int, ...]]) -> None:
    with pytest.raises(BadCut):
        rule(5, 0)
    with pytest.raises(BadCut):
        rule(-1, 2)


def test_kv_heads_are_shared_where_ranks_outnumber_them() -> None:
    assert ((0, 1), (0, 1), (1, 2), (1, 2)) == shared_heads(2, 4)
    assert ((0, 2), (2, 4), (4, 6)) == shared_heads(6, 3)
    with pytest.raises(BadCut):
        shared_heads(3, 4)
    with pytest.raises(BadCut):
        shared_heads(4, 3)
