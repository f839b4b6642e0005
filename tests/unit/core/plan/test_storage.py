import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd.core.layout.boxes import Pieces, box, join
from weightd.core.plan.storage import shared_pairs


def places(extent: tuple[int, ...], stride: tuple[int, ...], offset: int) -> list[int]:
    return [
        offset + sum(i * s for i, s in zip(index, stride, strict=True))
        for index in itertools.product(*(range(n) for n in extent))
    ]


Shape = tuple[tuple[int, ...], tuple[int, ...], int]

shapes = st.integers(1, 3).flatmap(
    lambda n: st.tuples(st.tuples(*[st.integers(1, 4)] * n), st.tuples(*[st.integers(1, 12)] * n), st.integers(0, 20))
)


def pieces(given_shapes: list[Shape]) -> Pieces:
    return join(box(extent, offset=offset, stride=stride) for extent, stride, offset in given_shapes)


@given(st.lists(shapes, min_size=1, max_size=4))
def test_shared_memory_is_found_exactly(given_shapes: list[Shape]) -> None:
    where = [places(*s) for s in given_shapes]
    want = [(i, i) for i, p in enumerate(where) if len(set(p)) < len(p)]
    want += [(i, j) for i, j in itertools.combinations(range(len(where)), 2) if set(where[i]) & set(where[j])]

    assert shared_pairs(pieces(given_shapes)) == sorted(want)


def test_pieces_of_different_buffers_share_nothing() -> None:
    both = join([box((4,)), box((4,))])
    apart = Pieces(both.tensor, both.start, both.extent, both.step, np.array([0, 1]), both.offset, both.stride)

    assert shared_pairs(both) == [(0, 1)]
    assert shared_pairs(apart) == []


@pytest.mark.parametrize("shift,shared", [(2048, False), (2047, True)])
def test_halves_of_a_transposed_matrix_of_any_size(shift: int, shared: bool) -> None:
    """Expert weights stored [hidden, 2 f]: gate and up interleave in every row."""
    both = join([box((2048, 7168), offset=o, stride=(1, 4096)) for o in (0, shift)])

    assert (shared_pairs(both) == [(0, 1)]) is shared
