"""The landing: made once, grown with its bytes, within the node's budget, describing what it holds."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.golden_text import check_golden
from weightd.core.errors import error_from_wire
from weightd.core.plan.node_plan import Bucket
from weightd.core.units import Attempt, Boot, NodeId, Term, Version, VersionKey
from weightd.daemon.bulk.faults import BudgetExceeded
from weightd.daemon.bulk.landing import Landing, MemoryBudget
from weightd.link.faults import MemoryExhausted
from weightd.link.header import BITMAP_BITS, Description, pool_nbytes
from weightd.link.memory import Pool

HELD = Description(Term(1), VersionKey(Version(7), Attempt(Boot(9), 1)), "ab" * 16, 3)


def bucket(index: int) -> Bucket:
    return Bucket(index, NodeId("a"), 0, 0, 0, 0)


@pytest.fixture
def budget() -> MemoryBudget:
    return MemoryBudget(100_000)


@pytest.fixture
def landing(budget: MemoryBudget) -> Iterator[Landing]:
    landing = Landing("the landing of run grpo-7", budget)
    yield landing
    landing.close()
    assert 0 == budget.taken_nbytes


def test_both_halves_are_made_once(landing: Landing, budget: MemoryBudget) -> None:
    landing.provide(5000)
    halves = landing.halves

    landing.provide(5000)
    landing.provide(10)

    assert [5000, 5000] == [half.payload_nbytes for half in landing.halves]
    assert halves == landing.halves
    assert 2 * (4096 + 8192) == budget.taken_nbytes


def test_a_landing_of_nothing_has_halves(landing: Landing) -> None:
    landing.provide(0)

    assert [0, 0] == [half.payload_nbytes for half in landing.halves]


def test_what_does_not_fit_the_budget_changes_nothing(landing: Landing, budget: MemoryBudget) -> None:
    landing.provide(5000)
    halves = landing.halves

    with pytest.raises(BudgetExceeded) as refused:
        landing.provide(50_000)

    assert halves == landing.halves
    assert not halves[0].closed
    assert (2 * (4096 + 53_248), 24_576, 100_000) == (
        refused.value.nbytes,
        refused.value.taken_nbytes,
        refused.value.limit_nbytes,
    )


def test_landings_share_the_budget(landing: Landing, budget: MemoryBudget) -> None:
    other = Landing("the landing of run other", budget)
    other.provide(30_000)
    with pytest.raises(BudgetExceeded):
        landing.provide(30_000)
    other.close()

    landing.provide(30_000)


def test_no_memory_leaves_the_budget_as_it_was(
    landing: Landing, budget: MemoryBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Pool] = []
    create = Pool.create

    def once(name: str, nbytes: int) -> Pool:
        if made:
            raise MemoryExhausted(name, nbytes, "mapping", "Cannot allocate memory", "")
        made.append(create(name, nbytes))
        return made[0]

    monkeypatch.setattr(Pool, "create", once)
    with pytest.raises(MemoryExhausted):
        landing.provide(10)

    assert ((), 0) == (landing.halves, budget.taken_nbytes)
    assert made[0].closed


def fill(landing: Landing, half: int, value: int) -> int:
    landing.halves.begin(half, HELD)
    landing.halves[half].payload[:] = value
    for index in range(3):
        landing.halves.mark(half, bucket(index))
    return landing.halves.finish(half)


def test_a_committed_version_survives_growth(landing: Landing) -> None:
    landing.provide(5000)
    generation = fill(landing, 0, 7)
    old = landing.halves

    landing.provide(9000)

    assert np.all(landing.halves[0].payload[:5000] == 7)
    assert (generation, HELD) == (landing.halves[0].generation, landing.halves[0].description)
    assert frozenset(range(3)) == landing.halves.landed(0, HELD)
    larger = landing.provide(12_000)
    landing.retire([old])
    assert [False, False] == [half.closed for half in old]  # an epoch in hand was planned over them
    landing.retire([larger])
    assert [True, True] == [half.closed for half in old]
    assert np.all(landing.halves[0].payload[:5000] == 7)
    assert landing.halves is larger


def test_outgrown_halves_count_against_the_budget_until_they_are_given_back(
    landing: Landing, budget: MemoryBudget
) -> None:
    landing.provide(5000)
    landing.provide(9000)
    both = budget.taken_nbytes

    landing.retire([])

    assert (2 * (pool_nbytes(5000) + pool_nbytes(9000)), 2 * pool_nbytes(9000)) == (both, budget.taken_nbytes)


def test_a_half_that_is_being_written_is_left_behind_by_growth(landing: Landing) -> None:
    landing.provide(5000)
    landing.halves.begin(1, HELD)

    landing.provide(9000)

    assert 0 == landing.halves[1].generation
    assert frozenset() == landing.halves.landed(1, HELD)


def test_the_generation_is_odd_while_bytes_land(landing: Landing) -> None:
    landing.provide(10)

    landing.halves.begin(0, HELD)
    assert 1 == landing.halves[0].generation
    landing.halves.begin(0, HELD)
    assert 1 == landing.halves[0].generation
    assert 2 == landing.halves.finish(0)
    assert 2 == landing.halves.finish(0)
    assert 0 == landing.halves[1].generation


def test_a_fetch_that_is_begun_again_keeps_what_landed(landing: Landing) -> None:
    landing.provide(10)
    landing.halves.begin(0, HELD)
    landing.halves.mark(0, bucket(2))

    landing.halves.begin(0, HELD)
    assert frozenset([2]) == landing.halves.landed(0, HELD)

    another = HELD._replace(key=VersionKey(Version(8), HELD.key.attempt))
    landing.halves.begin(0, another)
    assert frozenset() == landing.halves.landed(0, another)
    assert frozenset() == landing.halves.landed(0, HELD)


def test_a_bit_of_several_buckets_says_nothing_of_one(landing: Landing) -> None:
    landing.provide(10)
    many = HELD._replace(buckets=BITMAP_BITS + 1)
    landing.halves.begin(0, many)
    landing.halves.mark(0, bucket(0))

    assert frozenset() == landing.halves.landed(0, many)


def test_the_text_of_a_budget_adds_up() -> None:
    error = BudgetExceeded("the landing of run grpo-7", 6 << 30, 3 << 30, 8 << 30)

    check_golden("errors/E_MEMORY_BUDGET", str(error))
    assert str(error) == str(error_from_wire(error.to_wire()))
