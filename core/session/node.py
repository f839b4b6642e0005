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

Whom it follows is in ``following``, its hooks in ``attached``, its bytes in ``landing``, what hooks are told in
``hook_goals``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, assert_never

from weightd.core.session.attached import Attached, Hook, acknowledged
from weightd.core.session.events import (
    AdoptEpoch,
    AnswerSuperseded,
    EpochPlanned,
    FetchAdvanced,
    FetchEnded,
    GoalArrived,
    HookGreeted,
    HookLost,
    HookReady,
    HookReported,
    JournalNode,
    NodeEffect,
    NodeEvent,
    NodeJournaled,
    PlanEpoch,
    ReadersChanged,
    TellHook,
    TellLeader,
)
from weightd.core.session.faults import NoLeader
from weightd.core.session.following import Following
from weightd.core.session.hook_goals import HookGoals, NoLeaderNow
from weightd.core.session.landing import Landing
from weightd.core.session.node_report import report_of, steady, steady_goal
from weightd.core.session.node_standing import standing_of
from weightd.core.session.records import Committed, Fenced, Held, NodeJournalState, TermTaken
from weightd.core.session.view import rank_name
from weightd.core.session.writing import JournalWriter
from weightd.core.units import NO_EPOCH, NO_KEY, Epoch, NodeId, RolloutRank, RunName, TrainerRank, Version
from weightd.core.wire.messages import (
    PublisherGoal,
    ReceiverGoal,
    Recovered,
    Refusal,
    SlotRelease,
    SlotState,
    TrainerHello,
)

if TYPE_CHECKING:
    from weightd.core.session.deadlines import Deadlines
    from weightd.core.session.events import SessionId
    from weightd.core.session.landing import Fetch
    from weightd.core.session.records import AnyRecord
    from weightd.core.session.writing import Continuation
    from weightd.core.units import Boot, Op, Term, VersionKey
    from weightd.core.wire.messages import EpochSpec, Goal, NodeReport

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
        self._goals = self.hook_goals_class(run, node, self.following, self.attached, self.landing)
        self._goals.committed = journal_state.committed.key
        self._highest: Version = journal_state.highest
        self._planned: dict[Epoch, EpochPlanned] = {}
        self._asked: dict[Epoch, EpochSpec] = {}
        self._journal = JournalWriter()
        self._recording: set[AnyRecord] = set()
        self._retry_at = 0.0
        self._fences: set[tuple[str, Op]] = set()
        self._out: list[NodeEffect] = []
        self._told: NodeReport | None = None
        self._answer = False
        self._beat_at = 0.0

    # ------------------------------------------------------------ the doors

    def handle(self, event: NodeEvent, now: float) -> list[NodeEffect]:
        """Take an event; return what to do."""
        match event:
            case HookGreeted():
                self.attached.greet(event, now, refused=self._is_refused(event))
            case HookReady():
                self.attached.ready(event.session)
            case HookReported():
                self._hear_hook(event)
            case HookLost():
                self.attached.lose(event)
            case GoalArrived():
                self._hear_leader(event, now)
            case EpochPlanned():
                self._take_plan(event)
            case FetchAdvanced():
                self.landing.advance(event)
            case FetchEnded():
                self._end_fetch(event, now)
            case ReadersChanged():
                self._goals.readers[event.key] = event.readers
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
        return Recovered(self.node, self.following.term, self._goals.committed, self._highest)

    def status(self, now: float) -> dict[str, object]:
        """Return this node's part of the status document, as plain values."""
        return standing_of(self, self._limits, now)

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
        return self._goals.committed

    @property
    def adopted(self) -> Epoch:
        """The epoch whose plan is in use."""
        return self._goals.adopted.epoch if self._goals.adopted is not None else NO_EPOCH

    @property
    def fetch_nbytes(self) -> int:
        """Bytes that come from other nodes with every version of the adopted epoch."""
        return self._goals.adopted.fetch_nbytes if self._goals.adopted is not None else 0

    def report(self) -> NodeReport:
        """Return the whole state of this node."""
        return report_of(self, self._planned, self._highest)

    # ------------------------------------------------------------ hooks

    def _hear_hook(self, event: HookReported) -> None:
        self.attached.hear(event)
        hook = self.attached.hooks.get(event.session)
        if hook is not None and hook.refused is not None:
            self._out.append(TellHook(event.session, Refusal(hook.refused)))

    def _is_refused(self, event: HookGreeted) -> bool:
        """Whether the leader still refuses an earlier try of this process; then the new one waits for that to end."""
        goal = self.following.goal
        hello = event.hello
        who = f"trainer {hello.rank}" if isinstance(hello, TrainerHello) else f"{hello.engine}[{hello.k}]"
        return goal is not None and any((who, event.boot) in r.ranks for r in goal.refused)

    def _refuse_hooks(self, goal: Goal) -> None:
        refused = {rank: r.error for r in goal.refused for rank in r.ranks}
        for hook in self.attached.hooks.values():
            error = refused.get((rank_name(hook.who), hook.boot))
            if hook.held_back:
                hook.held_back = error is not None
            elif error is not None and hook.refused is None:
                hook.refused = error
                self._out.append(TellHook(hook.session, Refusal(error)))

    def _tell_hooks(self, goal: Goal, now: float, *, beat: bool) -> None:
        lost = self._no_leader(now)
        for session, hook in self.attached.hooks.items():
            if hook.takes_part:
                body = self._goal_of(hook, goal, lost)
                if body is not None:
                    self._tell_hook(session, hook, body, now, beat=beat)
        for r in goal.release:
            if r.key not in self._goals.busy():
                self.attached.free_ended(TrainerRank(r.rank), SlotRelease(r.slot, r.key))

    def _goal_of(self, hook: Hook, goal: Goal, lost: NoLeaderNow | None) -> PublisherGoal | ReceiverGoal | None:
        if isinstance(hook.who, RolloutRank):
            return self._goals.receiver(hook, goal, lost)
        return self._goals.publisher(hook, goal, lost)

    def _tell_hook(
        self, session: SessionId, hook: Hook, body: PublisherGoal | ReceiverGoal, now: float, *, beat: bool
    ) -> None:
        """Tell a hook its goal when it changed, and again while its state does not answer it."""
        news = steady_goal(body) != hook.told
        if not news and not (beat and not self._answered(hook, body)):
            return
        hook.told, hook.told_at = steady_goal(body), now
        self._note_what_it_may_do(hook, body)
        self._out.append(TellHook(session, body))

    @staticmethod
    def _answered(hook: Hook, body: PublisherGoal | ReceiverGoal) -> bool:
        if not isinstance(body, ReceiverGoal):
            return False
        return acknowledged(body, hook.receiver) and hook.receiver.plan_digest == body.plan_digest

    @staticmethod
    def _note_what_it_may_do(hook: Hook, body: PublisherGoal | ReceiverGoal) -> None:
        """From here on it may read, or overwrite, what it was told."""
        if isinstance(body, PublisherGoal):
            hook.freed = hook.freed | frozenset(body.release)
        elif body.order == "write":
            done = (hook.receiver.op, hook.receiver.state, hook.receiver.key) == (body.op, "applied", body.key)
            if not done:
                hook.reads, hook.reads_op = body.key, body.op

    def _refuse_leaderless(self, now: float) -> None:
        """Without a leader nobody can join: after ``attach_s`` who waits is told so."""
        limit = self._limits.attach_s
        for hook in self.attached.hooks.values():
            if hook.refused is None and now - hook.since >= limit:
                error = NoLeader(self.run, self.node, self.following.leader, now - hook.since, limit, "attach_s")
                hook.refused = error.to_wire()
                self._out.append(TellHook(hook.session, Refusal(hook.refused)))

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
        self._record(TermTaken(event.term, event.goal.leader), now, self._follow(event.term))

    def _follow(self, term: Term) -> Continuation:
        def follow(now: float) -> None:
            event = self.following.waits
            if event is not None and event.term == term > self.following.term:
                self.following.waits = None
                self.following.follow(term, event.goal.leader)
                self.attached.forget_ops()
                self._accept(event, now)

        return follow

    def _accept(self, event: GoalArrived, now: float) -> None:
        self.following.accept(event, now)
        self._highest = max(self._highest, event.goal.key.version, event.goal.committed.key.version)

    def _no_leader(self, now: float) -> NoLeaderNow | None:
        waited_s = self.following.silent_for(now) - self._limits.heartbeat_timeout_s
        limit_s = self._limits.restart_s
        return NoLeaderNow(round(waited_s, 1), limit_s) if waited_s >= limit_s else None

    # ------------------------------------------------------------ epochs and bytes

    def _take_plan(self, event: EpochPlanned) -> None:
        if event.epoch in self._asked:
            self._planned[event.epoch] = event

    def _plan_and_adopt(self, goal: Goal) -> None:
        specs = [spec for spec in (goal.epoch, goal.next_epoch) if spec is not None]
        for spec in specs:
            if not _same(self._asked.get(spec.epoch), spec):
                self._asked[spec.epoch] = spec
                self._planned.pop(spec.epoch, None)
                self._out.append(PlanEpoch(spec))
        if not specs:
            return  # a new leader numbers its epochs above those that it sees here
        wanted = {spec.epoch for spec in specs}
        self._asked = {e: s for e, s in self._asked.items() if e in wanted}
        self._planned = {e: p for e, p in self._planned.items() if e in wanted}
        if goal.epoch is not None and goal.epoch.epoch != self.adopted:
            plan = self._planned.get(goal.epoch.epoch)
            if plan is not None and plan.error is None:
                self._goals.adopted = plan
                self._out.append(AdoptEpoch(plan.epoch))

    def _fetch(self, goal: Goal) -> None:
        """Come to hold the version in hand; let go of what nobody needs."""
        busy = self._goals.busy()
        self.landing.drop({*goal.retained, *busy})
        adopted = self._goals.adopted
        if goal.stage not in FETCHES or adopted is None or goal.epoch is None or adopted.epoch != goal.epoch.epoch:
            self._out += self.landing.stop()
            return
        kept = {*goal.retained, *busy}
        self._out += self.landing.want(adopted.epoch, goal.key, goal.op, adopted.fetch_nbytes, kept)

    def _end_fetch(self, event: FetchEnded, now: float) -> None:
        ended = self.landing.end(event)
        if ended is not None:
            self._record(Held(event.key), now, self._holding(ended))

    def _holding(self, fetch: Fetch) -> Continuation:
        def complete(_: float) -> None:
            self.landing.complete(fetch)

        return complete

    # ------------------------------------------------------------ the journal

    def _record_decisions(self, goal: Goal, now: float) -> None:
        """Journal commits and fences as they are learnt."""
        note = goal.committed
        if note.key.version > self._goals.committed.version:
            record = Committed(note.key, note.engines)
            if record not in self._recording:
                self._record(record, now, self._recorded_commit(note.key))
        for order in goal.engines:
            if order.order == "fence" and (order.engine, order.op) not in self._fences:
                self._fences.add((order.engine, order.op))
                self._record(Fenced(order.engine, order.key, order.op), now, None)

    def _recorded_commit(self, key: VersionKey) -> Continuation:
        def learn(_: float) -> None:
            if key.version > self._goals.committed.version:
                self._goals.committed = key

        return learn

    def _record(self, record: AnyRecord, now: float, then: Continuation | None) -> None:
        if record in self._recording or now < self._retry_at:
            return
        self._recording.add(record)
        token, plain = self._journal.write(record, now, then, awaited=False)
        self._out.append(JournalNode(token, plain))

    def _journaled(self, event: NodeJournaled, now: float) -> None:
        """What could not be recorded is not vouched for; it is tried again after a heartbeat."""
        writing = self._journal.close(event.token)
        if writing is None:
            return
        self._recording.discard(writing.record)
        if event.error is not None:
            self._retry_at = now + self._limits.heartbeat_s
            if isinstance(writing.record, Held):
                self.landing.fetch = None  # fetched again: the same bytes, and another record
        elif writing.then is not None:
            writing.then(now)

    # ------------------------------------------------------------ turning the crank

    def _settle(self, now: float) -> list[NodeEffect]:
        beat = now >= self._beat_at
        if beat:
            self._beat_at = now + self._limits.heartbeat_s
        goal = self.following.goal
        if goal is not None:
            self._refuse_hooks(goal)
            self._plan_and_adopt(goal)
            self._record_decisions(goal, now)
            self._fetch(goal)
            self._tell_hooks(goal, now, beat=beat)
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


def _same(one: EpochSpec | None, other: EpochSpec) -> bool:
    """Return whether two epochs are the same, proved or not."""
    return one is not None and (one.epoch, one.trainers, one.receivers) == (
        other.epoch,
        other.trainers,
        other.receivers,
    )
