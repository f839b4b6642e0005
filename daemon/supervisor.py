"""One run on this node: turns the crank of its machines and carries out their effects.

The machines decide; this room does.  It is the only place where a session
meets a clock or an ``await``: one event in, its effects out, until the run
ends.  Every effect that can fail reports back with the event that its
docstring in ``core.session.events`` names.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self, assert_never
from urllib.parse import quote

import anyio
import msgspec
from anyio.abc import TaskGroup

from weightd.core.errors import InternalInvariantBroken, WeightdError
from weightd.core.roster.topology import Roster
from weightd.core.session import events as ev
from weightd.core.session.attached import STILL_READING
from weightd.core.session.compaction import compacted
from weightd.core.session.leader import LeaderMachine
from weightd.core.session.node import NodeMachine
from weightd.core.session.records import NodeJournalState, replay, replay_node
from weightd.core.units import NO_KEY, NO_TERM, Boot, NodeId, RunName, Term
from weightd.core.wire import messages as m
from weightd.daemon.attached import AttachedHooks, Hook
from weightd.daemon.bulk.landing import Landing, MemoryBudget
from weightd.daemon.bulk.port import BulkServer
from weightd.daemon.bulk.tcp import TcpBulkClient
from weightd.daemon.config import Config
from weightd.daemon.epochs import EpochPlans, LayoutStore, unknown_peers
from weightd.daemon.fetches import Fetches
from weightd.daemon.inbox import Inbox, RunEvent
from weightd.daemon.journal import Journal, JournalError
from weightd.daemon.planning import Planning
from weightd.daemon.serving import Serving
from weightd.daemon.status.versions import VersionTable
from weightd.daemon.workers import in_worker
from weightd.link.control import trace_of

log = logging.getLogger("weightd.run")

STANDING: frozenset[str] = frozenset({"prepared", "applying", "committed", "failed"})
"""Stages in which engines may stand until they are told the decision."""

NO_TRACE = b"\0" * 16
"""Of messages that belong to no version."""

IDLE_TURN_S = 60.0
"""Longest sleep of the crank when no machine has a deadline; only bounds the wait, nothing depends on it."""


@dataclass(frozen=True, slots=True)
class Undecided:
    """A version that engines of this node, or of the run led here, stand in.

    Attributes:
        version: Its number.
        stage: How far it is.
        waiting_for: Whom it waits for.
    """

    version: int
    stage: str
    waiting_for: str


class House(Protocol):
    """What a run needs of its daemon; no call blocks, and a message that is lost is repeated."""

    config: Config
    boot: Boot
    hooks: AttachedHooks
    layouts: LayoutStore
    budget: MemoryBudget
    bulk: BulkServer
    memcpy_bytes_per_s: float

    def soon(self, call: Callable[[], None]) -> None:
        """Run a call on the event loop, from any thread."""

    def to_hook(self, session: ev.SessionId, run: RunName, term: Term, trace: bytes, body: m.Body) -> bool:
        """Send to an attached hook; say whether there was room."""
        ...

    def to_peer(self, node: NodeId, run: RunName, term: Term, trace: bytes, body: m.Body) -> bool:
        """Send to another node's daemon; say whether there was room."""
        ...


@dataclass(frozen=True, slots=True)
class _Record:
    """A record on its way to a journal, and the event that tells its outcome."""

    role: str
    record: dict[str, object]
    outcome: Callable[..., ev.NodeJournaled | ev.LeaderJournaled]


@dataclass
class RunSupervisor:
    """All that this node does for one run; made by ``begin``.

    Attributes:
        node: The node's machine.
        leader: The leader's machine, while this node leads.
        versions: What became of each version, while this node leads.
    """

    run: RunName
    config: Config
    boot: Boot
    links: House
    inbox: Inbox
    planning: Planning
    fetches: Fetches
    serving: Serving
    node: NodeMachine
    copy_bytes_per_s: float
    versions: VersionTable
    leader: LeaderMachine | None = None
    _journals: dict[str, Journal] = field(default_factory=dict)
    _tasks: TaskGroup | None = None
    _draining: bool = False
    _goal_seq: int = 0
    _goal_at: float = 0.0
    _rank0: tuple[Roster, Boot] | None = None
    _records: deque[_Record] = field(default_factory=deque)
    _records_came: anyio.Event = field(default_factory=anyio.Event)

    @classmethod
    async def begin(cls, run: RunName, house: House) -> Self:
        """Make the supervisor of a run from what its daemon has.

        Raises:
            JournalError: The node's journal of the run cannot be read.
        """
        config = house.config
        inbox = Inbox()
        landing = Landing(f"the landing of run {run}", house.budget)
        planning = Planning(config.node, house.layouts, config.deadlines.plan_s, landing)
        journal, state = await in_worker("opening a journal", _node_journal, config.state_dir, run)
        node = NodeMachine(run, config.node, house.boot, config.deadlines, state)

        def ask(sender: NodeId, wanted: m.TicketWanted) -> None:
            house.to_peer(sender, run, node.following.term, trace_of(run, wanted.key), wanted)

        fetches = Fetches(config, TcpBulkClient(), inbox, ask, house.soon, lambda: node.following.term)
        serving = Serving(
            run,
            config.node,
            house.hooks,
            planning,
            house.bulk,
            node.readable,
            inbox,
            house.soon,
            config.deadlines.restart_s,
        )
        versions = VersionTable(config.limits.versions_kept)
        supervisor = cls(
            run, config, house.boot, house, inbox, planning, fetches, serving, node, house.memcpy_bytes_per_s, versions
        )
        supervisor._journals["node"] = journal
        return supervisor

    # ------------------------------------------------------------ the crank

    async def turn(self) -> None:
        """Turn the crank until the task is cancelled."""
        async with anyio.create_task_group() as tasks:
            self._tasks = self.fetches.tasks = tasks
            tasks.start_soon(self._write_journals)
            try:
                while True:
                    await self._turn_once()
            finally:
                self.fetches.stop_all()
                for journal in self._journals.values():
                    journal.close()
                self.planning.landing.close()

    async def _turn_once(self) -> None:
        now = anyio.current_time()
        machines: list[NodeMachine | LeaderMachine] = [self.node, *([self.leader] if self.leader else [])]
        wake = min((d for mach in machines if (d := mach.next_deadline()) is not None), default=now + IDLE_TURN_S)
        event: RunEvent | None = None
        with anyio.move_on_after(max(0.0, wake - now)):
            event = await self.inbox.next()
        now = anyio.current_time()
        if event is not None:
            self._handle(event, now)
        # A machine past its deadline is woken even while messages keep coming: a busy socket delays no verdict.
        for machine in machines:
            due = machine.next_deadline()
            if due is not None and due <= now:
                self._carry_out(machine.on_deadline(now))
        if self.leader is not None:
            self.versions.observe(self.leader, now, self.planning.snapshot_nbytes, self.copy_bytes_per_s)

    def _handle(self, event: RunEvent, now: float) -> None:
        match event:
            case ev.NodeReported() | ev.PeerRecovered() | ev.HigherTermSeen() | ev.EpochProved() | ev.LeaderJournaled():
                if self.leader is not None:
                    self._carry_out(self.leader.handle(event, now))
            case _:
                if isinstance(event, ev.GoalArrived):
                    self._goal_at = now
                self._carry_out(self.node.handle(event, now))

    async def rank0_greeted(self, roster: Roster, boot: Boot) -> None:
        """Trainer rank 0 greeted this node with the roster: lead, or be ready to when the term in hand ends.

        Raises:
            JournalError: The leader's journal cannot be read.
        """
        if "leader" not in self._journals:
            self._journals["leader"] = await in_worker(
                "opening a journal", open_journal, self.config.state_dir, self.run, "leader"
            )
        self._rank0 = roster, boot
        await self._lead()

    def _to_lead(self) -> tuple[Roster, Boot] | None:
        return self._rank0 if self.leader is None else None

    async def _lead(self) -> None:
        """Lead for the trainer rank 0 that greeted last, unless this node leads."""
        if self._to_lead() is None:
            return
        state = await in_worker("replaying a journal", replay, tuple(self._journals["leader"].records))
        to_lead = self._to_lead()
        if to_lead is None:
            return  # another greeting was faster
        (roster, boot), self._rank0 = to_lead, None
        self.leader = LeaderMachine(
            self.run,
            self.config.node,
            self.boot,
            tuple(self.config.peers),
            roster,
            boot,
            self.config.deadlines,
            state,
            self.config.limits.bucket_bytes,
        )
        self.leader.state.draining = self._draining
        self.inbox.nudge()

    @property
    def term(self) -> Term:
        """Newest term known here."""
        return max(self.leader.term if self.leader else NO_TERM, self.node.following.term)

    def may_read(self, hook: Hook) -> bool:
        """Whether a trainer rank's memory is still to be read, should its process have ended."""
        return self.planning.adopted is None or (hook.who, hook.boot) in self.planning.named

    def unused(self, now: float) -> bool:
        """Whether nobody takes part in the run any more, here or where it is led."""
        if self.node.attached.hooks:
            return False
        if self.leader is not None:
            return not self.leader.state.members.here
        return now - self._goal_at > self.config.deadlines.restart_s

    # ------------------------------------------------------------ stopping in order

    def drain(self) -> None:
        """Begin and prepare no version any more."""
        self._draining = True
        if self.leader is not None:
            self._carry_out(self.leader.drain(anyio.current_time()))

    def undecided(self) -> Undecided | None:
        """Return the version that engines stand in, if the run is led here or has engine ranks here."""
        now, goal = anyio.current_time(), self.node.following.goal
        busy = [h for h in self.node.attached.hooks.values() if h.receiver.state in STILL_READING | {"applied"}]
        if self.leader is not None and self.leader.state.stage in STANDING:
            state = self.leader.state
            waiting = state.waiting_text(now, self.leader.stage_deadline())
            return Undecided(int(state.key.version), state.stage, waiting)
        led = goal is not None and self.node.following.silent_for(now) < self.config.deadlines.heartbeat_timeout_s
        if goal is None or not busy or not (led or self.leader is not None):
            return None
        names = ", ".join(str(h.who) for h in busy)
        return Undecided(int(busy[0].receiver.key.version), goal.stage, goal.waiting_for or f"{names} to go on")

    def give_up(self, waited_s: float) -> None:
        """Fail the version that is prepared and not decided, if the run is led here."""
        if self.leader is not None:
            self._carry_out(self.leader.give_up(waited_s, anyio.current_time()))

    # ------------------------------------------------------------ for others

    def recovered(self) -> m.Recovered:
        """Return what this node knows of the run, for a daemon that is about to lead."""
        return self.node.recovered()

    def answer_ticket(self, node: NodeId, wanted: m.TicketWanted) -> None:
        """Give a node leave to read, or say why not.  A run that does not turn yet says nothing: it is asked again."""
        if self._tasks is not None:
            self._spawn(partial(self._answer_ticket, node, wanted))

    async def _answer_ticket(self, node: NodeId, wanted: m.TicketWanted) -> None:
        ticket = await self.serving.ticket(node, wanted)
        self.links.to_peer(node, self.run, self.term, trace_of(self.run, wanted.key), ticket)
        if ticket.error is None:
            await self.serving.expire(ticket.ticket)

    # ------------------------------------------------------------ effects

    def _carry_out(self, effects: Iterable[ev.NodeEffect | ev.LeaderEffect]) -> None:
        for effect in effects:
            self._do(effect)

    def _do(self, effect: ev.NodeEffect | ev.LeaderEffect) -> None:
        match effect:
            case ev.TellHook(session, body):
                self.links.to_hook(session, self.run, self.term, self._trace(), body)
            case ev.TellLeader(leader, report):
                report = self._with_wire(report)
                if leader == self.config.node:
                    self.inbox.repeat(ev.NodeReported(report, self.boot))
                else:
                    self.links.to_peer(leader, self.run, self.term, self._trace(), report)
            case ev.TellNode(node, goal):
                self._tell_node(node, goal)
            case ev.AnswerSuperseded(node, term, leader):
                self.links.to_peer(node, self.run, self.term, NO_TRACE, m.Superseded(term, leader))
            case ev.AskPeer(node):
                self.links.to_peer(node, self.run, self.term, NO_TRACE, m.Recover())
            case ev.PlanEpoch(spec):
                self._spawn(partial(self._plan, spec))
            case ev.ProveEpoch(spec):
                self._spawn(partial(self._prove, spec))
            case ev.AdoptEpoch(epoch):
                self.planning.adopt(epoch)
                self.serving.forget_unplanned()
                self.links.hooks.keep_only(self.run, self.planning.named)
            case ev.StartFetch(epoch, key, op, half):
                self.fetches.start(self.planning.plans(epoch), key, op, half)
            case ev.StopFetch(key, op):
                self.fetches.stop(key, op)
            case ev.EndServing(key, rank, slot):
                self.serving.end(key, rank, slot)
            case ev.JournalNode(token, record):
                self._records.append(_Record("node", record, partial(ev.NodeJournaled, token)))
                self._records_came.set()
            case ev.JournalLeader(token, record):
                self._records.append(_Record("leader", record, partial(ev.LeaderJournaled, token)))
                self._records_came.set()
            case ev.StopLeading(why):
                log.warning("stops leading", extra={"facts": {"run": self.run, "why": why}})
                self.leader = None
                self._spawn(self._lead)
            case ev.Note(what, facts):
                log.info(what, extra={"facts": facts})
            case _:
                assert_never(effect)

    def _tell_node(self, node: NodeId, goal: m.Goal) -> None:
        leader_term = self.leader.term if self.leader else self.term
        if node == self.config.node:
            self._goal_seq += 1
            self.inbox.repeat(ev.GoalArrived(goal, leader_term, self.boot, self._goal_seq))
        else:
            self.links.to_peer(node, self.run, leader_term, trace_of(self.run, goal.key), goal)

    def _with_wire(self, report: m.NodeReport) -> m.NodeReport:
        if report.fetch is None:
            return report
        wire = self.fetches.wire_nbytes(report.fetch.key)
        return msgspec.structs.replace(report, fetch=msgspec.structs.replace(report.fetch, wire_nbytes=wire))

    def _trace(self) -> bytes:
        goal = self.node.following.goal
        return trace_of(self.run, goal.key if goal is not None else NO_KEY)

    def _spawn(self, job: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._tasks is None:
            raise InternalInvariantBroken("effects are carried out while the crank turns", self.run)
        self._tasks.start_soon(job)

    # ------------------------------------------------------------ planning

    async def _plan(self, spec: m.EpochSpec) -> None:
        outcome = await self._planned(spec)
        if isinstance(outcome, WeightdError):
            self.inbox.outcome(ev.EpochPlanned(spec.epoch, "", 0, 0, (), outcome.to_wire()))
        else:
            self.inbox.outcome(outcome.planned(self.config.node))

    async def _prove(self, spec: m.EpochSpec) -> None:
        outcome = await self._planned(spec)
        if isinstance(outcome, WeightdError):
            self.inbox.outcome(ev.EpochProved(spec.epoch, (), (), outcome.to_wire()))
        else:
            self.inbox.outcome(outcome.proved())

    async def _planned(self, spec: m.EpochSpec) -> EpochPlans | WeightdError:
        places: list[m.TrainerPlace | m.ReceiverPlace] = [*spec.trainers, *spec.receivers, *spec.down]
        holders = {p.layout_digest: p.node for p in places}

        def ask(digest: str) -> None:
            # A rank's own node has its layout; the leader has all of them once it has proved the epoch.
            holder = holders[digest] if self.leader is not None else self.node.following.leader
            if holder not in ("", self.config.node):
                self.links.to_peer(holder, self.run, self.term, NO_TRACE, m.BlobWanted(digest))

        outcome = await self.planning.plan(spec, ask)
        if isinstance(outcome, WeightdError):
            return outcome
        return unknown_peers(outcome, self.config.node, self.config.peers) or outcome

    # ------------------------------------------------------------ journals

    async def _write_journals(self) -> None:
        """Write records one by one, in the order of their effects."""
        while True:
            while not self._records:
                self._records_came = anyio.Event()
                await self._records_came.wait()
            job = self._records.popleft()
            try:
                await in_worker("writing a journal", self._append_now, job.role, job.record)
            except JournalError as e:
                log.warning("journal failed", extra={"facts": {"run": self.run, "role": job.role, "why": e.why}})
                if self._journals[job.role].broken:
                    raise  # nothing can be vouched for any more: the run ends here and begins anew from what is on disk
                self.inbox.outcome(job.outcome(e.to_wire()))
            else:
                self.inbox.outcome(job.outcome())

    def _append_now(self, role: str, record: dict[str, object]) -> None:
        journal = self._journals[role]
        journal.append(record)
        if journal.overgrown:
            journal.rewrite(dict(r) for r in compacted(journal.records))
        if record.get("type") == "prepared":
            journal.reserve()


def _node_journal(state_dir: Path, run: RunName) -> tuple[Journal, NodeJournalState]:
    """Open and replay the journal of a run's node; blocking."""
    journal = open_journal(state_dir, run, "node")
    return journal, replay_node(journal.records)


def open_journal(state_dir: Path, run: RunName, role: str) -> Journal:
    """Open a run's journal; any run name makes one harmless folder name.

    Raises:
        JournalError: It cannot be opened or read.
    """
    folder = state_dir / "runs" / quote(run, safe="").replace(".", "%2E")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as e:
        raise JournalError(str(folder), 0, f"cannot be made: {e.strerror}") from None
    return Journal(folder / f"{role}.journal")
