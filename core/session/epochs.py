"""From members to epochs: which ranks the next one has, whether it is proved, planned and ready.

One epoch is adopted at a time, and at most one is under way.  What is under
way is thrown away as soon as the members differ from it: proof and plan are
functions of it and of nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from weightd.core.errors import Refused, WeightdError, error_from_wire
from weightd.core.roster.judge import judge
from weightd.core.roster.topology import Registration
from weightd.core.session.faults import DeadlinePassed, PlanDiffers
from weightd.core.session.members import engine_ranks
from weightd.core.units import NO_EPOCH, EngineId, EngineRank, Epoch, RolloutRank, TrainerRank
from weightd.core.wire.messages import EpochSpec, ReceiverPlace, TrainerPlace

if TYPE_CHECKING:
    from weightd.core.roster.topology import Roster
    from weightd.core.session.events import EpochProved
    from weightd.core.session.members import Member, Members
    from weightd.core.session.view import View, Who
    from weightd.core.units import Boot, NodeId

EPOCH_REFUSED = "the epoch was not adopted; engines keep what they serve"


@dataclass(slots=True)
class Upcoming:
    """An epoch under way.

    Attributes:
        spec: What it is; with ``plans`` once it is proved.
        state: How far it is.
        since: When it was begun.
        rank_nbytes: Planned bytes of each rank, once it is proved.
    """

    spec: EpochSpec
    state: Literal["proving", "planning", "ready"]
    since: float
    rank_nbytes: dict[RolloutRank, int]


def spec_nodes(spec: EpochSpec) -> tuple[NodeId, ...]:
    """Return every node that holds a rank of an epoch, sorted."""
    return tuple(sorted({p.node for p in spec.trainers} | {p.node for p in spec.receivers}))


def spec_engines(spec: EpochSpec) -> tuple[EngineId, ...]:
    """Return the engines that an epoch feeds, in its order."""
    return tuple(dict.fromkeys(p.engine for p in spec.receivers))


def spec_boots(spec: EpochSpec) -> dict[Who, Boot]:
    """Return the incarnation of every rank of an epoch."""
    boots: dict[Who, Boot] = {p.rank: p.boot for p in spec.trainers}
    boots.update({RolloutRank(p.engine, p.k): p.boot for p in spec.receivers})
    return boots


class Epochs:
    """The adopted epoch and the one under way."""

    def __init__(self, bucket_limit_bytes: int, plan_s: float, last: EpochSpec | None) -> None:
        self._bucket_limit_bytes = bucket_limit_bytes
        self._plan_s = plan_s
        self._number = last.epoch if last else NO_EPOCH
        self._last_places: dict[RolloutRank, ReceiverPlace] = {}
        if last is not None:
            self._last_places = {RolloutRank(p.engine, p.k): p for p in (*last.receivers, *last.down)}
        self._hopeless: EpochSpec | None = None
        self.adopted: EpochSpec | None = None
        self.rank_nbytes: dict[RolloutRank, int] = {}
        self.upcoming: Upcoming | None = None

    # ------------------------------------------------------------ what is wanted

    def wanted(self, roster: Roster, members: Members, view: View) -> EpochSpec | None:
        """Return the epoch that the members add up to; None while a trainer rank is missing."""
        trainers = [members.here.get(TrainerRank(r)) for r in range(roster.world)]
        if not all(m is not None and m.ready for m in trainers):
            return None
        engines = members.complete_engines(roster)
        receivers = [self._receiver_place(who, members.here[who]) for e in engines for who in engine_ranks(roster, e)]
        absent = [EngineId(e.id) for e in roster.engines if e.id not in engines]
        down = [p for e in absent for who in engine_ranks(roster, e) if (p := self._last_places.get(who))]
        number = max(self._number, *(p.epoch for r in view.reports().values() for p in r.planned), NO_EPOCH) + 1
        return EpochSpec(
            Epoch(number),
            roster,
            tuple(_trainer_place(TrainerRank(r), m) for r, m in enumerate(trainers) if m is not None),
            tuple(receivers),
            self._bucket_limit_bytes,
            (),
            tuple(down),
        )

    def is_new(self, wanted: EpochSpec) -> bool:
        """Return whether an epoch must be planned for it."""
        same = [s for s in (self.adopted, self._hopeless) if s is not None and _same_members(s, wanted)]
        return not same

    def is_under_way(self, wanted: EpochSpec) -> bool:
        """Return whether exactly this is under way."""
        return self.upcoming is not None and _same_members(self.upcoming.spec, wanted)

    def newcomers(self, spec: EpochSpec) -> tuple[Who, ...]:
        """Return the ranks of an epoch whose incarnation is not in the adopted one."""
        known = spec_boots(self.adopted) if self.adopted else {}
        return tuple(who for who, boot in spec_boots(spec).items() if known.get(who) != boot)

    # ------------------------------------------------------------ steps

    def begin(self, wanted: EpochSpec, members: Members, waited_s: float | None, subject: str, now: float) -> None:
        """Judge the members of an epoch and put it under way.

        Raises:
            Refused: Its topology breaks a rule.
        """
        self._number = wanted.epoch
        judge(wanted.roster, self._registrations(wanted, members), waited_s, subject)
        self.upcoming = Upcoming(wanted, "proving", now, {})

    def take_proof(self, event: EpochProved, now: float) -> WeightdError | None:
        """Note the outcome of a proof; return why the epoch cannot be."""
        under_way = self.upcoming
        if under_way is None or under_way.state != "proving" or event.epoch != under_way.spec.epoch:
            return None
        if event.error is not None:
            return error_from_wire(event.error)
        under_way.spec = msgspec.structs.replace(under_way.spec, plans=event.plans)
        under_way.rank_nbytes = {RolloutRank(EngineId(e), EngineRank(k)): n for e, k, n in event.rank_nbytes}
        under_way.state, under_way.since = "planning", now
        return None

    def check_plans(self, view: View, serving: int, now: float) -> WeightdError | None:
        """Compare what nodes planned; return why the epoch cannot be."""
        under_way = self.upcoming
        if under_way is None or under_way.state == "ready":
            return None
        waiting: list[str] = ["the proof of coverage"] if under_way.state == "proving" else []
        for plan in under_way.spec.plans:
            report = view.report(plan.node)
            own = next((p for p in report.planned if p.epoch == under_way.spec.epoch), None) if report else None
            if own is None:
                waiting.append(f"node {plan.node}")
            elif own.error is not None:
                return error_from_wire(own.error)
            elif own.digest != plan.digest:
                return PlanDiffers(plan.node, under_way.spec.epoch, plan.digest, own.digest)
        if not waiting:
            under_way.state = "ready"
        elif now - under_way.since >= self._plan_s:
            waited = now - under_way.since
            return DeadlinePassed("planning", tuple(waiting), 0, None, waited, self._plan_s, "plan_s", serving)
        return None

    def abandon(self) -> None:
        """Forget what is under way; its members changed."""
        self.upcoming = None

    def give_up(self, spec: EpochSpec) -> None:
        """Forget what is under way and do not try these members again."""
        self.upcoming, self._hopeless = None, spec

    def adopt(self, ready: Upcoming) -> EpochSpec:
        """Make a ready epoch the adopted one; what came under way while it was journaled stays so."""
        self.adopted, self.rank_nbytes = ready.spec, ready.rank_nbytes
        self._last_places.update({RolloutRank(p.engine, p.k): p for p in ready.spec.receivers})
        self._hopeless = None
        if self.upcoming is ready:
            self.upcoming = None
        return ready.spec

    # ------------------------------------------------------------ inside

    @staticmethod
    def _receiver_place(who: RolloutRank, member: Member) -> ReceiverPlace:
        r = member.registration
        return ReceiverPlace(who.engine, who.k, r.node, r.slot, r.boot, member.layout_digest)

    def _registrations(self, spec: EpochSpec, members: Members) -> list[Registration]:
        """Return the registrations of an epoch, with the last known ones of engines that are down."""
        sizes = {e.id: e.size for e in spec.roster.engines}
        live = [members.here[who].registration for who in spec_boots(spec)]
        known = [
            Registration(RolloutRank(p.engine, p.k), sizes[p.engine], p.node, p.slot, 0, p.boot) for p in spec.down
        ]
        return [*live, *known]


def _trainer_place(rank: TrainerRank, member: Member) -> TrainerPlace:
    r = member.registration
    return TrainerPlace(rank, r.node, r.slot, r.boot, member.layout_digest)


def _same_members(one: EpochSpec, other: EpochSpec) -> bool:
    """Return whether two epochs have the same roster, ranks, incarnations and layouts."""
    return (one.roster, one.trainers, one.receivers) == (other.roster, other.trainers, other.receivers)


def epoch_report(spec: EpochSpec, error: WeightdError, subject: str) -> Refused:
    """Return the full report of an epoch that cannot be."""
    if isinstance(error, Refused):
        return error
    return Refused(f"{subject}, epoch {spec.epoch}", (error,), EPOCH_REFUSED)
