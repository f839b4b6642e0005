"""Which rows a rank holds: plain data, against index lists that are cut the slow way."""

from itertools import product

import pytest

from weightd.trainer_hooks.placements import Box, Cut, Run, held_boxes, held_runs, held_shape

Indices = list[int]


def chunk(indices: Indices, parts: int, index: int) -> Indices:
    size = -(-len(indices) // parts)
    return indices[index * size : (index + 1) * size]


def listed(size: int, *cuts: Cut) -> Indices:
    return [run.start + i for run in held_runs(size, cuts) for i in range(run.length)]


@pytest.mark.parametrize(
    "size, expected",
    [
        (11, [3, 3, 3, 2]),
        (10, [3, 3, 3, 1]),
        (6, [2, 2, 2, 0]),
        (5, [2, 2, 1, 0]),
        (3, [1, 1, 1, 0]),
        (1, [1, 0, 0, 0]),
    ],
)
def test_chunk_rule_over_four_ranks(size: int, expected: list[int]) -> None:
    assert [len(listed(size, Cut(4, r))) for r in range(4)] == expected
    assert [i for r in range(4) for i in listed(size, Cut(4, r))] == list(range(size))


def test_last_of_seven_rows_is_on_tensor_parallel_rank_1() -> None:
    """dp 3 x tp 2: read from left to right, the placements would put it on tp 0."""
    held = {(dp, tp): listed(7, Cut(3, dp, split_factor=2), Cut(2, tp)) for dp, tp in product(range(3), range(2))}

    assert held == {(0, 0): [0, 1], (1, 0): [2, 3], (2, 0): [], (0, 1): [4], (1, 1): [5], (2, 1): [6]}


@pytest.mark.parametrize("tp, dp", list(product((2, 3, 4, 8), (2, 3, 4, 8))))
def test_tensor_parallel_cut_comes_first(tp: int, dp: int) -> None:
    for size, t, d in product(range(1, 40), range(tp), range(dp)):
        expected = chunk(chunk(list(range(size)), tp, t), dp, d)

        assert listed(size, Cut(dp, d, split_factor=tp), Cut(tp, t)) == expected


@pytest.mark.parametrize("factor, parts", list(product((2, 3, 4), (1, 2, 3, 4))))
def test_lone_strided_cut_is_made_in_every_outer_part(factor: int, parts: int) -> None:
    for size, index in product(range(40), range(parts)):
        outer = [chunk(list(range(size)), factor, i) for i in range(factor)]
        expected = [i for part in outer for i in chunk(part, parts, index)]

        assert listed(size, Cut(parts, index, split_factor=factor)) == expected


def test_lone_strided_cut_is_several_boxes_of_one_local_tensor() -> None:
    cuts = [(Cut(2, 1, split_factor=2),), (Cut(3, 2),)]

    assert held_runs(8, cuts[0]) == (Run(2, 2, 0), Run(6, 2, 2))
    assert held_boxes((8, 7), cuts) == (Box((2, 6), (2, 1), (0, 0)), Box((6, 6), (2, 1), (2, 0)))
    assert held_shape((8, 7), cuts) == (4, 1)


def test_empty_shard_is_no_box() -> None:
    assert held_boxes((3, 5), [(Cut(4, 3),), ()]) == ()
    assert held_shape((3, 5), [(Cut(4, 3),), ()]) == (0, 5)


def test_0d_tensor_is_one_box() -> None:
    assert held_boxes((), []) == (Box((), (), ()),)
