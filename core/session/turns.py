"""One engine's way through a version: pause, write, done; or fenced, down, severed.

Every step looks at the last reports of a known set of ranks and at the clock.
An acknowledgement counts only if it carries this turn's op and key: what a rank
said about an earlier order means nothing here.

::

    PAUSING ⇄ LEAVING
       │ all paused
    WRITING ── all applied, planned bytes ──► DONE ── decision ──► COMMITTING ──► RESUMING ──► UP
       │
       └─ refused, torn, late, lost ──► FENCING ──► FENCED (all answered) | SEVERED (no answer) | DOWN (died)

    any ── v fails ──► ABORTING ──► ABORTED
    back after an absence ──► RETURNING ──► FENCED, or COMMITTING, or UP
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from weightd.core.errors import WeightdError, error_from_wire
from weightd.core.session.clocks import StallClock, stall_clock
from weightd.core.session.deadlines import Deadlines
from weightd.core.session.faults import ApplyFailed, DeadlinePassed, EnginePoisoned, RankLost
from weightd.core.units import NO_KEY, Boot, EngineId, NodeId, Op, RolloutRank, Version, VersionKey

if TYPE_CHECKING:
    from weightd.core.errors import WireError
    from weightd.core.session.view import Presence, View
    from weightd.core.wire.messages import Order, ReceiverEntry, ReceiverReport

BASES = frozenset({"unready", "serving", "torn"})
"""States of a rank that no order binds."""


class Phase(Enum):
    """Where an engine stands."""

    PAUSING = auto()
    LEAVING = auto()
    WRITING = auto()
    DONE = auto()
    FENCING = auto()
    FENCED = auto()
    SEVERED = auto()
    DOWN = auto()
    COMMITTING = auto()
    RESUMING = auto()
    UP = auto()
    ABORTING = auto()
    ABORTED = auto()
    RETURNING = auto()


SETTLED = frozenset({Phase.DONE, Phase.FENCED, Phase.SEVERED, Phase.DOWN})
"""Phases in which an engine holds back no decision."""

WATCHED = frozenset({Phase.PAUSING, Phase.LEAVING, Phase.WRITING, Phase.DONE})
"""Phases in which a lost rank changes what becomes of the engine."""

_ORDERS: dict[Phase, Order] = {
    Phase.PAUSING: "pause",
    Phase.LEAVING: "left",
    Phase.WRITING: "write",
    Phase.DONE: "write",
    Phase.FENCING: "fence",
    Phase.FENCED: "fence",
    Phase.SEVERED: "fence",
    Phase.COMMITTING: "commit",
    Phase.RESUMING: "resume",
    Phase.UP: "resume",
    Phase.ABORTING: "abort",
    Phase.ABORTED: "abort",
    Phase.RETURNING: "fence",
}


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank of the turn is, and which incarnation."""

    node: NodeId
    boot: Boot
    pid: int = field(default=0, compare=False)


@dataclass(slots=True)
class EngineTurn:
    """One engine in one version.

    Attributes:
        engine: Which.
        seats: The known set of its ranks; acknowledgements are counted against it.
        planned: Planned bytes of each rank.
        op: Of the orders.
        key: The version that the orders are about.
        limits: Deadlines.
        serving: Last version committed when the turn began.
        phase: Where it stands.
        since: When that began.
        up: Whether the engine acknowledged the last commit, or a fence, since it came.
        written: Whether ``write`` was ordered.
        cause: Why it was left out, the first thing that went wrong.
        failure: Report of the version, where it failed.
        behind: Whether its bytes are not those of the last commit: then it is fenced where others go back to base,
            or it would serve an old version beside engines that serve the last one.
        left_out: Why it is behind, where that is known.
    """

    engine: EngineId
    seats: dict[RolloutRank, Seat]
    planned: dict[RolloutRank, int]
    op: Op
    key: VersionKey
    limits: Deadlines
    serving: Version
    phase: Phase
    since: float
    up: bool
    written: bool = False
    cause: WeightdError | None = None
    failure: WireError | None = None
    behind: bool = False
    left_out: WireError | None = None
    began_at: float = 0.0
    stall: StallClock | None = None
    waiting: tuple[str, ...] = field(default=())

    # ------------------------------------------------------------ asking

    @property
    def settled(self) -> bool:
        """Whether it holds back no decision."""
        return self.phase in SETTLED

    def order(self) -> Order:
        """Return the order for all its ranks."""
        if self.behind and self.phase in (Phase.LEAVING, Phase.ABORTING, Phase.ABORTED):
            return "fence"
        if self.phase is Phase.DOWN:
            return "fence" if self.written else "abort"
        return _ORDERS[self.phase]

    def error(self) -> WireError | None:
        """Return why, with an order that ends the version for this engine."""
        if self.phase is Phase.LEAVING:
            return self.left_out if self.behind else None
        if self.phase in (Phase.ABORTING, Phase.ABORTED):
            return self.failure
        if self.phase not in (Phase.FENCING, Phase.FENCED, Phase.SEVERED, Phase.DOWN) or self.cause is None:
            return None
        if self.order() == "abort":
            return self.cause.to_wire()
        written = self.written or self.behind
        return EnginePoisoned(self.engine, self.key.version, self.serving, str(self.cause), written).to_wire()

    def live(self) -> bool:
        """Whether all its ranks are there and answered."""
        return self.phase not in (Phase.SEVERED, Phase.DOWN)

    def overdue(self, now: float) -> bool:
        """Whether a commit waits longer for its acknowledgement than it may hold up the run."""
        return self.phase is Phase.COMMITTING and now - self.since >= self.limits.commit_ack_s

    def ends_at(self) -> float | None:
        """Return when the phase ends by itself."""
        match self.phase:
            case Phase.PAUSING | Phase.LEAVING:
                return self.began_at + self.limits.apply_wait_s
            case Phase.WRITING:
                stalled = self.stall.ends_at if self.stall else self.since + self.limits.apply_stall_s
                return min(self.since + self.limits.apply_s, stalled)
            case Phase.FENCING | Phase.ABORTING:
                return self.since + self.limits.restart_s
            case Phase.COMMITTING:
                return self.since + self.limits.commit_ack_s
            case _:
                return None

    # ------------------------------------------------------------ orders from the leader

    def commit(self, now: float) -> None:
        """The decision is journaled, and names this engine."""
        self._enter(Phase.COMMITTING, now)

    def abort(self, failure: WireError, now: float) -> None:
        """The version failed, with this report."""
        self.failure = failure
        self._enter(Phase.ABORTING, now)

    # ------------------------------------------------------------ steps

    def step(self, view: View, now: float) -> bool:
        """Look at the reports; return whether the phase changed."""
        before = self.phase
        lost = self._lost(view, now) if self.phase in WATCHED else None
        if lost is not None:
            self._lose(lost[0], lost[1], now)
        else:
            self._step_phase(view, now)
        return self.phase is not before

    def _step_phase(self, view: View, now: float) -> None:
        match self.phase:
            case Phase.PAUSING:
                self._pausing(view, now)
            case Phase.LEAVING:
                self._leaving(view, now)
            case Phase.WRITING:
                self._writing(view, now)
            case Phase.DONE:
                self._still_done(view, now)
            case Phase.FENCING | Phase.SEVERED | Phase.RETURNING:
                self._fencing(view, now)
            case Phase.COMMITTING:
                self._committing(view, now)
            case Phase.RESUMING:
                self._resuming(view, now)
            case Phase.ABORTING:
                self._aborting(view, now)
            case _:
                pass

    def _pausing(self, view: View, now: float) -> None:
        reports = self._reports(view)
        refused = next((w for w, r in reports.items() if r and self._about(r) and r.state == "refused"), None)
        if refused is not None:
            self._fence(self._apply_error(refused, reports[refused], "the pause callback refused"), now)
            return
        self.waiting = tuple(f"{w} to pause" for w, r in reports.items() if not (r and self._paused(r)))
        if not self.waiting:
            self._begin_write(now)
        elif any(r and self._paused(r) and r.leave for r in reports.values()):
            self._enter(Phase.LEAVING, now)
        else:
            self._expect_safe_point(now)

    def _begin_write(self, now: float) -> None:
        self.written = True
        self.stall = stall_clock(self.limits.apply_stall_s, now)
        self._enter(Phase.WRITING, now)

    def _leaving(self, view: View, now: float) -> None:
        """Every rank leaves, so that none runs a collective alone; then the pause is ordered again."""
        reports = self._reports(view)
        self.waiting = tuple(f"{w} to leave" for w, r in reports.items() if not (r and self._left(view, w, r, now)))
        if not self.waiting:
            self._enter(Phase.PAUSING, now)
        else:
            self._expect_safe_point(now)

    def _expect_safe_point(self, now: float) -> None:
        if now - self.began_at >= self.limits.apply_wait_s:
            self._fence(self._late("apply_wait_s", self.limits.apply_wait_s, now - self.began_at), now)

    def _writing(self, view: View, now: float) -> None:
        reports = self._reports(view)
        for who, r in reports.items():
            fault = self._write_fault(who, r)
            if fault is not None:
                self._fence(fault, now)
                return
        self.waiting = tuple(f"{w} to apply" for w, r in reports.items() if not (r and self._applied(w, r)))
        if not self.waiting:
            self._enter(Phase.DONE, now)
            return
        nbytes = sum(r.applied_nbytes for r in reports.values() if r and self._about(r))
        held = any(self._presence(view, w, now).kind == "away" for w in self.seats)
        assert self.stall is not None, "set with the order to write"
        if self.stall.expired(nbytes, held=held, now=now):
            self._fence(self._late("apply_stall_s", self.limits.apply_stall_s, now - self.stall.at), now)
        elif now - self.since >= self.limits.apply_s:
            self._fence(self._late("apply_s", self.limits.apply_s, now - self.since), now)

    def _still_done(self, view: View, now: float) -> None:
        for who, r in self._reports(view).items():
            fault = self._write_fault(who, r)
            if fault is not None:
                self._fence(fault, now)
                return

    def _fencing(self, view: View, now: float) -> None:
        reports = self._reports(view)
        died = [w for w in self.seats if self._presence(view, w, now).died]
        open_ = [w for w, r in reports.items() if w not in died and not (r and self._fenced(view, w, r, now))]
        self.waiting = tuple(f"{w} to acknowledge the fence" for w in open_)
        if not open_:
            self.up = not died
            self._enter(Phase.DOWN if died else Phase.FENCED, now)
        elif self.phase is Phase.FENCING and now - self.since >= self.limits.restart_s:
            self.up = False
            self._enter(Phase.SEVERED, now)

    def _committing(self, view: View, now: float) -> None:
        """All that live must hold the commit; one that died is down with it, and its engine is not up."""
        died = [w for w in self.seats if self._presence(view, w, now).died]
        reports = self._reports(view)
        open_ = [w for w, r in reports.items() if w not in died and not (r and self._holds_commit(r))]
        self.waiting = tuple(f"{w} to acknowledge the commit" for w in open_)
        if not open_:
            self.up = not died
            self._enter(Phase.RESUMING, now)
        elif self.overdue(now):
            self.up = False  # severed: its resume follows the last acknowledgement

    def _resuming(self, view: View, now: float) -> None:
        if all(r and r.state == "serving" and r.base == self.key for r in self._reports(view).values()):
            self._enter(Phase.UP, now)

    def _aborting(self, view: View, now: float) -> None:
        died = [w for w in self.seats if self._presence(view, w, now).died]
        reports = self._reports(view)
        open_ = [w for w, r in reports.items() if w not in died and not (r and self._aborted(view, w, r, now))]
        self.waiting = tuple(f"{w} to answer the abort" for w in open_)
        if not open_ or now - self.since >= self.limits.restart_s:
            self.up = self.up and not died and not open_
            self._enter(Phase.ABORTED, now)

    # ------------------------------------------------------------ lost ranks

    def _lost(self, view: View, now: float) -> tuple[RolloutRank, Presence] | None:
        for who in self.seats:
            presence = self._presence(view, who, now)
            if presence.kind == "gone":
                return who, presence
        return None

    def _lose(self, who: RolloutRank, presence: Presence, now: float) -> None:
        """A rank is gone: before ``write`` a death leaves the others on the old version."""
        seat, stage = self.seats[who], self.phase.name.lower()
        lost = RankLost(str(who), seat.node, seat.pid, presence.why, stage, self.key.version, self.serving)
        if presence.died and not self.written:
            self.cause = self.cause or lost
            self.up = False
            self._enter(Phase.DOWN, now)
        else:
            self._fence(lost, now)

    # ------------------------------------------------------------ what a report says

    def _reports(self, view: View) -> dict[RolloutRank, ReceiverReport | None]:
        return {who: (e.report if (e := self._entry(view, who)) else None) for who in self.seats}

    def _entry(self, view: View, who: RolloutRank) -> ReceiverEntry | None:
        return view.receiver(who, self.seats[who].node, self.seats[who].boot)

    def _presence(self, view: View, who: RolloutRank, now: float) -> Presence:
        return view.rank(who, self.seats[who].node, self.seats[who].boot, now)

    def _about(self, r: ReceiverReport) -> bool:
        return r.op == self.op and r.key == self.key

    def _paused(self, r: ReceiverReport) -> bool:
        return self._about(r) and r.state in ("paused", "applying", "applied")

    def _left(self, view: View, who: RolloutRank, r: ReceiverReport, now: float) -> bool:
        if self.behind:
            return self._fenced(view, who, r, now) and not r.leave
        return r.op == self.op and r.state in BASES and not r.leave

    def _applied(self, who: RolloutRank, r: ReceiverReport) -> bool:
        return self._about(r) and r.state == "applied" and r.applied_nbytes == self.planned[who]

    def _holds_commit(self, r: ReceiverReport) -> bool:
        return r.committed == self.key and (r.base == self.key or (r.state == "applied" and r.key == self.key))

    def _aborted(self, view: View, who: RolloutRank, r: ReceiverReport, now: float) -> bool:
        if self.behind:
            return self._fenced(view, who, r, now)
        return r.op >= self.op and r.state in BASES

    def _fenced(self, view: View, who: RolloutRank, r: ReceiverReport, now: float) -> bool:
        here = self._presence(view, who, now).kind == "here"
        return here and r.op == self.op and r.state == "fenced"

    def _write_fault(self, who: RolloutRank, r: ReceiverReport | None) -> WeightdError | None:
        """Return how a rank that was told to write went wrong, if it did."""
        if r is None or r.op != self.op:
            return None
        if r.state in ("torn", "refused", "fenced"):
            return self._apply_error(who, r, "its bytes are torn" if r.state == "torn" else f"it is {r.state}")
        if self._about(r) and r.state == "applied" and r.applied_nbytes != self.planned[who]:
            return self._apply_error(who, r, "it applied another number of bytes than was planned")
        return None

    # ------------------------------------------------------------ errors and moves

    def _apply_error(self, who: RolloutRank, r: ReceiverReport | None, otherwise: str) -> ApplyFailed:
        said = error_from_wire(r.error) if r and r.error else None
        why = otherwise if said is None else str(said)
        if isinstance(said, ApplyFailed):
            why = said.why  # the rest of its text is said here, too
        return ApplyFailed(str(who), self.key.version, why, r.applied_nbytes if r else 0, self.planned[who])

    def _late(self, setting: str, limit_s: float, waited_s: float) -> DeadlinePassed:
        return DeadlinePassed(
            self.phase.name.lower(), self.waiting, self.key.version, None, waited_s, limit_s, setting, self.serving
        )

    def _fence(self, cause: WeightdError, now: float) -> None:
        self.cause = self.cause or cause
        self._enter(Phase.FENCING, now)

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase, self.since = phase, now
        if phase not in (Phase.PAUSING, Phase.LEAVING, Phase.WRITING):
            self.waiting = ()


def returning(turn: EngineTurn, committed: VersionKey, named: bool, view: View, now: float) -> EngineTurn:
    """Put an engine that came, or came back, into the phase that its ranks' states ask for.

    Args:
        turn: The engine's turn, its phase not yet chosen.
        committed: Last committed version.
        named: Whether that commit names this engine.
        view: The last reports.
        now: The time.
    """
    reports = [e.report if (e := view.receiver(w, s.node, s.boot)) else None for w, s in turn.seats.items()]
    free = all(r is not None and r.state in BASES for r in reports)
    whole = named and all(r is not None and _holds(r, committed) for r in reports)
    if free and (committed == NO_KEY or whole):
        turn.phase, turn.up = Phase.UP, True
    elif whole:
        turn.phase = Phase.COMMITTING
    else:
        turn.phase, turn.up = Phase.RETURNING, False
    turn.since = now
    return turn


def _holds(r: ReceiverReport, key: VersionKey) -> bool:
    """Return whether a rank's bytes are whole and of ``key``."""
    return r.base == key or (r.state == "applied" and r.key == key)
