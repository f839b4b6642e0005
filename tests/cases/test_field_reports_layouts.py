"""Cases of the field that concern what trainer ranks hold and how it is moved, by their ids in the case log.

Uneven, nested and strided shards (O-09 to O-15), alignment (O-18), empty and 0-d tensors (O-19 to O-22), fused and
strided layouts (O-23 to O-26), experts and pipelines (O-54 to O-58), buckets and reused buffers (O-59 to O-66).
What engines receive goes through the real proof, plans and copies.  O-12 is in ``test_field_reports_trainer``.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.hooks.delivery import Held, delivered, differing, engine, held, proved
from tests.hooks.megatron_model import LAYERS, Engine, World, checkpoint
from tests.integration.cluster import Cluster, all_do, attached, value_of
from weightd.core.errors import Refused, WeightdError, flatten
from weightd.core.layout.boxes import Pieces
from weightd.core.layout.build import LayoutBuilder
from weightd.core.layout.cuts import chunk_sizes, offsets, span, spans
from weightd.core.layout.flat import flat_range
from weightd.core.plan.planner import plan_node
from weightd.core.units import NodeId, RolloutRank, TrainerRank
from weightd.core.wire.messages import SourceSlot
from weightd.daemon.local_nodes import short_folder
from weightd.link.fd_messages import PoolKey
from weightd.rollout_hooks.apply import PlanInUse
from weightd.rollout_hooks.declare import Declaration, Part
from weightd.rollout_hooks.faults import SourceChanged, TargetMoved
from weightd.rollout_hooks.targets import targets_of
from weightd.trainer_hooks.adapters.megatron import Column, Experts, GateUp, GroupedQKV, Megatron, Rule, Whole
from weightd.trainer_hooks.adapters.pick import holdings_of
from weightd.trainer_hooks.declared import declared_holdings
from weightd.trainer_hooks.describe import describe_holdings
from weightd.trainer_hooks.placements import Cut, held_pieces, held_runs, held_shape
from weightd.trainer_hooks.shards import Holdings, unfused
from weightd.trainer_hooks.slots import Slots

SECTIONS = {
    "uneven, nested and strided shards": range(9, 16),
    "alignment": range(18, 19),
    "zero-size and 0-d": range(19, 23),
    "layout": range(23, 27),
    "experts and pipeline": range(54, 59),
    "buckets": range(59, 67),
}

ELSEWHERE: dict[int, str] = {}
"""Cases of these sections that only an engine's framework can show, with the reason; none is left."""

HERE = Path(__file__).parent


def test_every_case_of_these_sections_is_tested_or_listed() -> None:
    files = (HERE / "test_field_reports_layouts.py", HERE / "test_field_reports_trainer.py")
    tested = {int(n) for f in files for n in re.findall(r"^def test_o(\d+)_", f.read_text(), re.MULTILINE)}
    wanted = {n for ids in SECTIONS.values() for n in ids}

    assert set() == wanted - tested - set(ELSEWHERE)


# ------------------------------------------------------------ helpers


def counted(*shape: int, dtype: torch.dtype = torch.float32, first: int = 0) -> Tensor:
    """Return different numbers, so that no permutation and no off-by-one can pass."""
    return torch.arange(first, first + torch.Size(shape).numel()).to(dtype).reshape(shape)


def local(name: str, full: Tensor, pieces: Pieces, tensor: Tensor) -> Held:
    """Return a rank that holds one local tensor, described by pieces."""
    shape, mine = tuple(full.shape), tuple(tensor.shape)
    return held(Holdings((unfused(name, shape, tensor.dtype, mine, pieces, lambda: tensor),)))


def declared(name: str, shape: Sequence[int], first: int, rows: Tensor) -> Held:
    """Return a rank that declares some rows."""
    rest = tuple(shape[1:])
    return held(declared_holdings([(name, shape, (first, *(0 for _ in rest)), tuple(rows.shape), rows)]))


def whole(**shapes: Sequence[int]) -> Callable[[int], Declaration]:
    """Return what every rank of an engine needs: whole tensors; ``__`` stands for a dot."""
    return whole_of("float32", {name.replace("__", "."): shape for name, shape in shapes.items()})


def whole_of(dtype: str, shapes: Mapping[str, Sequence[int]]) -> Callable[[int], Declaration]:
    """Return the same, in some element type."""

    def declare(k: int) -> Declaration:
        d = Declaration(dtype)
        for name, shape in shapes.items():
            d.replicated(name, shape)
        return d

    return declare


def one(name: str, full: Tensor, trainers: Sequence[Held]) -> Tensor:
    """Return the tensor that an engine of one rank gets."""
    return delivered(trainers, 1, whole(**{name: tuple(full.shape)}))[0][name]


def refusal(call: Callable[[], object]) -> tuple[list[str], str]:
    """Return codes and text of what a call is refused with."""
    with pytest.raises(WeightdError) as caught:
        call()
    return [e.code for e in flatten([caught.value])], str(caught.value)


# ------------------------------------------------------------ uneven, nested and strided shards


def test_o09_global_shape_is_not_rows_times_ranks() -> None:
    full = counted(10, 2)
    sizes = chunk_sizes(10, 4)
    ranks = [declared("w", (10, 2), at, full[at : at + n]) for at, n in zip(offsets(sizes), sizes, strict=True)]

    assert (3, 3, 3, 1) == sizes
    assert {(10, 2)} == {layout.tensors[0].shape for layout, _ in ranks}
    assert torch.equal(full, one("w", full, ranks))


@pytest.mark.parametrize("wrong", [(12, 2), (4, 2)])
def test_o09_another_global_shape_is_refused(wrong: tuple[int, int]) -> None:
    rank = declared("w", wrong, 0, torch.ones(wrong))
    codes, text = refusal(lambda: one("w", counted(10, 2), [rank]))

    assert codes == ["E_DESCRIPTION"]
    assert str(wrong) in text
    assert "(10, 2)" in text


NESTED = {
    8: {(0, 0): [0, 1], (0, 1): [4, 5], (1, 0): [2, 3], (1, 1): [6, 7]},
    6: {(0, 0): [0, 1], (0, 1): [3, 4], (1, 0): [2], (1, 1): [5]},
}
"""Rows by (dp, tp), tensor parallelism first."""


@pytest.mark.parametrize("rows", NESTED)
def test_o10_nested_shards_of_one_dimension_come_in_the_order_of_cutting(rows: int) -> None:
    full = counted(rows, 3)
    ranks, naive = [], []
    for (dp, tp), mine in NESTED[rows].items():
        cuts: list[tuple[Cut, ...]] = [(Cut(2, dp, split_factor=2), Cut(2, tp)), ()]
        ranks.append(local("w", full, held_pieces(full.shape, cuts), full[mine].clone()))
        naive.append(full[mine])

    assert torch.equal(full, one("w", full, ranks))
    assert not torch.equal(full, torch.cat(naive))  # the order of the mesh


def test_o10_read_in_the_order_of_the_mesh_the_rows_are_refused_or_differ() -> None:
    full = counted(8, 3)
    ranks = []
    for (dp, tp), mine in NESTED[8].items():
        cuts: list[tuple[Cut, ...]] = [(Cut(2, dp), Cut(2, tp)), ()]
        ranks.append(local("w", full, held_pieces(full.shape, cuts), full[mine].clone()))

    assert not torch.equal(full, one("w", full, ranks))


@pytest.mark.parametrize("order", list(permutations(range(4))), ids=lambda o: "".join(map(str, o)))
def test_o11_empty_shard_hides_no_real_one_in_any_order(order: tuple[int, ...]) -> None:
    full, sizes = counted(5), chunk_sizes(5, 4)
    begins = offsets(sizes)
    ranks = [declared("w", (5,), begins[r], full[begins[r] : begins[r] + sizes[r]]) for r in order]

    assert (2, 2, 1, 0) == sizes
    assert 5 == begins[3]
    assert torch.equal(full, one("w", full, ranks))


def test_o13_uneven_pieces_that_add_up() -> None:
    full, sizes = counted(1000), (384, 320, 296)
    ranks = [declared("w", (1000,), at, full[at : at + n]) for at, n in zip(offsets(sizes), sizes, strict=True)]

    assert torch.equal(full, one("w", full, ranks))


def test_o13_piece_that_is_24_too_long_is_refused() -> None:
    codes, text = refusal(lambda: declared("w", (1000,), 704, torch.ones(320)))

    assert "E_LAYOUT_BOX" in codes
    assert "[704, 1024)" in text


def test_o13_gap_is_named() -> None:
    full = counted(1000)
    ranks = [declared("w", (1000,), at, full[at : at + 320]) for at in (0, 320, 640)]
    with pytest.raises(Refused) as caught:
        one("w", full, ranks)

    fields = caught.value.violations[0].fields()
    assert ["E_ELEM_UNCOVERED"] == [v.code for v in caught.value.violations]
    assert 40 == fields["count"]
    assert "[960, 1000)" in str(caught.value)


def test_o14_dimension_that_two_placements_shard() -> None:
    """7 rows by 3, then by 2, as torch chunks; what is delivered follows from the declared offsets."""
    full = counted(7, 2)
    owned = {(0, 0): [0, 1], (0, 1): [2], (1, 0): [3, 4], (1, 1): [5], (2, 0): [6], (2, 1): []}
    ranks = []
    for (i, j), rows in owned.items():
        cuts: list[tuple[Cut, ...]] = [(Cut(3, i), Cut(2, j)), ()]
        assert rows == [r.start + n for r in held_runs(7, cuts[0]) for n in range(r.length)]
        assert (len(rows), 2) == held_shape((7, 2), cuts)
        ranks.append(declared("w", (7, 2), rows[0] if rows else 7, full[rows].reshape(-1, 2)))

    assert torch.equal(full, one("w", full, ranks))


def test_o15_shards_that_are_taken_for_the_tensor() -> None:
    """Half of an expert's rows on each of two ranks, said to be all of them."""
    full = counted(512, 8)
    halves = [held(holdings_of({"w": full[r * 256 : (r + 1) * 256].clone()})) for r in range(2)]
    codes, text = refusal(lambda: one("w", full, halves))

    assert codes == ["E_DESCRIPTION"]
    assert "(256, 8)" in text
    assert "(512, 8)" in text


def test_o15_shards_that_claim_the_same_rows() -> None:
    full = counted(512, 8)
    halves = [declared("w", (512, 8), 0, full[r * 256 : (r + 1) * 256]) for r in range(2)]
    with pytest.raises(Refused) as caught:
        one("w", full, halves)

    assert 256 * 8 == caught.value.violations[0].fields()["count"]
    assert "[256, 512)" in str(caught.value)


# ------------------------------------------------------------ alignment


def flat_rank(places: dict[str, tuple[int, int]], memory: Tensor) -> Held:
    """Return a rank that publishes from one flat buffer: (first element, elements) of each tensor."""
    builder = LayoutBuilder()
    buffer = builder.add_buffer("flat", memory.nbytes, "float32", "slot")
    for name, (first, count) in places.items():
        builder.add_piece(builder.add_tensor(name, (count,), "float32"), buffer, (0,), (count,), first)
    return builder.build(), memory.numpy().view(np.uint8)


def test_o18_alignment_between_parameters_is_part_of_the_offsets() -> None:
    memory = torch.full((16,), -1.0)
    fulls = {"a": counted(3), "b": counted(5, first=10), "c": counted(2, first=20)}
    for first, full in zip((0, 4, 12), fulls.values(), strict=True):
        memory[first : first + len(full)] = full
    needs = whole(a=(3,), b=(5,), c=(2,))
    right = delivered([flat_rank({"a": (0, 3), "b": (4, 5), "c": (12, 2)}, memory)], 1, needs)
    running_sum = delivered([flat_rank({"a": (0, 3), "b": (3, 5), "c": (8, 2)}, memory)], 1, needs)

    assert [] == differing(right[0], fulls)
    assert ["b", "c"] == differing(running_sum[0], fulls)


# ------------------------------------------------------------ zero-size and 0-d


@pytest.mark.parametrize("sizes", [(8, 0, 24), (32, 0)])
def test_o19_empty_parameter_in_a_flat_partition(sizes: tuple[int, ...]) -> None:
    """Two ranks with 16 elements of the flat buffer each; the empty one lies in a partition, or at its end."""
    names = "abc"[: len(sizes)]
    fulls = {name: counted(n, first=100 * i) for i, (name, n) in enumerate(zip(names, sizes, strict=True))}
    flat, ranks = torch.cat(list(fulls.values())), []
    for r in range(2):
        builder = LayoutBuilder()
        buffer = builder.add_buffer("flat", 64, "float32", "slot")
        for name, at, n in zip(names, offsets(sizes), sizes, strict=True):
            low, high = max(16 * r - at, 0), min(16 * (r + 1) - at, n)
            pieces = flat_range((n,), low, high, at + low - 16 * r)
            builder.add_pieces(pieces, builder.add_tensor(name, (n,), "float32"), buffer)
        ranks.append((builder.build(), flat[16 * r : 16 * (r + 1)].clone().numpy().view(np.uint8)))
    params = delivered(ranks, 1, whole(**{name: (n,) for name, n in zip(names, sizes, strict=True)}))

    assert [] == differing(params[0], fulls)


def test_o20_parameter_without_elements_keeps_its_shape() -> None:
    empty = torch.empty(0, 8)
    ranks = [held(holdings_of({"w": empty}))]

    assert [(0, 8)] == [t.shape for t in ranks[0][0].tensors]
    assert (0, 8) == one("w", empty, ranks).shape
    codes, text = refusal(lambda: one("w", empty, [held(holdings_of({"w": torch.empty(0)}))]))
    assert codes == ["E_DESCRIPTION"]
    assert "(0, 8)" in text


def test_o21_buckets_come_from_declared_shapes() -> None:
    """Bytes are those of the layout, never of a placeholder that a framework leaves in a parameter."""
    limit = 1 << 20
    fulls = {f"w{n}": torch.empty(256, 256) for n in range(100)}
    trainers = [held(holdings_of(fulls))]
    _, targets = engine(1, whole(**dict.fromkeys(fulls, (256, 256))))
    plan = plan_node(proved(trainers, {r: t.layout for r, t in targets.items()}, "b"), NodeId("a"), limit)

    assert 25 <= len(plan.fetch.buckets)
    assert max(b.nbytes for b in plan.fetch.buckets) <= limit
    assert 100 * 256 * 1024 == sum(b.nbytes for b in plan.fetch.buckets)


def test_o22_scalar_and_one_element_are_two_shapes() -> None:
    fulls = {"scalar": torch.tensor(2.5, dtype=torch.bfloat16), "one": torch.tensor([2.5], dtype=torch.bfloat16)}
    params = delivered([held(holdings_of(fulls))], 1, whole_of("bfloat16", {"scalar": (), "one": (1,)}))

    assert [] == differing(params[0], fulls)
    codes, _ = refusal(
        lambda: delivered([held(holdings_of(fulls))], 1, whole_of("bfloat16", {"scalar": (1,), "one": (1,)}))
    )
    assert codes == ["E_DESCRIPTION"]


# ------------------------------------------------------------ layout


def test_o23_strided_tensor_is_published_by_its_logical_order() -> None:
    strided = counted(4, 6).t()

    assert not strided.is_contiguous()
    assert torch.equal(strided.contiguous(), one("w", strided, [held(holdings_of({"w": strided}))]))


INTERLEAVED = torch.tensor([0.0, 1, 10, 20, 2, 3, 11, 21])
"""4 query heads 0 to 3, keys 10 and 11, values 20 and 21, by group."""


def test_o24_interleaved_groups_are_taken_apart_where_they_are_declared() -> None:
    megatron = Megatron(rules=[Rule("qkv", GroupedQKV("q", "k", "v", heads=4, groups=2, head_dim=1))])
    params = delivered([held(megatron.holdings({"qkv": INTERLEAVED}))], 1, whole(q=(4,), k=(2,), v=(2,)))

    expected = {"q": counted(4), "k": torch.tensor([10.0, 11]), "v": torch.tensor([20.0, 21])}
    assert [] == differing(params[0], expected)


def test_o24_interleaved_groups_that_nobody_declared_keep_their_own_name() -> None:
    ranks = [held(holdings_of({"qkv": INTERLEAVED}))]
    codes, _ = refusal(lambda: delivered(ranks, 1, whole(q=(4,), k=(2,), v=(2,))))

    assert torch.equal(INTERLEAVED, one("qkv", INTERLEAVED, ranks))
    assert set(codes) == {"E_NAME"}


def test_o25_grouped_gates_are_not_cut_at_the_midpoint() -> None:
    b, a = counted(2), counted(2, first=10)
    megatron = Megatron(rules=[Rule("ba", GateUp("b", "a", interleave=1))])
    ranks = [held(megatron.holdings({"ba": torch.stack([b, a], 1).reshape(-1)}))]

    def declare(k: int) -> Declaration:
        d = Declaration("float32")
        d.fused("ba", [Part(name, (2,), span(2, (1, 1), k)) for name in ("b", "a")])
        return d

    assert [[b[k], a[k]] for k in range(2)] == [list(params["ba"]) for params in delivered(ranks, 2, declare)]


def test_o26_engine_that_lays_its_weights_anew_after_loading_is_refused_by_name() -> None:
    params = {"w": torch.zeros(4, 6)}
    targets = targets_of(params, whole(w=(4, 6))(0), "E0[0]")
    targets.check_in_place("E0[0]", 1)  # type: ignore[arg-type]
    params["w"].data = params["w"].t().contiguous()
    with pytest.raises(TargetMoved) as caught:
        targets.check_in_place("E0[0]", 2)  # type: ignore[arg-type]

    assert (("w",), 2) == (caught.value.names, caught.value.version)


# ------------------------------------------------------------ experts and pipeline


def test_o54_stacked_experts_stay_stacked_or_are_split() -> None:
    """gate_up of 2 experts, 4 rows (gate :2, up 2:), 3 columns.  A rejecting consumer is refused before any byte."""
    stack = counted(2, 4, 3)
    as_stack = Megatron(rules=[Rule("fc1", Experts(Column("gate_up")))], experts=2)
    split = Megatron(rules=[Rule("fc1", Experts(GateUp("gate.{expert}", "up.{expert}")))], experts=2)
    ranks = [held(split.holdings({"fc1": stack}))]
    parts = {f"{part}.{e}": stack[e, 2 * j : 2 * j + 2] for j, part in enumerate(("gate", "up")) for e in range(2)}
    needs = whole(gate__0=(2, 3), gate__1=(2, 3), up__0=(2, 3), up__1=(2, 3))

    assert torch.equal(stack, one("gate_up", stack, [held(as_stack.holdings({"fc1": stack}))]))
    assert [] == differing(delivered(ranks, 1, needs)[0], parts)
    codes, _ = refusal(lambda: one("gate_up", stack, ranks))
    assert set(codes) == {"E_NAME"}


def test_o55_shared_expert_in_the_table_of_routed_ones() -> None:
    routed, shared = [counted(2, 3, first=10 * e) for e in range(4)], counted(2, 3, first=90)
    names = [*(f"experts.{e}" for e in range(4)), "shared"]
    table = torch.stack([*routed, shared])
    rules = [Rule("w{expert}", Column("experts.{expert}")), Rule("shared", Whole("shared"))]
    ranks = [
        held(
            Megatron(rules=rules, experts=4, expert_rank=r, expert_size=2).holdings(
                {"w0": routed[2 * r], "w1": routed[2 * r + 1], "shared": shared}
            )
        )
        for r in range(2)
    ]

    def declare(k: int, names: Sequence[str] = names) -> Declaration:
        d = Declaration("float32")
        slots = names[slice(*spans((3, 2))[k])]
        d.parameter("table", (len(slots), 2, 3))
        for at, name in enumerate(slots):
            d.take("table", name, (2, 3), (0, 0), (2, 3), (at, 0, 0))
        return d

    params = delivered(ranks, 2, declare)
    assert torch.equal(table, torch.cat([p["table"] for p in params]))
    codes, text = refusal(lambda: delivered(ranks, 2, lambda k: declare(k, [*names[:4], "experts.4"])))
    assert "E_NAME" in codes
    assert "experts.4" in text


def test_o56_stages_are_complete_only_together() -> None:
    world, tensors = World(pp=2), checkpoint()
    stages, needs = world.held(tensors), Engine(1)
    expected = needs.expected(tensors, 0)
    (params,) = delivered(stages, 1, needs.declaration)

    assert torch.equal(expected["0.qkv.weight"], params["0.qkv.weight"])
    assert torch.equal(expected["4.qkv.weight"], params["4.qkv.weight"])
    for alone in stages:
        codes, _ = refusal(partial(delivered, [alone], 1, needs.declaration))
        assert "E_NAME" in codes


def test_o57_unequal_stages_have_a_declared_offset() -> None:
    fulls = {f"layers.{n}.w": counted(2, 3, first=10 * n) for n in range(LAYERS)}

    def stages(second: range) -> list[Held]:
        found = []
        for layers, mine in ((range(2), range(2)), (second, range(2, 5))):
            megatron = Megatron(rules=[Rule("{layer}.w", Whole("layers.{layer}.w"))], layers=layers)
            found.append(held(megatron.holdings({f"{i}.w": fulls[f"layers.{n}.w"] for i, n in enumerate(mine)})))
        return found

    needs = whole(**{name.replace(".", "__"): (2, 3) for name in fulls})
    assert [] == differing(delivered(stages(range(2, 5)), 1, needs)[0], fulls)
    codes, text = refusal(lambda: delivered(stages(range(3, 6)), 1, needs))  # stage times own number of layers
    assert "E_NAME" in codes
    assert "layers.2.w" in text
    assert "layers.5.w" in text


def test_o58_stage_holds_and_takes_its_own_layers_only() -> None:
    fulls = {f"layers.{n}.w": counted(16, 8, first=200 * n) for n in range(8)}
    ranks = []
    for stage in range(2):
        megatron = Megatron(
            rules=[Rule("{layer}.w", Whole("layers.{layer}.w"))], layers=range(4 * stage, 4 * stage + 4)
        )
        ranks.append(held(megatron.holdings({f"{i}.w": fulls[f"layers.{4 * stage + i}.w"] for i in range(4)})))

    def declare(k: int) -> Declaration:
        return whole(**{f"layers__{n}__w": (16, 8) for n in range(4 * k, 4 * k + 4)})(k)

    params, targets = engine(2, declare)
    proof = proved(ranks, {r: t.layout for r, t in targets.items()}, ["a", "b"])
    plan = plan_node(proof, NodeId("a"), 1 << 20)
    nbytes = 4 * 16 * 8 * 4

    assert [nbytes, nbytes] == [len(payload) for _, payload in ranks]
    assert [nbytes, nbytes] == [plan.ranks[r].nbytes for r in targets]
    assert nbytes == plan.fetch.landing_nbytes  # the other stage's, once
    for k, got in enumerate(delivered(ranks, 2, declare, ["a", "b"])):
        assert [] == differing(got, {name: fulls[name] for name in params[k]})


# ------------------------------------------------------------ buckets


BIG = {"a": counted(100), "embedding": counted(393_216), "z": counted(7)}


def test_o59_tensor_that_is_larger_than_a_bucket() -> None:
    limit, trainers = 1 << 20, [held(holdings_of(BIG))]
    needs = whole(**{name: tuple(t.shape) for name, t in BIG.items()})
    _, targets = engine(1, needs)
    plan = plan_node(proved(trainers, {r: t.layout for r, t in targets.items()}, "b"), NodeId("a"), limit)

    assert max(b.nbytes for b in plan.fetch.buckets) <= limit
    assert 2 <= len(plan.fetch.buckets)
    assert [] == differing(delivered(trainers, 1, needs, "b", limit)[0], BIG)


def test_o60_sides_that_bucket_differently_have_different_plans() -> None:
    """Plans are compared by digest before anything moves; ``E_PLAN_DIGEST`` names the node that planned otherwise."""
    needs = whole(**{name: tuple(t.shape) for name, t in BIG.items()})
    _, targets = engine(1, needs)
    proof = proved([held(holdings_of(BIG))], {r: t.layout for r, t in targets.items()}, "b")
    digests = [plan_node(proof, NodeId("a"), limit).digest for limit in (2 << 20, 1 << 20, 1 << 20)]

    assert digests[0] != digests[1] == digests[2]


@pytest.mark.parametrize("small", [False, True])
def test_o61_ranks_with_different_numbers_of_buckets(small: bool) -> None:
    """Rank 0 fills three buckets; rank 1 none, or one."""
    big, extra = counted(3 * 256), counted(5, first=9000)
    ranks = [held(holdings_of({"big": big})), held(holdings_of({"small": extra} if small else {}))]
    fulls = {"big": big, **({"small": extra} if small else {})}
    needs = whole(**{name: tuple(t.shape) for name, t in fulls.items()})
    _, targets = engine(1, needs)
    plan = plan_node(proved(ranks, {r: t.layout for r, t in targets.items()}, ["b", "c"]), NodeId("a"), 1024)

    by_node = [b.source_node for b in plan.fetch.buckets]
    assert (3, int(small)) == (by_node.count(NodeId("b")), by_node.count(NodeId("c")))
    assert [] == differing(delivered(ranks, 1, needs, ["b", "c"], 1024)[0], fulls)


@pytest.fixture
def slots() -> Iterator[tuple[Tensor, Slots]]:
    """One parameter and the slots that it is published into."""
    param = counted(64)
    made = Slots(TrainerRank(0), describe_holdings(holdings_of({"w": param}), None, (), "a test"), "", 1)
    yield param, made
    made.close()


def test_o62_what_is_overwritten_after_publish_is_never_seen(slots: tuple[Tensor, Slots]) -> None:
    param, made = slots
    before = param.clone()
    made.fill(0)
    param.fill_(9)
    layout = describe_holdings(holdings_of({"w": param}), None, (), "a test").layout

    assert torch.equal(before, one("w", before, [(layout, made.pools[0].payload.copy())]))


def test_o63_generator_is_read_while_its_context_is_open() -> None:
    weights = {"a": counted(4), "b": counted(3, first=10)}
    described = describe_holdings(holdings_of((n, t) for n, t in weights.items()), None, (), "a test")
    made = Slots(TrainerRank(0), described, "", 1)
    for tensor in weights.values():
        tensor.add_(1)  # the delta is merged
    made.fill(0)
    merged = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in weights.values():
        tensor.sub_(1)
    params = delivered([(described.layout, made.pools[0].payload.copy())], 1, whole(a=(4,), b=(3,)))
    made.close()

    assert [] == differing(params[0], merged)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in which unix sockets have room."""
    made = short_folder("wd-")
    yield made
    shutil.rmtree(made)


@pytest.mark.processes
@pytest.mark.net
def test_o64_slot_is_reused_only_after_the_slowest_reader(folder: Path) -> None:
    """Two engines, one of which takes its time; the trainer publishes the next version while they read."""
    with Cluster(folder, ["a"]) as cluster:
        trainer = cluster.trainer(0, 1, engines={"E0": 1, "E1": 1})
        readers = [cluster.engine("E0", 0, 1), cluster.engine("E1", 0, 1, dwell_s=0.5)]
        attached([trainer, *readers])
        assert 1 == trainer.ask("publish")
        for version in (1, 2, 3):
            for reader in readers:
                reader.tell("receive")
            assert version + 1 == trainer.ask("publish")  # into the other slot, while they read
            trainer.ask("scribble")
            assert [version] * 2 == [value_of(reader.answer()) for reader in readers]
            assert [[]] * 2 == all_do(readers, "differing", contents=version)


def test_o65_values_do_not_change_after_they_were_handed_over(slots: tuple[Tensor, Slots]) -> None:
    param, made = slots
    made.fill(0)
    layout = describe_holdings(holdings_of({"w": param}), None, (), "a test").layout
    payload = made.pools[0].payload.copy()
    kept = delivered([(layout, payload)], 1, whole(w=(64,)))[0]["w"]
    payload[:] = 0xFF  # the slot is written again

    assert torch.equal(param, kept)


@pytest.mark.parametrize("when", ["before", "after"])
def test_o66_slot_that_is_still_written_is_noticed(slots: tuple[Tensor, Slots], when: str) -> None:
    """A slot is called ready while its second half is written: its generation is odd, or moves."""
    param, made = slots
    made.fill(0)
    pool = made.pools[0]
    params, targets = engine(1, whole(w=(64,)))
    layout = describe_holdings(holdings_of({"w": param}), None, (), "a test").layout
    proof = proved([(layout, pool.payload)], {r: t.layout for r, t in targets.items()})
    rank: RolloutRank = next(iter(targets))
    ranked = plan_node(proof, NodeId("a"), 1 << 20).ranks[rank]
    plan = PlanInUse(str(rank), "", ranked, {PoolKey(0, 0, 0): pool}, targets[rank])
    said = SourceSlot(0, 0, pool.generation)

    def writes_on(_: int) -> bool:
        pool.bump()
        return False

    if when == "before":
        pool.bump()
    with pytest.raises(SourceChanged) as caught:
        plan.apply(None, [said], writes_on if when == "after" else lambda _: False)  # type: ignore[arg-type]

    assert when == caught.value.when
    assert bool(torch.isnan(params[0]["w"]).all()) is (when == "before")
