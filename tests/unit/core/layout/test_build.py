from __future__ import annotations

import numpy as np
import pytest

from weightd.core.errors import Refused
from weightd.core.layout.boxes import box, join, placed
from weightd.core.layout.build import LayoutBuilder
from weightd.core.layout.columns import RowRange, Unused
from weightd.core.layout.faults import BadColumns, BadEntry, BoxOutOfBounds, BufferOverrun, DuplicateName, UnknownDType


def test_single_and_many_pieces_stay_in_the_order_they_were_added() -> None:
    b = LayoutBuilder()
    w, s = b.add_tensor("w", (5, 3), "float32"), b.add_tensor("scale", (), "float32")
    one, two = b.add_buffer("one", 60, "float32", "slot"), b.add_buffer("two", 8, "float32", "slot", base=64)
    b.add_piece(w, one, (0, 0), (2, 3))
    b.add_pieces(join([placed(box((1, 3), start=(2, 0), offset=6), w, one), placed(box(()), s, two)]))
    b.add_piece(w, one, (4, 1), (1, 2), offset=9, stride=(77, 1))
    b.add_piece(w, one, (0, 0), (0, 3))

    layout = b.build()

    assert 4 == layout.pieces
    assert 2 == layout.ndim
    assert [0, 0, 1, 0] == layout.tensor.tolist()
    assert [[0, 0], [2, 0], [0, 0], [4, 1]] == layout.start.tolist()
    assert [[2, 3], [1, 3], [1, 1], [1, 2]] == layout.extent.tolist()
    assert [[3, 1], [0, 1], [0, 0], [0, 1]] == layout.stride.tolist()
    assert [0, 0, 1, 0] == layout.buffer.tolist()


def test_a_layout_of_0d_tensors_has_columns_of_no_width() -> None:
    b = LayoutBuilder()
    b.add_piece(b.add_tensor("scale", (), "float32"), b.add_buffer("scale", 4, "float32", "param"), (), ())

    layout = b.build()

    assert (1, 0) == layout.start.shape
    assert 1 == layout.pieces


def test_an_empty_rank_is_a_layout_too() -> None:
    b = LayoutBuilder()
    b.add_tensor("w", (5, 3), "float32")

    layout = b.build()

    assert 0 == layout.pieces
    assert (0, 2) == layout.extent.shape


def test_what_is_said_about_names_is_kept() -> None:
    b = LayoutBuilder()
    b.add_tensor("embed", (13, 3), "float32")
    b.add_alias("lm_head", "embed")
    b.add_unused("embed", (11, 13), "padding of the trainer's vocabulary")
    b.add_unused("mtp", why="draft head")
    b.add_kept("inv_freq")

    layout = b.build()

    assert (("lm_head", "embed"),) == layout.aliases
    assert (
        Unused("embed", RowRange(11, 13), "padding of the trainer's vocabulary"),
        Unused("mtp", None, "draft head"),
    ) == layout.unused
    assert ("inv_freq",) == layout.kept
    assert (0, None) == (b.tensor_row("embed"), b.tensor_row("lm_head"))


def test_layouts_are_values() -> None:
    b = LayoutBuilder()
    b.add_piece(b.add_tensor("w", (5,), "float32"), b.add_buffer("w", 20, "float32", "param"), (0,), (5,))

    with pytest.raises(ValueError, match="read-only"):
        b.build().offset[0] = 3


def test_an_entry_that_cannot_stand_is_refused_in_the_line_that_adds_it() -> None:
    b = LayoutBuilder()
    b.add_tensor("w", (5,), "float32")
    b.add_buffer("w", 20, "float32", "param")
    with pytest.raises(DuplicateName):
        b.add_tensor("w", (5,), "float32")
    with pytest.raises(DuplicateName):
        b.add_buffer("w", 20, "float32", "param")
    with pytest.raises(UnknownDType):
        b.add_tensor("v", (5,), "torch.float32")
    with pytest.raises(UnknownDType):
        b.add_buffer("v", 20, "fp8", "param")
    with pytest.raises(BadEntry, match="base 32 is no multiple of 64"):
        b.add_buffer("v", 20, "float32", "slot", base=32)
    with pytest.raises(BadColumns, match="differ in length"):
        b.add_piece(0, 0, (0, 0), (5,))


def test_all_faults_of_pieces_are_in_one_report() -> None:
    b = LayoutBuilder()
    w, buffer = b.add_tensor("w", (5,), "float32"), b.add_buffer("w", 20, "float32", "param")
    b.add_piece(w, buffer, (0,), (5,))
    b.add_piece(w, buffer, (3,), (3,))
    b.add_piece(w, buffer, (0,), (5,), offset=1)
    b.add_piece(w, buffer, (4,), (2,))
    b.add_kept("x")
    b.add_kept("x")
    with pytest.raises(Refused) as names:
        b.build()
    assert [DuplicateName] == [type(v) for v in names.value.violations]

    b._kept.clear()
    with pytest.raises(Refused) as report:
        b.build("layout of trainer rank 3")

    assert "layout of trainer rank 3" == report.value.subject
    outside, overrun = report.value.violations
    assert isinstance(outside, BoxOutOfBounds)
    assert isinstance(overrun, BufferOverrun)
    assert (1, (3,), 1) == (outside.piece, outside.start, outside.others)
    assert (2, 1, 5) == (overrun.piece, overrun.offset, overrun.elements)


def test_a_piece_wider_than_every_tensor_is_refused_unless_it_is_only_padding() -> None:
    b = LayoutBuilder()
    w, buffer = b.add_tensor("w", (5,), "float32"), b.add_buffer("w", 40, "float32", "param")
    b.add_pieces(box((5, 1)), w, buffer)
    assert (1, 1) == b.build().extent.shape

    b.add_pieces(box((5, 2)), w, buffer)
    with pytest.raises(BadColumns, match="a piece has 2 dimensions, the widest tensor 1"):
        b.build()


def test_numbers_may_be_numpy_s() -> None:
    b = LayoutBuilder()
    n = np.int64(5)

    w = b.add_tensor("w", (n, n), "float32")  # type: ignore[arg-type]

    assert 0 == w
    assert (5, 5) == b.build().tensors[0].shape
    assert int is type(b.build().tensors[0].shape[0])
