from __future__ import annotations

import numpy as np
import pytest

from weightd.core.layout.boxes import no_pieces
from weightd.core.layout.faults import BadCut
from weightd.core.layout.flat import expand_flat, flat_range


def test_a_range_inside_one_row_is_one_piece() -> None:
    p = flat_range((4, 5), 6, 9, offset=2)

    assert [[1, 1]] == p.start.tolist()
    assert [[1, 3]] == p.extent.tolist()
    assert [2] == p.offset.tolist()


def test_a_range_that_ends_with_a_row_has_no_tail() -> None:
    p = flat_range((4, 5), 3, 15)

    assert [[0, 3], [1, 0]] == p.start.tolist()
    assert [[1, 2], [2, 5]] == p.extent.tolist()


def test_three_dimensions_need_five_pieces() -> None:
    p = flat_range((4, 3, 5), 8, 52)  # 0,1,3.. | 0,2 | 1 and 2 | 3,0 3,1 | 3,2 -> 2 elements left: 45+7

    assert [[0, 1, 3], [0, 2, 0], [1, 0, 0], [3, 0, 0], [3, 1, 0]] == p.start.tolist()
    assert [[1, 1, 2], [1, 1, 5], [2, 3, 5], [1, 1, 5], [1, 1, 2]] == p.extent.tolist()
    assert [0, 2, 7, 37, 42] == p.offset.tolist()


def test_a_0d_tensor_is_one_piece_and_an_empty_range_none() -> None:
    assert [1] == flat_range((), 0, 1).numel.tolist()
    assert 0 == len(flat_range((), 0, 0))
    assert 0 == len(flat_range((5, 3), 7, 7))
    assert 0 == len(flat_range((0, 3), 0, 0))


def test_a_range_outside_of_the_tensor_is_refused_padding_too() -> None:
    """ZeRO-3 over 4 of 10 elements: partition 3, the last one has 1 element and 2 of padding."""
    assert [[9]] == flat_range((10,), 9, 10).start.tolist()
    with pytest.raises(BadCut, match=r"a dimension of 10 .* \[9, 12\]"):
        flat_range((10,), 9, 12)
    with pytest.raises(BadCut):
        flat_range((10,), -1, 3)


def test_no_range_gives_no_piece() -> None:
    none = np.zeros(0, np.int64)

    p = expand_flat(np.zeros((0, 3), np.int64), none, none, none)

    assert no_pieces(3).start.shape == p.start.shape
