"""A daemon of a simulation: the real machines, and a shell whose sockets, disks and streams are virtual."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from tests.simulation.memory import Memory
from weightd.core.session import events as ev
from weightd.core.session.records import replay
from weightd.core.units import (
    NO_KEY,
    Boot,
    EngineId,
    EngineRank,
    NodeId,
    Op,
    RolloutRank,
    RunName,
    TrainerRank,
    VersionKey,
)
from weightd.core.wire.messages import (
    CommitNote,
    EngineHello,
    EpochSpec,
    Goal,
    NodePlanDigest,
    NodeReport,
    PublisherGoal,
    PublisherReport,
    ReceiverGoal,
    ReceiverReport,
    Recover,
    Recovered,
    Refusal,
    Superseded,
    TrainerHello,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.world import World
    from weightd.core.errors import WireError
    from weightd.core.session.leader import LeaderMachine

RUN = RunName("sim")


class HookModel(Protocol):
    """What a daemon needs of a hook."""

    boot: Boot
    alive: bool

    def hello(self) -> TrainerHello | EngineHello:
        """What it says when it comes."""
        ...

    def told(self, body: PublisherGoal | ReceiverGoal | Refusal) -> None:
        """The daemon says something."""


@dataclass(eq=False)
class FetchJob:
    """One fetch into the landing."""

    reader: DaemonModel
    effect: ev.StartFetch
    spec: EpochSpec
    stopped: bool = False
    sources: list[Served] = field(default_factory=list)
    attempt: int = 0


@dataclass(frozen=True, eq=False)
class Served:
    """A slot of another node's trainer rank that is read."""

    daemon: DaemonModel
    rank: TrainerRank
    slot: int
    memory: Memory
    generation: int


@dataclass
class DaemonModel:
    """One node's daemon."""

    world: World
    node: NodeId
    boot: Boot
    frozen: bool = False
    leader: LeaderMachine | None = None
    leader_journal: list[dict[str, object]] = field(default_factory=list)
    node_journal: list[dict[str, object]] = field(default_factory=list)
    disk_full: bool = False
    slots: dict[tuple[int, Boot, int], Memory] = field(default_factory=dict)
    halves: list[Memory] = field(default_factory=lambda: [Memory(), Memory()])
    hooks: dict[int, HookModel] = field(default_factory=dict)
    _specs: dict[int, EpochSpec] = field(default_factory=dict)
    _fetch: FetchJob | None = None
    _serving: list[tuple[VersionKey, TrainerRank, int, FetchJob]] = field(default_factory=list)
    _inbox: list[Callable[[], None]] = field(default_factory=list)
    _seq: int = 0
    _wake_token: int = 0

    def __post_init__(self) -> None:
        self.machine = self.world.node_class(RUN, self.node, self.boot, self.world.scene.limits)

    # ------------------------------------------------------------ doors

    def deliver(self, action: Callable[[], None]) -> None:
        """Let the daemon do something, unless it is frozen: then later."""
        if self.frozen:
            self._inbox.append(action)
        else:
            action()

    def freeze(self) -> None:
        """Stop the process, as SIGSTOP does: nothing is lost, nothing is done."""
        self.frozen = True

    def thaw(self) -> None:
        """Let it go on with what came meanwhile."""
        self.frozen = False
        inbox, self._inbox = self._inbox, []
        for action in inbox:
            self.deliver(action)
        self._wake()

    def to_node(self, event: ev.NodeEvent) -> None:
        """Give the node's machine an event."""
        self.deliver(lambda: self._carry_out(self.machine.handle(event, self.world.clock.now)))

    def to_leader(self, event: ev.LeaderEvent) -> None:
        """Give the leader's machine an event."""
        self.deliver(lambda: self._leader_handles(event))

    def lead(self, hello: TrainerHello, boot: Boot) -> None:
        """Trainer rank 0 greeted this daemon."""
        assert hello.roster is not None
        self.leader = self.world.leader_class(
            RUN,
            self.node,
            self.boot,
            tuple(NodeId(n) for n in self.world.scene.nodes),
            hello.roster,
            boot,
            self.world.scene.limits,
            replay(self.leader_journal),
        )
        self._carry_out(self.leader.start(self.world.clock.now))

    def receive(self, sender: NodeId, boot: Boot, seq: int, term: int, body: object) -> None:
        """Take a message of another daemon, or of itself."""
        match body:
            case Goal():
                self.to_node(ev.GoalArrived(body, msgspec.convert(term, int), boot, seq))  # type: ignore[arg-type]
            case NodeReport():
                self.to_leader(ev.NodeReported(body, boot, seq))
            case Recover():
                self.deliver(lambda: self.world.net.send(self.node, sender, self.machine.recovered()))
            case Recovered():
                self.to_leader(ev.PeerRecovered(body, boot))
            case Superseded():
                self.to_leader(ev.HigherTermSeen(body.term, body.leader))
            case _:
                raise AssertionError(body)

    # ------------------------------------------------------------ hooks

    def greet(self, session: int, hook: HookModel) -> None:
        """A hook says hello; its layout and descriptors follow at once."""
        self.hooks[session] = hook
        hello, boot = hook.hello(), hook.boot
        self.to_node(ev.HookGreeted(session, hello, boot))
        self.to_node(ev.HookReady(session))
        if isinstance(hello, TrainerHello) and hello.rank == 0:
            self.deliver(lambda: self._greeted_by_rank0(hello, boot))

    def hear(self, session: int, report: PublisherReport | ReceiverReport, seq: int) -> None:
        """A hook repeats its state."""
        self.to_node(ev.HookReported(session, report, seq))

    def lose(self, session: int, why: str) -> None:
        """A hook's process ended."""
        self.hooks.pop(session, None)
        self.to_node(ev.HookLost(session, why))

    def _greeted_by_rank0(self, hello: TrainerHello, boot: Boot) -> None:
        if self.leader is None:
            self.lead(hello, boot)

    # ------------------------------------------------------------ cranks

    def _leader_handles(self, event: ev.LeaderEvent) -> None:
        if self.leader is not None:
            self._carry_out(self.leader.handle(event, self.world.clock.now), leader_stepped=True)

    def _wake(self) -> None:
        """Ask to be woken at the machines' next deadline."""
        self._wake_token += 1
        token = self._wake_token
        ends = [m.next_deadline() for m in (self.machine, self.leader) if m is not None]
        due = min((e for e in ends if e is not None), default=None)
        if due is not None and not self.frozen:
            self.world.clock.after(max(0.0, due - self.world.clock.now), lambda: self._woken(token))

    def _woken(self, token: int) -> None:
        if token != self._wake_token or self.frozen:
            return
        now = self.world.clock.now
        for machine in (self.machine, self.leader):
            due = machine.next_deadline() if machine is not None else None
            if machine is not None and due is not None and due <= now:
                self._carry_out(machine.on_deadline(now), leader_stepped=machine is self.leader)
        self._wake()

    def _carry_out(self, effects: list[ev.NodeEffect] | list[ev.LeaderEffect], *, leader_stepped: bool = False) -> None:
        for effect in effects:
            self._do(effect)
        for memory, half in zip(self.halves, self.machine.landing.halves, strict=True):
            memory.claimed = half.key if half is not None else memory.claimed
        self._wake()
        self.world.stepped(leader_stepped=leader_stepped)

    def _do(self, effect: ev.NodeEffect | ev.LeaderEffect) -> None:
        match effect:
            case ev.TellHook(session, body):
                self._tell_hook(session, body)
            case ev.TellLeader(leader, report):
                self.world.net.send(self.node, leader, report)
            case ev.TellNode(node, goal):
                self.world.net.send(self.node, node, goal)
            case ev.AnswerSuperseded(node, term, leader):
                self.world.net.send(self.node, node, Superseded(term, leader))
            case ev.AskPeer(node):
                self.world.net.send(self.node, node, Recover())
            case ev.PlanEpoch(spec):
                self._plan(spec)
            case ev.ProveEpoch(spec):
                self._prove(spec)
            case ev.AdoptEpoch():
                pass
            case ev.StartFetch():
                self._start_fetch(effect)
            case ev.StopFetch(key, op):
                self._stop_fetch(key, op)
            case ev.EndServing(key, rank, slot):
                self._end_serving(key, rank, slot)
            case ev.JournalNode(token, record):
                self._append(self.node_journal, record, lambda e: self.to_node(ev.NodeJournaled(token, e)))
            case ev.JournalLeader(token, record):
                self._append(self.leader_journal, record, lambda e: self.to_leader(ev.LeaderJournaled(token, e)))
            case ev.StopLeading():
                self._stop_leading()
            case ev.Note():
                self.world.notes.append((self.world.clock.now, effect))

    def _stop_leading(self) -> None:
        self.leader = None
        rank0 = self.world.publishers[0]
        if rank0.alive and rank0.greeted and self.world.scene.node_of(TrainerRank(0)) == self.node:
            hello = rank0.hello()
            self.world.clock.after(0.1, lambda: self.deliver(lambda: self._greeted_by_rank0(hello, rank0.boot)))

    def _tell_hook(self, session: int, body: PublisherGoal | ReceiverGoal | Refusal) -> None:
        hook = self.hooks.get(session)
        if hook is not None:
            boot = hook.boot
            self.world.in_order(self, session, lambda: hook.told(body) if hook.alive and hook.boot == boot else None)

    def _append(
        self, journal: list[dict[str, object]], record: dict[str, object], then: Callable[[WireError | None], None]
    ) -> None:
        def durable() -> None:
            if self.disk_full and journal is self.leader_journal:
                then(self.world.disk_error())
                return
            journal.append(record)
            if journal is self.leader_journal and record["type"] == "commit":
                self.world.committed(msgspec.convert({k: record[k] for k in ("key", "engines")}, CommitNote))
            then(None)

        self.world.in_order(self, -1 if journal is self.leader_journal else -2, durable)

    # ------------------------------------------------------------ epochs

    def _plan(self, spec: EpochSpec) -> None:
        self._specs[spec.epoch] = spec
        ranks = [RolloutRank(EngineId(p.engine), EngineRank(p.k)) for p in spec.receivers if p.node == self.node]
        plans = tuple(
            (str(w.engine), int(w.k), rank_digest(spec, w), 10, self.world.scene.planned_nbytes(w)) for w in ranks
        )
        event = ev.EpochPlanned(spec.epoch, node_digest(spec, self.node), 1, self._fetch_nbytes(spec), plans)
        self.world.clock.after(self.world.clock.between(0.05, 0.5), lambda: self.to_node(event))

    def _prove(self, spec: EpochSpec) -> None:
        nodes = sorted({p.node for p in spec.trainers} | {p.node for p in spec.receivers})
        plans = tuple(NodePlanDigest(n, node_digest(spec, n), 1, 1) for n in nodes)
        nbytes = tuple(
            (str(p.engine), int(p.k), self.world.scene.planned_nbytes(RolloutRank(p.engine, p.k)))
            for p in spec.receivers
        )
        event = ev.EpochProved(spec.epoch, plans, nbytes)
        self.world.clock.after(self.world.clock.between(0.05, 0.5), lambda: self.to_leader(event))

    def _fetch_nbytes(self, spec: EpochSpec) -> int:
        """A node without receivers fetches nothing; it reports like others."""
        return 1000 if any(p.node == self.node for p in spec.receivers) else 0

    # ------------------------------------------------------------ bytes

    def _start_fetch(self, effect: ev.StartFetch) -> None:
        memory = self.halves[effect.half]
        if memory.claimed == effect.key:
            memory.claimed = NO_KEY  # laid out for an epoch that is over: nobody vouches for it any more
        self.world.overwrites(memory, f"landing of {self.node}")
        memory.begin()
        job = FetchJob(self, effect, self._specs[effect.epoch])
        self._fetch = job
        self.world.clock.after(self.world.clock.between(0.05, 0.4), lambda: self.deliver(lambda: self._fetch_on(job)))

    def _stop_fetch(self, key: VersionKey, op: Op) -> None:
        if self._fetch is not None and (self._fetch.effect.key, self._fetch.effect.op) == (key, op):
            self._fetch.stopped = True

    def _fetch_on(self, job: FetchJob) -> None:
        """Read from every remote trainer rank, once all of them may be read."""
        if job.stopped:
            return
        sources = self._remote_sources(job)
        if sources is None:
            self._try_again(job)
            return
        key = job.effect.key
        job.sources, job.attempt = sources, job.attempt + 1
        for s in sources:
            s.daemon.serve(key, s, job)
            s.memory.readers += 1
        progress = ev.FetchAdvanced(key, job.effect.op, self._fetch_nbytes(job.spec) // 2)
        self.to_node(progress)
        attempt = job.attempt
        long = self.world.clock.chance(self.world.chaos.linger)
        takes_s = self.world.clock.between(2.0, 8.0) if long else self.world.clock.between(0.1, 0.6)
        self.world.clock.after(takes_s, lambda: self._fetched(job, attempt))

    def _try_again(self, job: FetchJob) -> None:
        again = self.world.clock.between(0.3, 0.8)
        self.world.clock.after(again, lambda: self.deliver(lambda: self._fetch_on(job)))

    def hang_up(self, job: FetchJob) -> list[Served]:
        """The streams of a fetch end."""
        sources, job.sources = job.sources, []
        for s in sources:
            s.memory.readers -= 1
            s.daemon.serve(job.effect.key, s, None)
        return sources

    def cut_off(self, job: FetchJob) -> None:
        """A sender ended a fetch's streams; it asks again."""
        if job.sources:
            job.attempt += 1
            self.hang_up(job)
            self._try_again(job)

    def _fetched(self, job: FetchJob, attempt: int) -> None:
        if job.attempt != attempt:
            return
        sources = self.hang_up(job)
        key = job.effect.key
        if job.stopped:
            return
        if not all(s.memory.shows(key, s.generation) for s in sources):
            self.deliver(lambda: self._fetch_on(job))
            return
        half = self.halves[job.effect.half]
        half.end(key)
        self.to_node(ev.FetchEnded(key, job.effect.op, half.generation))

    def _remote_sources(self, job: FetchJob) -> list[Served] | None:
        found: list[Served] = []
        for place in job.spec.trainers:
            if place.node == self.node or not self._fetch_nbytes(job.spec):
                continue
            daemon = self.world.daemons[place.node]
            slot = daemon.machine.readable(job.effect.key).get(place.rank)
            if daemon.frozen or slot is None:
                return None
            memory = daemon.slots[int(place.rank), place.boot, slot.slot]
            found.append(Served(daemon, place.rank, slot.slot, memory, slot.generation))
        return found

    def serve(self, key: VersionKey, source: Served, job: FetchJob | None) -> None:
        """Another node begins to read from one of this one's slots (``job``), or ends."""
        if job is not None:
            self._serving.append((key, source.rank, source.slot, job))
        else:
            mine = (key, source.rank, source.slot)
            self._serving.remove(next(s for s in self._serving if s[:3] == mine))
        reading = [s for s in self._serving if s[0] == key]
        self.to_node(ev.ReadersChanged(key, len(reading), frozenset((s[1], s[2]) for s in reading)))

    def _end_serving(self, key: VersionKey, rank: TrainerRank, slot: int) -> None:
        for *named, job in list(self._serving):
            if named == [key, rank, slot]:
                after_s = self.world.clock.between(0.01, 0.2)
                self.world.clock.after(after_s, partial(job.reader.cut_off, job))


def node_digest(spec: EpochSpec, node: NodeId) -> str:
    """Return the digest of a node's plan: a function of the epoch and of nothing else."""
    places = [(p.rank, p.boot) for p in spec.trainers] + [(p.k, p.boot) for p in spec.receivers]
    return f"{node}-{hash(tuple(places)) & 0xFFFFFFFF:08x}"


def rank_digest(spec: EpochSpec, who: RolloutRank) -> str:
    """Return the digest of a rank's plan."""
    return f"{who}-{hash(tuple((p.rank, p.boot, p.node) for p in spec.trainers)) & 0xFFFFFFFF:08x}"
