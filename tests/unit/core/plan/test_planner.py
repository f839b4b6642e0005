"""Node plans by hand-made layouts: pools, buckets, what is served, what is remembered, what is explained."""

from collections.abc import Sequence

import numpy as np
import pytest

from tests.property.worlds import deliver, expected, numbered, pools, topology_of
from weightd.core.layout.build import LayoutBuilder
from weightd.core.layout.columns import Layout
from weightd.core.plan.cache import PlanCache
from weightd.core.plan.explain import explain_plan, slots_nbytes, summarize
from weightd.core.plan.feeders import Feeder, explain_feeders, feeders
from weightd.core.plan.node_plan import TrainerSource
from weightd.core.plan.planner import plan_node
from weightd.core.plan.proof import CoverageProof, prove_coverage
from weightd.core.plan.served import needed_of, served_bucket, served_to
from weightd.core.plan.violations import BudgetError, Region
from weightd.core.units import EngineId, EngineRank, NodeId, RolloutRank, TrainerRank

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
SHAPE = (8, 6)
FULL = numbered(SHAPE, "int16")


def rank(k: int, engine: str = "E0") -> RolloutRank:
    return RolloutRank(EngineId(engine), EngineRank(k))


def part(kind: str, rows: tuple[int, int], columns: tuple[int, int] = (0, 6), base: int = 0, region: int = 0) -> Layout:
    """A dense part of the tensor."""
    b = LayoutBuilder()
    extent = (rows[1] - rows[0], columns[1] - columns[0])
    buffer = b.add_buffer("w", 2 * extent[0] * extent[1], "int16", kind, region, base)
    b.add_piece(b.add_tensor("w", SHAPE, "int16"), buffer, (rows[0], columns[0]), extent)
    return b.build()


@pytest.fixture
def proof() -> CoverageProof:
    """Rows halved over nodes a and b; on node c an engine cut by columns, and one that needs all."""
    topology = topology_of(["a/0", "b/0"], {"E0": ["c/0", "c/1"], "E1": ["c/2"]})
    trainers = [part("slot", (0, 4), base=128), part("slot", (4, 8))]
    ranks = {rank(0): part("param", (0, 8), (0, 4)), rank(1): part("param", (0, 8), (4, 6))}
    return prove_coverage(topology, trainers, {**ranks, rank(0, "E1"): part("param", (0, 8))})


def test_several_engines_of_a_node_share_what_crosses(proof: CoverageProof) -> None:
    plan = plan_node(proof, C, 1 << 20)

    # Both engines together need each of the 48 elements twice; each crosses once.
    assert [(b.source_node, b.nbytes) for b in plan.fetch.buckets] == [("a", 48), ("b", 48)]
    assert plan.fetch.gather.extent.tolist() == [[1, 1, 24]] * 2  # columns of all ranks together: read in one go
    assert deliver(plan, pools(proof.trainer_layouts, {"w": FULL}), proof.rollout_layouts) == {
        r: expected(proof.rollout_layouts[r], {"w": FULL}) for r in proof.ranks
    }


@pytest.mark.parametrize("limit", [2, 5, 16, 47, 48])
def test_buckets_keep_their_limit_and_have_no_gap(proof: CoverageProof, limit: int) -> None:
    plan = plan_node(proof, C, limit)

    assert sum(b.nbytes for b in plan.fetch.buckets) == 96
    assert max(b.nbytes for b in plan.fetch.buckets) <= limit
    for b in plan.fetch.buckets:
        rows = plan.fetch.gather.nbytes[b.first_row : b.last_row]
        assert int(rows.sum()) == b.nbytes
    assert [b.index for b in plan.fetch.buckets] == list(range(len(plan.fetch.buckets)))
    assert deliver(plan, pools(proof.trainer_layouts, {"w": FULL}), proof.rollout_layouts) == {
        r: expected(proof.rollout_layouts[r], {"w": FULL}) for r in proof.ranks
    }


def test_a_bucket_that_holds_no_element_is_refused(proof: CoverageProof) -> None:
    with pytest.raises(BudgetError) as caught:
        plan_node(proof, C, 1)

    assert caught.value.fields() == {"bucket_limit_bytes": 1, "parameter": "w", "element_nbytes": 2}


def test_larger_elements_come_first_so_that_all_lie_at_multiples_of_their_size() -> None:
    b = LayoutBuilder()
    sizes = {"uint8": 3, "int64": 1, "int16": 5, "float32": 1}
    for i, (dtype, n) in enumerate(sizes.items()):
        buffer = b.add_buffer(dtype, n * 8, dtype, "slot", base=64 * i)
        b.add_piece(b.add_tensor(dtype, (n,), dtype), buffer, (0,), (n,))
    layout = b.build()
    proof = prove_coverage(topology_of(["a/0"], {"E0": ["b/0"]}), [layout], {rank(0): layout})

    gather = plan_node(proof, B, 1 << 20).fetch.gather

    assert gather.itemsize.tolist() == [8, 4, 2, 1]
    assert (gather.target_offset % gather.itemsize).tolist() == [0, 0, 0, 0]
    assert gather.target_offset.tolist() == [0, 8, 12, 22]


def test_what_is_served_is_what_the_receiver_plans(proof: CoverageProof) -> None:
    plan = plan_node(proof, C, 20)
    memory = pools(proof.trainer_layouts, {"w": FULL})
    arrived = b""
    for node in (A, B):
        for bucket in served_to(plan, node):
            served = served_bucket(plan, bucket.index)
            sent = np.full(bucket.nbytes, 0xEE, np.uint8)
            for i in range(len(served.gather)):
                source: np.ndarray[tuple[int, ...], np.dtype[np.uint16]] = np.ndarray(
                    tuple(served.gather.extent[i].tolist()),
                    np.uint16,
                    memory[served.sources[int(served.gather.source[i])]],
                    int(served.gather.source_offset[i]),
                    tuple(served.gather.source_stride[i].tolist()),
                )
                begin, n = int(served.gather.target_offset[i]), source.nbytes
                assert (sent[begin : begin + n] == 0xEE).all()
                assert served.gather.target_stride[i, -1] in (0, 2)
                sent[begin : begin + n] = np.frombuffer(source.tobytes(), np.uint8)
            arrived += sent.tobytes()

    assert sorted(np.frombuffer(arrived, np.uint16).tolist()) == sorted(FULL.reshape(-1).tolist())
    assert needed_of(plan, A) == (TrainerSource(TrainerRank(0), 0),)
    assert served_to(plan, C) == ()
    with pytest.raises(IndexError):
        served_bucket(plan, len(plan.fetch.buckets))


def test_several_regions_of_one_trainer_rank() -> None:
    b = LayoutBuilder()
    for region, (name, rows) in enumerate([("low", 3), ("high", 5)]):
        buffer = b.add_buffer(name, rows * 12, "int16", "slot", region=2 * region, base=64 * region)
        tensor = b.tensor_row("w")
        b.add_piece(b.add_tensor("w", SHAPE, "int16") if tensor is None else tensor, buffer, (3 * region, 0), (rows, 6))
    trainer = b.build()
    proof = prove_coverage(
        topology_of(["a/0"], {"E0": ["a/0", "b/0"]}), [trainer], {rank(k): part("param", (0, 8)) for k in (0, 1)}
    )

    for node, k in ((A, 0), (B, 1)):
        plan = plan_node(proof, node, 1 << 20)
        got = deliver(plan, pools([trainer], {"w": FULL}), proof.rollout_layouts)
        assert got[rank(k)] == expected(proof.rollout_layouts[rank(k)], {"w": FULL})
    sources = plan_node(proof, A, 64).ranks[rank(0)].sources
    assert sources == (TrainerSource(TrainerRank(0), 0), TrainerSource(TrainerRank(0), 2))
    assert slots_nbytes(trainer) == 36 + 64 + 60


@pytest.mark.parametrize("shared", [False, True])
def test_what_an_engine_keeps_is_not_copied_however_many_dimensions_it_has(shared: bool) -> None:
    b = LayoutBuilder()
    b.add_piece(
        b.add_tensor("kept", (2, 2, 2), "int16"), b.add_buffer("kept", 16, "int16", "param"), (0,) * 3, (2,) * 3
    )
    b.add_kept("kept")
    held = LayoutBuilder()
    if shared:
        for builder, kind in ((b, "param"), (held, "slot")):
            buffer = builder.add_buffer("w", 8, "int16", kind)
            builder.add_piece(builder.add_tensor("w", (4,), "int16"), buffer, (0,), (4,))
    proof = prove_coverage(topology_of(["a/0"], {"E0": ["b/0"]}), [held.build()], {rank(0): b.build()})

    plan = plan_node(proof, B, 64)

    assert (plan.ranks[rank(0)].nbytes, plan.fetch.landing_nbytes) == ((8, 8) if shared else (0, 0))


def test_an_unchanged_epoch_is_not_proved_again(proof: CoverageProof) -> None:
    cache = PlanCache(kept=2)

    def ask(*reserved: int) -> CoverageProof:
        topology = topology_of(["a/0", "b/0"], {"E0": ["c/0", "c/1"], "E1": ["c/2"]}, reserved)
        return cache.proof(topology, proof.trainer_layouts, proof.rollout_layouts)

    first = ask()

    assert ask() is first
    assert cache.plan(first, C, 64) is cache.plan(first, C, 64)
    assert cache.plan(first, C, 64) is not cache.plan(first, C, 32)
    assert ask(0) is not first
    ask(1)
    assert ask() is not first  # two others were asked for since
    assert cache.plan(first, C, 64).digest == plan_node(proof, C, 64).digest  # a forgotten proof still plans
    assert cache.proof(proof.topology, proof.trainer_layouts, proof.rollout_layouts, only=[rank(0)]).whole is False


def test_the_summary_adds_up(proof: CoverageProof) -> None:
    summary = summarize(proof, {n: plan_node(proof, n, 32) for n in proof.topology.nodes})

    assert (summary.needed_nbytes, summary.local_nbytes, summary.landed_nbytes, summary.wire_nbytes) == (
        192,
        0,
        192,
        96,
    )
    assert [(x.source, x.target, x.nbytes, x.buckets) for x in summary.links] == [("a", "c", 48, 2), ("b", "c", 48, 2)]
    assert all(r.same_slot + r.same_node + r.remote == r.nbytes for r in summary.ranks)
    landing = summary.nodes[2].landing_nbytes
    assert [n.peak_nbytes for n in summary.nodes] == [2 * (128 + 48), 2 * 48, 2 * landing]
    assert "192 needed = 0 copied inside a node + 192 from landings; 96 cross between nodes" in explain_plan(summary)


def test_the_summary_says_of_whom_nothing_is_retained() -> None:
    topology = topology_of(["a/0", "b/0", "b/1"], {"E0": ["c/0"]})
    trainers = [part("slot", (0, 3)), part("live", (3, 5)), part("live", (5, 8))]
    proof = prove_coverage(topology, trainers, {rank(0): part("param", (0, 8))})
    summary = summarize(proof, {n: plan_node(proof, n, 32) for n in proof.topology.nodes})

    assert summary.live_ranks == (1, 2)
    assert "not retained: the bytes of 2 trainer ranks with live memory (1, 2)\n" in explain_plan(summary)


def test_who_feeds_which_rows() -> None:
    topology = topology_of(["a/0", "a/1", "b/0"], {"E0": ["a/0"]})
    trainers = [part("slot", (0, 3)), part("slot", (3, 5)), part("slot", (5, 8))]
    proof = prove_coverage(
        topology,
        trainers,
        {
            rank(0): part("param", (0, 8), (1, 6)),
        },
        only=[rank(0)],
    )

    fed = feeders(proof, rank(0), "w", (2, 6))

    def region(start: int, rows: int) -> Region:
        return Region((start, 1), (rows, 5), (1, 1))

    assert fed == (
        Feeder(region(2, 1), 0, "a", "same slot"),
        Feeder(region(3, 2), 1, "a", "same node"),
        Feeder(region(5, 1), 2, "b", "remote"),
    )
    text = explain_feeders(rank(0), "w", SHAPE, fed)
    assert text.splitlines()[0] == "w on E0[0]: 20 elements"
    assert "[5:6, 1:6] from trainer rank 2 on b (remote)" in text
    assert feeders(proof, rank(0), "w", (8, 9)) == ()
    assert "needs none of it" in explain_feeders(rank(0), "w", SHAPE, ())
    with pytest.raises(KeyError):
        feeders(proof, rank(0), "v")


def test_stepped_rows_are_cut_into_cells_that_cross_once() -> None:
    """Gate and up rows in turn on one engine, all rows on another of the same node."""
    topology = topology_of(["a/0"], {"E0": ["b/0", "b/1"], "E1": ["b/2"]})

    def stepped(first: int) -> Layout:
        b = LayoutBuilder()
        buffer = b.add_buffer("w", 48, "int16", "param")
        b.add_piece(b.add_tensor("w", SHAPE, "int16"), buffer, (first, 0), (4, 6), step=(2, 1))
        return b.build()

    ranks = {rank(0): stepped(0), rank(1): stepped(1), rank(0, "E1"): part("param", (0, 8))}
    proof = prove_coverage(topology, [part("slot", (0, 8))], ranks)
    plan = plan_node(proof, B, 1 << 20)

    assert sum(b.nbytes for b in plan.fetch.buckets) == FULL.nbytes
    assert len(plan.fetch.gather) == 2  # even rows, odd rows: two strided copies, not eight
    assert deliver(plan, pools([part("slot", (0, 8))], {"w": FULL}), ranks) == {
        r: expected(layout, {"w": FULL}) for r, layout in ranks.items()
    }


def copies_of(trainers: Sequence[Layout], target: Layout) -> list[list[int]]:
    topology = topology_of([f"a/{i}" for i in range(len(trainers))], {"E0": ["a/x"]})
    proof = prove_coverage(topology, trainers, {rank(0): target})
    extent: list[list[int]] = plan_node(proof, A, 64).ranks[rank(0)].copies.extent.tolist()
    return extent


def test_copies_have_as_few_dimensions_as_they_can() -> None:
    assert copies_of([part("slot", (0, 8))], part("param", (0, 8))) == [[1, 1, 48]]
    assert copies_of([part("slot", (0, 4)), part("slot", (4, 8))], part("param", (0, 8))) == [[1, 1, 24], [1, 1, 24]]
    halves = [part("slot", (0, 8), (0, 3)), part("slot", (0, 8), (3, 6))]
    assert copies_of(halves, part("param", (0, 8))) == [[1, 8, 3], [1, 8, 3]]


def test_more_than_three_varying_dimensions_become_several_rows() -> None:
    shape = (2, 3, 2, 3)

    def layout(kind: str, stride: tuple[int, ...]) -> Layout:
        b = LayoutBuilder()
        buffer = b.add_buffer("w", 2 * 36, "int16", kind)
        b.add_piece(b.add_tensor("w", shape, "int16"), buffer, (0,) * 4, shape, stride=stride)
        return b.build()

    trainer, target = layout("slot", (1, 2, 6, 12)), layout("param", (18, 6, 3, 1))  # stored in opposite orders

    assert copies_of([trainer], target) == [[3, 2, 3]] * 2
    topology = topology_of(["a/0"], {"E0": ["b/0"]})
    proof = prove_coverage(topology, [trainer], {rank(0): target})
    full = numbered(shape, "int16")
    got = deliver(plan_node(proof, B, 10), pools([trainer], {"w": full}), {rank(0): target})
    assert got == {rank(0): expected(target, {"w": full})}


def test_what_lies_between_two_needed_parts_is_not_fetched() -> None:
    topology = topology_of(["a/0"], {"E0": ["b/0", "b/1"], "E1": ["c/0"]})
    ranks = {rank(0): part("param", (0, 2)), rank(1): part("param", (5, 8)), rank(0, "E1"): part("param", (2, 5))}
    proof = prove_coverage(topology, [part("slot", (0, 8))], ranks)

    plan = plan_node(proof, B, 1 << 20)

    assert sum(b.nbytes for b in plan.fetch.buckets) == (2 + 3) * 12
    assert sorted(plan.fetch.gather.source_offset.tolist()) == [0, 60]
