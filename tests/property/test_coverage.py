"""The element proof against counting single elements, and the plan against slices of the full tensors."""

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from tests.property.worlds import (
    World,
    deliver,
    elements,
    expected,
    pools,
    remote_nbytes,
    truth,
    worlds,
)
from weightd.core.errors import Refused
from weightd.core.plan.holdings import needed_nbytes
from weightd.core.plan.planner import plan_node
from weightd.core.plan.proof import prove_coverage
from weightd.core.plan.violations import ElementsAmbiguous, ElementsUncovered, Region, SourceUnused


def _members(regions: tuple[Region, ...]) -> list[tuple[int, ...]]:
    return [i for r in regions for i in elements(tuple(zip(r.start, r.extent, r.step, strict=True)))]


@given(st.booleans().flatmap(lambda damaged: worlds(damaged=damaged)))
def test_verdict_is_that_of_counting_elements(world: World) -> None:
    trainers, rollouts = world.layouts()
    want: dict[tuple[str, str], frozenset[tuple[int, ...]]] = {}
    for n, t in enumerate(world.tensors):
        so = truth(world, n)
        for code, which in (
            ("E_ELEM_UNCOVERED", so.missing),
            ("E_ELEM_AMBIGUOUS", so.ambiguous),
            ("E_SRC_UNUSED", so.unused),
        ):
            if which:
                want[t.name, code] = which
    try:
        proof = prove_coverage(world.topology, trainers, rollouts)
        got: dict[tuple[str, str], frozenset[tuple[int, ...]]] = {}
    except Refused as e:
        got = {}
        for v in e.violations:
            assert isinstance(v, ElementsUncovered | ElementsAmbiguous | SourceUnused)
            listed = _members(v.ranges)
            assert len(listed) == len(set(listed)) == v.count
            assert v.first_index == min(listed)
            assert v.ranges_left_out == 0
            got[v.parameter, v.code] = frozenset(listed)
            if isinstance(v, ElementsUncovered):
                assert v.covered + v.count == v.needed
            if isinstance(v, SourceUnused):
                assert v.used + v.declared + v.count == v.owned
    else:
        for rank, pieces in world.needed.items():
            numel = sum(prod(e for _, e, _ in box) for _, box in pieces)
            assert proof.totals[rank].elements == numel

    assert got == want


@given(worlds(), st.integers(1, 200))
def test_delivered_bytes_are_slices_of_the_full_tensors(world: World, limit: int) -> None:
    trainers, rollouts = world.layouts()
    limit = max(limit, 8)

    proof = prove_coverage(world.topology, trainers, rollouts)

    fulls = world.fulls()
    memory = pools(trainers, fulls)
    for node in world.topology.nodes:
        plan = plan_node(proof, node, limit)
        got = deliver(plan, memory, rollouts)
        for rank, buffers in got.items():
            assert buffers == expected(rollouts[rank], fulls)
            assert plan.ranks[rank].nbytes == proof.totals[rank].nbytes == needed_nbytes(rollouts[rank])
        fetched = sum(b.nbytes for b in plan.fetch.buckets)
        assert fetched == remote_nbytes(world, node) == int(plan.fetch.gather.nbytes.sum())
        assert all(0 < b.nbytes <= limit for b in plan.fetch.buckets)
        for b in plan.fetch.buckets:
            senders = {
                world.topology.trainers[plan.fetch.sources[int(s)].rank].node
                for s in plan.fetch.gather.source[b.first_row : b.last_row]
            }
            assert senders == {b.source_node} != {node}


@given(worlds())
def test_a_node_that_plans_alone_has_the_plan_of_the_leader(world: World) -> None:
    trainers, rollouts = world.layouts()
    proof = prove_coverage(world.topology, trainers, rollouts)
    for node in world.topology.nodes:
        mine = world.topology.rollout_ranks(node)
        alone = prove_coverage(world.topology, trainers, {r: rollouts[r] for r in mine}, only=mine)

        assert plan_node(alone, node, 64).digest == plan_node(proof, node, 64).digest
