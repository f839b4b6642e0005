from __future__ import annotations

import pytest

from weightd.core.layout.boxes import box, check_dim, join, moved, no_pieces, placed, row_major, tidy, widened
from weightd.core.layout.faults import BadColumns


def test_row_major_strides_of_three_and_of_no_dimensions() -> None:
    assert (15, 3, 1) == row_major((2, 5, 3))
    assert () == row_major(())


def test_a_box_is_contiguous_from_zero_unless_told() -> None:
    p = box((2, 3))

    assert [[0, 0]] == p.start.tolist()
    assert [[1, 1]] == p.step.tolist()
    assert [[3, 1]] == p.stride.tolist()
    assert [0] == p.offset.tolist()
    assert [6] == p.numel.tolist()


def test_an_empty_box_is_no_piece_and_a_0d_box_is_one_element() -> None:
    assert 0 == len(box((0, 3)))
    assert 2 == box((0, 3)).ndim
    assert [1] == box(()).numel.tolist()


def test_a_box_of_arguments_of_different_length_is_refused() -> None:
    with pytest.raises(BadColumns, match="start: 1 numbers for 2 dimensions"):
        box((2, 3), start=(0,))


def test_step_and_stride_mean_nothing_where_the_extent_is_one() -> None:
    p = tidy(box((1, 3), step=(4, 2), stride=(9, 1)))

    assert [[1, 2]] == p.step.tolist()
    assert [[0, 1]] == p.stride.tolist()


def test_joined_pieces_are_as_wide_as_the_widest() -> None:
    p = join([box((5,), offset=2), no_pieces(1), box((4, 3))])

    assert [[5, 1], [4, 3]] == p.extent.tolist()
    assert [[1, 0], [3, 1]] == p.stride.tolist()
    assert [2, 0] == p.offset.tolist()
    assert 3 == join([], ndim=3).ndim


def test_widened_pieces_are_padded_at_the_right() -> None:
    p = widened(box((5,), start=(2,), step=(3,)), 3)

    assert [[2, 0, 0]] == p.start.tolist()
    assert [[5, 1, 1]] == p.extent.tolist()
    assert [[3, 1, 1]] == p.step.tolist()
    assert [[1, 0, 0]] == p.stride.tolist()


def test_placed_and_moved_change_only_what_they_say() -> None:
    p = moved(placed(join([box((2,)), box((3,), offset=5)]), tensor=7, buffer=1), 10)

    assert [7, 7] == p.tensor.tolist()
    assert [1, 1] == p.buffer.tolist()
    assert [10, 15] == p.offset.tolist()
    assert [4] == placed(p.take(p.offset > 10), tensor=4).tensor.tolist()


def test_a_dimension_that_is_not_there_is_refused() -> None:
    check_dim(box((2, 3)), 0, 2)
    with pytest.raises(BadColumns, match="1 from number -1 of 2 dimensions"):
        check_dim(box((2, 3)), -1)
    with pytest.raises(BadColumns, match="2 from number 1 of 2 dimensions"):
        check_dim(box((2, 3)), 1, 2)
