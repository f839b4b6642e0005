from __future__ import annotations

import numpy as np
import pytest

from weightd.core.layout import reshape
from weightd.core.layout.boxes import box, join
from weightd.core.layout.faults import BadColumns, NotDescribable
from weightd.core.layout.reshape import merge_dims, split_dim


def test_a_run_becomes_head_middle_and_tail() -> None:
    p = split_dim(box((9,), start=(2,), offset=4), 0, 4)  # 2 3 | 4 5 6 7 | 8 9 10

    assert [[0, 2], [1, 0], [2, 0]] == p.start.tolist()
    assert [[1, 2], [1, 4], [1, 3]] == p.extent.tolist()
    assert [4, 6, 10] == p.offset.tolist()


def test_whole_rows_stay_one_piece() -> None:
    p = split_dim(box((12,), stride=(2,)), 0, 4)

    assert [[3, 4]] == p.extent.tolist()
    assert [[8, 2]] == p.stride.tolist()


def test_interleaved_rows_become_a_plain_dimension() -> None:
    """Rows 1, 3, 5, 7, 9 of (gate, up) pairs are column 1 of 5 pairs."""
    p = split_dim(box((5, 3), start=(1, 0), step=(2, 1)), 0, 2)

    assert [[0, 1, 0]] == p.start.tolist()
    assert [[5, 1, 3]] == p.extent.tolist()
    assert [[3, 0, 1]] == p.stride.tolist()


def test_a_step_that_fits_no_row_becomes_one_piece_per_column() -> None:
    p = split_dim(box((5,), step=(2,)), 0, 3)  # 0 2 4 6 8: (0,0) (0,2) (1,1) (2,0) (2,2)

    assert [[0, 0], [0, 2], [1, 1]] == p.start.tolist()
    assert [[2, 1], [2, 1], [1, 1]] == p.extent.tolist()
    assert [[2, 1], [2, 1], [1, 1]] == p.step.tolist()


def test_split_refuses_a_length_of_zero_and_a_missing_dimension() -> None:
    with pytest.raises(BadColumns, match="a dimension of length 0"):
        split_dim(box((5,)), 0, 0)
    with pytest.raises(BadColumns):
        split_dim(box((5,)), -1, 5)


def test_merged_whole_rows_are_one_piece() -> None:
    p = merge_dims(box((2, 3), start=(4, 0), offset=1), 0, 3)

    assert [[12]] == p.start.tolist()
    assert [[6]] == p.extent.tolist()


def test_merged_columns_are_as_many_pieces_as_the_shorter_side() -> None:
    tall = merge_dims(box((5, 2), start=(0, 1)), 0, 4)
    wide = merge_dims(box((2, 3), start=(0, 1)), 0, 4)

    assert [[1], [2]] == tall.start.tolist()
    assert [[4], [4]] == tall.step.tolist()
    assert [0, 1] == tall.offset.tolist()
    assert [[1], [5]] == wide.start.tolist()
    assert [[3], [3]] == wide.extent.tolist()


def test_rows_that_are_apart_in_memory_do_not_merge() -> None:
    assert 2 == len(merge_dims(box((2, 3), stride=(5, 1)), 0, 3))


def test_merging_into_too_many_pieces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reshape, "MAX_PIECES", 6)
    assert 6 == len(merge_dims(box((6, 7)), 0, 9))
    with pytest.raises(NotDescribable, match="1 pieces would become more than 6"):
        merge_dims(box((7, 8)), 0, 9)
    with pytest.raises(BadColumns):
        merge_dims(box((7,)), 0, 9)


def test_an_unrolled_dimension_of_any_size_is_refused_before_it_is_made() -> None:
    huge = np.iinfo(np.int64).max // 4
    with pytest.raises(NotDescribable):
        merge_dims(box((huge, huge), stride=(1, 1)), 0, 3)
    with pytest.raises(NotDescribable):  # their number is 0 modulo 2**64
        merge_dims(join([box((2**61, 2**61), stride=(1, 1))] * 8), 0, 3)
