"""A trainer rank of a simulation: two slots, and what the hook knows of versions.

A live one steps in slot 0 once that is released; if it waits for too long, it copies what it published to slot 1 first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.simulation.memory import Memory
from weightd.core.errors import WeightdError
from weightd.core.units import NO_KEY, Boot, RolloutRank, TrainerRank, Version, VersionKey
from weightd.core.wire.messages import (
    PublisherGoal,
    PublisherReport,
    ReceiverGoal,
    Refusal,
    Region,
    SlotState,
    TrainerHello,
)
from weightd.trainer_hooks.ledger import Ledger

if TYPE_CHECKING:
    from tests.simulation.world import World

SLOTS = 2
NEVER = Boot(0)


@dataclass
class PublisherModel:
    """One trainer rank, through all its incarnations."""

    world: World
    rank: TrainerRank
    boot: Boot = NEVER
    alive: bool = False
    greeted: bool = False
    step: int = 0
    session: int = 0
    ledger: Ledger = field(init=False)
    memory: list[Memory] = field(default_factory=list)
    keys: list[VersionKey] = field(default_factory=list)
    outcomes: dict[VersionKey, str] = field(default_factory=dict)
    made: list[VersionKey] = field(default_factory=list)
    _seq: int = 0
    _busy: bool = False
    _waits_since: float | None = None

    def hello(self) -> TrainerHello:
        """What it says when it comes."""
        return TrainerHello(
            self.rank,
            len(self.world.scene.trainers),
            1000 + int(self.rank),
            self.boot,
            f"slot-{self.rank}",
            f"layout-t{self.rank}",
            100,
            tuple(Region(i, 0, 100) for i in range(SLOTS)),
            self.world.scene.roster if self.rank == 0 else None,
            self.live,
        )

    @property
    def live(self) -> bool:
        """Whether slot 0 is the memory of its parameters."""
        return self.rank in self.world.scene.live

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Start a process."""
        self.boot, self.alive, self.session = self.world.new_boot(), True, self.world.new_session()
        self.ledger = Ledger(self.rank)
        self.memory = [Memory(retained=not self.live) for _ in range(SLOTS)]
        self.keys = [NO_KEY] * SLOTS
        self.step, self.made = len(self.world.steps), []
        self._seq, self._busy, self.greeted, self._waits_since = 0, False, True, None
        daemon = self.world.daemons[self.world.scene.node_of(self.rank)]
        for i, memory in enumerate(self.memory):
            daemon.slots[int(self.rank), self.boot, i] = memory
        self.world.in_order(daemon, self.session, lambda: daemon.greet(self.session, self))
        self.report()
        self._repeat(self.boot)
        self._train(self.boot)

    def kill(self) -> None:
        """End the process; its memory stays with the daemon."""
        if not self.alive:
            return
        self.alive = False
        daemon, session = self.world.daemons[self.world.scene.node_of(self.rank)], self.session
        self.world.clock.after(
            self.world.clock.between(0.05, 0.3),
            lambda: self.world.in_order(daemon, session, lambda: daemon.lose(session, "killed by signal 9")),
        )

    def told(self, body: PublisherGoal | ReceiverGoal | Refusal) -> None:
        """Take a goal; a refusal ends the process, and another tries later."""
        if isinstance(body, Refusal):
            self.world.refusals.append((f"trainer {self.rank}", body.error.text))
            self.kill()
            self.world.clock.after(self.world.clock.between(1, 5), self.world.starts(self))
            return
        assert isinstance(body, PublisherGoal)
        self.ledger.goal_arrived(body, tuple(self.keys))
        for release in body.release:
            if self.keys[release.slot] == release.key != NO_KEY:
                self.keys[release.slot] = NO_KEY
        for failure in body.failures:
            self.outcomes.setdefault(failure.key, failure.error.code)
        self.report()

    def report(self) -> None:
        """Tell the daemon the whole state."""
        self._seq += 1
        slots = tuple(
            SlotState(i, key, memory.generation, f"layout-t{self.rank}")
            for i, (key, memory) in enumerate(zip(self.keys, self.memory, strict=True))
        )
        daemon, seq, session = self.world.daemons[self.world.scene.node_of(self.rank)], self._seq, self.session
        report = PublisherReport(slots)
        self.world.in_order(daemon, session, lambda: daemon.hear(session, report, seq))

    def _repeat(self, boot: Boot) -> None:
        if self.alive and self.boot == boot:
            self.report()
            self.world.clock.after(2.0, lambda: self._repeat(boot))

    # ------------------------------------------------------------ training

    def _train(self, boot: Boot) -> None:
        """Publish the job's next step whenever a slot is free."""
        if not self.alive or self.boot != boot:
            return
        goal = self.ledger.goal
        ready = goal.epoch and goal.paused is None and not self._busy
        if ready and self._may_step():
            if NO_KEY in (self.keys[:1] if self.live else self.keys):
                self._waits_since = None
                self._publish()
            elif self.live:
                self._wait_or_move()
        self.world.clock.after(self.world.clock.between(0.3, 1.5), lambda: self._train(boot))

    def _may_step(self) -> bool:
        """Trainer ranks meet in collectives: none is more than a step ahead of one that lives."""
        return all(self.step <= p.step for p in self.world.publishers if p.alive)

    def _wait_or_move(self) -> None:
        """Copy the live slot, once a step has waited for too long."""
        now = self.world.clock.now
        self._waits_since = now if self._waits_since is None else self._waits_since
        waited = now - self._waits_since >= self.world.scene.limits.step_wait_s
        if not waited or self.keys[1] != NO_KEY:
            return
        self.world.overwrites(self.memory[1], f"the copy of trainer {self.rank}")
        self.memory[1].begin()
        self._busy = True
        boot, key = self.boot, self.keys[0]
        self.world.clock.after(self.world.clock.between(0.05, 0.3), lambda: self._moved(boot, key))

    def _moved(self, boot: Boot, key: VersionKey) -> None:
        if not self.alive or self.boot != boot:
            return
        self._busy = False
        self.memory[1].end(key)
        if self.keys[0] != key:
            return  # released meanwhile
        self.memory[1].claimed = self.keys[1] = key
        self.memory[0].moved = True
        self.world.moves += 1
        self.report()

    def _publish(self) -> None:
        if self.step == len(self.world.steps):
            if self.world.clock.now >= self.world.trains_until:
                return
            self.world.steps.append(max(self.ledger.next_version, self.world.least_version))
        number = self.world.steps[self.step]
        self.step += 1
        try:
            key = self.ledger.key_for(Version(number))
        except WeightdError as error:
            self.world.refusals.append((f"trainer {self.rank}", str(error)))
            return
        slot, boot = self.keys.index(NO_KEY), self.boot
        self.world.overwrites(self.memory[slot], f"slot {slot} of trainer {self.rank}")
        self.memory[slot].begin()
        self._busy = True
        self.world.clock.after(self.world.clock.between(0.05, 0.3), lambda: self._published(boot, slot, key))

    def _published(self, boot: Boot, slot: int, key: VersionKey) -> None:
        if not self.alive or self.boot != boot:
            return
        self.memory[slot].end(key)
        self.memory[slot].claimed = key
        self.keys[slot], self._busy = key, False
        self.ledger.published(key)
        self.made.append(key)
        self.report()

    @property
    def who(self) -> TrainerRank | RolloutRank:
        """Its role."""
        return self.rank
