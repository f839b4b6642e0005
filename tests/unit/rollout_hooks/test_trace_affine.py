"""Views as boxes: every element of a view is in exactly one box, at its place on the other side."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from weightd.core.layout.boxes import row_major
from weightd.rollout_hooks.trace.affine import View, boxes, dense_shape

SHAPES = [(7,), (3, 4), (2, 3, 4), (4, 1, 3), (2, 2, 2, 2)]


def elements(view: View) -> list[int]:
    """Return the places of a view's elements, in order."""
    return [
        view.offset + sum(i * s for i, s in zip(index, view.stride, strict=True))
        for index in product(*(range(n) for n in view.extent))
    ]


def said(shape: tuple[int, ...], view: View, other: View) -> list[tuple[int, int]]:
    """Return place here and there of each element of all boxes."""
    found = []
    for row in boxes(shape, view, other):
        for index in product(*(range(n) for n in row.extent)):
            at = [s + i * k for s, i, k in zip(row.start, index, row.step, strict=True)]
            there = row.offset + sum(i * s for i, s in zip(index, row.stride, strict=True))
            found.append((int(np.ravel_multi_index(at, shape)), there))
    return sorted(found, key=lambda pair: pair[1])


@pytest.mark.parametrize("shape", SHAPES)
def test_every_flat_range_with_every_step(shape: tuple[int, ...]) -> None:
    size = int(np.prod(shape))
    for first in range(size):
        for step in range(1, size + 1):
            for extent in range(1, (size - 1 - first) // step + 2):
                view, other = View(first, (extent,), (step,)), View(5, (extent,), (2,))
                assert list(zip(elements(view), elements(other), strict=True)) == said(shape, view, other)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_view_of_two_dimensions(shape: tuple[int, ...]) -> None:
    size = int(np.prod(shape))
    for first, a, b, m, n in product(range(0, size, 2), range(size), range(1, 5), range(1, 4), range(1, 4)):
        if first + a * (m - 1) + b * (n - 1) < size:
            view, other = View(first, (m, n), (a, b)), View(1, (m, n), (n, 1))
            assert list(zip(elements(view), elements(other), strict=True)) == said(shape, view, other)


def test_what_is_one_box_stays_one() -> None:
    whole = View(0, (2, 3, 4), row_major((2, 3, 4)))

    assert 1 == len(boxes((6, 4), whole, whole))  # two dimensions that run evenly along one
    assert 1 == len(boxes((24,), whole, whole))
    assert 1 == len(boxes((2, 12), whole, whole))
    assert 3 == len(boxes((4, 3), View(2, (8,), (1,)), View(0, (8,), (1,))))  # 2 | 3 to 8 | 9


def test_memory_with_gaps() -> None:
    assert (4, 3, 2) == dense_shape((4, 3), (6, 2))
    assert (3, 5) == dense_shape((3, 2), (5, 1))
    assert (1 + 2 * 5 + 2,) == dense_shape((3, 2), (5, 2))  # strides that do not divide each other: one row
    assert (1,) == dense_shape((), ())
