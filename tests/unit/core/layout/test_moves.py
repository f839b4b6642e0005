from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from weightd.core.layout import moves as module
from weightd.core.layout.algebra import transpose
from weightd.core.layout.boxes import box
from weightd.core.layout.faults import NotDescribable
from weightd.core.layout.intersect import intersect
from weightd.core.layout.moves import Moves, coalesce, to_copy_dims

if TYPE_CHECKING:
    from weightd.core.layout.columns import Int64


def test_whole_rows_on_both_sides_are_one_run() -> None:
    m = coalesce(intersect(box((5, 4, 3)), box((2, 4, 3), start=(3, 0, 0))))

    assert [[1, 1, 24]] == m.extent.tolist()
    assert [[0, 0, 1]] == m.source_stride.tolist()
    assert [36] == m.source_offset.tolist()
    assert [0] == m.target_offset.tolist()


def test_a_column_cut_keeps_two_dimensions() -> None:
    m = coalesce(intersect(box((5, 6)), box((5, 2), start=(0, 3))))

    assert [[5, 2]] == m.extent.tolist()
    assert [[6, 1]] == m.source_stride.tolist()
    assert [[2, 1]] == m.target_stride.tolist()


def test_dimensions_join_only_where_both_sides_agree() -> None:
    padded = box((5, 3), stride=(4, 1))

    assert [[5, 3]] == coalesce(intersect(padded, box((5, 3)))).extent.tolist()
    assert [[5, 3]] == coalesce(intersect(box((5, 3)), padded)).extent.tolist()


def test_a_matrix_that_both_sides_store_transposed_is_one_run() -> None:
    turned = transpose(box((3, 5)), (1, 0))

    m = coalesce(intersect(turned, turned))

    assert [[1, 15]] == m.extent.tolist()


def test_one_element_has_no_dimension_at_all() -> None:
    m = to_copy_dims(coalesce(intersect(box(()), box(()))))

    assert [[1, 1, 1]] == m.extent.tolist()
    assert [[0, 0, 0]] == m.source_stride.tolist()


def test_a_fourth_dimension_becomes_rows_along_the_smallest_extent() -> None:
    source, target = box((3, 2, 4, 5), stride=(1000, 100, 10, 1)), box((3, 2, 4, 5), stride=(999, 99, 9, 1))

    m = to_copy_dims(coalesce(intersect(source, target)))

    assert [[3, 4, 5]] * 2 == m.extent.tolist()
    assert [[1000, 10, 1]] * 2 == m.source_stride.tolist()
    assert [0, 100] == m.source_offset.tolist()
    assert [0, 99] == m.target_offset.tolist()
    assert [0, 0] == m.overlap.tolist()


def test_too_many_rows_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    zero: Int64 = np.zeros(1, np.int64)
    extent, source, target = (np.array([c], np.int64) for c in ([9, 8, 7, 6], [1000, 100, 10, 1], [999, 99, 9, 1]))
    four = Moves(zero, extent, zero, source, zero, target)
    monkeypatch.setattr(module, "MAX_MOVES", 41)
    with pytest.raises(NotDescribable, match="6 moves would become more than 41"):
        to_copy_dims(four, 2)
    monkeypatch.setattr(module, "MAX_MOVES", 42)
    assert 42 == len(to_copy_dims(four, 2))
