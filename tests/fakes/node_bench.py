"""A node's machine on a bench: goals and hooks are said by the test, the journal answers by itself."""

from __future__ import annotations

from collections import deque

import msgspec

from tests.fakes.leader_bench import E0, RANK0_BOOT, ROSTER, A, B
from weightd.core.errors import WireError
from weightd.core.session import events as ev
from weightd.core.session.deadlines import Deadlines
from weightd.core.session.node import NodeMachine
from weightd.core.session.records import NodeJournalState
from weightd.core.units import (
    NO_KEY,
    NO_OP,
    Boot,
    EngineRank,
    Epoch,
    Op,
    RunName,
    SlotName,
    Term,
    TrainerRank,
    Version,
    VersionKey,
)
from weightd.core.wire.messages import (
    CommitNote,
    EngineHello,
    EngineOrder,
    EpochSpec,
    Goal,
    NodeReport,
    Order,
    PublisherGoal,
    PublisherReport,
    RankRelease,
    ReceiverGoal,
    ReceiverPlace,
    ReceiverReport,
    Refusal,
    Region,
    SlotState,
    Stage,
    TrainerHello,
    TrainerPlace,
)

LIMITS = Deadlines(attach_s=30.0, restart_s=10.0, heartbeat_s=1.0, heartbeat_timeout_s=5.0)
T1_BOOT, E01_BOOT = Boot(201), Boot(301)
TRAINER, ENGINE = 1, 2
"""Sessions of the two hooks of this node: trainer rank 1, and rank 1 of engine E0."""
RANK_PLAN = "rank-plan"


def epoch(number: int = 1, trainer_boot: Boot = T1_BOOT, engine_boot: Boot = E01_BOOT) -> EpochSpec:
    """Return an epoch: trainer rank 0 and E0[0] on node a, trainer rank 1 and E0[1] on this one, node b."""
    trainers = (
        TrainerPlace(TrainerRank(0), A, _slot(0), RANK0_BOOT, "layout-0"),
        TrainerPlace(TrainerRank(1), B, _slot(1), trainer_boot, "layout-1"),
    )
    receivers = (
        ReceiverPlace(E0, EngineRank(0), A, _slot(2), Boot(300), "layout-e0"),
        ReceiverPlace(E0, EngineRank(1), B, _slot(3), engine_boot, "layout-e1"),
    )
    return EpochSpec(Epoch(number), ROSTER, trainers, receivers, 1 << 20)


def _slot(number: int) -> SlotName:
    return SlotName(f"slot-{number}")


class NodeBench:
    """Drives one ``NodeMachine`` on node b, led by node a."""

    def __init__(self, journal: NodeJournalState | None = None) -> None:
        self.machine = NodeMachine(RunName("bench"), B, Boot(11), LIMITS, journal or NodeJournalState())
        self.now = 1000.0
        self.term, self.seq = Term(1), 0
        self.effects: list[ev.NodeEffect] = []
        self.journal: list[dict[str, object]] = []
        self.answers_journal = True
        self.disk_error: WireError | None = None
        self._goal: Goal | None = None

    # ------------------------------------------------------------ events

    def handle(self, event: ev.NodeEvent) -> list[ev.NodeEffect]:
        """Give the machine an event; return all effects up to the next rest."""
        return self._run(self.machine.handle(event, self.now))

    def pass_time(self, seconds: float) -> list[ev.NodeEffect]:
        """Let time pass in steps of a second."""
        out: list[ev.NodeEffect] = []
        for _ in range(int(seconds)):
            self.now += 1.0
            out += self._run(self.machine.on_deadline(self.now))
        return out

    def _run(self, effects: list[ev.NodeEffect]) -> list[ev.NodeEffect]:
        out: list[ev.NodeEffect] = []
        todo = deque([effects])
        while todo:
            batch = todo.popleft()
            out += batch
            for effect in batch:
                if isinstance(effect, ev.JournalNode) and self.answers_journal:
                    self.journal += [effect.record] if self.disk_error is None else []
                    todo.append(self.machine.handle(ev.NodeJournaled(effect.token, self.disk_error), self.now))
        self.effects += out
        return out

    def attach(self, *, live: bool = False) -> NodeBench:
        """Let both hooks of this node come."""
        self.greet_trainer(live=live)
        self.greet_engine()
        return self

    def greet_trainer(self, session: int = TRAINER, boot: Boot = T1_BOOT, rank: int = 1, *, live: bool = False) -> None:
        """Let a trainer rank come."""
        regions = (Region(0, 0, 99),)
        hello = TrainerHello(TrainerRank(rank), 2, 1001, 5, f"slot-{rank}", f"layout-{rank}", 9, regions, live=live)
        self.handle(ev.HookGreeted(session, hello, boot))
        self.handle(ev.HookReady(session))

    def greet_engine(self, session: int = ENGINE, boot: Boot = E01_BOOT, k: int = 1) -> None:
        """Let an engine rank come."""
        hello = EngineHello("E0", EngineRank(k), 2, 2001, 5, "slot-3", "layout-e1", 9)
        self.handle(ev.HookGreeted(session, hello, boot))
        self.handle(ev.HookReady(session))
        self.engine(ReceiverReport("unready", plan_digest=RANK_PLAN), session)

    def publish(self, *names: VersionKey, session: int = TRAINER) -> list[ev.NodeEffect]:
        """Let the trainer rank show slots."""
        slots = tuple(SlotState(i, name, 2 * (i + 1), "layout-1") for i, name in enumerate(names))
        return self.handle(ev.HookReported(session, PublisherReport(slots)))

    def engine(self, report: ReceiverReport, session: int = ENGINE) -> list[ev.NodeEffect]:
        """Let the engine rank be in a state."""
        return self.handle(ev.HookReported(session, report))

    def goal(self, stage: Stage, name: VersionKey = NO_KEY, op: int = 0, **more: object) -> list[ev.NodeEffect]:
        """Let the leader say its goal; fields not named stay as they were."""
        before = self._goal or Goal(
            A, NO_OP, "attaching", NO_KEY, None, None, CommitNote(NO_KEY, ()), (), (), (), (), RANK0_BOOT, Version(1)
        )
        fields = {"stage": stage, "key": name, "op": Op(op or before.op)} | more
        self._goal = msgspec.structs.replace(before, **fields)
        self.seq += 1
        return self.handle(ev.GoalArrived(self._goal, self.term, Boot(10), self.seq))

    def plan(self, number: int = 1, error: WireError | None = None) -> list[ev.NodeEffect]:
        """Let this node's plan of an epoch be made."""
        plans = (("E0", 1, RANK_PLAN, 77, 100),)
        return self.handle(ev.EpochPlanned(Epoch(number), "node-plan", 64, 50, plans, error))

    def ready(self, *, live: bool = False) -> NodeBench:
        """Attach both hooks and adopt epoch 1."""
        self.attach(live=live)
        self.goal("attaching", next_epoch=epoch())
        self.plan()
        self.goal("idle", epoch=epoch(), next_epoch=None)
        return self

    def fetch(self, name: VersionKey, op: int) -> NodeBench:
        """Come to hold a version."""
        self.goal("fetching", name, op, retained=(*self.committed_keys(), name))
        self.handle(ev.FetchEnded(name, Op(op), generation=8))
        return self

    def committed_keys(self) -> tuple[VersionKey, ...]:
        """Return the last commit, if there is one."""
        assert self._goal is not None
        last = self._goal.committed.key
        return (last,) if last != NO_KEY else ()

    # ------------------------------------------------------------ looking

    def told_publisher(self, session: int = TRAINER) -> PublisherGoal:
        """Return the last goal of the trainer rank."""
        bodies = [e.body for e in self.effects if isinstance(e, ev.TellHook) and e.session == session]
        return [b for b in bodies if isinstance(b, PublisherGoal)][-1]

    def told_receiver(self, session: int = ENGINE) -> ReceiverGoal:
        """Return the last goal of the engine rank."""
        bodies = [e.body for e in self.effects if isinstance(e, ev.TellHook) and e.session == session]
        return [b for b in bodies if isinstance(b, ReceiverGoal)][-1]

    def refusals(self) -> list[tuple[int, str]]:
        """Return every refusal that a hook was told, with its code."""
        return [
            (e.session, e.body.error.code)
            for e in self.effects
            if isinstance(e, ev.TellHook) and isinstance(e.body, Refusal)
        ]

    def report(self) -> NodeReport:
        """Return what the leader was told last."""
        return [e.report for e in self.effects if isinstance(e, ev.TellLeader)][-1]


def order(kind: Order, name: VersionKey, op: int) -> tuple[EngineOrder, ...]:
    """Return the orders of the one engine."""
    return (EngineOrder(E0, kind, Op(op), name),)


def release(name: VersionKey, slot: int, rank: int = 1) -> RankRelease:
    """Return the release of a slot."""
    return RankRelease(TrainerRank(rank), slot, name)
