"""What the leader sees: the last report of every node, and which ranks are there.

A rank is *here*, *away* or *gone*.  Away is what may come back by itself: its
node is silent, or restarted and not yet greeted again by the hook.  Gone is a
process that was seen to end (``died``), or one that stayed away for
``restart_s``, whose state nobody knows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from weightd.core.roster.topology import Registration
from weightd.core.units import Boot, NodeId, RolloutRank, Term, TrainerRank, VersionKey
from weightd.core.wire.messages import NodeReport, ReceiverEntry, SlotState, TrainerEntry

if TYPE_CHECKING:
    from weightd.core.session.deadlines import Deadlines

Who = TrainerRank | RolloutRank


def rank_name(who: Who) -> str:
    """Return a rank as messages and texts call it.

    >>> rank_name(TrainerRank(3))
    'trainer 3'
    """
    return str(who) if isinstance(who, RolloutRank) else f"trainer {who}"


def role_of(entry: TrainerEntry | ReceiverEntry) -> Who:
    """Return the rank of an entry."""
    return entry.rank if isinstance(entry, TrainerEntry) else RolloutRank(entry.engine, entry.k)


def registration_of(node: NodeId, entry: TrainerEntry | ReceiverEntry) -> Registration:
    """Return an entry as the registration that the roster's rules judge."""
    size = entry.world if isinstance(entry, TrainerEntry) else entry.size
    return Registration(role_of(entry), size, node, entry.slot, entry.pid, entry.boot)


@dataclass(frozen=True, slots=True)
class Presence:
    """Whether a rank is there, since when it is not, and why."""

    kind: Literal["here", "away", "gone"]
    since: float = 0.0
    why: str = ""
    died: bool = False


HERE = Presence("here")


@dataclass(slots=True)
class _Heard:
    """The newest report of a node, and where to find what in it."""

    boot: Boot
    report: NodeReport
    at: float
    seq: int
    earlier_boots: set[Boot] = field(default_factory=set)
    receivers: dict[tuple[Who, Boot], ReceiverEntry] = field(default_factory=dict)
    trainers: dict[tuple[Who, Boot], TrainerEntry] = field(default_factory=dict)
    roles: set[Who] = field(default_factory=set)
    lost: dict[tuple[str, Boot], str] = field(default_factory=dict)

    def read(self) -> None:
        """Index the report."""
        self.receivers = {(RolloutRank(e.engine, e.k), e.boot): e for e in self.report.receivers}
        self.trainers = {(e.rank, e.boot): e for e in self.report.trainers}
        self.roles = {who for who, _ in (*self.receivers, *self.trainers)}
        self.lost = {(x.who, x.boot): x.why for x in self.report.lost}

    def entry(self, who: Who, boot: Boot) -> TrainerEntry | ReceiverEntry | None:
        """Return the incarnation of a rank."""
        return self.receivers.get((who, boot)) if isinstance(who, RolloutRank) else self.trainers.get((who, boot))


class View:
    """The newest report of every node.  The only thing that the leader decides by."""

    def __init__(self, deadlines: Deadlines, now: float) -> None:
        self._limits = deadlines
        self._began_at = now
        self._heard: dict[NodeId, _Heard] = {}
        self._missed_since: dict[tuple[Who, Boot], float] = {}
        self.late_reports = 0

    # ------------------------------------------------------------ taking

    def take(self, report: NodeReport, boot: Boot, seq: int, now: float) -> bool:
        """Keep a report; return False for one that is older than what is known."""
        heard = self._heard.get(report.node)
        if heard is None:
            self._heard[report.node] = _Heard(boot, report, now, seq)
            self._heard[report.node].read()
            return True
        if boot in heard.earlier_boots or (boot == heard.boot and 0 < seq <= heard.seq):
            self.late_reports += 1
            return False
        if boot != heard.boot:
            heard.earlier_boots.add(heard.boot)
        heard.boot, heard.report, heard.at, heard.seq = boot, report, now, seq
        heard.read()
        return True

    def note_missing(self, expected: list[Registration], now: float) -> None:
        """Start or end the clocks of ranks that a heard node does not show."""
        missed: dict[tuple[Who, Boot], float] = {}
        for r in expected:
            heard = self._heard.get(r.node)
            if heard is not None and heard.entry(r.who, r.boot) is None:
                missed[r.who, r.boot] = self._missed_since.get((r.who, r.boot), now)
        self._missed_since = missed

    # ------------------------------------------------------------ asking

    def reports(self) -> dict[NodeId, NodeReport]:
        """Return the newest report of every node that was heard."""
        return {node: heard.report for node, heard in self._heard.items()}

    def report(self, node: NodeId) -> NodeReport | None:
        """Return the newest report of a node."""
        heard = self._heard.get(node)
        return None if heard is None else heard.report

    def node(self, node: NodeId, now: float) -> Presence:
        """Return whether a node is heard."""
        heard = self._heard.get(node)
        last = self._began_at if heard is None else heard.at
        silent_at = last + self._limits.heartbeat_timeout_s
        if now <= silent_at:
            return HERE if heard else Presence("away", last, f"node {node} was not heard yet")
        why = f"node {node} is silent since {now - last:.1f} s"
        return Presence("gone" if now >= silent_at + self._limits.restart_s else "away", silent_at, why)

    def rank(self, who: Who, node: NodeId, boot: Boot, now: float) -> Presence:
        """Return whether the incarnation ``boot`` of a rank is there."""
        heard = self._heard.get(node)
        if heard is not None:
            ended = self._ended(heard, who, boot)
            if ended is not None:
                return ended
        daemon = self.node(node, now)
        if daemon.kind != "here" or heard is None:
            return daemon
        if heard.entry(who, boot) is not None:
            return HERE
        since = self._missed_since.get((who, boot), now)
        why = f"its daemon on node {node} is up and it has not come back"
        return Presence("gone" if now >= since + self._limits.restart_s else "away", since, why)

    def receiver(self, who: RolloutRank, node: NodeId, boot: Boot) -> ReceiverEntry | None:
        """Return the last known state of a rollout rank's incarnation."""
        heard = self._heard.get(node)
        return None if heard is None else heard.receivers.get((who, boot))

    def trainer(self, rank: TrainerRank, node: NodeId, boot: Boot) -> TrainerEntry | None:
        """Return the last known state of a trainer rank's incarnation, ended ones with bytes included."""
        heard = self._heard.get(node)
        return None if heard is None else heard.trainers.get((rank, boot))

    def slot_with(self, rank: TrainerRank, node: NodeId, boot: Boot, key: VersionKey) -> SlotState | None:
        """Return the slot of a trainer rank that holds ``key``."""
        entry = self.trainer(rank, node, boot)
        return None if entry is None else next((s for s in entry.slots if s.key == key), None)

    def entries(self) -> list[tuple[NodeId, TrainerEntry | ReceiverEntry]]:
        """Return every attached rank of every node, trainers first, in a fixed order."""
        nodes = sorted(self._heard)
        trainers = [(n, e) for n in nodes for e in self._heard[n].report.trainers if e.alive]
        receivers = [(n, e) for n in nodes for e in self._heard[n].report.receivers]
        return [*trainers, *receivers]

    # ------------------------------------------------------------ inside

    @staticmethod
    def _ended(heard: _Heard, who: Who, boot: Boot) -> Presence | None:
        """Return how a process was seen to end, if it was."""
        why = heard.lost.get((rank_name(who), boot)) if heard.lost else None
        if why is not None:
            return Presence("gone", 0.0, why, died=True)
        entry = heard.entry(who, boot)
        if isinstance(entry, TrainerEntry) and not entry.alive:
            return Presence("gone", 0.0, "its process ended; its slots are held", died=True)
        if entry is None and who in heard.roles:
            return Presence("gone", 0.0, "its process was replaced by another", died=True)
        return None


def follows(report: NodeReport, term: Term) -> bool:
    """Return whether a node's report was made under ``term``."""
    return report.floor[0] == term
