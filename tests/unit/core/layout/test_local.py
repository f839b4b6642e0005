from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from weightd.core.layout.boxes import box, pieces_of
from weightd.core.layout.build import LayoutBuilder
from weightd.core.layout.faults import BadColumns
from weightd.core.layout.intersect import intersect
from weightd.core.layout.local import collect, empty_buffers, fill, move, piece_index, piece_view
from weightd.core.layout.moves import coalesce

if TYPE_CHECKING:
    from weightd.core.layout.columns import Layout


def _layout() -> Layout:
    """Rows 3 and 4 of a matrix with one element of padding a row, and a scale, in one buffer."""
    b = LayoutBuilder()
    w, s = b.add_tensor("w", (5, 3), "bfloat16"), b.add_tensor("scale", (), "bfloat16")
    buffer = b.add_buffer("all", 20, "bfloat16", "param")
    b.add_piece(w, buffer, (3, 0), (2, 3), offset=1, stride=(4, 1))
    b.add_piece(s, buffer, (), (), offset=9)
    return b.build()


def test_buffers_are_filled_from_whole_tensors_and_padding_is_left_alone() -> None:
    w = np.arange(100, 115, dtype=np.uint16).reshape(5, 3)
    (buffer,) = empty_buffers(_layout())

    written = fill(_layout(), [buffer], {"w": w, "scale": np.array(7, np.uint16)})

    assert 7 == written
    assert [0, 109, 110, 111, 0, 112, 113, 114, 0, 7] == buffer.tolist()


def test_whole_tensors_are_collected_from_buffers() -> None:
    buffer = np.arange(10, dtype=np.uint16)
    tensors = {"w": np.zeros((5, 3), np.uint16), "scale": np.array(0, np.uint16)}

    written = collect(_layout(), [buffer], tensors)

    assert 7 == written
    assert [[0, 0, 0], [0, 0, 0], [0, 0, 0], [1, 2, 3], [5, 6, 7]] == tensors["w"].tolist()
    assert 9 == tensors["scale"]


def test_a_view_that_would_leave_its_buffer_is_refused() -> None:
    pieces = pieces_of(_layout())

    assert [[1, 2, 3], [5, 6, 7]] == piece_view(np.arange(8), pieces, 0)[:, :].tolist()
    with pytest.raises(BadColumns, match="elements 1 to 7 are not all in a buffer of 7"):
        piece_view(np.arange(7), pieces, 0)


def test_the_index_of_a_piece_has_a_step() -> None:
    assert (slice(1, 6, 2), slice(0, 4, 1)) == piece_index(box((3, 4), start=(1, 0), step=(2, 1)), 0, 2)


def test_a_move_copies_and_counts() -> None:
    moves = coalesce(intersect(box((5, 6)), box((5, 2), start=(0, 3))))
    target = np.zeros(10, np.int64)

    copied = move(moves, 0, np.arange(30), target)

    assert 10 == copied
    assert [3, 4, 9, 10, 15, 16, 21, 22, 27, 28] == target.tolist()
