"""What happens to a session machine, and what it wants done.

Events are in the past tense, effects in the imperative.  A machine performs no
IO, reads no clock and spawns nothing: ``handle(event, now)`` and
``on_deadline(now)`` return the effects to carry out, in order, and
``next_deadline()`` says when to wake it.  Every effect that can fail names the
event that reports its outcome.
"""

from __future__ import annotations

from dataclasses import dataclass

from weightd.core.errors import WireError
from weightd.core.units import Boot, Epoch, NodeId, Op, Term, TrainerRank, VersionKey
from weightd.core.wire.messages import (
    EngineHello,
    EpochSpec,
    Goal,
    NodePlanDigest,
    NodeReport,
    PublisherGoal,
    PublisherReport,
    ReceiverGoal,
    ReceiverReport,
    Recovered,
    Refusal,
    TrainerHello,
)

SessionId = int
"""Names one attached hook on one node, drawn by the daemon at its hello."""


# ------------------------------------------------------------ events of a node's machine


@dataclass(frozen=True, slots=True)
class HookGreeted:
    """A hook's hello passed the checks of its message; ``boot`` is its incarnation."""

    session: SessionId
    hello: TrainerHello | EngineHello
    boot: Boot


@dataclass(frozen=True, slots=True)
class HookReady:
    """The hook's layout is stored and checked, and all its descriptors were accepted."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class HookReported:
    """A hook repeated its state.  ``seq`` is its envelope's; an older one than the last is dropped, 0 is not known."""

    session: SessionId
    report: PublisherReport | ReceiverReport
    seq: int = 0


@dataclass(frozen=True, slots=True)
class HookLost:
    """A hook's process ended, or its socket closed, or it said goodbye (``orderly``)."""

    session: SessionId
    why: str
    orderly: bool = False


@dataclass(frozen=True, slots=True)
class GoalArrived:
    """The leader of ``term`` repeated its goal; ``seq`` is its envelope's."""

    goal: Goal
    term: Term
    boot: Boot
    seq: int


@dataclass(frozen=True, slots=True)
class EpochPlanned:
    """Outcome of ``PlanEpoch``: this node's plan, or why there is none.

    Attributes:
        epoch: Which.
        digest: Of the node's plan.
        landing_nbytes: Of one half.
        fetch_nbytes: Per version.
        rank_plans: (engine, k, digest, encoded size, planned bytes) of each local rollout rank.
        error: Why not.
    """

    epoch: Epoch
    digest: str
    landing_nbytes: int
    fetch_nbytes: int
    rank_plans: tuple[tuple[str, int, str, int, int], ...]
    error: WireError | None = None


@dataclass(frozen=True, slots=True)
class FetchAdvanced:
    """More planned bytes of ``key`` are in the landing and checked."""

    key: VersionKey
    op: Op
    received_nbytes: int


@dataclass(frozen=True, slots=True)
class FetchEnded:
    """Outcome of ``StartFetch``: all bytes are there and every digest was right, or ``error``.

    ``wire_nbytes`` is what the bulk streams carried for it, retries included.
    """

    key: VersionKey
    op: Op
    generation: int
    error: WireError | None = None
    wire_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class ReadersChanged:
    """How many of this node's own readers (served fetches) still read ``key``, and from which (rank, slot)."""

    key: VersionKey
    readers: int
    slots: frozenset[tuple[TrainerRank, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class NodeJournaled:
    """Outcome of ``JournalNode``."""

    token: int
    error: WireError | None = None


NodeEvent = (
    HookGreeted
    | HookReady
    | HookReported
    | HookLost
    | GoalArrived
    | EpochPlanned
    | FetchAdvanced
    | FetchEnded
    | ReadersChanged
    | NodeJournaled
)


# ------------------------------------------------------------ effects of a node's machine


@dataclass(frozen=True, slots=True)
class TellHook:
    """Send the hook its goal, or its refusal."""

    session: SessionId
    body: PublisherGoal | ReceiverGoal | Refusal


@dataclass(frozen=True, slots=True)
class TellLeader:
    """Send the report to the node that leads."""

    leader: NodeId
    report: NodeReport


@dataclass(frozen=True, slots=True)
class AnswerSuperseded:
    """Tell the sender of a goal of a lower term who leads now."""

    node: NodeId
    term: Term
    leader: NodeId


@dataclass(frozen=True, slots=True)
class PlanEpoch:
    """Get the layouts that are lacking, plan this node; ends with ``EpochPlanned``."""

    spec: EpochSpec


@dataclass(frozen=True, slots=True)
class AdoptEpoch:
    """Use the plan of ``epoch``: make the landing, offer its descriptors; drop older plans not in use."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class StartFetch:
    """Fetch the planned bytes of ``key`` into landing half ``half``; ends with ``FetchEnded``."""

    epoch: Epoch
    key: VersionKey
    op: Op
    half: int


@dataclass(frozen=True, slots=True)
class StopFetch:
    """Stop the fetch of ``key``; a ``FetchEnded`` for it may still come and is ignored."""

    key: VersionKey
    op: Op


@dataclass(frozen=True, slots=True)
class JournalNode:
    """Append a record (a plain dict) to the node's journal and sync it; ends with ``NodeJournaled``."""

    token: int
    record: dict[str, object]


@dataclass(frozen=True, slots=True)
class EndServing:
    """Void the tickets that read ``key`` from this slot of a trainer rank: the bytes have moved to another slot.

    Who fetches asks again, and is given that one.  Ends with ``ReadersChanged``.
    """

    key: VersionKey
    rank: TrainerRank
    slot: int


NodeEffect = (
    TellHook
    | TellLeader
    | AnswerSuperseded
    | PlanEpoch
    | AdoptEpoch
    | StartFetch
    | StopFetch
    | EndServing
    | JournalNode
)


# ------------------------------------------------------------ events of the leader's machine


@dataclass(frozen=True, slots=True)
class NodeReported:
    """A node (the leader's own included) repeated its state.

    ``seq`` is the envelope's: within a boot an older one than the last is dropped; 0 is not known and always taken.
    """

    report: NodeReport
    boot: Boot
    seq: int = 0


@dataclass(frozen=True, slots=True)
class PeerRecovered:
    """A peer answered ``Recover``."""

    answer: Recovered
    boot: Boot


@dataclass(frozen=True, slots=True)
class HigherTermSeen:
    """A peer says that a higher term is led by another node: this machine stops."""

    term: Term
    leader: NodeId


@dataclass(frozen=True, slots=True)
class EpochProved:
    """Outcome of ``ProveEpoch``: coverage is proved, with every node's plan digest; or the full report."""

    epoch: Epoch
    plans: tuple[NodePlanDigest, ...]
    rank_nbytes: tuple[tuple[str, int, int], ...]
    error: WireError | None = None


@dataclass(frozen=True, slots=True)
class LeaderJournaled:
    """Outcome of ``JournalLeader``."""

    token: int
    error: WireError | None = None


LeaderEvent = NodeReported | PeerRecovered | HigherTermSeen | EpochProved | LeaderJournaled


# ------------------------------------------------------------ effects of the leader's machine


@dataclass(frozen=True, slots=True)
class TellNode:
    """Send a node the goal."""

    node: NodeId
    goal: Goal


@dataclass(frozen=True, slots=True)
class AskPeer:
    """Send ``Recover`` to a peer."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class ProveEpoch:
    """Get the layouts that are lacking from the nodes that have them, prove coverage; ends with ``EpochProved``."""

    spec: EpochSpec


@dataclass(frozen=True, slots=True)
class JournalLeader:
    """Append a record to the leader's journal and sync it; ends with ``LeaderJournaled``."""

    token: int
    record: dict[str, object]


@dataclass(frozen=True, slots=True)
class StopLeading:
    """This machine has ended; another term leads."""

    why: str


@dataclass(frozen=True, slots=True)
class Note:
    """One structured line for the log and the version table: a state change with its numbers."""

    what: str
    facts: dict[str, object]


LeaderEffect = TellNode | AskPeer | ProveEpoch | JournalLeader | StopLeading | Note
