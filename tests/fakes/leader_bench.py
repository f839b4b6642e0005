"""A leader's machine on a bench: what nodes report is said by the test, journal and proof answer by themselves."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import msgspec

from weightd.core.errors import WireError
from weightd.core.roster.topology import EngineDecl, Roster
from weightd.core.session import events as ev
from weightd.core.session.deadlines import Deadlines
from weightd.core.session.invariants import leader_faults
from weightd.core.session.leader import LeaderMachine
from weightd.core.session.records import JournalState, replay
from weightd.core.units import (
    NO_KEY,
    NO_VERSION,
    Attempt,
    Boot,
    EngineId,
    EngineRank,
    NodeId,
    Op,
    RolloutRank,
    RunName,
    SlotName,
    Term,
    TrainerRank,
    Version,
    VersionKey,
)
from weightd.core.wire.messages import (
    EngineOrder,
    EpochSpec,
    FetchState,
    Goal,
    LostRank,
    NodePlanDigest,
    NodeReport,
    Planned,
    ReceiverEntry,
    ReceiverReport,
    ReceiverState,
    Recovered,
    SlotState,
    TrainerEntry,
)

RUN = RunName("bench")
A, B = NodeId("a"), NodeId("b")
LIMITS = Deadlines(attach_s=30.0, collect_s=60.0, fetch_s=90.0, fetch_stall_s=20.0, apply_wait_s=40.0, restart_s=10.0)
RANK0_BOOT = Boot(100)
E0, E1 = EngineId("E0"), EngineId("E1")
ROSTER = Roster(2, (EngineDecl("E0", 2), EngineDecl("E1", 1)))
"""Two trainer ranks, one a node; E0 on both nodes, E1 on node b alone."""
PLACES: dict[TrainerRank | RolloutRank, NodeId] = {
    TrainerRank(0): A,
    TrainerRank(1): B,
    RolloutRank(E0, EngineRank(0)): A,
    RolloutRank(E0, EngineRank(1)): B,
    RolloutRank(E1, EngineRank(0)): B,
}


def key(version: int, count: int = 1, boot: int = RANK0_BOOT) -> VersionKey:
    """Return the name of a version's bytes."""
    return VersionKey(Version(version), Attempt(Boot(boot), count))


def rank(engine: str, k: int) -> RolloutRank:
    """Return a rollout rank."""
    return RolloutRank(EngineId(engine), EngineRank(k))


@dataclass
class FakeRank:
    """One attached rank as its node reports it."""

    boot: Boot
    node: NodeId
    size: int
    ready: bool = True
    slots: tuple[SlotState, ...] = ()
    report: ReceiverReport = field(default_factory=lambda: ReceiverReport("unready"))
    alive: bool = True
    roster: Roster | None = None
    live: bool = False


@dataclass
class FakeNode:
    """What one node says."""

    boot: Boot
    planned: tuple[Planned, ...] = ()
    fetch: FetchState | None = None
    lost: tuple[LostRank, ...] = ()
    committed: VersionKey = NO_KEY
    highest: Version = NO_VERSION
    silent: bool = False


class LeaderBench:
    """Drives one ``LeaderMachine``; checks its invariants after every step."""

    def __init__(
        self,
        roster: Roster = ROSTER,
        limits: Deadlines = LIMITS,
        journal: JournalState | None = None,
        peers: tuple[NodeId, ...] = (A, B),
        machine_class: type[LeaderMachine] = LeaderMachine,
    ) -> None:
        state = journal or JournalState()
        self.machine = machine_class(RUN, A, Boot(1), peers, roster, RANK0_BOOT, limits, state)
        self.now = 1000.0
        self.nodes = {n: FakeNode(Boot(10 + i)) for i, n in enumerate((A, B))}
        self.ranks: dict[TrainerRank | RolloutRank, FakeRank] = {}
        self.journal: list[dict[str, object]] = []
        self.effects: list[ev.LeaderEffect] = []
        self.goal: Goal | None = None
        self.proof_error: WireError | None = None
        self.disk_error: WireError | None = None
        self.answers_journal = True
        self.answers_recover = True
        self.nodes_plan = True
        self.stopped: str | None = None
        self._seq = 0
        self.roster = roster

    # ------------------------------------------------------------ time and events

    def lead(self) -> LeaderBench:
        """Start the machine; peers that know nothing answer."""
        self._run(self.machine.start(self.now))
        return self

    def pass_time(self, seconds: float, step_s: float = 1.0) -> LeaderBench:
        """Let time pass, with reports of all nodes that are not silent and the deadlines between."""
        end = self.now + seconds
        while self.now < end and self.stopped is None:
            self.now = min(end, self.now + step_s)
            self.say()
            if self.stopped is None:
                self._run(self.machine.on_deadline(self.now))
        return self

    def say(self, *nodes: NodeId) -> LeaderBench:
        """Let nodes report; all by default."""
        for node in nodes or tuple(self.nodes):
            if not self.nodes[node].silent:
                self._seq += 1
                self.handle(ev.NodeReported(self.report(node), self.nodes[node].boot, self._seq))
        return self

    def handle(self, event: ev.LeaderEvent) -> list[ev.LeaderEffect]:
        """Give the machine an event; return all effects up to the next rest."""
        before = len(self.effects)
        self._run(self.machine.handle(event, self.now))
        return self.effects[before:]

    def _run(self, effects: list[ev.LeaderEffect]) -> None:
        """Carry out effects in order; outcomes come after all of them, as they would."""
        outcomes: deque[ev.LeaderEvent] = deque()
        self._carry_out(effects, outcomes)
        while outcomes:
            self._carry_out(self.machine.handle(outcomes.popleft(), self.now), outcomes)

    def _carry_out(self, effects: list[ev.LeaderEffect], outcomes: deque[ev.LeaderEvent]) -> None:
        self.effects += effects
        assert leader_faults(self.machine) == []
        for effect in effects:
            match effect:
                case ev.JournalLeader(token, record):
                    self.journal += [record] if self.disk_error is None and self.answers_journal else []
                    if self.answers_journal:
                        outcomes.append(ev.LeaderJournaled(token, self.disk_error))
                case ev.ProveEpoch(spec):
                    outcomes.append(self._proof(spec))
                case ev.TellNode(_, goal):
                    self.goal = goal
                    self._plan(goal)
                case ev.AskPeer(node):
                    if self.answers_recover:
                        answer = Recovered(node, Term(0), NO_KEY)
                        outcomes.append(ev.PeerRecovered(answer, self.nodes[node].boot))
                case ev.StopLeading(why):
                    self.stopped = why
                case _:
                    pass

    def _proof(self, spec: EpochSpec) -> ev.EpochProved:
        nodes = sorted({p.node for p in spec.trainers} | {p.node for p in spec.receivers})
        plans = tuple(NodePlanDigest(n, f"plan-{n}", 0, 0) for n in nodes)
        nbytes = tuple((str(p.engine), int(p.k), 100) for p in spec.receivers)
        return ev.EpochProved(spec.epoch, plans, nbytes, self.proof_error)

    def _plan(self, goal: Goal) -> None:
        """Nodes plan the next epoch as the leader does."""
        for node, fake in self.nodes.items():
            if goal.next_epoch is not None and self.nodes_plan:
                fake.planned = (Planned(goal.next_epoch.epoch, f"plan-{node}"),)

    # ------------------------------------------------------------ what nodes say

    def report(self, node: NodeId) -> NodeReport:
        """Return a node's whole state."""
        fake = self.nodes[node]
        trainers = [
            TrainerEntry(
                w,
                r.size,
                SlotName(f"slot-{w}"),
                1000 + int(w),
                r.boot,
                f"layout-{w}",
                9,
                r.slots,
                r.ready,
                r.roster,
                alive=r.alive,
                live=r.live,
            )
            for w, r in self.ranks.items()
            if not isinstance(w, RolloutRank) and r.node == node
        ]
        receivers = [
            ReceiverEntry(
                w.engine,
                w.k,
                r.size,
                SlotName(f"slot-{w}"),
                2000 + int(w.k),
                r.boot,
                f"layout-{w}",
                9,
                r.report,
                r.ready,
            )
            for w, r in self.ranks.items()
            if isinstance(w, RolloutRank) and r.node == node
        ]
        floor = (self.machine.term, self.goal.op if self.goal else Op(0))
        return NodeReport(
            node,
            floor,
            0,
            tuple(trainers),
            tuple(receivers),
            fake.lost,
            fake.planned,
            fake.fetch,
            (),
            fake.committed,
            (),
            fake.highest,
        )

    def attach(self, *whos: TrainerRank | RolloutRank, boot: int | None = None) -> LeaderBench:
        """Let ranks attach and their nodes report; every declared one by default."""
        for who in whos or tuple(PLACES):
            own = boot if boot is not None else int(RANK0_BOOT) if who == 0 else 200 + len(self.ranks)
            is_engine = isinstance(who, RolloutRank)
            sizes = {e.id: e.size for e in self.roster.engines}
            size = sizes[who.engine] if isinstance(who, RolloutRank) else self.roster.world
            roster = self.roster if who == 0 and not is_engine else None
            self.ranks[who] = FakeRank(Boot(own), PLACES[who], size, roster=roster)
        return self.say()

    def ready(self) -> LeaderBench:
        """Lead, with every rank attached and the first epoch adopted."""
        self.lead().attach()
        self.say().say()
        assert self.stage == "idle"
        return self

    def publish(self, who: int, name: VersionKey, slot: int = 0, digest: str | None = None) -> LeaderBench:
        """Let a trainer rank show a published version."""
        r = self.ranks[TrainerRank(who)]
        kept = tuple(s for s in r.slots if s.slot != slot)
        r.slots = (*kept, SlotState(slot, name, 2, f"layout-{who}" if digest is None else digest))
        return self.say(r.node)

    def fetched(self, *nodes: NodeId) -> LeaderBench:
        """Let nodes hold the version in hand."""
        assert self.goal is not None
        for node in nodes or tuple(self.nodes):
            self.nodes[node].fetch = FetchState(self.goal.key, self.goal.op, 50, 50, complete=True)
            self.say(node)
        return self

    def state(self, who: RolloutRank, state: ReceiverState, **more: object) -> LeaderBench:
        """Let a rollout rank be in a state, for the order in hand."""
        order = self.order(who.engine)
        was = self.ranks[who].report
        fields: dict[str, object] = {"state": state, "op": order.op, "key": order.key, "base": was.base}
        if state in ("serving", "unready", "torn"):
            fields["key"] = NO_KEY
        if state == "applied":
            fields |= {"applied_nbytes": 100, "base": NO_KEY}
        self.ranks[who].report = msgspec.structs.replace(was, **({"error": None, "leave": False} | fields | more))
        return self.say(self.ranks[who].node)

    def die(self, who: TrainerRank | RolloutRank, why: str = "killed by signal 9") -> LeaderBench:
        """Let a process end; a trainer rank's slots stay."""
        fake = self.ranks[who]
        node = self.nodes[fake.node]
        name = str(who) if isinstance(who, RolloutRank) else f"trainer {who}"
        node.lost = (*node.lost, LostRank(name, fake.boot, why))
        if isinstance(who, RolloutRank) or not fake.slots:
            del self.ranks[who]
        else:
            self.ranks[who] = replace(fake, alive=False)
        return self.say(fake.node)

    # ------------------------------------------------------------ a version's way

    def collect(self, version: int) -> LeaderBench:
        """Let every trainer rank publish a version."""
        slot = version % 2
        return self.publish(0, key(version), slot).publish(1, key(version), slot)

    def prepare(self, version: int) -> LeaderBench:
        """Bring a version to PREPARED."""
        self.collect(version).fetched()
        assert self.stage == "prepared"
        return self

    def all_in(self, engine: str, state: ReceiverState, **more: object) -> LeaderBench:
        """Let all ranks of an engine be in a state."""
        for who in list(self.ranks):
            if isinstance(who, RolloutRank) and who.engine == engine:
                self.state(who, state, **more)
        return self

    def apply(self, engine: str) -> LeaderBench:
        """Let an engine pause and apply."""
        return self.all_in(engine, "paused").all_in(engine, "applied")

    def acknowledge(self, engine: str) -> LeaderBench:
        """Let an engine hold the commit, then serve it."""
        name = self.order(engine).key
        return self.all_in(engine, "applied", committed=name, base=name).all_in(
            engine, "serving", committed=name, base=name
        )

    def commit(self, version: int) -> LeaderBench:
        """Bring a version all the way."""
        self.prepare(version).apply("E0").apply("E1").acknowledge("E0").acknowledge("E1")
        assert self.stage == "idle"
        return self

    # ------------------------------------------------------------ looking

    @property
    def stage(self) -> str:
        """Stage of the run."""
        return self.machine.state.stage

    def told(self) -> Goal:
        """Return the goal that nodes were told last."""
        assert self.goal is not None
        return self.goal

    def epoch(self) -> EpochSpec:
        """Return the adopted epoch."""
        spec = self.told().epoch
        assert spec is not None
        return spec

    def refused(self) -> list[str]:
        """Return the ranks that are refused."""
        return sorted(who for r in self.told().refused for who, _ in r.ranks)

    def order(self, engine: str) -> EngineOrder:
        """Return the order that an engine was told last."""
        return next(o for o in self.told().engines if o.engine == engine)

    def orders(self) -> dict[str, str]:
        """Return every engine's order."""
        return {str(o.engine): o.order for o in self.told().engines}

    def failure(self, name: VersionKey) -> WireError:
        """Return the report of a failed version."""
        return next(f.error for f in self.told().failures if f.key == name)

    def refusal(self, who: str) -> WireError:
        """Return why a rank is refused."""
        return next(r.error for r in self.told().refused if who in [name for name, _ in r.ranks])

    def records(self, kind: str) -> list[dict[str, object]]:
        """Return the records of a kind in the journal."""
        return [r for r in self.journal if r["type"] == kind]

    def replayed(self) -> JournalState:
        """Return what a restart would read."""
        return replay(self.journal)


def codes(error: WireError) -> list[str]:
    """Return the codes of a report."""
    return [error.code, *(code for cause in error.causes for code in codes(cause))]
