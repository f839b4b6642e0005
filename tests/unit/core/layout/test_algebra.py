from __future__ import annotations

import pytest

from weightd.core.layout.algebra import compose, concatenate, embed, narrow, transpose
from weightd.core.layout.boxes import box, join, placed
from weightd.core.layout.faults import BadColumns, NotDescribable
from weightd.core.layout.flat import flat_range


def test_narrow_of_a_stepped_piece_begins_at_its_next_index() -> None:
    p = narrow(box((5,), start=(1,), step=(3,), offset=10, stride=(2,)), 0, 5, 12)  # 1 4 7 10 13: 7 and 10

    assert [[7]] == p.start.tolist()
    assert [[2]] == p.extent.tolist()
    assert [14] == p.offset.tolist()


def test_narrow_drops_pieces_that_have_nothing_left() -> None:
    p = narrow(join([box((5, 3)), box((5, 3), start=(5, 0), offset=15)]), 0, 6, 8)

    assert [[6, 0]] == p.start.tolist()
    assert [18] == p.offset.tolist()
    assert 0 == len(narrow(p, 0, 8, 8))


def test_narrowed_and_embedded_at_minus_low_is_the_narrowed_tensor() -> None:
    p = embed(narrow(box((9, 3)), 0, 5, 9), 0, -5)

    assert [[0, 0]] == p.start.tolist()
    assert [[4, 3]] == p.extent.tolist()
    assert [15] == p.offset.tolist()


def test_concatenate_refuses_sizes_that_are_not_one_per_tensor() -> None:
    assert [[0], [5], [9]] == concatenate([box((5,)), box((4,)), box((2,))], (5, 4, 2), 0).start.tolist()
    with pytest.raises(BadColumns, match="1 sizes for 2 tensors"):
        concatenate([box((5,)), box((4,))], (5,), 0)


def test_transpose_takes_the_order_that_numpy_takes() -> None:
    p = transpose(box((2, 5, 3), start=(7, 8, 9)), (2, 0, 1))

    assert [[9, 7, 8]] == p.start.tolist()
    assert [[1, 15, 3]] == p.stride.tolist()
    with pytest.raises(BadColumns, match="no order of 2 dimensions"):
        transpose(box((2, 3)), (0, 0))


def test_a_dimension_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadColumns):
        narrow(box((2, 3)), 2, 0, 1)
    with pytest.raises(BadColumns):
        embed(box((2, 3)), -1, 1)


def test_flat_half_of_a_fused_qkv_shard_is_three_boxes() -> None:
    """AutoTP rank 0 holds rows 0-2, 6-8, 12-14 of 18; ZeRO-3 over 2 cuts its 9 rows of 4 at element 18."""
    blocks = [embed(box((3, 4), offset=12 * i), 0, 6 * i) for i in range(3)]

    p = compose(join(blocks), flat_range((9, 4), 0, 18), (9, 4))

    assert [[0, 0], [6, 0], [7, 0]] == p.start.tolist()
    assert [[3, 4], [1, 4], [1, 2]] == p.extent.tolist()
    assert [0, 12, 16] == p.offset.tolist()


def test_composed_steps_multiply() -> None:
    """Every second row of 11 is a shard of 6; of that, every second row from 1 on is stored."""
    shard = box((6, 3), step=(2, 1))
    stored = box((3, 3), start=(1, 0), step=(2, 1), offset=100)

    p = compose(shard, stored, (6, 3))

    assert [[2, 0]] == p.start.tolist()
    assert [[4, 1]] == p.step.tolist()
    assert [[3, 3]] == p.extent.tolist()
    assert [100] == p.offset.tolist()


def test_rows_that_alternate_in_the_shard_come_apart() -> None:
    """A GLU shard stores (gate, up) row by row; gate is rows 5 to 8 of its tensor and every second row of the shard."""
    gate = box((4, 3), start=(5, 0), stride=(6, 1))

    p = compose(gate, box((7, 3), start=(1, 0)), (8, 3))  # of which the memory holds rows 1 to 7

    assert [[6, 0]] == p.start.tolist()
    assert [[3, 3]] == p.extent.tolist()
    assert [[1, 1]] == p.step.tolist()
    assert [[6, 1]] == p.stride.tolist()
    assert [3] == p.offset.tolist()


def test_what_the_outer_cut_does_not_mention_is_padding() -> None:
    """A vocabulary of 13 over 4 ranks of 5: rank 2 has 3 real rows, rank 3 none."""
    rank2 = compose(embed(box((3, 2)), 0, 10), box((5, 2)), (5, 2))
    rank3 = compose(box((0, 2)), box((5, 2)), (5, 2))

    assert [[3, 2]] == rank2.extent.tolist()
    assert 0 == len(rank3)


def test_many_shards_are_composed_at_once_with_a_shape_each() -> None:
    outer = join([placed(embed(box((5, 3)), 0, 5), 0), placed(embed(box((4, 2)), 1, 7), 1)])
    inner = join([placed(box((5, 3), offset=50), 0), placed(box((4, 2), offset=90), 1)])

    p = compose(outer, inner, [[5, 3], [4, 2]])  # type: ignore[list-item]

    assert [0, 1] == p.tensor.tolist()
    assert [[5, 0], [0, 7]] == p.start.tolist()
    assert [50, 90] == p.offset.tolist()


def test_an_outer_cut_that_is_no_box_of_the_shard_is_refused() -> None:
    turned = transpose(box((3, 2)), (1, 0))  # its shard is the transposed tensor

    with pytest.raises(NotDescribable, match="is no box of a shard of shape"):
        compose(turned, box((2, 3)), (2, 3))
    with pytest.raises(NotDescribable):
        compose(box((6, 3)), box((5, 3)), (5, 3))  # longer than its shard
    with pytest.raises(BadColumns, match="the shard has 1 dimensions, its pieces 2"):
        compose(box((6,)), box((2, 3)), (6,))
