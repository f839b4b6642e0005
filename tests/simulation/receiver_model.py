"""An engine rank of a simulation: the hook's own machine, and a process that comes to safe points now and then."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.simulation.memory import Memory
from weightd.core.errors import WireError
from weightd.core.session.invariants import RankFacts
from weightd.core.units import NO_VERSION, Boot, RolloutRank, TrainerRank, Version, VersionKey
from weightd.core.wire.messages import EngineHello, PublisherGoal, ReceiverGoal, Refusal, SourceSlot
from weightd.rollout_hooks.state import Deliver, Raise, ReceiverMachine, RunCopy, RunPause, RunResume

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.daemon_model import DaemonModel
    from tests.simulation.world import World
    from weightd.core.wire.messages import ReceiverReport

NEVER = Boot(0)
CHUNKS = 3
"""A copy looks this often whether it shall stop."""


@dataclass
class ReceiverModel:
    """One rollout rank, through all its incarnations."""

    world: World
    rank: RolloutRank
    boot: Boot = NEVER
    alive: bool = False
    session: int = 0
    machine: ReceiverMachine = field(default_factory=ReceiverMachine)
    content: VersionKey | None = None
    delivered: Version = NO_VERSION
    _seq: int = 0
    _returned: Version = NO_VERSION
    _entered_at: float = 0.0
    _paused_at: float | None = None
    _timeout_s: float = 0.0
    _last: ReceiverReport | None = None
    _reading: list[Memory] = field(default_factory=list)

    @property
    def who(self) -> TrainerRank | RolloutRank:
        """Its role."""
        return self.rank

    @property
    def daemon(self) -> DaemonModel:
        """The daemon of its node."""
        return self.world.daemons[self.world.scene.node_of(self.rank)]

    def hello(self) -> EngineHello:
        """What it says when it comes."""
        size = len(self.world.scene.engines[self.rank.engine])
        pid = 2000 + self.session % 1000
        slot = f"slot-{self.rank}"
        return EngineHello(self.rank.engine, self.rank.k, size, pid, self.boot, slot, f"layout-{self.rank}", 100)

    def facts(self) -> RankFacts:
        """What it says of itself beside what it really holds."""
        return RankFacts(self.rank, self.machine.report(), self.content, self.machine.servable)

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Start a process."""
        self.boot, self.alive, self.session = self.world.new_boot(), True, self.world.new_session()
        self.machine, self.content, self._returned = ReceiverMachine(), None, NO_VERSION
        self._seq, self._paused_at, self._last = 0, None, None
        self.world.in_order(self.daemon, self.session, lambda: self.daemon.greet(self.session, self))
        self.report(force=True)
        self._repeat(self.boot)
        self._run(self.boot)

    def kill(self) -> None:
        """End the process."""
        if not self.alive:
            return
        self.alive = False
        for memory in self._reading:
            memory.readers -= 1
        self._reading = []
        daemon, session = self.daemon, self.session
        self.world.clock.after(
            self.world.clock.between(0.05, 0.3),
            lambda: self.world.in_order(daemon, session, lambda: daemon.lose(session, "killed by signal 9")),
        )

    def told(self, body: PublisherGoal | ReceiverGoal | Refusal) -> None:
        """Take a goal; a refusal ends the process, and another tries later."""
        if isinstance(body, Refusal):
            self.world.refusals.append((str(self.rank), body.error.text))
            self.kill()
            self.world.clock.after(self.world.clock.between(1, 5), self.world.starts(self))
            return
        assert isinstance(body, ReceiverGoal)
        self.machine.goal_arrived(body)
        if body.plan_digest and body.plan_digest != self.machine.plan_digest:
            self._build(body.plan_digest)
        self._turn()

    def report(self, *, force: bool = False) -> None:
        """Tell the daemon the whole state if it changed."""
        report = self.machine.report()
        if report == self._last and not force:
            return
        self._last = report
        self._seq += 1
        seq, session, daemon = self._seq, self.session, self.daemon
        self.world.in_order(daemon, session, lambda: daemon.hear(session, report, seq))

    def _repeat(self, boot: Boot) -> None:
        if self.alive and self.boot == boot:
            self.report(force=True)
            self.world.clock.after(2.0, lambda: self._repeat(boot))

    def _build(self, digest: str) -> None:
        boot = self.boot

        def built() -> None:
            if self._lives(boot) and self.machine.goal.plan_digest == digest:
                self.machine.plan_built(digest, self.world.scene.planned_nbytes(self.rank))
                self._turn()

        self.world.clock.after(self.world.clock.between(0.02, 0.3), built)

    def _lives(self, boot: Boot) -> bool:
        return self.alive and self.boot == boot

    # ------------------------------------------------------------ the engine's loop

    def _run(self, boot: Boot) -> None:
        """Sample for a while, then come to the safe point."""
        pause = self.world.clock.between(0.1, 0.6)
        if self.world.clock.chance(self.world.chaos.skip_receive):
            pause = self.world.clock.between(5.0, 25.0)
        self.world.clock.after(pause, lambda: self._receive(boot))

    def _receive(self, boot: Boot) -> None:
        if not self._lives(boot):
            return
        self._entered_at, self._paused_at = self.world.clock.now, None
        self._timeout_s = self.world.clock.between(0.5, 3.0)
        self.machine.entered()
        self._turn()
        self._wait(boot, self._entered_at)

    def _wait(self, boot: Boot, entered_at: float) -> None:
        """Look at the clock while in ``receive()``."""
        if not self._lives(boot) or not self.machine.in_receive or self._entered_at != entered_at:
            return
        now, m = self.world.clock.now, self.machine
        self._paused_at = None if not m.waiting_in_barrier else self._paused_at or now
        if now >= entered_at + self._timeout_s and not m.leaving:
            barrier_s = self.world.scene.limits.barrier_s
            if self._paused_at is not None and now >= self._paused_at + barrier_s:
                m.ask_leave()
                self.report()
            elif not m.under_way:
                self._depart()
                return
        self.world.clock.after(0.25, lambda: self._wait(boot, entered_at))

    def _depart(self) -> None:
        self.machine.departed()
        self.report()
        self._run(self.boot)

    def _turn(self) -> None:
        """Carry out the machine's next steps."""
        while self.alive:
            step = self.machine.next_step(self._returned, None)
            self.report()
            match step:
                case None:
                    return
                case RunPause():
                    self._later(0.0, 0.2, self._paused)
                    return
                case RunCopy(key, sources):
                    self._begin_copy(key, sources)
                    return
                case RunResume():
                    self.world.check_resume(self)
                    self._later(0.0, 0.2, self.machine.resume_done)
                    return
                case Deliver(version):
                    self._returned = self.delivered = version
                    self._depart()
                    return
                case Raise():
                    self._depart()
                    return

    def _later(self, low_s: float, high_s: float, action: Callable[[], None]) -> None:
        boot, machine = self.boot, self.machine

        def run() -> None:
            if self._lives(boot) and self.machine is machine:
                action()
                self.report()
                self._turn()

        self.world.clock.after(self.world.clock.between(low_s, high_s), run)

    def _paused(self) -> None:
        if self.world.clock.chance(self.world.chaos.refuse):
            self.machine.pause_failed(WireError("E_APPLY", {}, "the pause callback raised"))
            self._depart()
        else:
            self.machine.pause_done()

    # ------------------------------------------------------------ copying

    def _begin_copy(self, key: VersionKey, sources: tuple[SourceSlot, ...]) -> None:
        self.world.check_write(self)
        self.content = None
        seen = [(self._memory(s), s.generation) for s in sources]
        if not all(memory.shows(key, generation) for memory, generation in seen):
            self.machine.copy_failed(WireError("E_STALE_SOURCE", {}, f"a source of {key} is not what was ordered"))
            self.world.stale_copies += 1
            self.report()
            return self._turn()
        self._reading = [memory for memory, _ in seen]
        for memory in self._reading:
            memory.readers += 1
        long = self.world.clock.chance(self.world.chaos.linger)
        chunk_s = self.world.clock.between(2.0, 9.0) if long else self.world.clock.between(0.02, 0.2)
        self._copy_on(self.boot, key, seen, CHUNKS, chunk_s)
        return None

    def _copy_on(self, boot: Boot, key: VersionKey, seen: list[tuple[Memory, int]], left: int, chunk_s: float) -> None:
        def chunk() -> None:
            if self._lives(boot) and left > 1 and not self.machine.stopping:
                self.machine.applied_nbytes = self.world.scene.planned_nbytes(self.rank) * (CHUNKS - left + 1) // CHUNKS
                self._copy_on(boot, key, seen, left - 1, chunk_s)
                return
            if self._lives(boot):
                for memory in self._reading:
                    memory.readers -= 1
                self._reading = []
                self._end_copy(key, seen)

        self.world.clock.after(chunk_s, chunk)

    def _end_copy(self, key: VersionKey, seen: list[tuple[Memory, int]]) -> None:
        if self.machine.stopping:
            self.machine.copy_stopped()
        elif all(memory.shows(key, generation) for memory, generation in seen):
            self.content = key
            self.machine.copy_done(self.world.scene.planned_nbytes(self.rank))
        else:
            self.world.stale_copies += 1
            self.machine.copy_failed(WireError("E_STALE_SOURCE", {}, f"a source of {key} changed"))
        self.report()
        self._turn()

    def _memory(self, source: SourceSlot) -> Memory:
        if source.rank < 0:
            return self.daemon.halves[source.slot]
        goal = self.daemon.machine.following.goal
        spec = goal.epoch if goal is not None else None
        assert spec is not None, "a write is ordered in an epoch"
        boot = next(p.boot for p in spec.trainers if p.rank == source.rank)
        return self.daemon.slots[source.rank, boot, source.slot]
