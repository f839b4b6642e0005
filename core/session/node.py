"""A node's machine: one per run, on every node.

Rules of this file.

1. It performs no IO, reads no clock, spawns nothing, logs nothing.  ``now`` is an argument (monotonic seconds).
2. Two doors change it: ``handle(event, now)`` and ``on_deadline(now)``.  Both return what to do, in order.
3. ``next_deadline()`` says when to wake it; None only while nobody is attached and nobody leads.
4. It decides nothing about a version.  It carries the leader's goal to its hooks and their states to the leader,
   whole, on every change and with every heartbeat: a lost, doubled or late message changes nothing.
5. It acts on no goal below its floor, and on none of a term that it has not journaled.
6. What it vouches for is journaled first: the term it follows, bytes that it holds, a commit before a hook hears of it.
7. A slot is given free, and a half of the landing reused, only after its own readers have ended.
8. A write is passed on only while every source of it is whole on this node.
9. A slot whose bytes have moved to another one is given free without asking: readers go on from there.

Whom it follows is in ``following``, its hooks in ``attached``, its bytes in ``landing``, its plans in ``node_plans``,
its journal in ``node_records``, what hooks are told in ``hook_goals`` and when in ``hook_talk``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, assert_never

from weightd.core.session.attached import Attached
from weightd.core.session.events import (
    AnswerSuperseded,
    EpochPlanned,
    FetchAdvanced,
    FetchEnded,
    GoalArrived,
    HookGreeted,
    HookLost,
    HookReady,
    HookReported,
    NodeEffect,
    NodeEvent,
    NodeJournaled,
    ReadersChanged,
    TellLeader,
)
from weightd.core.session.faults import NoLeader
from weightd.core.session.following import Following
from weightd.core.session.hook_goals import HookGoals, NoLeaderNow
from weightd.core.session.hook_talk import HookTalk
from weightd.core.session.landing import Landing
from weightd.core.session.node_parts import NodeParts
from weightd.core.session.node_plans import NodePlans
from weightd.core.session.node_records import NodeRecords
from weightd.core.session.node_report import report_of, steady
from weightd.core.session.node_standing import standing_of
from weightd.core.session.records import Held, NodeJournalState, TermTaken
from weightd.core.units import NO_KEY, NodeId, RunName, TrainerRank
from weightd.core.wire.messages import Recovered, SlotState

if TYPE_CHECKING:
    from weightd.core.session.deadlines import Deadlines
    from weightd.core.session.writing import Continuation
    from weightd.core.units import Boot, Term, VersionKey
    from weightd.core.wire.messages import Goal, NodeReport

FETCHES: frozenset[str] = frozenset({"fetching", "prepared", "applying"})
"""Stages in which a node comes to hold the version in hand, or goes on holding it."""

START = NodeJournalState()


class NodeMachine:
    """One run on one node.

    Args:
        run: The run.
        node: This node.
        boot: Of this daemon.
        deadlines: Limits.
        journal_state: ``records.replay_node`` of this node's journal.
    """

    following_class: ClassVar[type[Following]] = Following
    hook_goals_class: ClassVar[type[HookGoals]] = HookGoals

    def __init__(
        self, run: RunName, node: NodeId, boot: Boot, deadlines: Deadlines, journal_state: NodeJournalState = START
    ) -> None:
        self.run, self.node, self.boot = run, node, boot
        self._limits = deadlines
        self.attached = Attached()
        self.landing = Landing()
        self.following = self.following_class(journal_state)
        self.plans = NodePlans()
        self.records = NodeRecords(journal_state.committed.key, deadlines.heartbeat_s)
        self._parts = NodeParts(
            run, node, self.following, self.attached, self.landing, self.plans, self.records, journal_state.highest
        )
        self._goals = self.hook_goals_class(self._parts)
        self._talk = HookTalk(self.attached, self._goals)
        self._out: list[NodeEffect] = []
        self._told: NodeReport | None = None
        self._answer = False
        self._beat_at = 0.0

    # ------------------------------------------------------------ the doors

    def handle(self, event: NodeEvent, now: float) -> list[NodeEffect]:
        """Take an event; return what to do."""
        match event:
            case HookGreeted():
                self.attached.greet(event, now, refused=self._talk.is_refused(event, self.following.goal))
            case HookReady():
                self.attached.ready(event.session)
            case HookReported():
                self.attached.hear(event)
                self._out += self._talk.repeat_refusal(event.session)
            case HookLost():
                self.attached.lose(event)
            case GoalArrived():
                self._hear_leader(event, now)
            case EpochPlanned():
                self.plans.take(event)
            case FetchAdvanced():
                self.landing.advance(event)
            case FetchEnded():
                self._end_fetch(event, now)
            case ReadersChanged():
                self._goals.readers[event.key] = event
            case NodeJournaled():
                self._journaled(event, now)
            case _:
                assert_never(event)
        return self._settle(now)

    def on_deadline(self, now: float) -> list[NodeEffect]:
        """Look at the clock; return what to do."""
        return self._settle(now)

    def next_deadline(self) -> float | None:
        """Return when to call ``on_deadline``; None while there is nobody to tell anything."""
        return self._beat_at if self.attached.hooks or self.following.goal is not None else None

    # ------------------------------------------------------------ questions of the shell

    def readable(self, key: VersionKey) -> dict[TrainerRank, SlotState]:
        """Return which local slots may be served to other nodes for a version: published, and not given free."""
        goal = self.following.goal
        if goal is None or goal.epoch is None or key not in {goal.key, *goal.retained} - {NO_KEY}:
            return {}
        found = {
            TrainerRank(p.rank): self.attached.slot_with(p.rank, p.boot, key)
            for p in goal.epoch.trainers
            if p.node == self.node
        }
        return {rank: slot for rank, slot in found.items() if slot is not None}

    def recovered(self) -> Recovered:
        """Return the answer to a ``Recover``: what this node knows of the run."""
        return Recovered(self.node, self.following.term, self.committed, self._parts.highest)

    def status(self, now: float) -> dict[str, object]:
        """Return this node's part of the status document, as plain values."""
        return standing_of(self._parts, self._limits, now)

    @property
    def term(self) -> Term:
        """The term it follows; 0 before any."""
        return self.following.term

    @property
    def leader(self) -> NodeId | None:
        """Who leads that term."""
        return self.following.leader or None

    @property
    def key(self) -> VersionKey:
        """The version in hand, as far as this node was told."""
        return self.following.goal.key if self.following.goal is not None else NO_KEY

    @property
    def committed(self) -> VersionKey:
        """Last commit that is in this node's journal."""
        return self.records.committed

    def report(self) -> NodeReport:
        """Return the whole state of this node."""
        return report_of(self._parts)

    # ------------------------------------------------------------ the leader

    def _hear_leader(self, event: GoalArrived, now: float) -> None:
        match self.following.judge(event):
            case "superseded":
                self._out.append(AnswerSuperseded(event.goal.leader, self.following.term, self.following.leader))
            case "new term":
                self._consider_term(event, now)
            case "late":
                self.following.late_goals += 1
                self._answer = True
            case "newer":
                self._accept(event, now)

    def _consider_term(self, event: GoalArrived, now: float) -> None:
        """A term is followed once it is journaled; its newest goal waits for that."""
        waits = self.following.waits
        if waits is not None and waits.term > event.term:
            return
        self.following.waits = event
        record = TermTaken(event.term, event.goal.leader)
        self._out += self.records.write_again(record, now, self._follow(event.term))

    def _follow(self, term: Term) -> Continuation:
        def follow(now: float) -> None:
            event = self.following.waits
            if event is not None and event.term == term > self.following.term:
                self.following.waits = None
                self.following.follow(term, event.goal.leader)
                self.attached.forget_ops()
                self.records.new_term()
                self._accept(event, now)

        return follow

    def _accept(self, event: GoalArrived, now: float) -> None:
        self.following.accept(event, now)
        self._parts.highest = max(self._parts.highest, event.goal.key.version, event.goal.committed.key.version)

    def _silence(self, now: float) -> str:
        """Return what hooks wait for once the leader is silent: what it said last may long be over."""
        silent_s = self.following.silent_for(now)
        if silent_s < self._limits.heartbeat_timeout_s:
            return ""
        return f"node {self.following.leader}, which leads and is not heard for {silent_s:.0f} s"

    def _no_leader(self, now: float) -> NoLeaderNow | None:
        waited_s = self.following.silent_for(now) - self._limits.heartbeat_timeout_s
        limit_s = self._limits.restart_s
        if waited_s < limit_s:
            return None
        return NoLeaderNow(waited_s - waited_s % limit_s, limit_s)  # said again each time that it is over once more

    def _refuse_leaderless(self, now: float) -> None:
        """Without a leader nobody can join: after ``attach_s`` who waits is told so."""
        limit = self._limits.attach_s
        error = NoLeader(self.run, self.node, self.following.leader, limit, limit, "attach_s")
        self._out += self._talk.refuse_waiting(error.to_wire(), now - limit)

    # ------------------------------------------------------------ bytes

    def _fetch(self, goal: Goal) -> None:
        """Come to hold the version in hand; let go of what nobody needs."""
        kept = {*goal.retained, *self._goals.busy()}
        self.landing.drop(kept)
        plan = self.plans.adopted
        if goal.stage not in FETCHES or plan is None or goal.epoch is None or plan.epoch != goal.epoch.epoch:
            self._out += self.landing.stop()
        else:
            self._out += self.landing.want(plan.epoch, goal.key, goal.op, plan.fetch_nbytes, kept)

    def _end_fetch(self, event: FetchEnded, now: float) -> None:
        ended = self.landing.end(event)
        if ended is not None:
            self._out += self.records.write(Held(event.key), now, lambda _: self.landing.complete(ended))

    def _journaled(self, event: NodeJournaled, now: float) -> None:
        unwritten = self.records.close(event, now)
        if unwritten is not None and isinstance(unwritten.record, Held) and event.error is not None:
            self.landing.refuse(unwritten.record.key, event.error)

    # ------------------------------------------------------------ turning the crank

    def _settle(self, now: float) -> list[NodeEffect]:
        beat = now >= self._beat_at
        if beat:
            self._beat_at = now + self._limits.heartbeat_s
        goal = self.following.goal
        if goal is not None:
            self._out += self._talk.refuse(goal)
            self._out += self.plans.follow(goal)
            self._out += self.records.decisions(goal, now)
            self._fetch(goal)
            self._out += self._talk.tell(goal, self._no_leader(now), now, beat=beat, silence=self._silence(now))
            self._out += self._goals.end_serving()
            self._tell_leader(beat=beat)
        else:
            self._refuse_leaderless(now)
        out, self._out = self._out, []
        return out

    def _tell_leader(self, *, beat: bool) -> None:
        report = self.report()
        if beat or self._answer or steady(report) != self._told:
            self._told, self._answer = steady(report), False
            self._out.append(TellLeader(self.following.leader, report))
