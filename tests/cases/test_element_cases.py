"""Every row of the specification's element cases, by its id: delivered byte for byte, or refused as stated.

Tensors hold counted values in their dtype, padding is NaN, and what is expected are plain slices of the full tensor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.property.worlds import POISON, Box, deliver, flat_boxes, numbered, pools, topology_of
from weightd.core.dtypes import dtype_named
from weightd.core.errors import Refused, WeightdError
from weightd.core.layout.build import LayoutBuilder
from weightd.core.layout.columns import Layout
from weightd.core.layout.cuts import balanced_sizes, chunk_sizes
from weightd.core.layout.faults import BufferOverrun
from weightd.core.plan.blocks import scale_box
from weightd.core.plan.losses import elements_lost
from weightd.core.plan.node_plan import Copies, NodePlan, TrainerSource
from weightd.core.plan.planner import plan_node
from weightd.core.plan.proof import CoverageProof, prove_coverage
from weightd.core.plan.violations import (
    BlockCut,
    DescriptionConflict,
    ElementsAmbiguous,
    ElementsUncovered,
    NamesUnmatched,
    SourceUnused,
)
from weightd.core.units import EngineId, EngineRank, NodeId, RolloutRank, TrainerRank

Shard = tuple[str, Sequence[int], str, Sequence[Box]]
"""Name, shape, dtype, and boxes that lie one after another in one buffer."""


def rows(start: int, end: int, *rest: int) -> Box:
    """Rows [start, end) of a tensor whose other dimensions are whole."""
    return ((start, end - start, 1), *((0, n, 1) for n in rest))


def layout(
    kind: str,
    *shards: Shard,
    aliases: Sequence[tuple[str, str]] = (),
    unused: Sequence[tuple[str, tuple[int, int] | None]] = (),
    kept: Sequence[str] = (),
    padding: int = 3,
) -> Layout:
    """One buffer a tensor, its boxes dense in the order given, and padding behind them."""
    b = LayoutBuilder()
    base = 0
    for name, shape, dtype, boxes in shards:
        size = dtype_named(dtype).nbytes
        numel = [int(np.prod([e for _, e, _ in box], dtype=np.int64)) for box in boxes]
        nbytes = (sum(numel) + padding) * size
        tensor = b.add_tensor(name, shape, dtype)
        buffer = b.add_buffer(name, nbytes, dtype, kind, base=base if kind == "slot" else 0)
        base += -(-nbytes // 64) * 64
        offset = 0
        for box, n in zip(boxes, numel, strict=True):
            b.add_piece(
                tensor, buffer, [s for s, _, _ in box], [e for _, e, _ in box], offset, None, [k for *_, k in box]
            )
            offset += n
    for alias in aliases:
        b.add_alias(*alias)
    for name, span in unused:
        b.add_unused(name, span)
    for name in kept:
        b.add_kept(name)
    return b.build()


@dataclass
class Run:
    """One engine ``E0`` on one node, the trainers on another, unless said otherwise."""

    trainers: list[Layout]
    ranks: list[Layout]
    fulls: Mapping[str, NDArray[Any]]
    trainer_node: str = "t"
    plans: dict[NodeId, NodePlan] = field(default_factory=dict)

    def prove(self) -> CoverageProof:
        topology = topology_of(
            [f"{self.trainer_node}/s{r}" for r in range(len(self.trainers))],
            {"E0": [f"n{k // 2}/s{k}" for k in range(len(self.ranks))]},
        )
        return prove_coverage(topology, self.trainers, {rank(k): r for k, r in enumerate(self.ranks)})

    def delivered(self, proof: CoverageProof, limit: int = 1 << 20) -> list[list[bytearray]]:
        memory = pools(self.trainers, self.fulls)
        written: dict[RolloutRank, list[bytearray]] = {}
        for node in proof.topology.nodes:
            self.plans[node] = plan_node(proof, node, limit)
            written |= deliver(self.plans[node], memory, proof.rollout_layouts)
        return [written[rank(k)] for k in range(len(self.ranks))]

    def refused(self) -> tuple[WeightdError, ...]:
        with pytest.raises(Refused) as caught:
            self.prove()
        return caught.value.violations


def rank(k: int) -> RolloutRank:
    return RolloutRank(EngineId("E0"), EngineRank(k))


def packed(*parts: NDArray[Any], padding: int = 3) -> bytearray:
    """Parts one after another, then NaN padding: the oracle's buffer."""
    size = parts[0].itemsize if parts else 4
    return bytearray(b"".join(p.tobytes() for p in parts) + bytes([POISON]) * (padding * size))


def sources_of(plan: NodePlan, who: RolloutRank) -> list[tuple[int, int, int]]:
    """What a rank on the trainers' own node copies: (trainer rank, first element, elements), in fp32."""
    ranked = plan.ranks[who]
    found = []
    for i in range(len(ranked.copies)):
        source = ranked.sources[int(ranked.copies.source[i])]
        assert isinstance(source, TrainerSource)
        found.append((int(source.rank), int(ranked.copies.source_offset[i]) // 4, int(ranked.copies.nbytes[i]) // 4))
    return found


def source_runs(copies: Copies) -> int:
    """Contiguous stretches of the source that copies read."""
    total = 0
    for extent, stride, size in zip(copies.extent, copies.source_stride, copies.itemsize, strict=True):
        run, open_ = 1, True
        for n, s in zip(extent[::-1].tolist(), stride[::-1].tolist(), strict=True):
            if open_ and (n == 1 or s == run * size):
                run *= n
            else:
                open_ = False
        total += int(np.prod(extent)) // run
    return total


def test_l01_two_even_shards_to_four_uneven_ones() -> None:
    full = numbered((18,), "float32")
    run = Run(
        [layout("slot", ("w", (18,), "float32", [rows(s, s + 9)])) for s in (0, 9)],
        [layout("param", ("w", (18,), "float32", [rows(a, b)])) for a, b in ((0, 5), (5, 10), (10, 14), (14, 18))],
        {"w": full},
        trainer_node="n0",
    )
    proof = run.prove()

    got = run.delivered(proof)

    assert got == [[packed(full[a:b])] for a, b in ((0, 5), (5, 10), (10, 14), (14, 18))]
    assert sources_of(run.plans[NodeId("n0")], rank(0)) == [(0, 0, 5)]
    assert sources_of(run.plans[NodeId("n0")], rank(1)) == [(0, 5, 4), (1, 0, 1)]
    # k2 and k3 are on another node: s1[1, 5) and s1[5, 9) come as one stretch of 8 elements.
    gather = run.plans[NodeId("n1")].fetch.gather
    assert (gather.source_offset.tolist(), gather.nbytes.tolist()) == ([4], [32])


def test_l02_chunk_sizes_are_not_taken_for_balanced_ones() -> None:
    assert chunk_sizes(18, 4) == (5, 5, 5, 3)
    assert balanced_sizes(18, 4) == (5, 5, 4, 4)

    # A rank whose memory holds 4 rows cannot be described with 5.
    b = LayoutBuilder()
    b.add_piece(b.add_tensor("w", (18,), "float32"), b.add_buffer("w", 16, "float32", "slot"), (10,), (5,))
    with pytest.raises(Refused) as caught:
        b.build()
    assert [type(v) for v in caught.value.violations] == [BufferOverrun]

    # One rank that counts by chunks among ranks that are balanced claims its neighbour's row.
    spans = [(0, 5), (5, 10), (10, 15), (14, 18)]
    run = Run(
        [layout("slot", ("w", (18,), "float32", [rows(a, b)])) for a, b in spans],
        [layout("param", ("w", (18,), "float32", [rows(0, 18)]))],
        {},
    )
    [error] = run.refused()
    assert isinstance(error, ElementsAmbiguous)
    assert (error.count, error.first_index, error.owners) == (1, (14,), (2, 3))


def test_l03_a_rank_without_rows_is_registered_and_counted() -> None:
    full = numbered((5,), "float32")
    sizes = chunk_sizes(5, 4)
    spans = [(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(4)]
    shards = [[rows(a, b)] if b > a else [] for a, b in spans]
    run = Run(
        [layout("slot", ("w", (5,), "float32", s)) for s in shards],
        [layout("param", ("w", (5,), "float32", s)) for s in shards],
        {"w": full},
    )
    proof = run.prove()

    got = run.delivered(proof)

    assert sizes == (2, 2, 1, 0)
    assert got == [[packed(full[a:b])] if b > a else [packed()] for a, b in spans]
    assert rank(3) in proof.totals
    last = run.plans[NodeId("n1")].ranks[rank(3)]
    assert (len(last.copies), last.nbytes, last.sources) == (0, 0, ())


ZERO_CASES = [
    ("L04", (18, 3), 0, False, [1, 2, 1, 1], [15, 15, 12, 12]),
    ("L05", (18, 3), 0, True, [2, 2, 2, 1], [15, 15, 12, 12]),
    ("L06 ZeRO-1/2", (3, 18), 1, False, [3, 6, 3, 3], [15, 15, 12, 12]),
    ("L06 ZeRO-3", (3, 18), 1, True, [3, 6, 3, 3], [15, 15, 12, 12]),
]


@pytest.mark.parametrize("case,shape,dim,zero3,runs,elements", ZERO_CASES, ids=[c[0] for c in ZERO_CASES])
def test_l04_l05_l06_two_way_tensor_parallel_times_two_data_parallel(
    case: str, shape: tuple[int, int], dim: int, zero3: bool, runs: list[int], elements: list[int]
) -> None:
    full = numbered(shape, "float32")

    def cut(a: int, b: int) -> Box:
        return tuple((a, b - a, 1) if d == dim else (0, n, 1) for d, n in enumerate(shape))

    trainers = []
    for s in (0, 9):
        local = tuple(9 if d == dim else n for d, n in enumerate(shape))
        for dp in (0, 1):
            if not zero3:
                boxes = [cut(s, s + 9)]  # replicas: both data-parallel ranks hold the same box
            else:
                low, high = min(14 * dp, 27), min(14 * dp + 14, 27)
                boxes = [
                    tuple((a + s, e, k) if d == dim else (a, e, k) for d, (a, e, k) in enumerate(box))
                    for box in flat_boxes(local, low, high)
                ]
            trainers.append(layout("slot", ("w", shape, "float32", boxes), padding=1))
    spans = [(0, 5), (5, 10), (10, 14), (14, 18)]
    run = Run(trainers, [layout("param", ("w", shape, "float32", [cut(a, b)])) for a, b in spans], {"w": full})
    # All on one node, so that each rank's copies are those from the trainers themselves.
    topology = topology_of([f"n/s{i}" for i in range(4)], {"E0": ["n/a", "n/b", "n/c", "n/d"]})
    proof = prove_coverage(topology, run.trainers, {rank(k): r for k, r in enumerate(run.ranks)})
    plan = plan_node(proof, NodeId("n"), 64)

    got = deliver(plan, pools(run.trainers, run.fulls), proof.rollout_layouts)

    for k, (a, b) in enumerate(spans):
        assert got[rank(k)] == [packed(full[a:b] if dim == 0 else full[:, a:b])]
        assert proof.totals[rank(k)].elements == elements[k]
        assert source_runs(plan.ranks[rank(k)].copies) == runs[k]
        if dim == 0:  # head, middle and tail of a flat range are one copy again
            assert len(plan.ranks[rank(k)].copies) == runs[k]
    # The pad of each second partition belongs to nobody.
    assert proof.source.owned == proof.source.used == 54


def test_l07_flat_partitions_with_padding() -> None:
    full = numbered((10,), "float32")
    spans = [(0, 3), (3, 6), (6, 9), (9, 10)]
    run = Run(
        [layout("slot", ("w", (10,), "float32", [rows(a, b)]), padding=3 - (b - a)) for a, b in spans],
        [layout("param", ("w", (10,), "float32", [rows(0, 10)]))],
        {"w": full},
    )
    proof = run.prove()

    assert run.delivered(proof) == [[packed(full)]]
    assert [t.pieces for t in run.trainers] == [1, 1, 1, 1]
    assert [b.nbytes for t in run.trainers for b in t.buffers] == [12, 12, 12, 12]  # 3 elements each: 2 of pad
    assert proof.source.owned == 10


@pytest.mark.parametrize("heads_of", [[(0, 128), (128, 256), None, None], [(0, 256)]], ids=["autotp", "whole"])
def test_l08_key_value_heads_on_two_ranks_each(heads_of: list[tuple[int, int] | None]) -> None:
    full = numbered((256, 3), "bfloat16")
    run = Run(
        [layout("slot", ("k", (256, 3), "bfloat16", [rows(*s, 3)] if s else [])) for s in heads_of],
        [layout("param", ("k", (256, 3), "bfloat16", [rows(a, a + 128, 3)])) for a in (0, 0, 128, 128)],
        {"k": full},
    )
    proof = run.prove()

    assert run.delivered(proof) == [[packed(full[a : a + 128])] for a in (0, 0, 128, 128)]
    # Each head is on both ranks of a node and crosses to it once.
    assert [sum(b.nbytes for b in run.plans[NodeId(n)].fetch.buckets) for n in ("n0", "n1")] == [768, 768]


def fused(*parts: tuple[str, tuple[int, int], int, int]) -> Layout:
    """A parameter that fuses rows [a, b) of several tensors, one below the other."""
    b = LayoutBuilder()
    numel = sum((end - begin) * shape[1] for _, shape, begin, end in parts)
    buffer = b.add_buffer("fused.weight", numel * 4, "float32", "param")
    offset = 0
    for name, shape, begin, end in parts:
        b.add_piece(b.add_tensor(name, shape, "float32"), buffer, (begin, 0), (end - begin, shape[1]), offset)
        offset += (end - begin) * shape[1]
    return b.build()


QKV = {"q": (8, 4), "k": (4, 4), "v": (4, 4)}


@pytest.mark.parametrize("shapes", [QKV, {"gate": (6, 4), "up": (6, 4)}], ids=["qkv", "gate_up"])
def test_l09_fused_parameters_from_separate_tensors(shapes: dict[str, tuple[int, int]]) -> None:
    fulls = {name: numbered(shape, "float32", 100 * i) for i, (name, shape) in enumerate(shapes.items())}
    trainer = layout("slot", *((n, s, "float32", [rows(0, *s)]) for n, s in shapes.items()))
    halves = [[(n, s, k * s[0] // 2, (k + 1) * s[0] // 2) for n, s in shapes.items()] for k in (0, 1)]
    run = Run([trainer], [fused(*h) for h in halves], fulls)
    proof = run.prove()

    got = run.delivered(proof)

    for k, parts in enumerate(halves):
        assert got[k] == [packed(*(fulls[n][a:b] for n, _, a, b in parts), padding=0)]


def test_l09_a_missing_part_of_a_fused_parameter_is_named_with_its_range() -> None:
    halves = [[(n, s, k * s[0] // 2, (k + 1) * s[0] // 2) for n, s in QKV.items()] for k in (0, 1)]
    without_k = {n: s for n, s in QKV.items() if n != "k"}
    trainer = layout("slot", *((n, s, "float32", [rows(0, *s)]) for n, s in without_k.items()))

    names, error = Run([trainer], [fused(*h) for h in halves], {}).refused()

    assert isinstance(names, NamesUnmatched)
    assert names.unmatched_target == ("k",)
    assert isinstance(error, ElementsUncovered)
    assert (error.parameter, error.count, error.covered, error.first_index) == ("k", 16, 0, (0, 0))
    assert "all of it" in str(error)

    # One trainer rank of two is without its half of k.
    half = layout("slot", *((n, s, "float32", [rows(0, s[0] // 2, s[1])]) for n, s in QKV.items()))
    lacking = layout(
        "slot", *((n, s, "float32", [rows(s[0] // 2, s[0], s[1])] if n != "k" else []) for n, s in QKV.items())
    )
    [error] = Run([half, lacking], [fused(*h) for h in halves], {}).refused()
    assert isinstance(error, ElementsUncovered)
    assert (error.count, error.covered, error.needed) == (8, 8, 16)
    assert (error.first_index, error.needed_by, error.owners) == ((2, 0), ("E0[1]",), (0,))
    assert "rows [2, 4)" in str(error)


def test_l10_padded_vocabulary_only_if_declared() -> None:
    full = numbered((32064, 2), "bfloat16")
    trainers = [("emb", (32064, 2), "bfloat16", [rows(a, a + 16032, 2)]) for a in (0, 16032)]
    ranks = [layout("param", ("emb", (32000, 2), "bfloat16", [rows(a, a + 16000, 2)])) for a in (0, 16000)]
    declared = [layout("slot", t, unused=[("emb", (32000, 32064))]) for t in trainers]
    run = Run(declared, ranks, {"emb": full})
    proof = run.prove()

    assert run.delivered(proof) == [[packed(full[:16000])], [packed(full[16000:32000])]]
    assert (proof.source.owned, proof.source.used, proof.source.declared) == (64128, 64000, 128)

    for unused in ([], [("emb", (32001, 32064))], [("emb", (32000, 32063))]):
        silent = [layout("slot", t, unused=unused) for t in trainers]
        [error] = Run(silent, ranks, {}).refused()
        assert isinstance(error, DescriptionConflict)
        assert "64 rows; a padded vocabulary" in str(error)


def test_l10_an_engine_of_the_trainers_shape_leaves_padding_unused_only_if_declared() -> None:
    trainer: Shard = ("emb", (10, 2), "bfloat16", [rows(0, 10, 2)])
    ranks = [layout("param", ("emb", (10, 2), "bfloat16", [rows(0, 8, 2)]))]

    [error] = Run([layout("slot", trainer)], ranks, {}).refused()

    assert isinstance(error, SourceUnused)
    assert (error.owned, error.used, error.declared, error.count, error.first_index) == (20, 16, 0, 4, (8, 0))
    assert Run([layout("slot", trainer, unused=[("emb", (8, 10))])], ranks, {}).prove().source.declared == 4


TIED = ("lm_head", "emb")


@pytest.mark.parametrize(
    "trainer_names,trainer_alias,rank_names,rank_alias,writes",
    [
        (["emb"], [TIED], ["emb"], [TIED], 1),
        (["emb"], [], ["emb"], [TIED], 1),
        (["emb"], [TIED], ["emb", "lm_head"], [], 2),
        (["lm_head"], [], ["emb"], [TIED], 1),
        (["emb"], [TIED], ["lm_head"], [("emb", "lm_head")], 1),
    ],
    ids=["tied on both", "tied on the engine", "tied on the trainer", "trainer knows the alias", "other name first"],
)
def test_l11_tied_embedding(
    trainer_names: list[str],
    trainer_alias: list[tuple[str, str]],
    rank_names: list[str],
    rank_alias: list[tuple[str, str]],
    writes: int,
) -> None:
    full = numbered((6, 2), "float32")
    shape = (6, 2)
    trainers = [
        layout("slot", *((n, shape, "float32", [rows(a, a + 3, 2)]) for n in trainer_names), aliases=trainer_alias)
        for a in (0, 3)
    ]
    ranks = [layout("param", *((n, shape, "float32", [rows(0, 6, 2)]) for n in rank_names), aliases=rank_alias)]
    run = Run(trainers, ranks, {"emb": full, "lm_head": full})
    proof = run.prove()

    assert run.delivered(proof) == [[packed(full)] * writes]
    assert proof.totals[rank(0)].nbytes == writes * full.nbytes
    assert sum(b.nbytes for b in run.plans[NodeId("n0")].fetch.buckets) == full.nbytes  # it crosses once in any case


def test_l11_an_engine_that_ties_what_the_trainer_holds_apart_is_refused() -> None:
    shape = (6, 2)
    trainer = layout("slot", *((n, shape, "float32", [rows(0, 6, 2)]) for n in ("emb", "lm_head")))
    ranks = [layout("param", ("emb", shape, "float32", [rows(0, 6, 2)]), aliases=[TIED])]

    [error] = Run([trainer], ranks, {}).refused()

    assert isinstance(error, SourceUnused)
    assert (error.parameter, error.count) == ("lm_head", 12)


@pytest.mark.parametrize("order", ["in order", "permuted"])
def test_l12_eight_expert_groups_to_four(order: str) -> None:
    names = [f"experts.{i}.w" for i in range(64)]
    fulls = {n: numbered((2, 3), "bfloat16", 10 * i) for i, n in enumerate(names)}
    home = list(range(64)) if order == "in order" else np.random.default_rng(5).permutation(64).tolist()

    def shards(ids: Sequence[int]) -> list[Shard]:
        return [(names[i], (2, 3), "bfloat16", [rows(0, 2, 3)]) for i in ids]

    groups = [home[16 * k : 16 * k + 16] for k in range(4)]
    run = Run(
        [layout("slot", *shards(range(8 * r, 8 * r + 8))) for r in range(8)],
        [layout("param", *shards(ids)) for ids in groups],
        fulls,
    )
    proof = run.prove()

    assert run.delivered(proof, limit=50) == [[packed(fulls[names[i]]) for i in ids] for ids in groups]
    assert [t.pieces for t in run.trainers] == [8] * 8
    assert [proof.totals[rank(k)].pieces for k in range(4)] == [16] * 4


def test_l13_scales_follow_blocks_and_a_cut_inside_a_block_is_refused() -> None:
    assert scale_box("w", (512, 256), (256, 0), (256, 256), (128, 128)) == ((2, 0), (2, 2))

    with pytest.raises(BlockCut) as caught:
        scale_box("w", (512, 256), (192, 0), (192, 256), (128, 128))  # 512 rows over ranks of 192

    error = caught.value
    assert error.code == "E_SHAPE"
    assert (error.parameter, error.dim, error.block, error.cut) == ("w", 0, 128, 192)
    assert all(part in str(error) for part in ("E_SHAPE: w", "192", "[128, 256)", "192 = 128 + 64"))


def test_l14_a_source_that_dies_after_the_plan_leaves_its_elements_missing() -> None:
    def trainers(spans: Sequence[tuple[int, int]]) -> list[Layout]:
        return [layout("slot", ("w", (18, 3), "float32", [rows(a, b, 3)])) for a, b in spans]

    ranks = [layout("param", ("w", (18, 3), "float32", [rows(a, a + 9, 3)])) for a in (0, 9)]
    proof = Run(trainers([(0, 5), (5, 10), (10, 14), (14, 18)]), ranks, {}).prove()

    lost = elements_lost(proof, TrainerRank(1))

    assert (lost.held, lost.lost, lost.nbytes) == (15, 15, 60)
    [error] = lost.violations
    assert (error.count, error.covered, error.needed, error.first_index) == (15, 39, 54, (5, 0))
    assert (error.owners, error.needed_by) == ((0, 2, 3), ("E0[0]", "E0[1]"))

    replicated = Run(trainers([(0, 9), (0, 9), (9, 18)]), ranks, {}).prove()
    assert elements_lost(replicated, TrainerRank(0)).lost == 0
    assert elements_lost(replicated, TrainerRank(2)).lost == 27
