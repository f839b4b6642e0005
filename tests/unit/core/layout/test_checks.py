from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from weightd.core.errors import Refused, WeightdError
from weightd.core.layout.build import LayoutBuilder
from weightd.core.layout.checks import find_faults, padded_shapes, validate
from weightd.core.layout.columns import BufferInfo, Int64, Layout, RowRange, TensorInfo, Unused
from weightd.core.layout.faults import (
    BadColumns,
    BadEntry,
    BoxOutOfBounds,
    BufferOverrun,
    DTypeConflict,
    DuplicateName,
    UnknownDType,
)

TOP = 2**63 - 1


def _layout() -> Layout:
    """A matrix of 5 x 3 in 15 elements, and a vector of 4 in its second half."""
    b = LayoutBuilder()
    w, v = b.add_tensor("w", (5, 3), "float32"), b.add_tensor("v", (4,), "float32")
    one, two = b.add_buffer("w", 60, "float32", "slot"), b.add_buffer("v", 32, "float32", "slot", base=64)
    b.add_piece(w, one, (0, 0), (5, 3))
    b.add_piece(v, two, (0,), (4,), offset=4)
    return b.build()


def _with(column: str, row: int, values: list[int] | int) -> Layout:
    layout = _layout()
    changed = getattr(layout, column).copy()
    changed[row] = values
    return replace(layout, **{column: changed})


def _kinds(layout: Layout) -> list[type[WeightdError]]:
    return [type(fault) for fault in find_faults(layout)]


def test_a_good_layout_has_no_fault_and_comes_back() -> None:
    layout = _layout()

    assert layout is validate(layout)


@pytest.mark.parametrize(
    "column,row,values",
    [
        ("start", 0, [1, 0]),
        ("start", 0, [-1, 0]),
        ("start", 0, [TOP, 0]),
        ("start", 1, [0, 1]),  # a dimension that the vector does not have
        ("extent", 0, [6, 3]),
        ("extent", 0, [0, 3]),
        ("extent", 0, [-5, -3]),  # their product would be right
        ("extent", 0, [TOP, TOP]),
        ("extent", 0, [-TOP - 1, 3]),
        ("extent", 1, [4, 2]),
        ("step", 0, [2, 1]),
        ("step", 0, [0, 1]),
        ("step", 0, [TOP, 1]),
        ("step", 0, [2**62, 1]),  # times 4 it would be 0
        ("step", 1, [1, 7]),
    ],
)
def test_a_piece_that_is_no_box_inside_its_tensor_is_found(column: str, row: int, values: list[int]) -> None:
    assert BoxOutOfBounds in _kinds(_with(column, row, values))


@pytest.mark.parametrize(
    "extent,step,kinds",
    [
        (2, 2**31 - 1, []),
        (2, 2**31, [BoxOutOfBounds]),  # steps are multiplied by each other where pieces meet
        (2**9 + 1, 2**31 - 1, []),  # the last index is 2**40 - 2**9
        (2**9 + 2, 2**31 - 1, [BoxOutOfBounds]),
        (2**35 + 1, 2**29, [BoxOutOfBounds]),  # the last index is 0 modulo 2**64
    ],
)
def test_steps_in_the_longest_tensor(extent: int, step: int, kinds: list[type[WeightdError]]) -> None:
    layout = _layout()
    tensors = (TensorInfo("w", (2**40,), "uint8"),)
    buffers = (BufferInfo("w", 2**40, "uint8", "slot"),)
    zero, columns = layout.tensor[:1], [np.array([[v]], np.int64) for v in (0, extent, step, 1)]
    start, count, hop, stride = columns

    assert kinds == _kinds(Layout(tensors, buffers, zero, start, count, hop, zero, zero, stride))


@pytest.mark.parametrize(
    "column,row,values",
    [
        ("offset", 0, 1),
        ("offset", 0, -1),
        ("offset", 0, TOP),
        ("offset", 1, 5),
        ("stride", 0, [4, 1]),
        ("stride", 0, [3, 0]),  # three elements in one place
        ("stride", 0, [-3, 1]),
        ("stride", 0, [2**62, 1]),  # times 4 it would be 0
        ("stride", 0, [TOP, TOP]),
    ],
)
def test_a_piece_that_leaves_its_buffer_is_found(column: str, row: int, values: list[int] | int) -> None:
    assert [BufferOverrun] == _kinds(_with(column, row, values))


def test_a_negative_stride_is_found_where_it_means_nothing_too() -> None:
    single = replace(_with("extent", 0, [5, 1]), stride=np.array([[3, -1], [1, 0]], np.int64))

    assert [BufferOverrun] == _kinds(single)


@pytest.mark.parametrize("column", ["tensor", "buffer"])
@pytest.mark.parametrize("value", [-1, 2, TOP])
def test_a_piece_that_points_to_no_row_is_found(column: str, value: int) -> None:
    assert [BadColumns] == _kinds(_with(column, 1, value))


def test_columns_of_other_shape_or_type_are_found() -> None:
    layout = _layout()

    assert [BadColumns] == _kinds(replace(layout, offset=layout.offset[:1]))
    assert [BadColumns] == _kinds(replace(layout, step=layout.step[:, :1]))
    assert [BadColumns] == _kinds(replace(layout, offset=layout.offset.astype(np.int32)))
    assert BadColumns in _kinds(replace(layout, tensor=layout.tensor.reshape(1, 2)))


def test_a_piece_in_a_buffer_of_another_type_is_found() -> None:
    layout = _layout()
    buffers = (layout.buffers[0], replace_buffer(layout.buffers[1], dtype="uint32"))

    (fault,) = find_faults(replace(layout, buffers=buffers))

    assert isinstance(fault, DTypeConflict)
    assert (1, "v", "float32", "v", "uint32", 0) == tuple(fault.args)


def replace_buffer(buffer: BufferInfo, **changes: Any) -> BufferInfo:
    fields: dict[str, Any] = {name: getattr(buffer, name) for name in buffer.__struct_fields__}
    return BufferInfo(**(fields | changes))


@pytest.mark.parametrize(
    "changes,kind",
    [
        ({"name": ""}, BadEntry),
        ({"name": "a\nb"}, BadEntry),
        ({"name": "n" * 1025}, BadEntry),
        ({"dtype": "fp8"}, UnknownDType),
        ({"nbytes": -4}, BadEntry),
        ({"nbytes": 2**60}, BadEntry),
        ({"nbytes": 62}, BadEntry),
        ({"kind": "gpu"}, BadEntry),
        ({"region": -1}, BadEntry),
        ({"base": 65}, BadEntry),
        ({"base": -64}, BadEntry),
        ({"base": 2**60}, BadEntry),
        ({"name": "v"}, DuplicateName),
    ],
)
def test_a_buffer_that_cannot_stand_is_found(changes: dict[str, object], kind: type[WeightdError]) -> None:
    layout = _layout()
    buffers = (replace_buffer(layout.buffers[0], **changes), layout.buffers[1])

    assert [kind] == _kinds(replace(layout, buffers=buffers))


@pytest.mark.parametrize(
    "tensor,kind",
    [
        (TensorInfo("", (5, 3), "float32"), BadEntry),
        (TensorInfo("w", (5, 3), "float3"), UnknownDType),
        (TensorInfo("w", (-5, 3), "float32"), BadEntry),
        (TensorInfo("w", (2**40 + 1, 3), "float32"), BadEntry),
        (TensorInfo("w", (2**30, 2**30), "float32"), BadEntry),
        (TensorInfo("v", (5, 3), "float32"), DuplicateName),
    ],
)
def test_a_tensor_that_cannot_stand_is_found(tensor: TensorInfo, kind: type[WeightdError]) -> None:
    layout = _layout()

    assert [kind] == _kinds(replace(layout, tensors=(tensor, layout.tensors[1])))


def test_a_tensor_of_17_dimensions_is_found() -> None:
    wide: Int64 = np.zeros((0, 17), np.int64)
    layout = replace(LayoutBuilder().build(), start=wide, extent=wide, step=wide, stride=wide)

    (fault,) = find_faults(replace(layout, tensors=(TensorInfo("w", (1,) * 17, "float32"),)))

    assert "17 dimensions, more than 16" in str(fault)


@pytest.mark.parametrize(
    "changes,kind",
    [
        ({"aliases": (("w", "v"),)}, BadEntry),
        ({"aliases": (("u", "t"),)}, BadEntry),
        ({"aliases": (("u", "v"), ("u", "w"))}, DuplicateName),
        ({"aliases": (("", "v"),)}, BadEntry),
        ({"kept": ("u", "u")}, DuplicateName),
        ({"kept": ("",)}, BadEntry),
        ({"unused": (Unused(""),)}, BadEntry),
        ({"unused": (Unused("w", RowRange(3, 6)),)}, BadEntry),
        ({"unused": (Unused("w", RowRange(3, 3)),)}, BadEntry),
        ({"unused": (Unused("w", RowRange(-1, 3)),)}, BadEntry),
    ],
)
def test_what_is_said_about_names_is_checked(changes: dict[str, tuple[object, ...]], kind: type[WeightdError]) -> None:
    assert [kind] == _kinds(replace(_layout(), **changes))  # type: ignore[arg-type]


def test_rows_of_a_tensor_that_this_rank_does_not_list_may_be_unused() -> None:
    assert [] == _kinds(replace(_layout(), unused=(Unused("elsewhere", RowRange(3, 6)), Unused("w", RowRange(3, 5)))))


def test_a_0d_tensor_has_no_rows_that_could_be_unused() -> None:
    b = LayoutBuilder()
    b.add_tensor("scale", (), "float32")
    b.add_unused("scale", (0, 1))

    with pytest.raises(Refused, match="are none of a 0-d tensor"):
        b.build()


def test_shapes_are_padded_at_the_right() -> None:
    ranks, shapes = padded_shapes([(), (5, 3), (4,)], 2)

    assert [0, 2, 1] == ranks.tolist()
    assert [[1, 1], [5, 3], [4, 1]] == shapes.tolist()
