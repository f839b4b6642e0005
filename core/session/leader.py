"""The leader's machine: one per run, on the daemon that trainer rank 0 greeted.

Rules of this file.

1. It performs no IO, reads no clock, spawns nothing, logs nothing.  ``now`` is an argument (monotonic seconds).
2. Two doors change it: ``handle(event, now)`` and ``on_deadline(now)``.  Both return what to do, in order.
3. ``next_deadline()`` says when to wake it: at once when it is new, never again after ``StopLeading``.
4. It never raises for a peer's fault: that fails a version or refuses a rank.
5. Every effect that can fail names the event that reports its outcome.
6. It decides by the last report of every node and by nothing else: a lost, doubled or late report changes nothing.
7. What others rely on is journaled first: the term before it is announced, an epoch before it is adopted, PREPARED
   before the first pause, a failure and a commit before anyone is told.
8. One version is in hand, bound to the epoch that was adopted when it started, to its end.
9. A new start of trainer rank 0 is a new term: this machine says ``StopLeading``, and the shell makes another.

Who leads is here.  Ranks and epochs are in ``attaching``, the stages of a version in ``stages``, an engine's way
through one in ``turns``, what is published and decided in ``ledger``, and all that is known in ``run_state``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from weightd.core.errors import error_from_wire
from weightd.core.session.announcing import goal_of, steady
from weightd.core.session.attaching import Attaching
from weightd.core.session.epochs import Epochs
from weightd.core.session.events import (
    AskPeer,
    EpochProved,
    HigherTermSeen,
    LeaderEffect,
    LeaderEvent,
    LeaderJournaled,
    NodeReported,
    PeerRecovered,
    StopLeading,
    TellNode,
)
from weightd.core.session.faults import JournalFailed
from weightd.core.session.ledger import Ledger
from weightd.core.session.members import RANK0, Members
from weightd.core.session.records import Committed, JournalState, Started, TermTaken
from weightd.core.session.records import Prepared as PreparedRecord
from weightd.core.session.run_state import QUIET, RunState
from weightd.core.session.stages import Stages
from weightd.core.session.standing import standing_of
from weightd.core.session.view import View, follows
from weightd.core.units import NO_OP, Boot, EngineId, NodeId, RunName, Term

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightd.core.roster.topology import Roster
    from weightd.core.session.deadlines import Deadlines
    from weightd.core.wire.messages import Goal, NodeReport, Recovered

BUCKET_LIMIT_BYTES = 32 << 20
"""Largest bucket of a transfer where the shell says nothing: large against a round trip, small against a landing."""

STEPS_LIMIT = 100
"""Steps that one event can cause.  A version has eight stages; more than this is a loop of ours."""

_TICK_S = 0.001
"""Between two looks at least."""


class LeaderMachine:
    """Leads one run.

    Args:
        run: The run.
        node: The node this is on.
        boot: Of this daemon.
        peers: Every configured node; this one may be among them.
        roster: As trainer rank 0 declared it.
        rank0_boot: Incarnation of trainer rank 0, which names the attempts of this term.
        deadlines: Limits.
        journal_state: ``records.replay`` of the leader's journal on this node.
        bucket_limit_bytes: Largest bucket of a transfer.
    """

    def __init__(
        self,
        run: RunName,
        node: NodeId,
        boot: Boot,
        peers: Iterable[NodeId],
        roster: Roster,
        rank0_boot: Boot,
        deadlines: Deadlines,
        journal_state: JournalState,
        bucket_limit_bytes: int = BUCKET_LIMIT_BYTES,
    ) -> None:
        self.boot = boot
        self._peers = tuple(sorted(set(peers) - {node}))
        self._journal_state = journal_state
        down = frozenset(EngineId(p.engine) for p in journal_state.epoch.down) if journal_state.epoch else frozenset()
        self.state = RunState(
            run,
            node,
            roster,
            rank0_boot,
            deadlines,
            View(deadlines, 0.0),
            Members(),
            Epochs(bucket_limit_bytes, deadlines.plan_s, journal_state.epoch),
            Ledger(journal_state, rank0_boot),
            down,
        )
        self._attaching = Attaching(self.state)
        self._stages = Stages(self.state)
        self._began_at: float | None = None
        self._answers: dict[NodeId, Recovered] = {}
        self._late_answers: dict[NodeId, Recovered] = {}
        self._introduced: set[NodeId] = set()
        self._leads = False
        self._stopped: str | None = None
        self._told: Goal | None = None
        self._beat_at = 0.0
        self._seen_at = 0.0

    # ------------------------------------------------------------ the doors

    def handle(self, event: LeaderEvent, now: float) -> list[LeaderEffect]:
        """Take an event; return what to do."""
        if self._stopped is not None:
            return []
        self._begin(now)
        match event:
            case NodeReported():
                self._hear(event, now)
            case PeerRecovered():
                self._late_answers[event.answer.node] = event.answer
            case HigherTermSeen():
                self._see_term(event)
            case EpochProved():
                self._attaching.take_proof(event, now)
            case LeaderJournaled():
                self._journaled(event, now)
            case _:
                assert_never(event)
        return self._settle(now)

    def start(self, now: float) -> list[LeaderEffect]:
        """Begin to lead, or rather to ask who led; the same as the first ``on_deadline``."""
        return self.on_deadline(now)

    def on_deadline(self, now: float) -> list[LeaderEffect]:
        """Look at the clock; return what to do."""
        if self._stopped is not None:
            return []
        self._begin(now)
        return self._settle(now)

    def drain(self, now: float) -> list[LeaderEffect]:
        """The daemon is to stop: begin and prepare nothing any more; what is prepared goes on to its decision."""
        self.state.draining = True
        return self.on_deadline(now)

    def give_up(self, waited_s: float, now: float) -> list[LeaderEffect]:
        """``drain_s`` is over: fail what is prepared and not decided, with who was waited for."""
        if self._leads and self._stopped is None:
            self._stages.give_up(waited_s, self.state.limits.drain_s, "drain_s", now)
        return self.on_deadline(now)

    def next_deadline(self) -> float | None:
        """Return when to call ``on_deadline``; None once it has stopped."""
        if self._stopped is not None:
            return None
        if self._began_at is None:
            return 0.0
        ends = [self._beat_at, self._stages.ends_at(), self._attaching.deadline()]
        # One that has passed was looked at, and waits for something else; the next beat looks again.
        # A limit that is held while its ranks are away moves with every look: not sooner than a tick, or it is a spin.
        return max(min(e for e in ends if e is not None and e > self._seen_at), self._seen_at + _TICK_S)

    @property
    def term(self) -> Term:
        """The term it leads, which its envelopes carry; 0 before it leads."""
        return self.state.term

    def status(self, now: float) -> dict[str, object]:
        """Return the leader's part of the status document, as plain values."""
        phase = self._stopped or ("leads" if self._leads else "recovers")
        return {"leading": phase, **standing_of(self.state, self._attaching, self._stages, now)}

    def stage_deadline(self) -> float | None:
        """Return when the stage ends by itself; None in IDLE and PAUSED."""
        return self._attaching.deadline() if self.state.stage == "attaching" else self._stages.ends_at()

    # ------------------------------------------------------------ taking the lead

    def _begin(self, now: float) -> None:
        if self._began_at is None:
            self._began_at = now
            self._beat_at = now
            self.state.view = View(self.state.limits, now)
            self.state.since = now

    def _recover(self, now: float) -> None:
        """Once every peer answered, or was silent for ``restart_s``, take a term above all that were seen."""
        assert self._began_at is not None, "set by the first door"
        self._take_answers()
        silent = [p for p in self._peers if p not in self._answers]
        waited = now - self._began_at >= self.state.limits.restart_s
        if self.state.journal.awaited() is None and (not silent or waited):
            self._take_term(now)

    def _take_answers(self) -> None:
        """Learn what peers know; from then on they have a part in the run."""
        s = self.state
        for answer in self._late_answers.values():
            s.ledger.raise_floor(answer.highest)
            s.ledger.raise_floor(answer.committed.version)
            s.ledger.learn_commit(answer.committed, ())
        self._answers.update(self._late_answers)
        self._late_answers.clear()

    def _take_term(self, now: float) -> None:
        s = self.state
        seen = [s.term, self._journal_state.term, *(a.term for a in self._answers.values())]
        term = Term(max(seen) + 1)
        s.write(TermTaken(term, s.node), now, lambda at: self._lead(term, at))

    def _lead(self, term: Term, now: float) -> None:
        self.state.term = term
        if not self._leads:
            self._attaching.open(now)
        self._leads = True
        self._introduced.clear()
        self.state.note("term taken", {"barred": [p for p in self._peers if p not in self._answers]})

    def _admit_barred(self, now: float) -> None:
        """A peer that was silent when the term was taken has answered; between versions it is let in.

        If it knows a term that is not below this one, somebody led without this leader's knowledge: a term above
        that is taken, but only beside the trainer rank 0 that this leader was made for.
        """
        s = self.state
        if not self._late_answers or s.stage not in QUIET or s.journal.awaited() is not None:
            return
        highest = max(a.term for a in self._late_answers.values())
        self._take_answers()
        if highest < s.term:
            return
        here = s.members.here.get(RANK0)
        if here is not None and here.registration.boot == s.rank0_boot:
            self._take_term(now)
        else:
            self._stop(f"term {highest} was taken elsewhere, and trainer rank 0 is not here")

    def _barred(self, node: NodeId) -> bool:
        """A peer that has not said what it knows has no part in the run."""
        return node != self.state.node and node not in self._introduced and node not in self._answers

    def _see_term(self, event: HigherTermSeen) -> None:
        if (event.term, event.leader) != (self.state.term, self.state.node) and event.term >= self.state.term:
            self._stop(f"term {event.term} is led by node {event.leader}")

    def _stop(self, why: str) -> None:
        if self._stopped is None:
            self._stopped = why
            self.state.out.append(StopLeading(why))

    # ------------------------------------------------------------ hearing

    def _hear(self, event: NodeReported, now: float) -> None:
        s, report = self.state, event.report
        if self._barred(report.node) or not self._leads or not follows(report, s.term):
            return
        if not s.view.take(report, event.boot, event.seq, now):
            return
        if report.node not in self._introduced:
            self._introduced.add(report.node)
            self._introduce(report, now)

    def _introduce(self, report: NodeReport, now: float) -> None:
        """A node's first report in this term may know what this leader's journal does not."""
        s = self.state
        s.raise_op(max((r.report.op for r in report.receivers), default=NO_OP))
        if s.stage in QUIET and s.epoch is None:
            s.ledger.raise_floor(report.highest)
            engines = {r.engine for r in report.receivers if r.report.committed == report.committed}
            if s.ledger.learn_commit(report.committed, tuple(sorted(engines))):
                s.write(Committed(s.ledger.committed.key, s.ledger.committed.engines), now, awaited=False)

    # ------------------------------------------------------------ the journal

    def _journaled(self, event: LeaderJournaled, now: float) -> None:
        writing = self.state.journal.close(event.token)
        if writing is None:
            return
        if event.error is None:
            if writing.then is not None:
                writing.then(now)
            return
        kind = type(writing.record).__name__.lower()
        why = str(error_from_wire(event.error))
        s = self.state
        refusable = isinstance(writing.record, Started | PreparedRecord) and writing.record.key == s.key
        if refusable and s.stage in ("collecting", "fetching"):
            self._stages.refuse_version(JournalFailed(f"{kind} of v{s.key.version}", why, s.serving), now)
        else:
            self._stop(f"journal: {kind} was not written: {why}")

    # ------------------------------------------------------------ turning the crank

    def _settle(self, now: float) -> list[LeaderEffect]:
        self._seen_at = now
        if self._leads:
            self._advance(now)
        elif self._stopped is None:
            self._recover(now)
        oldest = self.state.journal.oldest_at()
        if oldest is not None and now - oldest >= self.state.limits.restart_s:
            self._stop(f"journal: no answer for {now - oldest:.0f} s")
        if self._stopped is None:
            self._tell(now)
        out, self.state.out = self.state.out, []
        return out

    def _advance(self, now: float) -> None:
        for _ in range(STEPS_LIMIT):
            if self._stopped is not None:
                return
            self._admit_barred(now)
            if self._attaching.step(now):
                self._stop("trainer rank 0 started anew: a new term follows")
                return
            changed = self.state.step_turns(now)
            if not self._stages.step(now) and not changed:
                return
        raise AssertionError(f"no rest after {STEPS_LIMIT} steps in stage {self.state.stage}")

    def _tell(self, now: float) -> None:
        """Tell every node the goal when it changed, and with every heartbeat; ask peers that have not answered."""
        s = self.state
        beat = now >= self._beat_at
        if beat:
            self._beat_at = now + s.limits.heartbeat_s
            s.out += [AskPeer(p) for p in self._peers if self._barred(p)]
        if not self._leads:
            return
        goal = goal_of(s, s.waiting_text(now, self.stage_deadline()))
        if not beat and self._told is not None and steady(goal) == self._told:
            return
        self._told = steady(goal)
        s.out += [TellNode(n, goal) for n in (s.node, *self._peers) if not self._barred(n)]
