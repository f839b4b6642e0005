"""One pass over a plan that is built: whole, stopped, or discarded because a source did not stand still."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.unit.daemon.test_epochs import LAYOUTS, A, planned, spec
from weightd.core.units import Attempt, Boot, EngineId, EngineRank, RolloutRank, Version, VersionKey
from weightd.core.wire.messages import SourceSlot
from weightd.link.fd_messages import LANDING, PoolKey
from weightd.link.memory import Pool
from weightd.rollout_hooks.apply import PlanInUse, readable
from weightd.rollout_hooks.faults import PlanUnusable, SourceChanged
from weightd.rollout_hooks.targets import targets_of

WHO = "E0[0]"
KEY = VersionKey(Version(8), Attempt(Boot(255), 1))
SLOTS = (SourceSlot(0, 1, 2), SourceSlot(LANDING, 0, 2))
"""Trainer rank 0 holds rows 0-2 in its slot 1, the landing row 3 in its half 0."""


class Rank:
    """A rank that needs four rows: three of a local trainer rank, one from the landing."""

    def __init__(self) -> None:
        self.w = torch.full((4, 3), float("nan"))
        plan = planned(spec()).plans[A].ranks[RolloutRank(EngineId("E0"), EngineRank(0))]
        keys = [PoolKey(0, 0, 0), PoolKey(0, 1, 0), PoolKey(LANDING, 0, 0), PoolKey(LANDING, 1, 0)]
        self.pools = {key: Pool.create(str(key), 4096) for key in keys}
        for pool in self.pools.values():
            pool.payload[:] = 0xFF
            pool.bump()
            pool.bump()
        self.floats(PoolKey(0, 1, 0))[:9] = np.arange(9)
        self.floats(PoolKey(LANDING, 0, 0))[:3] = np.arange(9, 12)
        self.plan = PlanInUse(WHO, "digest", plan, self.pools, targets_of({"w": self.w}, LAYOUTS["e0"], WHO))

    def floats(self, key: PoolKey) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        return self.pools[key].payload[: 4096 // 4 * 4].view(np.float32)


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.plan.close()


def test_a_pass_reads_the_slots_that_the_order_names(rank: Rank) -> None:
    assert rank.plan.apply(KEY, SLOTS, lambda done: False) == 48
    assert rank.w.tolist() == torch.arange(12.0).reshape(4, 3).tolist()


def test_a_source_that_is_overwritten_while_it_is_read_is_found_out(rank: Rank) -> None:
    """Every byte was copied; that some are of another version shows in the generation alone."""
    pool = rank.pools[PoolKey(0, 1, 0)]

    def overwrite(done: int) -> bool:
        pool.bump()
        return False

    with pytest.raises(SourceChanged) as caught:
        rank.plan.apply(KEY, SLOTS, overwrite)

    assert (caught.value.when, caught.value.expected) == ("after", 2)
    assert caught.value.found > 2


def test_a_source_that_holds_something_else_is_not_read(rank: Rank) -> None:
    with pytest.raises(SourceChanged) as caught:
        rank.plan.apply(KEY, (SLOTS[0], SourceSlot(LANDING, 0, 4)), lambda done: False)

    assert (caught.value.when, caught.value.expected, caught.value.found) == ("before", 4, 2)
    assert torch.isnan(rank.w).all()


def test_a_pass_that_is_told_to_stop_says_how_far_it_came(rank: Rank) -> None:
    assert 0 < rank.plan.apply(KEY, SLOTS, lambda done: True) < rank.plan.nbytes


@pytest.mark.parametrize("slots", [SLOTS[:1], (SLOTS[0], SourceSlot(LANDING, 7, 2))])
def test_an_order_that_lacks_a_source_is_refused(rank: Rank, slots: tuple[SourceSlot, ...]) -> None:
    with pytest.raises(PlanUnusable, match="names no slot"):
        rank.plan.apply(KEY, slots, lambda done: False)

    assert torch.isnan(rank.w).all()


def test_readable_bytes_are_those_of_the_smallest_slot(rank: Rank) -> None:
    assert set(readable(rank.pools).values()) == {rank.pools[PoolKey(0, 0, 0)].payload_nbytes}
