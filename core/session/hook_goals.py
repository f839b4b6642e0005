"""What a node tells its hooks: the leader's goal, as far as it concerns each, with the local slots to read from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from weightd.core.session.events import EndServing
from weightd.core.session.faults import NoLeader, Undecided
from weightd.core.session.view import rank_name
from weightd.core.units import NO_EPOCH, NO_KEY, NO_OP, NO_TERM, RolloutRank, TrainerRank
from weightd.core.wire.messages import EngineOrder, Order, PublisherGoal, ReceiverGoal, SlotRelease, SourceSlot

if TYPE_CHECKING:
    from weightd.core.errors import WireError
    from weightd.core.session.attached import Hook
    from weightd.core.session.events import ReadersChanged
    from weightd.core.session.node_parts import NodeParts
    from weightd.core.units import VersionKey
    from weightd.core.wire.messages import EpochSpec, Goal

LANDING = -1
"""Stands for the landing among the sources of a rank."""

ENDING: frozenset[Order] = frozenset({"abort", "fence", "left", "commit", "resume"})
"""Orders that end something: they reach ranks that are in the epoch no more, too."""


@dataclass(frozen=True, slots=True)
class NoLeaderNow:
    """Nobody leads for longer than ``restart_s``."""

    waited_s: float
    limit_s: float


def _untouched(hook: Hook) -> bool:
    """Whether a rank was never told anything: orders that end what its predecessor had begun are none of its own."""
    r = hook.receiver
    return (r.state, r.op, r.key) == ("unready", NO_OP, NO_KEY)


class HookGoals:
    """Turns the leader's goal into the goals of this node's hooks."""

    def __init__(self, parts: NodeParts) -> None:
        self._run, self._node = parts.run, parts.node
        self._following = parts.following
        self._attached = parts.attached
        self._landing = parts.landing
        self._plans = parts.plans
        self._records = parts.records
        self.readers: dict[VersionKey, ReadersChanged] = {}

    # ------------------------------------------------------------ publishers

    def publisher(self, hook: Hook, goal: Goal, lost: NoLeaderNow | None) -> PublisherGoal:
        """Return what a trainer rank may know and do."""
        rank = hook.who
        joined = goal.epoch is not None and any((p.rank, p.boot) == (rank, hook.boot) for p in goal.epoch.trainers)
        unrecorded = self._unrecorded(goal.committed.key)
        # A pause that follows a commit is told after it: to a wait for that version it would be the wrong answer.
        paused = None if unrecorded else goal.paused
        return PublisherGoal(
            NO_TERM if lost else self._following.term,
            goal.epoch.epoch if goal.epoch is not None and joined else NO_EPOCH,
            goal.attempt_boot,
            self._records.committed if unrecorded else goal.committed.key,
            goal.next_version,
            goal.failures,
            self._releases(hook, goal),
            goal.stage,
            goal.key,
            goal.waiting_for,
            self._no_leader(lost) if lost else paused,
        )

    def _releases(self, hook: Hook, goal: Goal) -> tuple[SlotRelease, ...]:
        """Return the slots that the leader gave free, or that moved, once this node's own readers have ended."""
        held = {(s.slot, s.key) for s in hook.publisher.slots}
        busy = self.busy()
        given = [
            SlotRelease(r.slot, r.key)
            for r in goal.release
            if r.rank == hook.who and (r.slot, r.key) in held and r.key not in busy
        ]
        moved = [s for rank, s in self._attached.moved() if rank == hook.who and not self._slot_is_read(rank, s)]
        return tuple(dict.fromkeys((*given, *moved)))

    def _slot_is_read(self, rank: TrainerRank, slot: SlotRelease) -> bool:
        served = self.readers.get(slot.key)
        return self._attached.slot_is_read(rank, slot) or (served is not None and (rank, slot.slot) in served.slots)

    def end_serving(self) -> list[EndServing]:
        """Return what other nodes read from slots whose bytes have moved: they shall ask again."""
        return [
            EndServing(slot.key, rank, slot.slot)
            for rank, slot in self._attached.moved()
            if (served := self.readers.get(slot.key)) is not None and (rank, slot.slot) in served.slots
        ]

    def busy(self) -> set[VersionKey]:
        """Return the versions that somebody may still read from this node's memory."""
        return {k for k, served in self.readers.items() if served.readers > 0} | self._attached.reading()

    # ------------------------------------------------------------ receivers

    def receiver(self, hook: Hook, goal: Goal, lost: NoLeaderNow | None) -> ReceiverGoal | None:
        """Return what a rollout rank must do; None while it is not yet this node's to say."""
        who = hook.who
        assert isinstance(who, RolloutRank), "receivers are rollout ranks"
        joined = goal.epoch is not None and any(
            (RolloutRank(p.engine, p.k), p.boot) == (who, hook.boot) for p in goal.epoch.receivers
        )
        planned = joined and goal.epoch is not None and goal.epoch.epoch == self._plans.epoch
        digest, nbytes = self._plans.rank_plan(who) if planned else ("", 0)
        order = next((o for o in goal.engines if o.engine == who.engine), None)
        if order is not None and not joined and (order.order not in ENDING or _untouched(hook)):
            order = None
        if order is not None and order.order in ("commit", "resume") and self._unrecorded(order.key):
            return None
        named = who.engine in goal.committed.engines and not self._unrecorded(goal.committed.key)
        base = ReceiverGoal(
            NO_TERM if lost else self._following.term,
            goal.epoch.epoch if goal.epoch is not None and planned else NO_EPOCH,
            digest,
            nbytes,
            committed=goal.committed.key if named else NO_KEY,
            stage=goal.stage,
            waiting_for=goal.waiting_for,
            error=self._undecided(hook, lost) if lost else order.error if order else None,
        )
        return base if order is None else self._with_order(base, hook, order, goal.epoch)

    def _with_order(
        self, base: ReceiverGoal, hook: Hook, order: EngineOrder, spec: EpochSpec | None
    ) -> ReceiverGoal | None:
        kind: Order = order.order
        sources: tuple[SourceSlot, ...] = ()
        if kind == "write":
            found = self.sources(spec, order.key) if spec is not None else None
            if found is None or hook.receiver.plan_digest != base.plan_digest:
                kind = "pause"  # it stands paused until the bytes are here and its plan is built
            else:
                sources = found
        return msgspec.structs.replace(base, order=kind, op=order.op, key=order.key, sources=sources)

    def sources(self, spec: EpochSpec, key: VersionKey) -> tuple[SourceSlot, ...] | None:
        """Return every local source of a version; None unless all of them are whole."""
        half = self._landing.holds(spec.epoch, key)
        if half is None:
            return None
        whole = self._landing.halves[half]
        assert whole is not None, "holds names a half that is whole"
        found = [SourceSlot(LANDING, half, whole.generation)]
        for place in spec.trainers:
            if place.node == self._node:
                slot = self._attached.slot_with(TrainerRank(place.rank), place.boot, key)
                if slot is None:
                    return None
                found.append(SourceSlot(place.rank, slot.slot, slot.generation))
        return tuple(found)

    def _unrecorded(self, key: VersionKey) -> bool:
        """Whether a commit is not yet in this node's journal; nobody here is told of it before."""
        return key.version > self._records.committed.version

    # ------------------------------------------------------------ nobody leads

    def _no_leader(self, lost: NoLeaderNow) -> WireError:
        following = self._following
        return NoLeader(self._run, self._node, following.leader, lost.waited_s, lost.limit_s, "restart_s").to_wire()

    def _undecided(self, hook: Hook, lost: NoLeaderNow) -> WireError | None:
        """A rank that stands paused or applied learns that nobody decides."""
        r = hook.receiver
        if r.state not in ("pausing", "paused", "applying", "applied"):
            return None
        leader = self._following.leader
        return Undecided(rank_name(hook.who), r.state, r.key.version, leader, lost.waited_s, lost.limit_s).to_wire()
