"""What the leader knows of its run: one place for all of it, with the few questions that every stage asks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightd.core.session.epochs import spec_engines
from weightd.core.session.events import JournalLeader, LeaderEffect, Note
from weightd.core.session.faults import still_served
from weightd.core.session.turns import EngineTurn, Phase, Seat, returning
from weightd.core.session.view import Who, rank_name
from weightd.core.session.writing import JournalWriter
from weightd.core.units import NO_KEY, NO_OP, NO_TERM, EngineId, NodeId, Op, RolloutRank, RunName, Term, VersionKey

if TYPE_CHECKING:
    from weightd.core.errors import Refused, WeightdError
    from weightd.core.roster.topology import Roster
    from weightd.core.session.clocks import StallClock
    from weightd.core.session.deadlines import Deadlines
    from weightd.core.session.epochs import Epochs
    from weightd.core.session.ledger import Ledger
    from weightd.core.session.members import Members
    from weightd.core.session.records import AnyRecord
    from weightd.core.session.view import View
    from weightd.core.session.writing import Continuation
    from weightd.core.units import Boot, Version
    from weightd.core.wire.messages import EpochSpec, Stage

QUIET: frozenset[str] = frozenset({"attaching", "idle", "paused"})
"""Stages with no version in hand."""


@dataclass
class RunState:
    """One run, as its leader knows it.

    Attributes:
        stage: Stage of the version in hand.
        since: When it was entered.
        key: The version in hand.
        op: Of its orders.
        turns: Each engine's way, newest version that it took part in.
        part: Engines that take part in the version in hand.
        paused: Why publishes are refused.
        waiting: What the stage waits for, by name.
        draining: Its daemon stops in order: no version is begun or prepared any more.
    """

    run: RunName
    node: NodeId
    roster: Roster
    rank0_boot: Boot
    limits: Deadlines
    view: View
    members: Members
    epochs: Epochs
    ledger: Ledger
    down_at_start: frozenset[EngineId]
    term: Term = NO_TERM
    stage: Stage = "attaching"
    since: float = 0.0
    key: VersionKey = NO_KEY
    op: Op = NO_OP
    turns: dict[EngineId, EngineTurn] = field(default_factory=dict)
    part: tuple[EngineId, ...] = ()
    stall: StallClock | None = None
    paused: WeightdError | None = None
    waiting: tuple[str, ...] = ()
    draining: bool = False
    declared_fault: Refused | None = None
    journal: JournalWriter = field(default_factory=JournalWriter)
    out: list[LeaderEffect] = field(default_factory=list)
    turn_class: type[EngineTurn] = EngineTurn
    _last_op: Op = NO_OP

    # ------------------------------------------------------------ small moves

    def take_op(self) -> Op:
        """Return the next op of this term."""
        self._last_op = Op(self._last_op + 1)
        return self._last_op

    def raise_op(self, op: Op) -> None:
        """Count on from an op that a rank still speaks of, so that no order of this term is mistaken for an old one."""
        self._last_op = max(self._last_op, op)

    def enter(self, stage: Stage, now: float) -> None:
        """Change the stage, and say so."""
        facts: dict[str, object] = {
            "from": self.stage,
            "version": self.key.version,
            "attempt": str(self.key.attempt),
            "op": self.op,
            "seconds": round(now - self.since, 3),
        }
        self.stage, self.since, self.waiting = stage, now, ()
        self.note(f"stage {stage}", facts)

    def note(self, what: str, facts: dict[str, object]) -> None:
        """Add a line for the log."""
        self.out.append(Note(what, {"run": self.run, "term": self.term, **facts}))

    def write(self, record: AnyRecord, now: float, then: Continuation | None = None, *, awaited: bool = True) -> None:
        """Append a record to the journal; ``then`` follows once it is durable."""
        token, plain = self.journal.write(record, now, then, awaited=awaited)
        self.out.append(JournalLeader(token, plain))

    # ------------------------------------------------------------ questions

    @property
    def serving(self) -> Version:
        """Last committed version."""
        return self.ledger.serving

    @property
    def epoch(self) -> EpochSpec | None:
        """The adopted epoch: that of the version in hand, since it changes only between versions."""
        return self.epochs.adopted

    def lacking(self) -> tuple[Who, ...]:
        """Return the trainer ranks, and ranks of required engines, that the adopted epoch has and the run lacks."""
        if self.epoch is None:
            return ()
        required = {e.id for e in self.epoch.roster.engines if e.required}
        boots: dict[Who, Boot] = {p.rank: p.boot for p in self.epoch.trainers}
        places = [*self.epoch.receivers, *self.epoch.down]
        boots.update({RolloutRank(p.engine, p.k): p.boot for p in places if p.engine in required})
        down = {RolloutRank(p.engine, p.k) for p in self.epoch.down}
        return tuple(w for w, boot in boots.items() if w in down or not self._is_here(w, boot))

    def _is_here(self, who: Who, boot: Boot) -> bool:
        member = self.members.here.get(who)
        return member is not None and member.registration.boot == boot

    def why_lost(self, who: Who) -> str:
        """Return what was seen of a rank that is not here."""
        if who in self.members.lost:
            return self.members.lost[who][1]
        return "it was started anew and waits for its epoch" if who in self.members.here else "it is gone"

    def pid_of(self, who: Who, boot: Boot) -> int:
        """Return the process of a rank's incarnation, 0 where it is not known."""
        member = self.members.here.get(who)
        known = member.registration if member else self.members.lost[who][0] if who in self.members.lost else None
        return known.pid if known and known.boot == boot else 0

    # ------------------------------------------------------------ engines

    def still_served(self, now: float) -> str:
        """Return, for a text, what engines serve: those whose ranks all live and hold the last commit."""
        held = self.epoch is not None and any(
            not self._is_behind(engine)
            and all(self.view.rank(w, s.node, s.boot, now).kind != "gone" for w, s in self.seats(engine).items())
            for engine in spec_engines(self.epoch)
        )
        return still_served(self.serving, served=held)

    def seats(self, engine: EngineId) -> dict[RolloutRank, Seat]:
        """Return the known set of an engine's ranks in the adopted epoch."""
        assert self.epoch is not None, "engines have seats in an epoch"
        places = [p for p in self.epoch.receivers if p.engine == engine]
        whos = [RolloutRank(p.engine, p.k) for p in places]
        return {w: Seat(p.node, p.boot, self.pid_of(w, p.boot)) for w, p in zip(whos, places, strict=True)}

    def new_turn(self, engine: EngineId, key: VersionKey, op: Op, now: float) -> EngineTurn:
        """Return a turn at its start; an engine that is up stays up."""
        before = self.turns.get(engine)
        behind = self._is_behind(engine)
        planned = {w: self.epochs.rank_nbytes.get(w, 0) for w in self.seats(engine)}
        return self.turn_class(
            engine,
            self.seats(engine),
            planned,
            op,
            key,
            self.limits,
            self.serving,
            Phase.PAUSING,
            now,
            up=before.up if before else False,
            behind=behind,
            left_out=before.error() if before and behind else None,
            began_at=now,
        )

    def _is_behind(self, engine: EngineId) -> bool:
        """Whether a rank of an engine does not hold the last commit."""
        committed = self.ledger.committed.key
        entries = [self.view.receiver(w, s.node, s.boot) for w, s in self.seats(engine).items()]
        return committed != NO_KEY and any(e is None or e.report.base != committed for e in entries)

    def bring_back(self, engine: EngineId, now: float) -> None:
        """Give an engine that came, or came back, the orders that its ranks' states ask for."""
        committed = self.ledger.committed
        turn = self.new_turn(engine, committed.key, self.take_op(), now)
        self.turns[engine] = returning(turn, committed.key, engine in committed.engines, self.view, now)

    def step_turns(self, now: float) -> bool:
        """Let every engine look at the reports; return whether one changed its phase."""
        changed = False
        for engine, turn in list(self.turns.items()):
            before = turn.phase
            if turn.step(self.view, now):
                changed = True
                self._note_turn(turn, before)
            changed = self._watch_idle_engine(engine, turn, now) or changed
        return changed

    def _watch_idle_engine(self, engine: EngineId, turn: EngineTurn, now: float) -> bool:
        """An engine that was not reachable, or missed a commit, is not up until it answered."""
        if engine in self.part and self.stage not in QUIET:
            return False
        passed = turn.phase in (Phase.COMMITTING, Phase.RESUMING, Phase.UP) and turn.key.version < self.serving
        if not (passed or turn.phase in (Phase.UP, Phase.ABORTED, Phase.FENCED)):
            return False
        kinds = {self.view.rank(w, s.node, s.boot, now).kind for w, s in turn.seats.items()}
        if passed or "gone" in kinds:
            turn.up = False
        in_epoch = self.epoch is not None and any(p.engine == engine for p in self.epoch.receivers)
        if turn.up or kinds != {"here"} or not in_epoch or self.seats(engine) != turn.seats:
            return False
        self.bring_back(engine, now)
        return True

    def _note_turn(self, turn: EngineTurn, before: Phase) -> None:
        facts: dict[str, object] = {"engine": turn.engine, "from": before.name.lower(), "version": turn.key.version}
        if turn.cause is not None:
            facts["cause"] = str(turn.cause)
        self.note(f"engine {turn.phase.name.lower()}", facts)

    # ------------------------------------------------------------ texts

    def waiting_text(self, now: float, ends_at: float | None) -> str:
        """Return what the stage waits for, with its clock."""
        if not self.waiting:
            return ""
        shown = ", ".join(self.waiting[:8]) + (f" and {len(self.waiting) - 8} more" if len(self.waiting) > 8 else "")
        clock = f", {now - self.since:.0f} of {ends_at - self.since:.0f} s" if ends_at is not None else ""
        return f"{shown}{clock}"

    def names(self, ranks: tuple[Who, ...]) -> tuple[str, ...]:
        """Return ranks for a text."""
        return tuple(rank_name(w) for w in ranks)
