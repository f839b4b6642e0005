"""The session under stateful testing: messages between nodes in any order, lost or doubled, whenever it likes.

The machines are the real ones; hypothesis is the network, the scheduler and
the reaper.  After every step every invariant is checked by the world itself,
and at the end of every example faults stop and the run must go on.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.conftest import FULL
from tests.simulation.scene import QUIET_DAY, Chaos, Scene
from tests.simulation.world import Net, World
from weightd.core.units import NodeId

ANY = st.integers(0, 10_000)
SMALL = Scene(("a", "b"), ("a", "b"), {"E0": ("a", "b"), "E1": ("b",)})


class HeldNet(Net):
    """A network whose messages arrive when the test says so, if at all."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.held: list[Callable[[], None]] = []
        self.open = True

    def carry(self, sender: NodeId, receiver: NodeId, arrive: Callable[[], None]) -> None:
        """Hold what crosses the network."""
        if self.open or sender == receiver:
            super().carry(sender, receiver, arrive)
        else:
            self.held.append(arrive)

    def release(self) -> None:
        """Let messages through again; what was held is lost."""
        self.open = True
        self.held.clear()


class Session(RuleBasedStateMachine):
    """Two nodes, two trainer ranks, an engine over both nodes and one on the second."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(0, SMALL)
        self.net = HeldNet(self.world)
        self.world.net = self.net

    @initialize(seed=st.integers(0, 50), attached=st.booleans())
    def begin(self, seed: int, attached: bool) -> None:
        """Start every process; hold the network at once, or once the first version is in hand."""
        self.world.clock.random.seed(seed)
        self.world.start()
        if attached:
            self.world.run_until(30.0, lambda: bool(self.world.steps))
        self.net.open = False

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        """Hooks, disks and deadlines go on; nothing crosses the network."""
        self.world.run_until(self.world.clock.now + seconds)

    @rule(count=st.integers(1, 30))
    def messages_arrive_in_order(self, count: int) -> None:
        """The oldest messages arrive."""
        for _ in range(min(count, len(self.net.held))):
            self.net.held.pop(0)()
            self.world.run_until(self.world.clock.now + 0.02)

    @precondition(lambda self: self.net.held)
    @rule(which=ANY)
    def any_message_arrives(self, which: int) -> None:
        """One message overtakes others."""
        self.net.held.pop(which % len(self.net.held))()

    @precondition(lambda self: self.net.held)
    @rule(which=ANY)
    def a_message_arrives_twice(self, which: int) -> None:
        """One message arrives, and stays on its way."""
        self.net.held[which % len(self.net.held)]()

    @precondition(lambda self: self.net.held)
    @rule(which=ANY, count=st.integers(1, 10))
    def messages_are_lost(self, which: int, count: int) -> None:
        """Some messages never arrive."""
        first = which % len(self.net.held)
        del self.net.held[first : first + count]

    @rule(which=ANY)
    def a_rank_dies_and_comes_back(self, which: int) -> None:
        """A process ends; another takes its role."""
        models = self.world.models()
        model = models[which % len(models)]
        model.kill()
        self.world.clock.after(2.0, self.world.starts(model))

    @rule(which=ANY, seconds=st.sampled_from([2.0, 6.0, 12.0]))
    def a_node_falls_silent(self, which: int, seconds: float) -> None:
        """A daemon does nothing for a while."""
        daemons = list(self.world.daemons.values())
        daemon = daemons[which % len(daemons)]
        if not daemon.frozen:
            daemon.freeze()
            self.world.clock.after(seconds, daemon.thaw)

    @rule(refuse=st.booleans(), linger=st.booleans())
    def engines_change_their_mood(self, refuse: bool, linger: bool) -> None:
        """Pauses are refused, copies take long."""
        self.world.chaos = Chaos(refuse=0.3 if refuse else 0.0, linger=0.3 if linger else 0.0)

    @invariant()
    def every_rule_holds(self) -> None:
        """Look at everything, even if nothing was handled."""
        self.world.stepped(leader_stepped=True)

    def teardown(self) -> None:
        """Faults stop: the run goes on, and everybody is answered."""
        self.net.release()
        self.world.chaos = QUIET_DAY
        self.world.calm()
        last = self.world.last_version()
        goes_on = self.world.run_until(
            self.world.clock.now + 120.0,
            lambda: self.world.last_version() >= last + 2 and self.world.all_serve(last + 1),
        )
        assert goes_on, self.world.standing()
        assert self.world.unanswered() == []


TestSession = Session.TestCase
TestSession.settings = settings(max_examples=400 if FULL else 25, stateful_step_count=40)
