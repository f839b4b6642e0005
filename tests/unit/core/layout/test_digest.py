from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from weightd.core.layout.boxes import box
from weightd.core.layout.build import LayoutBuilder
from weightd.core.layout.digest import layout_digest

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightd.core.layout.columns import Layout


def _builder() -> LayoutBuilder:
    b = LayoutBuilder()
    w = b.add_tensor("w", (5, 3), "bfloat16")
    buffer = b.add_buffer("w", 12, "bfloat16", "param")
    b.add_piece(w, buffer, (3, 0), (2, 3))
    return b


def test_the_digest_is_the_same_on_every_machine() -> None:
    assert "034f73862a88f84000e0b141cbfa698e" == layout_digest(_builder().build())


def test_step_and_stride_of_a_single_index_are_no_content() -> None:
    one, other = _column(stride=(7, 3)), _column(stride=(3, 3))

    assert layout_digest(one) == layout_digest(other)
    loose = replace(one, step=np.array([[1, 9]], np.int64), stride=np.array([[3, 8]], np.int64))
    assert layout_digest(one) == layout_digest(loose)


def _column(stride: tuple[int, int]) -> Layout:
    b = LayoutBuilder()
    w = b.add_tensor("w", (5, 3), "bfloat16")
    b.add_pieces(box((5, 1), stride=(stride[1], stride[0])), w, b.add_buffer("w", 30, "bfloat16", "param"))
    return b.build()


@pytest.mark.parametrize("column", ["start", "extent", "step", "stride", "offset"])
def test_every_number_is_content(column: str) -> None:
    layout = _builder().build()
    changed = getattr(layout, column).copy()
    changed.flat[0] += 1

    assert layout_digest(layout) != layout_digest(replace(layout, **{column: changed}))


def test_every_entry_of_a_table_is_content() -> None:
    digests = {layout_digest(_builder().build())}
    changes: list[Callable[[LayoutBuilder], object]] = [
        lambda b: b.add_alias("v", "w"),
        lambda b: b.add_unused("w"),
        lambda b: b.add_unused("w", (0, 2)),
        lambda b: b.add_unused("w", (0, 3)),
        lambda b: b.add_unused("w", why="frozen"),
        lambda b: b.add_kept("v"),
        lambda b: b.add_tensor("v", (), "bfloat16"),
        lambda b: b.add_buffer("v", 2, "bfloat16", "param"),
        lambda b: b.add_buffer("v", 2, "bfloat16", "slot"),
        lambda b: b.add_buffer("v", 2, "bfloat16", "slot", region=1),
        lambda b: b.add_buffer("v", 2, "bfloat16", "slot", base=64),
        lambda b: b.add_buffer("v", 2, "float16", "slot"),
    ]
    for change in changes:
        builder = _builder()
        change(builder)
        digests.add(layout_digest(builder.build()))

    assert 1 + len(changes) == len(digests)


def test_the_order_of_buffers_is_content_because_plans_point_to_their_rows() -> None:
    one, other = LayoutBuilder(), LayoutBuilder()
    for b, names in ((one, "ab"), (other, "ba")):
        for name in names:
            b.add_buffer(name, 2, "bfloat16", "param")

    assert layout_digest(one.build()) != layout_digest(other.build())
