"""The leader's goal, as one message, from what it knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from weightd.core.session.run_state import QUIET
from weightd.core.session.turns import Phase
from weightd.core.units import NO_KEY
from weightd.core.wire.messages import EngineOrder, Goal

if TYPE_CHECKING:
    from weightd.core.session.run_state import RunState
    from weightd.core.units import VersionKey
    from weightd.core.wire.messages import EpochSpec


def goal_of(s: RunState, waiting_for: str) -> Goal:
    """Return the whole goal: the same for every node, repeated until it is superseded by the next."""
    in_hand = NO_KEY if s.stage in QUIET else s.key
    return Goal(
        s.node,
        s.op,
        s.stage,
        in_hand,
        s.epoch,
        _next_epoch(s),
        s.ledger.committed,
        s.ledger.failures_told(),
        tuple(_orders(s)),
        s.ledger.releases(s.view, in_hand),
        _retained(s, in_hand),
        s.ledger.attempt_boot,
        s.ledger.next_version,
        s.members.refusals(),
        waiting_for,
        s.paused.to_wire() if s.paused is not None else None,
    )


def steady(goal: Goal) -> Goal:
    """Return the goal without what changes by itself: a clock is no news."""
    return msgspec.structs.replace(goal, waiting_for="")


def _next_epoch(s: RunState) -> EpochSpec | None:
    """Nodes plan an epoch once its coverage is proved, and know then what their plan's digest must be."""
    upcoming = s.epochs.upcoming
    return upcoming.spec if upcoming is not None and upcoming.state != "proving" else None


def _orders(s: RunState) -> list[EngineOrder]:
    nothing_yet = [t for t in s.turns.values() if t.phase is Phase.UP and t.key == NO_KEY]
    return [EngineOrder(t.engine, t.order(), t.op, t.key, t.error()) for t in s.turns.values() if t not in nothing_yet]


def _retained(s: RunState, in_hand: VersionKey) -> tuple[VersionKey, ...]:
    """Return the versions whose bytes nodes keep: the last commit, the one before until it is settled, and in hand."""
    kept = [s.ledger.committed.key, in_hand] + ([] if s.ledger.settled else [s.ledger.previous])
    return tuple(dict.fromkeys(k for k in kept if k != NO_KEY))
