"""A node's plans: which epochs it was asked to plan, what came of it, and which plan is in use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightd.core.session.events import AdoptEpoch, PlanEpoch
from weightd.core.units import NO_EPOCH
from weightd.core.wire.messages import Planned

if TYPE_CHECKING:
    from weightd.core.session.events import EpochPlanned, NodeEffect
    from weightd.core.units import Epoch, RolloutRank
    from weightd.core.wire.messages import EpochSpec, Goal


class NodePlans:
    """The plans of one run on one node.

    Attributes:
        adopted: The plan in use.
    """

    def __init__(self) -> None:
        self.adopted: EpochPlanned | None = None
        self._asked: dict[Epoch, EpochSpec] = {}
        self._planned: dict[Epoch, EpochPlanned] = {}

    @property
    def epoch(self) -> Epoch:
        """The epoch whose plan is in use."""
        return self.adopted.epoch if self.adopted is not None else NO_EPOCH

    @property
    def fetch_nbytes(self) -> int:
        """Bytes that come from other nodes with every version."""
        return self.adopted.fetch_nbytes if self.adopted is not None else 0

    def rank_plan(self, who: RolloutRank) -> tuple[str, int]:
        """Return digest and encoded size of a local rank's plan; empty where there is none."""
        plans = self.adopted.rank_plans if self.adopted is not None else ()
        return next(((digest, nbytes) for engine, k, digest, nbytes, _ in plans if (engine, k) == who), ("", 0))

    def reported(self) -> tuple[Planned, ...]:
        """Return what the leader is told."""
        return tuple(Planned(p.epoch, p.digest, p.fetch_nbytes, p.error) for p in self._planned.values())

    def take(self, event: EpochPlanned) -> None:
        """Keep a plan that was asked for."""
        if event.epoch in self._asked:
            self._planned[event.epoch] = event

    def follow(self, goal: Goal) -> list[NodeEffect]:
        """Return what to do so that the leader's epochs are planned, and the adopted one is in use."""
        specs = [spec for spec in (goal.epoch, goal.next_epoch) if spec is not None]
        if not specs:
            return []  # a new leader numbers its epochs above those that it sees here
        out: list[NodeEffect] = []
        for spec in specs:
            if not _same(self._asked.get(spec.epoch), spec):
                self._asked[spec.epoch] = spec
                self._planned.pop(spec.epoch, None)
                out.append(PlanEpoch(spec))
        wanted = {spec.epoch for spec in specs}
        self._asked = {e: s for e, s in self._asked.items() if e in wanted}
        self._planned = {e: p for e, p in self._planned.items() if e in wanted}
        return [*out, *self._adopt(goal.epoch)]

    def _adopt(self, spec: EpochSpec | None) -> list[NodeEffect]:
        plan = self._planned.get(spec.epoch) if spec is not None and spec.epoch != self.epoch else None
        if plan is None or plan.error is not None:
            return []
        self.adopted = plan
        return [AdoptEpoch(plan.epoch)]


def _same(one: EpochSpec | None, other: EpochSpec) -> bool:
    """Return whether two epochs are the same, proved or not."""
    if one is None:
        return False
    return (one.epoch, one.trainers, one.receivers) == (other.epoch, other.trainers, other.receivers)
