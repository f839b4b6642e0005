"""The stages of a version on the leader, one function each.

Each looks at the run and either waits, naming whom for, or moves on.  Nothing
is remembered between two looks except what ``RunState`` holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightd.core.errors import Refused, WeightdError, error_from_wire
from weightd.core.session.clocks import stall_clock
from weightd.core.session.collecting import layout_skew, not_published, publishers_lost, rank_lost, version_skew
from weightd.core.session.epochs import spec_engines, spec_nodes
from weightd.core.session.faults import DeadlinePassed, RunPaused
from weightd.core.session.records import Committed, EpochTaken, Failed, Prepared, Started
from weightd.core.session.turns import Phase
from weightd.core.session.view import rank_name
from weightd.core.units import NO_KEY, EngineId, RolloutRank, VersionKey

if TYPE_CHECKING:
    from weightd.core.session.epochs import Upcoming
    from weightd.core.session.run_state import RunState
    from weightd.core.session.turns import EngineTurn
    from weightd.core.units import NodeId
    from weightd.core.wire.messages import EpochSpec, FetchState


class Stages:
    """What a run does next."""

    def __init__(self, state: RunState) -> None:
        self._s = state
        self._failing: set[VersionKey] = set()

    def step(self, now: float) -> bool:
        """Take one step; return whether anything changed, so that another may follow."""
        s = self._s
        if s.journal.awaited() is not None:
            return False
        before = (s.stage, s.key, s.journal.awaited())
        match s.stage:
            case "attaching":
                self._attaching(now)
            case "idle" | "paused":
                self._idle(now)
            case "collecting":
                self._collecting(now)
            case "fetching":
                self._fetching(now)
            case "prepared" | "applying":
                self._applying(now)
            case "committed":
                self._committed(now)
            case "failed":
                self._failed(now)
        return (s.stage, s.key, s.journal.awaited()) != before

    def ends_at(self) -> float | None:
        """Return when the stage, or what it waits for, ends by itself; None in the quiet stages."""
        s = self._s
        writing = s.journal.awaited()
        if writing is not None:
            return writing.at + s.limits.restart_s
        match s.stage:
            case "collecting":
                return s.since + s.limits.collect_s
            case "fetching":
                stalled = s.stall.ends_at if s.stall else s.since + s.limits.fetch_stall_s
                return min(s.since + s.limits.fetch_s, stalled)
            case "prepared" | "applying" | "committed" | "failed":
                return min(filter(None, (t.ends_at() for t in self._turns())), default=s.since + s.limits.restart_s)
            case _:
                return None

    def refuse_version(self, error: WeightdError, now: float) -> None:
        """Fail the version in hand before PREPARED for a reason outside it."""
        if self._s.stage in ("collecting", "fetching"):
            self._fail((error,), now)

    def give_up(self, waited_s: float, limit_s: float, setting: str, now: float) -> None:
        """Fail the version in hand because its time to be decided is over; one that is being decided is left alone."""
        s = self._s
        if s.stage in ("prepared", "applying") and s.journal.awaited() is None:
            self._fail((self._late(setting, limit_s, waited_s),), now)

    # ------------------------------------------------------------ between versions

    def _attaching(self, now: float) -> None:
        if self._ready():
            self._adopt(now)

    def _idle(self, now: float) -> None:
        s = self._s
        for key, error in s.ledger.stray(s.view, s.term):
            s.ledger.fail(key, error.to_wire())
        s.ledger.forget_unseen(s.view)
        if self._ready():
            self._adopt(now)
            return
        self._pause_or_go_on(now)
        undecided = [k for k in s.ledger.undecided(s.view) if k not in self._failing]
        if s.stage == "paused":
            assert s.paused is not None, "a paused run says why"
            for key in undecided:
                self._refuse_key(key, s.paused, now)
        elif undecided and not s.draining and not self._waits_for_plan(now):
            self._start(undecided[0], now)

    def _ready(self) -> bool:
        upcoming = self._s.epochs.upcoming
        return upcoming is not None and upcoming.state == "ready"

    def _adopt(self, now: float) -> None:
        s = self._s
        upcoming = s.epochs.upcoming
        assert upcoming is not None, "only a ready epoch is adopted"
        nbytes = tuple((str(w.engine), int(w.k), n) for w, n in upcoming.rank_nbytes.items())
        s.write(EpochTaken(upcoming.spec, nbytes), now, lambda at: self._adopted(upcoming, at))

    def _adopted(self, ready: Upcoming, now: float) -> None:
        """The epoch is journaled: it is the run's, and every engine whose ranks changed is looked at anew."""
        s = self._s
        spec = s.epochs.adopt(ready)
        for engine in spec_engines(spec):
            turn = s.turns.get(engine)
            if turn is None or turn.seats != s.seats(engine):
                s.turns.pop(engine, None)
                s.bring_back(engine, now)
        s.note(f"epoch {spec.epoch} adopted", {"trainers": len(spec.trainers), "receivers": len(spec.receivers)})
        if s.stage == "attaching":
            s.enter("idle", now)

    def _pause_or_go_on(self, now: float) -> None:
        s = self._s
        lacking = s.lacking()
        if lacking:
            why = f"{rank_name(lacking[0])} is lost: {s.why_lost(lacking[0])}"
            s.paused = RunPaused(s.run, why, s.names(lacking), s.serving)
            s.waiting = tuple(f"{rank_name(w)} to come back" for w in lacking)
            if s.stage != "paused":
                s.enter("paused", now)
        elif s.stage == "paused":
            s.paused = None
            s.enter("idle", now)

    def _waits_for_plan(self, now: float) -> bool:
        """An epoch in planning is waited for once, so that joiners do not starve."""
        s = self._s
        if s.epochs.upcoming is None:
            return False
        s.waiting = (f"epoch {s.epochs.upcoming.spec.epoch} in {s.epochs.upcoming.state}",)
        return now - s.since < s.limits.plan_s

    def _refuse_key(self, key: VersionKey, error: WeightdError, now: float) -> None:
        """Fail a publish that never came in hand."""
        s = self._s
        report = Refused(f"version {key.version} (attempt {key.attempt})", (error,), s.still_served(now)).to_wire()
        self._failing.add(key)

        def told(_: float) -> None:
            self._failing.discard(key)
            s.ledger.fail(key, report)

        s.write(Failed(key, report), now, told, awaited=False)

    def _start(self, key: VersionKey, now: float) -> None:
        s = self._s
        assert s.epoch is not None, "versions start in an epoch"
        s.key, s.op, s.part = key, s.take_op(), ()
        s.ledger.start(key)
        s.write(Started(key, s.op, s.epoch.epoch), now, awaited=False)
        s.enter("collecting", now)

    # ------------------------------------------------------------ COLLECTING

    def _collecting(self, now: float) -> None:
        s, spec = self._s, self._spec()
        missing = not_published(s, spec, s.key)
        skews = (layout_skew(s, spec, s.key), version_skew(s, spec, s.key))
        faults = (*publishers_lost(s, missing, now), *(skew for skew in skews if skew is not None))
        if faults:
            self._fail(faults, now)
        elif not missing:
            s.stall = stall_clock(s.limits.fetch_stall_s, now)
            s.enter("fetching", now)
        else:
            self._refuse_passed(spec, now)
            s.waiting = tuple(f"trainer {p.rank} (node {p.node}) to publish v{s.key.version}" for p in missing)
            self._limit("collect_s", s.limits.collect_s, now)

    def _refuse_passed(self, spec: EpochSpec, now: float) -> None:
        """Fail late publishes below the version in hand that others have gone past.

        One may hold the slot that its rank needs for the version in hand.
        """
        for key in self._s.ledger.undecided(self._s.view):
            if key.version < self._s.key.version and key not in self._failing:
                skew = version_skew(self._s, spec, key)
                if skew is not None:
                    self._refuse_key(key, skew, now)

    # ------------------------------------------------------------ FETCHING

    def _fetching(self, now: float) -> None:
        s = self._s
        spec = self._spec()
        lost = self._sources_lost(spec, now)
        if lost:
            self._fail(tuple(lost), now)
            return
        open_: list[NodeId] = []
        received = 0
        for node in self._needed_nodes(spec, now):
            fetch = self._fetch_of(node)
            received += fetch.received_nbytes if fetch else 0
            if fetch is not None and fetch.error is not None:
                self._fail((error_from_wire(fetch.error),), now)
                return
            if fetch is None or not fetch.complete or fetch.received_nbytes != fetch.planned_nbytes:
                open_.append(node)
        if not open_:
            self._prepare(now)
            return
        s.waiting = tuple(f"node {n} to hold v{s.key.version}{self._progress(n)}" for n in open_)
        held = any(s.view.node(n, now).kind == "away" for n in spec_nodes(spec))
        assert s.stall is not None, "set on entering the stage"
        if s.stall.expired(received, held=held, now=now):
            self._fail((self._late("fetch_stall_s", s.limits.fetch_stall_s, now - s.stall.at),), now)
        else:
            self._limit("fetch_s", s.limits.fetch_s, now)

    def _sources_lost(self, spec: EpochSpec, now: float) -> list[WeightdError]:
        """Return the trainer ranks whose bytes are needed and are no more."""
        s = self._s
        lost: list[WeightdError] = []
        for place in spec.trainers:
            presence = s.view.rank(place.rank, place.node, place.boot, now)
            offered = s.view.slot_with(place.rank, place.node, place.boot, s.key) is not None
            node_gone = s.view.node(place.node, now).kind == "gone"
            if node_gone or (not offered and presence.kind != "away"):
                lost.append(rank_lost(s, place, presence.why or "it does not offer the version any more"))
        return lost

    def _needed_nodes(self, spec: EpochSpec, now: float) -> list[NodeId]:
        """Return the known set of nodes: those of the epoch, but for nodes of nothing but lost engine ranks."""
        s = self._s
        needed = {p.node for p in spec.trainers}
        for p in spec.receivers:
            if s.view.rank(RolloutRank(p.engine, p.k), p.node, p.boot, now).kind != "gone":
                needed.add(p.node)
        return sorted(needed)

    def _fetch_of(self, node: NodeId) -> FetchState | None:
        report = self._s.view.report(node)
        fetch = report.fetch if report else None
        return fetch if fetch is not None and (fetch.key, fetch.op) == (self._s.key, self._s.op) else None

    def _progress(self, node: NodeId) -> str:
        fetch = self._fetch_of(node)
        return f" ({fetch.received_nbytes} of {fetch.planned_nbytes} bytes)" if fetch else ""

    def _prepare(self, now: float) -> None:
        s = self._s
        if s.draining:
            return  # no engine is paused for a daemon that stops: its successor goes on from here
        s.write(Prepared(s.key, s.op, self._spec().epoch), now, self._prepared)

    def _prepared(self, now: float) -> None:
        """PREPARED is journaled: every engine whose ranks all live is told to pause."""
        s = self._s
        s.op = s.take_op()
        for engine in spec_engines(self._spec()):
            kinds = {s.view.rank(w, seat.node, seat.boot, now).kind for w, seat in s.seats(engine).items()}
            if "gone" not in kinds:
                s.turns[engine] = s.new_turn(engine, s.key, s.op, now)
                s.part = (*s.part, engine)
        s.enter("prepared", now)

    # ------------------------------------------------------------ PREPARED, APPLYING

    def _applying(self, now: float) -> None:
        s = self._s
        turns = self._turns()
        if s.stage == "prepared" and any(t.written for t in turns):
            s.enter("applying", now)
        s.waiting = tuple(w for t in turns for w in t.waiting)
        if all(t.settled for t in turns):
            self._decide(turns, now)

    def _decide(self, turns: list[EngineTurn], now: float) -> None:
        """Every engine is done or excluded: commit for those that are done, or fail if none of the living is."""
        s = self._s
        done = tuple(t.engine for t in turns if t.phase is Phase.DONE)
        if not done and any(t.live() for t in turns):
            self._fail(tuple(t.cause for t in turns if t.cause is not None), now)
            return
        s.write(Committed(s.key, done), now, lambda at: self._commit(done, at))

    def _commit(self, done: tuple[EngineId, ...], now: float) -> None:
        """The commit is journaled: from here on it may be told."""
        s = self._s
        s.ledger.commit(s.key, done)
        for engine in done:
            s.turns[engine].commit(now)
        facts: dict[str, object] = {"version": s.key.version, "engines": list(done), "fenced": self._left_out(done)}
        s.note("version committed", facts)
        s.enter("committed", now)

    def _left_out(self, done: tuple[EngineId, ...]) -> list[str]:
        return [str(e) for e in self._s.part if e not in done]

    # ------------------------------------------------------------ COMMITTED, FAILED

    def _committed(self, now: float) -> None:
        s = self._s
        open_ = [t for t in self._turns() if t.phase is Phase.COMMITTING and not t.overdue(now)]
        s.waiting = tuple(w for t in open_ for w in t.waiting)
        if not open_:
            s.ledger.settled = True
            self._end(now)

    def _failed(self, now: float) -> None:
        s = self._s
        open_ = [t for t in self._turns() if t.phase is Phase.ABORTING]
        s.waiting = tuple(w for t in open_ for w in t.waiting)
        if not open_:
            self._end(now)

    def _end(self, now: float) -> None:
        s = self._s
        s.part, s.stall = (), None
        s.enter("idle", now)
        s.key = NO_KEY

    def _fail(self, errors: tuple[WeightdError, ...], now: float) -> None:
        """Fail the version in hand; orders go out at once, the report once it is journaled."""
        s = self._s
        key = s.key
        report = Refused(f"version {key.version} (attempt {key.attempt})", errors, s.still_served(now))
        wire = report.to_wire()
        for turn in self._turns():
            turn.abort(wire, now)
        s.note("version failed", {"version": key.version, "attempt": str(key.attempt), "report": str(report)})
        s.enter("failed", now)
        s.write(Failed(key, wire), now, lambda _: s.ledger.fail(key, wire))

    # ------------------------------------------------------------ common

    def _turns(self) -> list[EngineTurn]:
        return [self._s.turns[e] for e in self._s.part]

    def _spec(self) -> EpochSpec:
        assert self._s.epoch is not None, "a version is bound to an epoch"
        return self._s.epoch

    def _limit(self, setting: str, limit_s: float, now: float) -> None:
        if now - self._s.since >= limit_s:
            self._fail((self._late(setting, limit_s, now - self._s.since),), now)

    def _late(self, setting: str, limit_s: float, waited_s: float) -> DeadlinePassed:
        s = self._s
        return DeadlinePassed(s.stage, s.waiting, s.key.version, None, waited_s, limit_s, setting, s.serving)
