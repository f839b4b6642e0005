"""A whole run under a virtual clock: real machines, modelled bytes, and whatever can go wrong.

After every step every invariant is checked.  ``run_until`` ends with the first
one that is broken, by name; nothing here is random but the seed.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.clock import Clock
from tests.simulation.daemon_model import DaemonModel
from tests.simulation.memory import Memory
from tests.simulation.publisher_model import PublisherModel
from tests.simulation.receiver_model import ReceiverModel
from tests.simulation.scene import QUIET_DAY, Chaos, Scene
from weightd.core.errors import WireError
from weightd.core.session.events import Note
from weightd.core.session.faults import JournalFailed
from weightd.core.session.invariants import WorldFacts, lease_fault, rank_faults, world_faults
from weightd.core.session.leader import LeaderMachine
from weightd.core.session.node import NodeMachine
from weightd.core.units import NO_KEY, Boot, NodeId, TrainerRank, VersionKey
from weightd.core.wire.messages import CommitNote


class Broken(AssertionError):
    """A rule does not hold in this schedule."""


class Net:
    """Messages between daemons: lost, doubled, delayed and reordered while faults are on."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._seq = 0

    def send(self, sender: NodeId, receiver: NodeId, body: object) -> None:
        """Send a message; a daemon's own do not cross the network."""
        self._seq += 1
        w, seq = self.world, self._seq
        source, target = w.daemons[sender], w.daemons.get(receiver)
        if target is None:
            return
        term = source.leader.term if source.leader is not None and hasattr(body, "leader") else source.machine.term

        def arrive() -> None:
            target.receive(sender, source.boot, seq, term, body)

        self.carry(sender, receiver, arrive)

    def carry(self, sender: NodeId, receiver: NodeId, arrive: Callable[[], None]) -> None:
        """Let a message arrive: soon, late, twice or never."""
        w = self.world
        if sender == receiver:
            w.clock.after(0.001, arrive)
            return
        if not w.clock.chance(w.chaos.loss):
            late = w.clock.between(0.5, 6.0) if w.clock.chance(w.chaos.slow) else 0.0
            w.clock.after(w.clock.between(0.002, 0.05) + late, arrive)
        if w.clock.chance(w.chaos.double):
            w.clock.after(w.clock.between(0.0, 10.0), arrive)


class World:
    """A run, its nodes, its processes, and an oracle that sees all of it."""

    def __init__(
        self,
        seed: int,
        scene: Scene | None = None,
        chaos: Chaos = QUIET_DAY,
        node_class: type[NodeMachine] = NodeMachine,
        leader_class: type[LeaderMachine] = LeaderMachine,
        *,
        check: bool = True,
    ) -> None:
        self.clock = Clock(seed)
        self.scene = scene or Scene()
        self.chaos = chaos
        self.node_class, self.leader_class = node_class, leader_class
        self.check = check
        self.net = Net(self)
        self.commits: list[CommitNote] = []
        self.steps: list[int] = []
        self.least_version = 1
        self.trains_until = float("inf")
        self.notes: list[tuple[float, Note]] = []
        self.refusals: list[tuple[str, str]] = []
        self.stale_copies = 0
        self.moves = 0
        self._boots = 0
        self._sessions = 0
        self._order: dict[tuple[NodeId, int], float] = {}
        self.daemons = {NodeId(n): DaemonModel(self, NodeId(n), self.new_boot()) for n in self.scene.nodes}
        self.publishers = [PublisherModel(self, TrainerRank(r)) for r in range(len(self.scene.trainers))]
        self.receivers = {w: ReceiverModel(self, w) for w in self.scene.rollout_ranks()}

    # ------------------------------------------------------------ running

    def start(self) -> None:
        """Start every process, in any order."""
        for model in self.models():
            self.clock.after(self.clock.between(0.0, 3.0), self.starts(model))
        if self.chaos.fault_every_s:
            self.clock.after(self.clock.between(5.0, 15.0), self._fault)

    def run_until(self, end: float, done: Callable[[], bool] | None = None) -> bool:
        """Run to a time, or until something holds; return whether it did."""
        while self.clock.now < end:
            if done is not None and done():
                return True
            if not self.clock.step():
                return done() if done is not None else False
        return False

    def starts(self, model: PublisherModel | ReceiverModel) -> Callable[[], None]:
        """Return the action that starts a process unless it runs."""
        return lambda: None if model.alive else model.start()

    def models(self) -> list[PublisherModel | ReceiverModel]:
        """Every process."""
        return [*self.publishers, *self.receivers.values()]

    def leader(self) -> LeaderMachine | None:
        """The machine of the highest term."""
        machines = [d.leader for d in self.daemons.values() if d.leader is not None and d.leader.term]
        return max(machines, key=lambda m: m.term, default=None)

    def in_order(self, daemon: DaemonModel, channel: int, action: Callable[[], None]) -> None:
        """Let an action of a reliable channel inside one host happen soon, after those before it."""
        at = max(self.clock.now + self.clock.between(0.001, 0.02), self._order.get((daemon.node, channel), 0.0))
        self._order[daemon.node, channel] = at
        self.clock.after(at - self.clock.now, action)

    def new_boot(self) -> Boot:
        """Return an incarnation."""
        self._boots += 1
        return Boot(self._boots)

    def new_session(self) -> int:
        """Return a session."""
        self._sessions += 1
        return self._sessions

    @staticmethod
    def disk_error() -> WireError:
        """What a full disk says."""
        return JournalFailed("a record", "no space left on device", 0).to_wire()

    # ------------------------------------------------------------ faults

    def _fault(self) -> None:
        """Something dies or falls silent."""
        if not self.chaos.fault_every_s:
            return
        dice = self.clock.random.random()
        if dice < 0.55:
            self._restart(self.clock.random.choice(list(self.receivers.values())), 1.0, 20.0)
        elif dice < 0.7:
            self._restart(self.clock.random.choice(self.publishers), 0.5, 8.0)
        else:
            self._silence(self.clock.random.choice(list(self.daemons.values())))
        self.clock.after(self.clock.random.expovariate(1 / self.chaos.fault_every_s), self._fault)

    def _restart(self, model: PublisherModel | ReceiverModel, low_s: float, high_s: float) -> None:
        model.kill()
        self.clock.after(self.clock.between(low_s, high_s), self.starts(model))

    def _silence(self, daemon: DaemonModel) -> None:
        if not daemon.frozen:
            daemon.freeze()
            self.clock.after(self.clock.random.choice([1.0, 4.0, 7.0, 15.0]), daemon.thaw)

    # ------------------------------------------------------------ the oracle

    def stepped(self, *, leader_stepped: bool) -> None:
        """Check every rule; those of the leader alone when it is the leader that stepped."""
        if not self.check:
            return
        ranks = [r.facts() for r in self.receivers.values() if r.alive]
        facts = WorldFacts(self.leader(), ranks, self.commits)
        faults = world_faults(facts) if leader_stepped else rank_faults(facts)
        if faults:
            self.broken(faults[0])

    def committed(self, note: CommitNote) -> None:
        """A commit is durable: every rank that lives has applied it."""
        self.commits.append(note)
        for who, model in self.receivers.items():
            if who.engine in note.engines and model.alive and model.content not in (note.key, None):
                self.broken(f"commit of {note.key} names {who}, which holds {model.content}")

    def overwrites(self, memory: Memory, what: str) -> None:
        """Somebody is about to overwrite bytes: nobody may need them (J4)."""
        if not self.check:
            return
        if memory.readers:
            self.broken(f"J4: {what} holds {memory.content}, is read by {memory.readers}, and is overwritten")
        leader = self.leader()
        if leader is None:
            return
        s = leader.state
        committed = self.commits[-1].key if self.commits else NO_KEY
        in_hand = NO_KEY if s.stage in ("attaching", "idle", "paused", "failed", "committed") else s.key
        previous = NO_KEY if s.ledger.settled else s.ledger.previous
        if not memory.retained:
            committed = previous = NO_KEY
        if memory.moved:
            in_hand = NO_KEY
        fault = lease_fault(memory.claimed, committed, in_hand, previous)
        if fault is not None:
            self.broken(f"{fault} ({what})")

    def check_write(self, model: ReceiverModel) -> None:
        """No rank writes before all ranks of its engine are paused."""
        for other in self._siblings(model):
            if other.machine.servable:
                self.broken(f"barrier: {model.rank} writes while {other.rank} still serves {other.machine.base}")

    def check_resume(self, model: ReceiverModel) -> None:
        """No rank resumes on new bytes before all that live hold the commit."""
        base = model.machine.base
        if base == NO_KEY or base == model.world.before_last(base):
            return
        for other in self._siblings(model):
            behind = other.machine.state in ("applying", "applied") and other.machine.committed.version < base.version
            if behind and other.machine.key == base:
                self.broken(f"barrier: {model.rank} resumes on {base}, and {other.rank} does not hold its commit")

    def before_last(self, key: VersionKey) -> VersionKey | None:
        """Return ``key`` if it is not the newest commit: then resuming on it is going back to base."""
        return key if self.commits and self.commits[-1].key != key else None

    def _siblings(self, model: ReceiverModel) -> list[ReceiverModel]:
        return [m for w, m in self.receivers.items() if w.engine == model.rank.engine and m is not model and m.alive]

    def broken(self, what: str) -> None:
        """End the schedule."""
        raise Broken(f"seed {self.clock.seed}, {self.clock.now:.3f} s: {what}")

    # ------------------------------------------------------------ questions of tests

    def last_version(self) -> int:
        """Last committed version."""
        return self.commits[-1].key.version if self.commits else 0

    def all_serve(self, version: int) -> bool:
        """Whether every rollout rank serves at least a version."""
        return all(
            r.alive and r.machine.state == "serving" and r.machine.base.version >= version
            for r in self.receivers.values()
        )

    def standing(self) -> dict[str, object]:
        """Return where everybody stands, for the report of a schedule that does not go on."""
        leader = self.leader()
        ranks = {str(w): (m.alive, m.machine.state, str(m.machine.base)) for w, m in self.receivers.items()}
        trainers = {int(p.rank): (p.alive, [str(k) for k in p.keys]) for p in self.publishers}
        return {"leader": leader.status(self.clock.now) if leader else None, "ranks": ranks, "trainers": trainers}

    def unanswered(self) -> list[str]:
        """Return the versions that a living trainer rank published, that are decided, and that it was not told of."""
        last = self.last_version()
        return [
            f"trainer {p.rank}: {key}"
            for p in self.publishers
            if p.alive
            for key in p.made
            if key.version < last and key not in p.outcomes and not p.ledger.committed(key.version)
        ]

    def calm(self) -> None:
        """Faults stop: what is dead starts again, what is frozen thaws."""
        self.chaos = QUIET_DAY
        for daemon in self.daemons.values():
            if daemon.frozen:
                daemon.thaw()
        for model in self.models():
            if not model.alive:
                self.clock.after(self.clock.between(0.5, 3.0), self.starts(model))

    def rank(self, engine: str, k: int) -> ReceiverModel:
        """Return a rollout rank."""
        return next(m for w, m in self.receivers.items() if w == (engine, k))
