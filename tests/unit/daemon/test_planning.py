"""Plans are found again for exactly the epoch that they were made of, and name the landing that they were made over."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from tests.unit.daemon.test_epochs import LAYOUTS, A, spec
from weightd.core.errors import InternalInvariantBroken, WeightdError
from weightd.core.session.faults import DeadlinePassed
from weightd.core.units import Boot, EngineId, EngineRank, Epoch, RolloutRank, TrainerRank
from weightd.core.wire.messages import EpochSpec
from weightd.daemon.bulk.landing import Halves, Landing, MemoryBudget
from weightd.daemon.epochs import EpochPlans, LayoutStore
from weightd.daemon.planning import Planning

pytestmark = pytest.mark.anyio

RANK = RolloutRank(EngineId("E0"), EngineRank(0))


def stored(*left_out: str) -> LayoutStore:
    store = LayoutStore()
    for digest, layout in LAYOUTS.items():
        if digest not in left_out:
            store.put(digest, b"", layout)
    return store


@pytest.fixture
def landing() -> Iterator[Landing]:
    landing = Landing("the landing of run r", MemoryBudget(1 << 20))
    yield landing
    landing.close()


async def planned(planning: Planning, of: EpochSpec) -> EpochPlans:
    found = await planning.plan(of, lambda digest: None)
    assert not isinstance(found, WeightdError), found
    return found


async def test_an_epoch_is_planned_once(landing: Landing) -> None:
    planning = Planning(A, stored(), 1.0, landing)
    first = await planned(planning, spec())

    assert await planned(planning, spec()) is first
    assert planning.plans(Epoch(1)) is first
    with pytest.raises(InternalInvariantBroken):
        planning.plans(Epoch(2))


async def test_an_epoch_of_the_same_number_and_other_ranks_is_planned_anew(landing: Landing) -> None:
    """A leader of a new term counts on from what it knows, which may be less than what a node has planned."""
    planning = Planning(A, stored(), 1.0, landing)
    first = await planned(planning, spec(boot1=11))
    second = await planned(planning, spec(boot1=12))

    assert second is not first
    assert planning.plans(Epoch(1)) is second
    assert planning.named == {(TrainerRank(0), Boot(10)), (TrainerRank(1), Boot(12))}


class GrowingLanding(Landing):
    """A landing that is made larger than it need be, so that small plans can outgrow it."""

    least = 0

    def provide(self, nbytes: int) -> Halves:
        return super().provide(max(nbytes, self.least))


async def test_a_landing_that_was_replaced_makes_another_rank_plan() -> None:
    """Nothing else differs; a rank that kept its plan would read the half that nobody writes any more."""
    landing = GrowingLanding("the landing of run r", MemoryBudget(1 << 20))
    planning = Planning(A, stored(), 1.0, landing)
    epochs = [msgspec.structs.replace(spec(), epoch=Epoch(number)) for number in (1, 2, 3)]
    first, again = await planned(planning, epochs[0]), await planned(planning, epochs[1])
    landing.least = 1 << 16
    grown = await planned(planning, epochs[2])
    landing.close()

    assert first.rank_blobs[RANK][0] == again.rank_blobs[RANK][0] != grown.rank_blobs[RANK][0]
    assert (first.halves is again.halves, again.halves is grown.halves) == (True, False)


async def test_plans_before_the_adopted_epoch_are_dropped(landing: Landing) -> None:
    planning = Planning(A, stored(), 1.0, landing)
    for number in (1, 2, 3):
        await planned(planning, msgspec.structs.replace(spec(), epoch=Epoch(number)))
    planning.adopt(Epoch(2))

    assert [planning.find(Epoch(n)) is not None for n in (1, 2, 3)] == [False, True, True]


async def test_a_layout_that_does_not_come_is_named_with_its_rank(landing: Landing) -> None:
    asked: list[str] = []
    planning = Planning(A, stored("e1"), 0.1, landing)
    error = await planning.plan(spec(), asked.append)

    assert isinstance(error, DeadlinePassed)
    assert error.waited_for == ("E1[0] on b",)
    assert asked == ["e1"]
