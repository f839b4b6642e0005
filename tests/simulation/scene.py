"""Who is where in a simulated run, how fast it gives up, and how bad its network is."""

from dataclasses import dataclass, field

from weightd.core.roster.topology import EngineDecl, Roster
from weightd.core.session.deadlines import Deadlines
from weightd.core.units import EngineId, EngineRank, NodeId, RolloutRank, TrainerRank

QUICK = Deadlines(
    attach_s=40.0,
    barrier_s=2.0,
    collect_s=20.0,
    plan_s=8.0,
    fetch_s=40.0,
    fetch_stall_s=10.0,
    apply_wait_s=15.0,
    apply_s=15.0,
    apply_stall_s=6.0,
    commit_ack_s=6.0,
    restart_s=5.0,
    step_wait_s=3.0,
    heartbeat_s=1.0,
    heartbeat_timeout_s=3.0,
)
"""Deadlines in the proportions of the real ones, short enough for thousands of schedules."""


@dataclass(frozen=True)
class Chaos:
    """How likely things go wrong; all zero is a quiet day.

    Attributes:
        loss: A message between nodes is lost.
        double: It arrives twice.
        slow: It is late by seconds.
        refuse: A pause callback raises.
        linger: A copy takes many seconds.
        skip_receive: A rank does not come to a safe point for many seconds.
        fault_every_s: Mean time between deaths and silences; 0 for none.
    """

    loss: float = 0.0
    double: float = 0.0
    slow: float = 0.0
    refuse: float = 0.0
    linger: float = 0.0
    skip_receive: float = 0.0
    fault_every_s: float = 0.0


QUIET_DAY = Chaos()
BAD_DAY = Chaos(loss=0.03, double=0.03, slow=0.03, refuse=0.01, linger=0.02, skip_receive=0.01, fault_every_s=12.0)


@dataclass(frozen=True)
class Scene:
    """A run.

    Attributes:
        nodes: Names of the nodes; trainer rank 0's leads.
        trainers: Node of trainer rank r at position r.
        engines: Engine to the node of its rank k at position k.
        required: Engines without which the run pauses.
        live: Trainer ranks whose parameters are the memory that is read.
    """

    nodes: tuple[str, ...] = ("a", "b", "c")
    trainers: tuple[str, ...] = ("a", "a", "b")
    engines: dict[str, tuple[str, ...]] = field(default_factory=lambda: {"E0": ("b", "c"), "E1": ("c",), "E2": ("b",)})
    required: frozenset[str] = frozenset()
    live: frozenset[int] = frozenset()
    limits: Deadlines = QUICK

    @property
    def roster(self) -> Roster:
        """As trainer rank 0 declares it: sizes only, places are measured."""
        engines = tuple(EngineDecl(e, len(nodes), required=e in self.required) for e, nodes in self.engines.items())
        return Roster(len(self.trainers), engines)

    def node_of(self, who: TrainerRank | RolloutRank) -> NodeId:
        """Where a rank runs."""
        return NodeId(self.engines[who.engine][who.k] if isinstance(who, RolloutRank) else self.trainers[who])

    def rollout_ranks(self) -> list[RolloutRank]:
        """Every rollout rank."""
        return [RolloutRank(EngineId(e), EngineRank(k)) for e, nodes in self.engines.items() for k in range(len(nodes))]

    def planned_nbytes(self, who: RolloutRank) -> int:
        """Planned bytes of a rank; the last engine's are none at all."""
        return 0 if who.engine == list(self.engines)[-1] else 100 * (int(who.k) + 1)
