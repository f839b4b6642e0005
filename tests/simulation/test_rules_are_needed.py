"""Each rule is switched off once, and the simulation says what that breaks.

A rule whose absence no schedule notices would be a rule nobody needs, or a
simulation that does not look.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tests.simulation.scene import QUIET_DAY, Chaos, Scene
from tests.simulation.world import Broken, World
from weightd.core.session.following import Following
from weightd.core.session.hook_goals import HookGoals
from weightd.core.session.leader import LeaderMachine
from weightd.core.session.ledger import Ledger
from weightd.core.session.node import NodeMachine
from weightd.core.session.records import JournalState
from weightd.core.session.turns import EngineTurn, Phase
from weightd.core.units import TrainerRank, VersionKey
from weightd.core.wire.messages import SlotRelease

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightd.core.session.attached import Hook
    from weightd.core.session.events import GoalArrived
    from weightd.core.session.view import View
    from weightd.core.wire.messages import Goal

SEEDS = range(40)
STORM = Chaos(loss=0.1, double=0.2, slow=0.15, refuse=0.03, linger=0.05, skip_receive=0.03, fault_every_s=5.0)
DEAF = Chaos(loss=0.3)
LINGERING = Chaos(linger=0.3, skip_receive=0.05)
LIVE = Scene(live=frozenset({0, 1, 2}))


def first_fault(
    chaos: Chaos,
    node_class: type[NodeMachine] = NodeMachine,
    leader_class: type[LeaderMachine] = LeaderMachine,
    seeds: Iterable[int] = SEEDS,
    scene: Scene | None = None,
) -> str:
    """Return what the first broken schedule says; empty if none breaks."""
    for seed in seeds:
        world = World(seed, scene or Scene(), chaos, node_class, leader_class)
        try:
            world.start()
            world.run_until(30.0)
            world.calm()
            last = world.last_version()
            if not world.run_until(world.clock.now + 90.0, lambda w=world, v=last: w.last_version() >= v + 3):  # type: ignore[misc]
                return f"stuck: {world.standing()}"
        except Broken as broken:
            return str(broken)
    return ""


# ------------------------------------------------------------ the pause barrier


class HastyTurn(EngineTurn):
    """Has an engine write as soon as one rank is paused."""

    def _pausing(self, view: View, now: float) -> None:
        if any(r and self._paused(r) for r in self._reports(view).values()):
            self._begin_write(now)


class HastyResume(EngineTurn):
    """Has a rank resume before the others hold the commit."""

    def _committing(self, view: View, now: float) -> None:
        self.up = True
        self._enter(Phase.RESUMING, now)


def with_turn(turn: type[EngineTurn]) -> type[LeaderMachine]:
    """Return a leader whose engines take turns by another rule."""

    class Leader(LeaderMachine):
        def _begin(self, now: float) -> None:
            self.state.turn_class = turn
            super()._begin(now)

    return Leader


# ------------------------------------------------------------ exact release


class LooseLedger(Ledger):
    """Gives the version before free with the commit, not with its acknowledgement."""

    def _is_free(self, key: VersionKey, in_hand: VersionKey) -> bool:
        return 0 < key.version < self.serving or super()._is_free(key, in_hand)


class LooseLeader(LeaderMachine):
    """Uses it."""

    def _begin(self, now: float) -> None:
        if not isinstance(self.state.ledger, LooseLedger):
            self.state.ledger = LooseLedger(JournalState(), self.state.rank0_boot)
        super()._begin(now)


class BySlot(HookGoals):
    """Passes a release on by its slot, whatever the slot holds by now."""

    def _releases(self, hook: Hook, goal: Goal) -> tuple[SlotRelease, ...]:
        slots = {s.slot: s.key for s in hook.publisher.slots}
        return tuple(SlotRelease(r.slot, slots[r.slot]) for r in goal.release if r.rank == hook.who and r.slot in slots)


class BySlotNode(NodeMachine):
    """Uses it."""

    hook_goals_class: ClassVar[type[HookGoals]] = BySlot


# ------------------------------------------------------------ readers of a slot that moved


class Moving(HookGoals):
    """Gives a slot free as soon as its bytes are in another one, whoever still reads it."""

    def _slot_is_read(self, rank: TrainerRank, slot: SlotRelease) -> bool:
        return False


class MovingNode(NodeMachine):
    """Uses it."""

    hook_goals_class: ClassVar[type[HookGoals]] = Moving


# ------------------------------------------------------------ resend


class SilentLeader(LeaderMachine):
    """Says a goal once."""

    def _tell(self, now: float) -> None:
        if self._leads and now >= self._beat_at:
            self._beat_at = now + self.state.limits.heartbeat_s
        super()._tell(now)


class SilentNode(NodeMachine):
    """Says its state once."""

    def _tell_leader(self, *, beat: bool) -> None:
        super()._tell_leader(beat=False)


# ------------------------------------------------------------ floor


class NoFloor(Following):
    """Acts on whatever comes."""

    def _is_below(self, event: GoalArrived) -> bool:
        return False


class NoFloorNode(NodeMachine):
    """Uses it."""

    following_class: ClassVar[type[Following]] = NoFloor


# ------------------------------------------------------------ the tests


def test_with_all_rules_nothing_breaks() -> None:
    assert first_fault(STORM, seeds=range(6)) == ""
    assert first_fault(DEAF, seeds=range(6)) == ""


def test_without_the_pause_barrier_a_rank_writes_while_another_serves() -> None:
    assert "barrier: " in first_fault(STORM, leader_class=with_turn(HastyTurn))


def test_without_the_resume_barrier_a_rank_runs_before_the_others_hold_the_commit() -> None:
    assert "barrier: " in first_fault(STORM, leader_class=with_turn(HastyResume))


def test_released_with_the_commit_bytes_change_that_are_not_yet_replaced_everywhere() -> None:
    assert "J4: " in first_fault(STORM, leader_class=LooseLeader)


def test_released_by_its_slot_alone_a_version_in_hand_is_overwritten() -> None:
    assert "J4: " in first_fault(STORM, node_class=BySlotNode)


def test_a_slot_that_moved_is_not_stepped_in_while_somebody_reads_it() -> None:
    assert first_fault(LINGERING, scene=LIVE, seeds=range(6)) == ""
    assert "J4: " in first_fault(LINGERING, node_class=MovingNode, scene=LIVE)


def test_without_resends_a_lost_message_is_the_end_of_the_run() -> None:
    assert first_fault(QUIET_DAY, SilentNode, SilentLeader, seeds=range(3)) == ""
    assert "stuck: " in first_fault(DEAF, SilentNode, SilentLeader)


def test_without_the_floor_a_late_goal_undoes_a_newer_one() -> None:
    assert first_fault(STORM, node_class=NoFloorNode) != ""
