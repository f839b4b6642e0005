"""The hooks of one node: who is attached, what each said last, what each was told last."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from weightd.core.session.turns import BASES
from weightd.core.session.view import Who, rank_name
from weightd.core.units import NO_KEY, NO_OP, EngineId, Op, RolloutRank, SlotName, VersionKey
from weightd.core.wire.messages import (
    LostRank,
    PublisherGoal,
    PublisherReport,
    ReceiverEntry,
    ReceiverGoal,
    ReceiverReport,
    SlotRelease,
    SlotState,
    TrainerEntry,
    TrainerHello,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightd.core.errors import WireError
    from weightd.core.session.events import HookGreeted, HookLost, HookReported, SessionId
    from weightd.core.units import Boot, TrainerRank
    from weightd.core.wire.messages import EngineHello

STILL_READING = frozenset({"pausing", "paused", "refused", "applying"})
"""States in which a rank that was told to write may not have read its last byte yet."""

LOST_KEPT = 4
"""Incarnations of a role whose end is told: the leader may know an earlier one than the last that ended."""

UNREAD = ReceiverReport("unready")
SILENT = PublisherReport(())


@dataclass(slots=True)
class Hook:
    """One attached process, in one role.

    Attributes:
        session: Its session with this daemon.
        hello: What it said when it came.
        boot: Its incarnation.
        since: When it came.
        ready: Its layout and its descriptors are there.
        report: Its last state.
        seq: Sequence number of that.
        refused: Why the run refuses it, if so.
        held_back: It came again after a refusal that the leader has not yet dropped.
        told: The last goal it was told, without what changes by itself.
        told_at: When.
        reads: Bytes that it may still be reading; they change for nobody.
        reads_op: Op of the order to write them.
        reads_from: Every slot that it was told to read them from, by trainer rank.
        freed: Slots that it was told to be free, by name.
    """

    session: SessionId
    hello: TrainerHello | EngineHello
    boot: Boot
    since: float
    ready: bool = False
    report: PublisherReport | ReceiverReport | None = None
    seq: int = 0
    refused: WireError | None = None
    held_back: bool = False
    told: PublisherGoal | ReceiverGoal | None = None
    told_at: float = 0.0
    reads: VersionKey = NO_KEY
    reads_op: Op = NO_OP
    reads_from: frozenset[tuple[int, int]] = frozenset()
    freed: frozenset[SlotRelease] = field(default_factory=frozenset)

    @property
    def who(self) -> Who:
        """Its role."""
        hello = self.hello
        return hello.rank if isinstance(hello, TrainerHello) else RolloutRank(EngineId(hello.engine), hello.k)

    @property
    def receiver(self) -> ReceiverReport:
        """Its last state, of a rollout rank."""
        return self.report if isinstance(self.report, ReceiverReport) else UNREAD

    @property
    def publisher(self) -> PublisherReport:
        """Its last state, of a trainer rank."""
        return self.report if isinstance(self.report, PublisherReport) else SILENT

    @property
    def takes_part(self) -> bool:
        """Whether the leader is told of it."""
        return self.refused is None and not self.held_back

    def hear(self, report: PublisherReport | ReceiverReport, seq: int) -> None:
        """Keep its state; note when it has surely read its last byte."""
        if 0 < seq <= self.seq:
            return
        self.report, self.seq = report, seq
        if isinstance(report, ReceiverReport):
            if self.has_read(report):
                self.reads, self.reads_from = NO_KEY, frozenset()
        else:
            shown = {(s.slot, s.key) for s in report.slots}
            self.freed = frozenset(f for f in self.freed if (f.slot, f.key) in shown)

    def may_read(self, key: VersionKey, rank: int, slot: int) -> bool:
        """Return whether a rollout rank may be reading ``key`` from this slot of a trainer rank."""
        if self.reads == key:
            return (rank, slot) in self.reads_from
        # Of a daemon that was started anew, which told it nothing: it may read any slot.
        return self.receiver.state == "applying" and self.receiver.key == key

    def told_to_read(self, goal: ReceiverGoal) -> None:
        """Note the sources of an order to write.

        Told other slots for the same bytes, a rank may have begun with those before: it may read all of them.
        """
        sources = frozenset((s.rank, s.slot) for s in goal.sources)
        self.reads_from = self.reads_from | sources if self.reads == goal.key else sources
        self.reads, self.reads_op = goal.key, goal.op

    def has_read(self, report: ReceiverReport) -> bool:
        """Return whether a state comes after the last byte of what it was told to write."""
        if report.op == self.reads_op:
            return report.state not in STILL_READING
        return report.op > self.reads_op and report.state != "pausing"


class Attached:
    """The hooks of a node, and what it keeps of those that ended."""

    def __init__(self) -> None:
        self.hooks: dict[SessionId, Hook] = {}
        self._lost: dict[Who, deque[LostRank]] = {}
        self._ended: dict[tuple[TrainerRank, Boot], TrainerEntry] = {}

    # ------------------------------------------------------------ events

    def greet(self, event: HookGreeted, now: float, *, refused: bool) -> None:
        """Take a hook in; one of the same process is the same hook with another session."""
        hook = Hook(event.session, event.hello, event.boot, now, held_back=refused)
        before = next((h for h in self.hooks.values() if (h.who, h.boot) == (hook.who, hook.boot)), None)
        if before is not None:
            del self.hooks[before.session]
            if before.refused is None and before.hello.layout_digest == hook.hello.layout_digest:
                hook.ready, hook.report = before.ready, before.report
                hook.reads, hook.reads_op, hook.freed = before.reads, before.reads_op, before.freed
                hook.reads_from = before.reads_from
        self.hooks[event.session] = hook

    def ready(self, session: SessionId) -> None:
        """Its layout and its descriptors are there."""
        if session in self.hooks:
            self.hooks[session].ready = True

    def hear(self, event: HookReported) -> None:
        """Keep a hook's state."""
        if event.session in self.hooks:
            self.hooks[event.session].hear(event.report, event.seq)

    def lose(self, event: HookLost) -> None:
        """A process ended; slots of a trainer rank outlive it."""
        hook = self.hooks.pop(event.session, None)
        if hook is None or not hook.takes_part:
            return
        why = "it left in order" if event.orderly else event.why
        lost = self._lost.setdefault(hook.who, deque(maxlen=LOST_KEPT))
        lost.append(LostRank(rank_name(hook.who), hook.boot, why))
        if isinstance(hook.hello, TrainerHello):
            entry = trainer_entry(hook, hook.hello, alive=False)
            kept = tuple(s for s in entry.slots if SlotRelease(s.slot, s.key) not in hook.freed)
            self._keep(entry, kept)

    # ------------------------------------------------------------ slots

    def slot_with(self, rank: TrainerRank, boot: Boot, key: VersionKey) -> SlotState | None:
        """Return the slot of a trainer rank's incarnation that holds ``key`` and may be read.

        Of two that hold it, the later one: the bytes have moved there.
        """
        ended = self._ended.get((rank, boot))
        if ended is not None:
            return _last_with(key, ended.slots)
        for hook in self.hooks.values():
            if hook.who == rank and hook.boot == boot and isinstance(hook.hello, TrainerHello):
                free = {(f.slot, f.key) for f in hook.freed}
                return _last_with(key, [s for s in hook.publisher.slots if (s.slot, s.key) not in free])
        return None

    def moved(self) -> list[tuple[TrainerRank, SlotRelease]]:
        """Return the slots of live ranks here whose bytes are in a later slot as well."""
        return [
            (hook.hello.rank, SlotRelease(s.slot, s.key))
            for hook in self.hooks.values()
            if isinstance(hook.hello, TrainerHello) and hook.hello.live
            for s in hook.publisher.slots
            if s.key != NO_KEY and _last_with(s.key, hook.publisher.slots) is not s
        ]

    def free_ended(self, rank: TrainerRank, free: SlotRelease) -> None:
        """Let go of a slot whose process ended."""
        for (r, _), entry in list(self._ended.items()):
            if r == rank:
                self._keep(entry, tuple(s for s in entry.slots if (s.slot, s.key) != (free.slot, free.key)))

    def forget_ops(self) -> None:
        """A new term counts its ops anew; what a rank may be reading it may still be reading."""
        for hook in self.hooks.values():
            hook.reads_op = NO_OP

    def reading(self) -> set[VersionKey]:
        """Return the bytes that local rollout ranks may be reading, by what they were told and by what they say."""
        said = {h.receiver.key for h in self.hooks.values() if h.receiver.state == "applying"}
        return said | {h.reads for h in self.hooks.values() if h.reads != NO_KEY}

    def slot_is_read(self, rank: TrainerRank, slot: SlotRelease) -> bool:
        """Return whether a local rollout rank may be reading this very slot."""
        return any(h.may_read(slot.key, rank, slot.slot) for h in self.hooks.values())

    def _keep(self, entry: TrainerEntry, slots: tuple[SlotState, ...]) -> None:
        who = (entry.rank, entry.boot)
        if slots:
            self._ended[who] = msgspec.structs.replace(entry, slots=slots, alive=False)
        else:
            self._ended.pop(who, None)

    # ------------------------------------------------------------ for the report

    def trainer_entries(self) -> tuple[TrainerEntry, ...]:
        """Return every trainer rank, those that ended with bytes in hand last."""
        live = [trainer_entry(h, h.hello) for h in self._in_order() if isinstance(h.hello, TrainerHello)]
        return (*live, *(self._ended[k] for k in sorted(self._ended)))

    def receiver_entries(self) -> tuple[ReceiverEntry, ...]:
        """Return every rollout rank."""
        return tuple(_receiver_entry(h, h.hello) for h in self._in_order() if not isinstance(h.hello, TrainerHello))

    def lost_ranks(self) -> tuple[LostRank, ...]:
        """Return the ranks that were here and are gone."""
        return tuple(rank for lost in self._lost.values() for rank in lost)

    def _in_order(self) -> list[Hook]:
        return sorted((h for h in self.hooks.values() if h.takes_part), key=lambda h: (rank_name(h.who), h.session))


def trainer_entry(hook: Hook, hello: TrainerHello, *, alive: bool = True) -> TrainerEntry:
    """Return a trainer rank as its node sees it; only slots that hold something."""
    return TrainerEntry(
        hello.rank,
        hello.world,
        SlotName(hello.slot),
        hello.pid,
        hook.boot,
        hello.layout_digest,
        hello.layout_nbytes,
        tuple(s for s in hook.publisher.slots if s.key != NO_KEY),
        hook.ready,
        hello.roster,
        hook.publisher.closing,
        alive,
        hello.live,
    )


def _last_with(key: VersionKey, slots: Sequence[SlotState]) -> SlotState | None:
    return next((s for s in reversed(slots) if s.key == key), None)


def _receiver_entry(hook: Hook, hello: EngineHello) -> ReceiverEntry:
    return ReceiverEntry(
        EngineId(hello.engine),
        hello.k,
        hello.size,
        SlotName(hello.slot),
        hello.pid,
        hook.boot,
        hello.layout_digest,
        hello.layout_nbytes,
        hook.receiver,
        hook.ready and hook.report is not None,
    )


def acknowledged(goal: ReceiverGoal, report: ReceiverReport) -> bool:
    """Return whether a rollout rank's state answers its goal, so that it need not be repeated."""
    about = report.op == goal.op and report.key == goal.key
    match goal.order:
        case "idle":
            return True
        case "pause":
            return about and report.state in ("pausing", "paused", "refused", "applying", "applied")
        case "write":
            return about and report.state in ("applying", "applied", "torn")
        case "commit":
            return report.committed == goal.key
        case "resume":
            return report.state == "serving" and report.base == goal.key
        case "abort" | "left":
            return report.op >= goal.op and report.state in BASES and not report.leave
        case "fence":
            return report.op == goal.op and report.state == "fenced"
