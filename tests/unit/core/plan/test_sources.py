import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.property.worlds import topology_of
from weightd.core.layout.build import LayoutBuilder
from weightd.core.layout.columns import Layout
from weightd.core.plan.node_plan import LandingSource, NodePlan
from weightd.core.plan.planner import plan_node
from weightd.core.plan.proof import CoverageProof, prove_coverage
from weightd.core.plan.sources import spread
from weightd.core.roster.topology import Topology
from weightd.core.units import EngineId, EngineRank, NodeId, RolloutRank, TrainerRank

ROWS = 12


def whole(kind: str) -> Layout:
    """Twelve tensors of 100 bytes, all of them."""
    b = LayoutBuilder()
    buffer = b.add_buffer("all", 100 * ROWS, "uint8", kind)
    for i in range(ROWS):
        b.add_piece(b.add_tensor(f"t{i:02}", (100,), "uint8"), buffer, (0,), (100,), 100 * i)
    return b.build()


def proved(topology: Topology) -> CoverageProof:
    """All trainer ranks are replicas of each other, all rollout ranks need everything."""
    layouts = {r: whole("param") for r in topology.rollout_ranks()}
    return prove_coverage(topology, [whole("slot") for _ in topology.trainers], layouts)


def given_by(plan: NodePlan, k: int) -> dict[int | str, int]:
    """Bytes that a rank copies, by trainer rank."""
    ranked = plan.ranks[RolloutRank(EngineId("E0"), EngineRank(k))]
    found: dict[int | str, int] = {}
    for row, nbytes in zip(ranked.copies.source.tolist(), ranked.copies.nbytes.tolist(), strict=True):
        source = ranked.sources[row]
        who = "landing" if isinstance(source, LandingSource) else int(source.rank)
        found[who] = found.get(who, 0) + nbytes
    return found


def fetched_from(plan: NodePlan) -> dict[TrainerRank, int]:
    found: dict[TrainerRank, int] = {}
    for row, nbytes in zip(plan.fetch.gather.source.tolist(), plan.fetch.gather.nbytes.tolist(), strict=True):
        source = plan.fetch.sources[row]
        found[source.rank] = found.get(source.rank, 0) + nbytes
    return found


def test_the_same_slot_comes_first() -> None:
    plan = plan_node(proved(topology_of(["a/0", "a/1", "b/0"], {"E0": ["a/1", "a/0"]})), NodeId("a"), 1 << 20)

    assert (given_by(plan, 0), given_by(plan, 1)) == ({1: 1200}, {0: 1200})
    assert plan.fetch.buckets == ()


def test_the_same_node_comes_second_and_evenly() -> None:
    plan = plan_node(proved(topology_of(["a/0", "b/0", "a/1", "a/2"], {"E0": ["a/9"]})), NodeId("a"), 1 << 20)

    assert given_by(plan, 0) == {0: 400, 2: 400, 3: 400}


def test_what_a_slot_already_gives_counts() -> None:
    """Rank 0 feeds its own slot; of the other rank's bytes it then gives fewer."""
    plan = plan_node(proved(topology_of(["a/0", "a/1"], {"E0": ["a/0", "a/9"]})), NodeId("a"), 1 << 20)

    assert (given_by(plan, 0), given_by(plan, 1)) == ({0: 1200}, {1: 1200})


def test_other_nodes_are_asked_evenly_and_once() -> None:
    topology = topology_of(["a/0", "a/1", "b/0"], {"E0": ["c/0", "c/1", "d/0"]})
    proof = proved(topology)
    plan = plan_node(proof, NodeId("c"), 1 << 20)

    # Half from each node; node a's half again evenly from its two ranks.
    assert fetched_from(plan) == {TrainerRank(0): 300, TrainerRank(1): 300, TrainerRank(2): 600}
    assert [given_by(plan, k) for k in (0, 1)] == [{"landing": 1200}] * 2
    assert [b.source_node for b in plan.fetch.buckets] == ["a", "b"]


def test_nodes_do_not_all_begin_with_the_same_sender() -> None:
    proof = proved(topology_of(["b/0", "d/0"], {"E0": ["a/0", "c/0"]}))

    first = {n: plan_node(proof, NodeId(n), 1 << 20).fetch.buckets[0].source_node for n in "ac"}

    assert first == {"a": "b", "c": "d"}


def test_a_reserved_rank_is_a_source() -> None:
    topology = topology_of(["a/0"], {"E0": ["a/1"]}, reserved=[0])

    assert given_by(plan_node(proved(topology), NodeId("a"), 1 << 20), 0) == {0: 1200}


def test_a_node_without_rollout_ranks_fetches_nothing() -> None:
    proof = proved(topology_of(["a/0"], {"E0": ["b/1"]}))

    for node in ("a", "unheard of"):
        plan = plan_node(proof, NodeId(node), 1 << 20)
        assert (plan.ranks, plan.fetch.buckets, plan.fetch.landing_nbytes) == ({}, (), 0)


@given(st.lists(st.integers(1, 9), max_size=30), st.lists(st.integers(0, 40), min_size=1, max_size=5))
def test_loads_come_out_even_within_one_item(sizes: list[int], load: list[int]) -> None:
    nbytes = np.array(sizes, np.int64)

    pick = spread(nbytes, load)

    after = [n + int(nbytes[pick == i].sum()) for i, n in enumerate(load)]
    used = [after[i] for i in set(pick.tolist())]
    largest = max(sizes, default=0)
    assert sum(after) == sum(load) + sum(sizes)
    assert not used or max(used) <= min(after) + 2 * largest
    assert pick.tolist() == spread(nbytes, load).tolist()


@pytest.mark.parametrize("nodes", [("a", "b"), ("b", "a")])
def test_a_plan_does_not_depend_on_the_order_of_insertion(nodes: tuple[str, str]) -> None:
    topology = topology_of(["a/0", "b/0"], {"E0": ["c/0"]})
    proof = proved(topology)
    digests = {n: plan_node(proof, NodeId(n), 64).digest for n in (*nodes, "c")}

    assert digests["c"] == plan_node(proved(topology), NodeId("c"), 64).digest
