from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.property.worlds import topology_of
from weightd.core.errors import WeightdError
from weightd.core.layout.build import LayoutBuilder
from weightd.core.layout.columns import Layout
from weightd.core.plan.copies import columns_of, take
from weightd.core.plan.holdings import needed_nbytes
from weightd.core.plan.message import check_rank_plan, decode_rank_plan, encode_rank_plan
from weightd.core.plan.node_plan import Copies, LandingSource, RankPlan, Source, TrainerSource
from weightd.core.plan.plan_faults import CopyOutOfBounds, MalformedPlan, PlanMismatch
from weightd.core.plan.planner import plan_node
from weightd.core.plan.proof import prove_coverage
from weightd.core.units import EngineId, EngineRank, NodeId, RolloutRank, TrainerRank

E0 = RolloutRank(EngineId("E0"), EngineRank(0))


def shard(start: int, rows: int, kind: str) -> Layout:
    b = LayoutBuilder()
    buffer = b.add_buffer("w", rows * 6, "int16", kind, base=64 if kind == "slot" else 0)
    b.add_piece(b.add_tensor("w", (6, 3), "int16"), buffer, (start, 0), (rows, 3))
    return b.build()


@pytest.fixture
def target() -> Layout:
    return shard(0, 6, "param")


@pytest.fixture
def plan(target: Layout) -> RankPlan:
    """Three rows from a trainer on the same node, three from the landing."""
    topology = topology_of(["a/0", "b/0"], {"E0": ["a/1"]})
    proof = prove_coverage(topology, [shard(0, 3, "slot"), shard(3, 3, "slot")], {E0: target})
    return plan_node(proof, NodeId("a"), 64).ranks[E0]


POOLS: dict[Source, int] = {TrainerSource(TrainerRank(0), 0): 82, LandingSource(): 18}


def changed(plan: RankPlan, column: str, row: int, value: Any) -> RankPlan:
    values = getattr(plan.copies, column).copy()
    values[row] = value
    return replace(plan, copies=replace(plan.copies, **{column: values}))


def test_a_plan_survives_the_way_to_a_hook(plan: RankPlan, target: Layout) -> None:
    arrived = decode_rank_plan(encode_rank_plan(plan))

    check_rank_plan(arrived, target, POOLS)
    assert (arrived.rank, arrived.sources, arrived.nbytes) == (
        E0,
        (TrainerSource(TrainerRank(0), 0), LandingSource()),
        36,
    )
    assert arrived.target_digest == plan.target_digest
    for mine, theirs in zip(columns_of(plan.copies), columns_of(arrived.copies), strict=True):
        assert mine.tolist() == theirs.tolist()
    assert encode_rank_plan(arrived) == encode_rank_plan(plan)


@pytest.mark.parametrize(
    "field,value",
    [
        ("format", 2),
        ("format", "1"),
        ("source", b"\0" * 15),
        ("extent", b""),
        ("rows", -1),
        ("rows", 1 << 40),
        ("k", -1),
        ("sources", [[0, -1]]),
        ("sources", [[-2, 0]]),
        ("sources", [[0]]),
        ("nbytes", 1.5),
        ("more", 1),
    ],
)
def test_bytes_that_are_no_plan(plan: RankPlan, field: str, value: Any) -> None:
    message = msgspec.msgpack.decode(encode_rank_plan(plan))
    message[field] = value

    with pytest.raises(MalformedPlan):
        decode_rank_plan(msgspec.msgpack.encode(message))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"\x01"])
def test_other_bytes(data: bytes) -> None:
    with pytest.raises(MalformedPlan):
        decode_rank_plan(data)


BIG = 1 << 62


@pytest.mark.parametrize(
    "column,value,fault",
    [
        ("source", 2, PlanMismatch),
        ("source", -1, PlanMismatch),
        ("target", 1, PlanMismatch),
        ("itemsize", 4, PlanMismatch),
        ("itemsize", 0, PlanMismatch),
        ("source_offset", 65, CopyOutOfBounds),  # no multiple of the element
        ("source_offset", 66, CopyOutOfBounds),  # 18 bytes from there end at 84 of 82
        ("source_offset", -2, CopyOutOfBounds),
        ("source_offset", BIG, CopyOutOfBounds),
        ("target_offset", 20, CopyOutOfBounds),
        ("target_offset", -BIG, CopyOutOfBounds),
        ("extent", [1, 1, 0], CopyOutOfBounds),
        ("extent", [1, 1, BIG], CopyOutOfBounds),
        ("extent", [BIG, BIG, BIG], CopyOutOfBounds),
        ("extent", [2, 1, 9], CopyOutOfBounds),  # twice the same place
        ("extent", [1, 1, 8], PlanMismatch),  # not the bytes that were promised
        ("source_stride", [0, 0, -2], CopyOutOfBounds),
        ("source_stride", [0, 0, 3], CopyOutOfBounds),
        ("target_stride", [0, 0, BIG], CopyOutOfBounds),
        ("target_stride", [0, 0, 0], CopyOutOfBounds),
    ],
)
def test_rows_that_leave_their_memory(
    plan: RankPlan, target: Layout, column: str, value: Any, fault: type[WeightdError]
) -> None:
    with pytest.raises(fault):
        check_rank_plan(changed(plan, column, 0, value), target, POOLS)


def test_a_plan_for_another_layout_or_other_pools(plan: RankPlan, target: Layout) -> None:
    with pytest.raises(PlanMismatch, match="digest of the layout"):
        check_rank_plan(plan, shard(0, 5, "param"), POOLS)
    with pytest.raises(PlanMismatch, match="the landing"):
        check_rank_plan(plan, target, {TrainerSource(TrainerRank(0), 0): 82})
    with pytest.raises(CopyOutOfBounds, match="the landing of 17 bytes"):
        check_rank_plan(plan, target, {**POOLS, LandingSource(): 17})


def test_a_plan_that_leaves_out_what_the_rank_needs(plan: RankPlan, target: Layout) -> None:
    short = replace(plan, copies=take(plan.copies, slice(0, 1)), nbytes=int(plan.copies.nbytes[0]))

    with pytest.raises(PlanMismatch) as raised:
        check_rank_plan(short, target, POOLS)
    assert (raised.value.fact, raised.value.planned, raised.value.found) == ("bytes of a version", "18", "36")


def test_what_a_rank_keeps_is_not_planned() -> None:
    b = LayoutBuilder()
    for name in ("w", "cos"):
        b.add_piece(b.add_tensor(name, (6, 3), "int16"), b.add_buffer(name, 36, "int16", "param"), (0, 0), (6, 3))
    b.add_kept("cos")

    assert needed_nbytes(b.build()) == 36


def test_an_empty_plan_fits(target: Layout) -> None:
    row, wide = np.zeros(0, np.int64), np.zeros((0, 3), np.int64)
    empty = Copies(row, row, wide, row, row, wide, wide, row)
    none = LayoutBuilder().build()
    topology = topology_of(["a/0"], {"E0": ["a/0"]})
    plan = plan_node(prove_coverage(topology, [none], {E0: none}), NodeId("a"), 64).ranks[E0]

    check_rank_plan(decode_rank_plan(encode_rank_plan(plan)), none, {})
    assert len(plan.copies) == len(empty) == 0
