"""View pairs and the pass over them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from weightd.core.plan.node_plan import Copies
from weightd.link import copies as link_copies
from weightd.link.copies import CopyPlan, merged, run_pairs

Bytes = NDArray[np.uint8]


def rows(*given: dict[str, Any]) -> Copies:
    """Return copies from one dict a row; strides in bytes, dimensions right-aligned."""

    def wide(values: list[int], fill: int) -> list[int]:
        return [fill] * (3 - len(values)) + values

    return Copies(
        source=np.array([r.get("source", 0) for r in given], np.int64),
        source_offset=np.array([r.get("from_", 0) for r in given], np.int64),
        source_stride=np.array([wide(r["source_stride"], 0) for r in given], np.int64).reshape(-1, 3),
        target=np.array([r.get("target", 0) for r in given], np.int64),
        target_offset=np.array([r.get("to", 0) for r in given], np.int64),
        target_stride=np.array([wide(r["target_stride"], 0) for r in given], np.int64).reshape(-1, 3),
        extent=np.array([wide(r["extent"], 1) for r in given], np.int64).reshape(-1, 3),
        itemsize=np.array([r.get("itemsize", 2) for r in given], np.int64),
    )


def numbers(n: int) -> Bytes:
    return np.arange(1, n + 1, dtype=np.uint16).view(np.uint8)


def test_box_goes_where_its_row_says() -> None:
    """Columns 1-2 of a 3 x 4 matrix, into rows of 5 elements from element 6 on."""
    row = {"from_": 2, "source_stride": [8, 2], "to": 12, "target_stride": [10, 2], "extent": [3, 2]}
    target = np.zeros(44, np.uint8)
    plan = CopyPlan(rows(row), [target], {(0, 0): numbers(12)})

    assert plan.nbytes == plan.run({0: 0}) == 12
    assert target.view(np.uint16).tolist() == [0] * 6 + [2, 3, 0, 0, 0, 6, 7, 0, 0, 0, 10, 11] + [0] * 4


def test_each_slot_of_a_source_has_its_own_pairs() -> None:
    row = {"source_stride": [2], "target_stride": [2], "extent": [4]}
    target = np.zeros(8, np.uint8)
    plan = CopyPlan(rows(row), [target], {(0, 0): numbers(4), (0, 1): numbers(8)[8:]})
    plan.run({0: 1})

    assert target.view(np.uint16).tolist() == [5, 6, 7, 8]
    with pytest.raises(KeyError):
        plan.run({0: 2})


def test_sources_of_different_ranks_may_be_in_different_slots() -> None:
    first = {"source_stride": [2], "target_stride": [2], "extent": [2]}
    second = first | {"source": 1, "to": 4}
    target = np.zeros(8, np.uint8)
    pools = {(0, 0): numbers(2), (0, 1): numbers(4)[4:], (1, 0): numbers(6)[8:], (1, 1): numbers(8)[12:]}
    CopyPlan(rows(first, second), [target], pools).run({0: 1, 1: 0})

    assert target.view(np.uint16).tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize(
    "row",
    [
        {"from_": 2, "source_stride": [2], "target_stride": [2], "extent": [4]},
        {"to": 2, "source_stride": [2], "target_stride": [2], "extent": [4]},
        {"source_stride": [-2], "target_stride": [2], "extent": [4]},
        {"source_stride": [1 << 40, 2], "target_stride": [2, 2], "extent": [2, 2]},
    ],
)
def test_row_outside_of_its_memory_makes_no_view(row: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        CopyPlan(rows(row), [np.zeros(8, np.uint8)], {(0, 0): numbers(4)})


def test_what_is_dense_on_both_sides_becomes_one_dimension() -> None:
    dense = {"source_stride": [24, 8, 2], "target_stride": [24, 8, 2], "extent": [2, 3, 4]}
    source_only = dense | {"target_stride": [40, 10, 2]}
    outer_two = {"source_stride": [60, 20, 2], "target_stride": [60, 20, 2], "extent": [2, 3, 4]}
    gaps = {"source_stride": [24, 8, 2], "target_stride": [2, 4, 20], "extent": [2, 1, 4]}
    trailing = {"source_stride": [8, 2, 6], "target_stride": [8, 2, 4], "extent": [3, 4, 1]}
    given = rows(dense, source_only, outer_two, gaps, trailing)
    flat = merged(given)

    assert flat.extent.tolist() == [[1, 1, 24], [2, 3, 4], [1, 6, 4], [1, 2, 4], [1, 1, 12]]
    assert flat.source_stride.tolist() == [[0, 0, 2], [24, 8, 2], [0, 20, 2], [0, 24, 2], [0, 0, 2]]
    assert flat.nbytes.tolist() == given.nbytes.tolist()


@given(
    st.tuples(*[st.integers(1, 4)] * 3), st.tuples(*[st.integers(0, 2)] * 6), st.sampled_from([1, 2, 4, 8]), st.data()
)
def test_any_box_arrives_and_nothing_else_changes(
    extent: tuple[int, ...], gaps: tuple[int, ...], size: int, data: st.DataObject
) -> None:
    shapes = [[n + g for n, g in zip(extent, gaps[i : i + 3], strict=True)] for i in (0, 3)]
    order = data.draw(st.permutations(range(3)))
    source = np.random.default_rng(0).integers(1, 256, np.prod(shapes[0]) * size, np.uint8)
    target = np.zeros(np.prod(shapes[1]) * size, np.uint8)
    views = [m.view(f"u{size}").reshape(s)[: extent[0], : extent[1], : extent[2]] for m, s in
             zip((source, target), shapes, strict=True)]  # fmt: skip
    row = {"itemsize": size, "extent": [extent[d] for d in order]}
    row |= {n: [v.strides[d] for d in order] for n, v in zip(("source_stride", "target_stride"), views, strict=True)}
    nbytes = CopyPlan(rows(row), [target], {(0, 0): source}).run({0: 0})

    assert nbytes == views[0].nbytes
    assert np.array_equal(views[0], views[1])
    views[1][...] = 0
    assert not target.any()


def test_pass_ends_early_when_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_copies, "BLOCK_BYTES", 4)
    row = {"source_stride": [2], "target_stride": [2], "extent": [2]}
    target = np.zeros(12, np.uint8)
    plan = CopyPlan(rows(*[row | {"from_": 4 * i, "to": 4 * i} for i in range(3)]), [target], {(0, 0): numbers(6)})
    seen: list[int] = []

    def look_up(done: int) -> bool:
        seen.append(done)
        return len(seen) == 2

    assert plan.run({0: 0}, look_up) == 8
    assert seen == [4, 8]
    assert target.view(np.uint16).tolist() == [1, 2, 3, 4, 0, 0]


def test_bytes_are_counted_as_they_are_written() -> None:
    pairs: list[Any] = [(np.zeros((2, 3), np.uint32), np.ones((2, 3), np.uint32)), (np.zeros(5, np.uint8), 1)]

    assert run_pairs(pairs) == 29


def test_plan_without_rows() -> None:
    assert CopyPlan(rows(), [], {}).run({}) == 0
