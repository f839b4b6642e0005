"""Who comes and goes: taking ranks in, refusing them, and bringing epochs under way.

Runs beside the stages of a version, which never see a rank that is not in
their epoch.  A fault of a newcomer is the newcomer's alone; a fault of the
first epoch is everybody's, and nothing stays half registered.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from weightd.core.errors import Refused, WeightdError, flatten
from weightd.core.roster.judge import judge, judge_declared
from weightd.core.roster.violations import RanksMissing
from weightd.core.session.epochs import epoch_report, spec_boots
from weightd.core.session.events import ProveEpoch
from weightd.core.session.faults import DeadlinePassed, still_served
from weightd.core.session.members import RANK0
from weightd.core.session.view import Who, rank_name
from weightd.core.units import Boot, EngineId, EngineRank, RolloutRank, TrainerRank
from weightd.core.wire.messages import TrainerEntry

if TYPE_CHECKING:
    from weightd.core.session.events import EpochProved
    from weightd.core.session.run_state import RunState
    from weightd.core.wire.messages import EpochSpec


class Attaching:
    """Membership and epochs of a run."""

    def __init__(self, state: RunState) -> None:
        self._s = state
        self._began_at: float | None = None
        self._joined: set[tuple[Who, Boot]] = set()
        self._noted: EpochSpec | None = None

    def open(self, now: float) -> None:
        """Start the clock of the first epoch and judge what is declared."""
        self._began_at = now
        self._judge_declaration()

    def step(self, now: float) -> bool:
        """Look at who is there; return whether trainer rank 0 started anew, which is another term's business."""
        s = self._s
        if s.epoch is None:
            self._follow_rank0(now)
        s.members.update(s.roster, s.view, now)
        if s.epoch is not None and self._rank0_is_new():
            return True
        if s.declared_fault is not None:
            s.members.refuse(list(s.members.here), s.declared_fault)
            return False
        if s.epoch is None:
            self._first_epoch(now)
        else:
            self._note_joined(s.epoch)
            self._later_epoch(now)
            self._refuse_stragglers(now)
        self._check_plans(now)
        return False

    def take_proof(self, event: EpochProved, now: float) -> None:
        """Note the outcome of a proof."""
        fault = self._s.epochs.take_proof(event, now)
        if fault is not None:
            self._refuse_upcoming(fault, now)

    def deadline(self) -> float | None:
        """Return when the first epoch must be ready."""
        if self._s.epoch is not None or self._began_at is None:
            return None
        return self._began_at + self._s.limits.attach_s

    def waits(self) -> tuple[str, ...]:
        """Return what the next epoch waits for."""
        s = self._s
        if s.epochs.upcoming is not None:
            return (f"epoch {s.epochs.upcoming.spec.epoch} in {s.epochs.upcoming.state}",)
        missing = s.members.missing(s.roster, s.down_at_start)
        unready = s.members.unready(s.roster, s.down_at_start)
        return (
            *(f"{rank_name(w)} to attach" for w in missing),
            *(f"layout and memory of {rank_name(w)}" for w in unready),
        )

    # ------------------------------------------------------------ trainer rank 0

    def _judge_declaration(self) -> None:
        faults = judge_declared(self._s.roster)
        subject = f"run {self._s.run}"
        self._s.declared_fault = Refused(subject, tuple(faults), self._effect()) if faults else None

    def _follow_rank0(self, now: float) -> None:
        """Before the first epoch a rank 0 that attaches again may bring another roster."""
        s = self._s
        for node, entry in s.view.entries():
            if node == s.node and isinstance(entry, TrainerEntry) and self._brings_news(entry, now):
                assert entry.roster is not None, "checked with the news"
                s.roster, s.rank0_boot, s.ledger.attempt_boot = entry.roster, entry.boot, entry.boot
                self._judge_declaration()

    def _brings_news(self, entry: TrainerEntry, now: float) -> bool:
        s = self._s
        known = s.members.here.get(RANK0)
        if entry.rank != RANK0 or entry.roster is None or s.members.is_refused(RANK0, entry.boot):
            return False
        if known is not None and known.registration.boot != entry.boot:
            r = known.registration
            return s.view.rank(RANK0, r.node, r.boot, now).died
        return (entry.boot, entry.roster) != (s.rank0_boot, s.roster)

    def _rank0_is_new(self) -> bool:
        here = self._s.members.here.get(RANK0)
        return here is not None and here.registration.boot != self._s.rank0_boot

    # ------------------------------------------------------------ the first epoch

    def _first_epoch(self, now: float) -> None:
        s = self._s
        if not s.members.here:
            if s.members.refusals():
                self._began_at = None  # everybody was refused: the next to come starts the clock
            return
        if self._began_at is None:
            self._began_at = now
        missing = s.members.missing(s.roster, s.down_at_start)
        unready = s.members.unready(s.roster, s.down_at_start)
        if missing or unready:
            s.epochs.abandon()
        else:
            self._plan(now)
        waited_s = self._waited_s(now)  # None once more where the plan was refused, and with it everybody
        ready = s.epochs.upcoming is not None and s.epochs.upcoming.state == "ready"
        if waited_s is not None and waited_s >= s.limits.attach_s and not ready:
            self._refuse_all(self._attach_report(waited_s), now)

    def _waited_s(self, now: float) -> float | None:
        return None if self._began_at is None else now - self._began_at

    def _attach_report(self, waited_s: float) -> Refused:
        """Return the full report of an attach that took too long: who is absent, and what else is wrong."""
        s = self._s
        registrations = [m.registration for m in s.members.here.values()]
        try:
            judge(s.roster, registrations, waited_s, f"run {s.run}")
        except Refused as report:
            return Refused(report.subject, tuple(self._with_lost(v) for v in report.violations), self._effect())
        late = DeadlinePassed("attaching", self.waits(), 0, None, waited_s, s.limits.attach_s, "attach_s", s.serving)
        return Refused(f"run {s.run}", (late,), self._effect())

    def _with_lost(self, violation: WeightdError) -> WeightdError:
        """Tell missing ranks that attached from those that never did."""
        if not isinstance(violation, RanksMissing):
            return violation
        engine, lost = violation.engine, {}
        for number in violation.missing:
            who = TrainerRank(number) if engine is None else RolloutRank(EngineId(engine), EngineRank(number))
            why = self._s.members.why_absent(who)
            lost.update({str(number): why} if why else {})
        return replace(violation, lost=lost)

    def _refuse_all(self, report: WeightdError, now: float) -> None:
        s = self._s
        s.note("attach refused", {"report": str(report), "ranks": len(s.members.here)})
        s.members.refuse(list(s.members.here), report)
        s.epochs.abandon()
        self._began_at = None

    # ------------------------------------------------------------ later epochs

    def _later_epoch(self, now: float) -> None:
        s = self._s
        wanted = s.epochs.wanted(s.roster, s.members, s.view)
        if wanted is None or not s.epochs.is_new(wanted):
            s.epochs.abandon()
        else:
            self._plan(now)

    def _note_joined(self, epoch: EpochSpec) -> None:
        """Note who was in an epoch, of those that are here: a rank whose engine lost another one is no newcomer."""
        if epoch is not self._noted:
            self._noted = epoch
            here = {(who, m.registration.boot) for who, m in self._s.members.here.items()}
            self._joined = here & (self._joined | set(spec_boots(epoch).items()))

    def _refuse_stragglers(self, now: float) -> None:
        """A newcomer whose engine, or whose trainer, does not complete within ``attach_s`` is refused by itself."""
        s = self._s
        if s.stage not in ("idle", "paused") or s.epochs.upcoming is not None:
            return
        late: dict[EngineId | None, list[Who]] = {}
        for who, member in s.members.here.items():
            if (who, member.registration.boot) not in self._joined and now - member.since >= s.limits.attach_s:
                late.setdefault(who.engine if isinstance(who, RolloutRank) else None, []).append(who)
        for engine, whos in late.items():
            report = self._missing_of(engine, s.limits.attach_s)
            if report is not None:
                s.members.refuse(whos, report)

    def _missing_of(self, engine: EngineId | None, waited_s: float) -> Refused | None:
        report = self._attach_report(waited_s)
        mine = [v for v in flatten((report,)) if isinstance(v, RanksMissing) and v.engine == engine]
        whose = f"run {self._s.run}, engine {engine}" if engine else f"run {self._s.run}, trainer"
        return Refused(whose, tuple(mine), self._effect()) if mine else None

    # ------------------------------------------------------------ planning

    def _plan(self, now: float) -> None:
        """Put the epoch that the members add up to under way, unless it is."""
        s = self._s
        wanted = s.epochs.wanted(s.roster, s.members, s.view)
        if wanted is None or s.epochs.is_under_way(wanted) or not s.epochs.is_new(wanted):
            return
        s.epochs.abandon()
        waited_s = now - self._began_at if self._began_at is not None and s.epoch is None else None
        try:
            s.epochs.begin(wanted, s.members, waited_s, f"run {s.run}", now)
        except Refused as report:
            self._refuse(wanted, report, now)
            return
        s.note(f"epoch {wanted.epoch} proving", {"nodes": sorted({p.node for p in wanted.trainers})})
        s.out.append(ProveEpoch(wanted))

    def _check_plans(self, now: float) -> None:
        upcoming = self._s.epochs.upcoming
        was = upcoming.state if upcoming else ""
        fault = self._s.epochs.check_plans(self._s.view, self._s.serving, now)
        if fault is not None:
            self._refuse_upcoming(fault, now)
        elif upcoming and upcoming.state != was:
            self._s.note(f"epoch {upcoming.spec.epoch} {upcoming.state}", {})

    def _refuse_upcoming(self, fault: WeightdError, now: float) -> None:
        upcoming = self._s.epochs.upcoming
        assert upcoming is not None, "a fault is of what is under way"
        self._refuse(upcoming.spec, epoch_report(upcoming.spec, fault, f"run {self._s.run}"), now)

    def _refuse(self, spec: EpochSpec, report: Refused, now: float) -> None:
        """Refuse everybody for the first epoch, the newcomers for a later one; the old epoch stands."""
        s = self._s
        if s.epoch is None:
            self._refuse_all(report, now)
            return
        newcomers = s.epochs.newcomers(spec)
        s.note(f"epoch {spec.epoch} refused", {"report": str(report), "newcomers": s.names(newcomers)})
        s.members.refuse(newcomers, report)
        s.epochs.give_up(spec)

    def _effect(self) -> str:
        return f"no epoch started, nothing is half registered; {still_served(self._s.serving)}"
