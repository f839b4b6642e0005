"""Gets an epoch's layouts together, plans it in a worker thread, provides its landing.

Plans are kept while an epoch is adopted or on its way; an unchanged epoch costs
nothing, since a plan is found again by what it was made of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import msgspec

from weightd.core.errors import InternalInvariantBroken, WeightdError
from weightd.core.layout.columns import Layout
from weightd.core.session.faults import DeadlinePassed
from weightd.core.units import Boot, Epoch, NodeId, RolloutRank, TrainerRank
from weightd.core.wire.messages import EpochSpec
from weightd.daemon.bulk.landing import HALVES, Landing
from weightd.daemon.epochs import EpochPlans, LayoutStore, encode_plans, layout_digests, plan_epoch
from weightd.daemon.workers import allowance_for, in_worker

ASK_EVERY_S = 0.5
"""Between two requests for a layout that is still lacking."""


@dataclass
class Planning:
    """Plans of one run on one node."""

    node: NodeId
    layouts: LayoutStore
    plan_s: float
    landing: Landing
    adopted: Epoch | None = None
    _plans: dict[Epoch, EpochPlans] = field(default_factory=dict)
    _landing_serial: int = 0
    _turn: anyio.Lock = field(default_factory=anyio.Lock)

    async def plan(self, spec: EpochSpec, ask: Callable[[str], None]) -> EpochPlans | WeightdError:
        """Return all plans of an epoch, with this node's landing made, or why there are none.

        Args:
            spec: The epoch.
            ask: Sends for the layout of a digest; called again while it is lacking.
        """
        async with self._turn:
            known = self._plans.get(spec.epoch)
            if known is not None and known.spec == msgspec.structs.replace(spec, plans=()):
                return known
            layouts = await self._collect(spec, ask)
            if isinstance(layouts, WeightdError):
                return layouts
            try:
                plans = await in_worker(
                    "planning an epoch", plan_epoch, spec, layouts, self.node, allowance_s=self.plan_s
                )
                before = self.landing.halves
                nbytes = plans.plans[self.node].fetch.landing_nbytes
                plans.halves = await in_worker(
                    "making a landing", self.landing.provide, nbytes, allowance_s=allowance_for(HALVES * nbytes)
                )
                self._landing_serial += plans.halves is not before
                await in_worker("encoding plans", encode_plans, plans, self.node, self._landing_serial)
            except WeightdError as e:
                return e
            self._plans[spec.epoch] = plans
            return plans

    async def _collect(self, spec: EpochSpec, ask: Callable[[str], None]) -> dict[str, Layout] | WeightdError:
        digests = layout_digests(spec)
        with anyio.move_on_after(self.plan_s):
            while True:
                found = {d: layout for d in digests if (layout := self.layouts.layout(d)) is not None}
                if len(found) == len(digests):
                    return found
                for digest in digests:
                    if digest not in found:
                        ask(digest)
                await self.layouts.arrival(ASK_EVERY_S)
        lacking = [d for d in digests if self.layouts.layout(d) is None]
        who = tuple(
            [f"trainer {t.rank} on {t.node}" for t in spec.trainers if t.layout_digest in lacking]
            + [f"{r.engine}[{r.k}] on {r.node}" for r in spec.receivers if r.layout_digest in lacking]
        )
        return DeadlinePassed(
            stage="planning",
            waited_for=who,
            version=0,
            bucket=None,
            waited_s=self.plan_s,
            limit_s=self.plan_s,
            setting="plan_s",
            serving=0,
        )

    def plans(self, epoch: Epoch) -> EpochPlans:
        """Return the plans of an epoch that was planned here."""
        try:
            return self._plans[epoch]
        except KeyError:
            raise InternalInvariantBroken("an epoch is planned before it is used", f"epoch {epoch}") from None

    def find(self, epoch: Epoch) -> EpochPlans | None:
        """Return the plans of an epoch, if it was planned here; for requests of others."""
        return self._plans.get(epoch)

    def adopt(self, epoch: Epoch) -> None:
        """Use ``epoch`` from now on; older plans are dropped."""
        self.adopted = epoch
        for old in [e for e in self._plans if e < epoch]:
            del self._plans[old]
        self.landing.retire(plans.halves for plans in self._plans.values())

    @property
    def named(self) -> frozenset[tuple[TrainerRank, Boot]]:
        """Every incarnation of a trainer rank whose memory some plan in hand reads."""
        return frozenset((t.rank, t.boot) for plans in self._plans.values() for t in plans.spec.trainers)

    @property
    def snapshot_nbytes(self) -> int:
        """Bytes that the trainer ranks copy for a version of the adopted epoch; 0 before the first."""
        plans = self._plans.get(self.adopted) if self.adopted is not None else None
        return plans.snapshot_nbytes if plans is not None else 0

    def rank_blob(self, digest: str) -> bytes | None:
        """Return the encoded rank plan of that digest, of any epoch in hand."""
        for plans in self._plans.values():
            for found, data in plans.rank_blobs.values():
                if found == digest:
                    return data
        return None

    def rank_plans(self, rank: RolloutRank, digest: str) -> EpochPlans | None:
        """Return the epoch whose plan of ``rank`` has that digest."""
        for plans in self._plans.values():
            if rank in plans.rank_blobs and plans.rank_blobs[rank][0] == digest:
                return plans
        return None
