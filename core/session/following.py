"""Whom a node follows, and which of the leader's goals it acts on.

The floor is (term, op, stage): what is below it is answered with the node's
state, counted, and not acted on.  So is what an envelope's sequence shows to
be older than a goal that was read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from weightd.core.units import NO_OP, Op, Term

if TYPE_CHECKING:
    from weightd.core.session.events import GoalArrived
    from weightd.core.session.records import NodeJournalState
    from weightd.core.units import Boot, NodeId
    from weightd.core.wire.messages import Goal, Stage

STAGE_ORDER: dict[Stage, int] = {
    "attaching": 0,
    "collecting": 1,
    "fetching": 2,
    "prepared": 3,
    "applying": 4,
    "committed": 5,
    "failed": 5,
    "idle": 6,
    "paused": 6,
}
"""Order of the stages within one op; idle and paused take turns."""

Verdict = Literal["superseded", "new term", "late", "newer"]


@dataclass(frozen=True, slots=True)
class Floor:
    """Below this no goal is acted on."""

    op: Op = NO_OP
    stage: int = 0


class Following:
    """The leader that a node follows, with the newest goal it acted on."""

    def __init__(self, journal: NodeJournalState) -> None:
        self.term: Term = journal.term
        self.leader: NodeId = journal.leader
        self.goal: Goal | None = None
        self.goal_seq = 0
        self.heard_at: float | None = None
        self.late_goals = 0
        self.waits: GoalArrived | None = None
        self._boot: Boot | None = None
        self._floor = Floor()

    def judge(self, event: GoalArrived) -> Verdict:
        """Return what a goal is to this node."""
        if event.term > self.term:
            return "new term"
        if event.term < self.term or event.goal.leader != self.leader:
            return "superseded"
        return "late" if self._is_below(event) else "newer"

    def follow(self, term: Term, leader: NodeId) -> None:
        """A higher term is journaled: follow it, and forget what the lower one wanted."""
        self.term, self.leader = term, leader
        self.goal, self.goal_seq, self._boot, self._floor = None, 0, None, Floor()

    def accept(self, event: GoalArrived, now: float) -> None:
        """Act on a goal from now on."""
        self.goal, self.goal_seq, self.heard_at, self._boot = event.goal, event.seq, now, event.boot
        self._floor = Floor(event.goal.op, STAGE_ORDER[event.goal.stage])

    def silent_for(self, now: float) -> float:
        """Return for how long the leader was not heard; 0 where none was ever."""
        return now - self.heard_at if self.heard_at is not None else 0.0

    def _is_below(self, event: GoalArrived) -> bool:
        """Whether a goal of this term is older than one that was acted on."""
        if self._boot is None:
            return False
        if event.boot != self._boot or event.seq <= self.goal_seq:
            return True
        place = (event.goal.op, STAGE_ORDER[event.goal.stage])
        return place < (self._floor.op, self._floor.stage)
