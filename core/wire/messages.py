"""Every message of weightd, in one place.

All traffic is **level-triggered**.  A hook and a node repeat their *whole* state
(``PublisherReport``, ``ReceiverReport``, ``NodeReport``); a node and the leader
repeat their whole *goal* (``PublisherGoal``, ``ReceiverGoal``, ``Goal``): on every
change, on reconnect, and every ``heartbeat_s``.  A lost, doubled or late
message therefore changes nothing; within one sender's boot an older ``seq`` is dropped.

::

    hook ──Hello, report──► its node's daemon ──NodeReport──► leader (a daemon, too)
    hook ◄──Welcome, goal── its node's daemon ◄────Goal────── leader

Large things (layouts, rank plans) are *blobs*: named by digest, announced in
hellos, reports and goals, asked for with ``BlobWanted`` by whoever lacks them, and sent
in ``BlobChunk`` pieces.

Descriptors travel on the unix socket beside (``link.fds``), bulk bytes on raw
TCP (``daemon.bulk``).  Ranks, versions and the like are the types of
``core.units``; on the wire they are whole numbers and text.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from weightd.core.errors import WireError
from weightd.core.roster.topology import Roster
from weightd.core.units import (
    NO_EPOCH,
    NO_KEY,
    NO_OP,
    NO_TERM,
    NO_VERSION,
    Boot,
    EngineId,
    EngineRank,
    Epoch,
    NodeId,
    Op,
    RunName,
    SlotName,
    Term,
    TrainerRank,
    Version,
    VersionKey,
)

PROTOCOL = 1
"""Wire version; both sides must speak the same one."""

MAX_FRAME_BYTES = 8 << 20
"""Largest frame; ZeroMQ's MAXMSGSIZE is set to it, and it bounds every decoded list."""

CHUNK_BYTES = 2 << 20
"""Payload of one BlobChunk: a quarter of a frame, so that a chunk and its envelope always fit."""

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=255)]
Digest = Annotated[str, Meta(max_length=64)]


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """A message body; ``type`` holds the class name."""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message body."""


# ---------------------------------------------------------------- hook → daemon


class Region(Part, frozen=True):
    """One shared memory pool that a trainer rank will offer on the fd socket.

    Attributes:
        slot: Which of the rank's slots it belongs to, from 0.
        region: Its number within the slot.
        nbytes: Size of the whole memfd, header page included.
    """

    slot: Count
    region: Count
    nbytes: Count


class TrainerHello(Struct, frozen=True):
    """A trainer rank greets its node's daemon.

    ``roster`` comes from rank 0 alone.  ``live``: slot 0 is the memory of its parameters, so that no slot is kept
    readable longer than its version is in hand.
    """

    rank: TrainerRank
    world: Count
    pid: Count
    start_time: Count
    slot: Name
    layout_digest: Digest
    layout_nbytes: Count
    regions: tuple[Region, ...]
    roster: Roster | None = None
    live: bool = False


class EngineHello(Struct, frozen=True):
    """A rollout rank greets its node's daemon."""

    engine: Name
    k: EngineRank
    size: Count
    pid: Count
    start_time: Count
    slot: Name
    layout_digest: Digest
    layout_nbytes: Count


class SlotState(Part, frozen=True):
    """What one slot of a trainer rank holds: bytes named by ``key``, or nothing (``NO_KEY``).

    ``generation`` is the slot's counter in shared memory: odd while it is written.  A key that two slots of a
    live rank hold has *moved* to the later one: nobody begins to read the earlier one any more.
    """

    slot: Count
    key: VersionKey = NO_KEY
    generation: Count = 0
    layout_digest: Digest = ""
    label: str | None = None


class PublisherReport(Struct, frozen=True):
    """Whole state of a trainer rank.  A slot with a key is *published*: complete and readable."""

    slots: tuple[SlotState, ...]
    closing: bool = False


ReceiverState = Literal["unready", "serving", "pausing", "paused", "refused", "applying", "applied", "torn", "fenced"]
"""States of a rollout rank (specification of the session, section 3).

A *base* is ``unready``, ``serving`` or ``torn``.  ``refused``: a pause that failed, bytes intact.
``applied`` with ``committed == key`` holds the commit and waits for ``resume``.
"""


class ReceiverReport(Struct, frozen=True):
    """Whole state of a rollout rank.

    Attributes:
        state: As above; it changes *before* a callback runs.
        key: The version that a state from ``pausing`` to ``fenced`` is about; else ``NO_KEY``.
        base: Committed version whose bytes are whole in the parameters; ``NO_KEY`` if unready or torn.
        committed: Newest commit this rank knows of that names its engine.
        op: Newest op whose order this rank acted on.
        in_receive: Inside ``receive()``, that is at a safe point.
        leave: Asks to leave the barrier.
        applied_nbytes: Planned bytes copied so far for ``key``.
        plan_digest: Rank plan it has mapped and built; orders need it.
        error: Why it is ``refused`` or ``torn``.
        closing: It detaches in order.
    """

    state: ReceiverState
    key: VersionKey = NO_KEY
    base: VersionKey = NO_KEY
    committed: VersionKey = NO_KEY
    op: Op = NO_OP
    in_receive: bool = False
    leave: bool = False
    applied_nbytes: Count = 0
    plan_digest: Digest = ""
    error: WireError | None = None
    closing: bool = False


# ---------------------------------------------------------------- daemon → hook


class Welcome(Struct, frozen=True):
    """The daemon's answer to a hello, at once.  ``session`` binds the fd socket to this hook."""

    node: NodeId
    session: Count
    heartbeat_s: float
    heartbeat_timeout_s: float
    max_frame_bytes: Count


class Refusal(Struct, frozen=True):
    """The hook is not, or no longer, part of the run; it raises ``error``."""

    error: WireError


class VersionFailed(Part, frozen=True):
    """A version that failed, with its whole report.  The next attempt counts one more."""

    key: VersionKey
    error: WireError


class SlotRelease(Part, frozen=True):
    """The slot may be overwritten if it holds exactly ``key``."""

    slot: Count
    key: VersionKey


class PublisherGoal(Struct, frozen=True):
    """What a trainer rank may know and do.

    Attributes:
        term: Of the leader; ``NO_TERM`` while there is none.
        epoch: The adopted epoch; ``NO_EPOCH`` until the rank has joined.
        attempt_boot: ``Attempt.boot`` for every publish of this term.
        committed: Last committed version.
        next_version: Smallest number that a publish may use.
        failures: Failed versions above ``committed``.
        release: Slots that may be overwritten.
        stage: Stage of the version in hand, for progress and for errors of ``wait()``.
        key: The version in hand.
        waiting_for: What it waits for, in words with numbers.
        paused: Why the run refuses publishes, if it does.
    """

    term: Term = NO_TERM
    epoch: Epoch = NO_EPOCH
    attempt_boot: Boot = Boot(0)
    committed: VersionKey = NO_KEY
    next_version: Version = Version(1)
    failures: tuple[VersionFailed, ...] = ()
    release: tuple[SlotRelease, ...] = ()
    stage: str = ""
    key: VersionKey = NO_KEY
    waiting_for: str = ""
    paused: WireError | None = None


class SourceSlot(Part, frozen=True):
    """Which slot of a source a rank copies from.

    Attributes:
        rank: Trainer rank on this node; -1 for the node's landing.
        slot: Its slot, or the half of the landing.
        generation: Value that the pool's header must show before and after the copy.
    """

    rank: int
    slot: Count
    generation: Count


Order = Literal["idle", "pause", "write", "commit", "resume", "abort", "fence", "left"]
"""Orders to a rollout rank.

``pause``: at the next safe point run the pause callback, report ``paused`` (or ``refused``).
``write``: copy from ``sources``, report ``applied``; bytes already held are ``applied`` at once.
``commit``: note that ``key`` is committed for this engine and report it; do not run yet.
``resume``: every rank holds the commit: run the resume callback, serve ``key``.
``abort``: ``key`` failed: before the first write back to base; a written rank is torn.
``fence``: this engine is left out of ``key``: stop, report ``fenced``.
``left``: the leave was granted: back to base, resume callback; a later pause stands for the next call.
"""


class ReceiverGoal(Struct, frozen=True):
    """What a rollout rank must do.  ``plan_digest`` names the rank plan of the adopted epoch."""

    term: Term = NO_TERM
    epoch: Epoch = NO_EPOCH
    plan_digest: Digest = ""
    plan_nbytes: Count = 0
    order: Order = "idle"
    op: Op = NO_OP
    key: VersionKey = NO_KEY
    sources: tuple[SourceSlot, ...] = ()
    committed: VersionKey = NO_KEY
    stage: str = ""
    waiting_for: str = ""
    error: WireError | None = None


# ---------------------------------------------------------------- node → leader


class TrainerEntry(Part, frozen=True):
    """One trainer rank, as its node sees it, with its slots.

    ``alive`` is False for a process that has ended while its slots hold bytes that may be needed: the daemon
    holds their descriptors, and memory outlives the process that made it.  ``live`` is that of its hello.
    """

    rank: TrainerRank
    world: Count
    slot: SlotName
    pid: Count
    boot: Boot
    layout_digest: Digest
    layout_nbytes: Count
    slots: tuple[SlotState, ...]
    ready: bool
    roster: Roster | None = None
    closing: bool = False
    alive: bool = True
    live: bool = False


class ReceiverEntry(Part, frozen=True):
    """One attached rollout rank, as its node sees it, with its last report.  ``ready``: layout and fds are there."""

    engine: EngineId
    k: EngineRank
    size: Count
    slot: SlotName
    pid: Count
    boot: Boot
    layout_digest: Digest
    layout_nbytes: Count
    report: ReceiverReport
    ready: bool


class LostRank(Part, frozen=True):
    """A rank that was attached and is gone.  ``who``: ``trainer 3`` or ``E0[1]``; the last few of each role."""

    who: str
    boot: Boot
    why: str


class Planned(Part, frozen=True):
    """A node's plan of an epoch: its digest, or why there is none.  ``fetch_nbytes`` per version."""

    epoch: Epoch
    digest: Digest
    fetch_nbytes: Count = 0
    error: WireError | None = None


class FetchState(Part, frozen=True):
    """Progress of the fetch of ``key``.  Complete when ``received == planned`` and every bucket's digest was right.

    ``wire_nbytes`` is what the bulk streams carried for it, retries included.
    """

    key: VersionKey
    op: Op
    planned_nbytes: Count
    received_nbytes: Count
    complete: bool
    error: WireError | None = None
    wire_nbytes: Count = 0


class NodeReport(Struct, frozen=True):
    """Whole state of one node for one run.

    Attributes:
        node: Its id.
        floor: (term, op) of the newest goal it acted on; a goal below it is answered, not acted on.
        goal_seq: Newest ``Goal`` of this leader that it has read.
        trainers: Attached trainer ranks.
        receivers: Attached rollout ranks.
        lost: Ranks that were attached and are gone.
        planned: Its plans of the epochs it was told.
        fetch: Progress of the version in hand.
        held: Versions whose bytes are whole on this node (landing; trainers' slots are in ``trainers``).
        committed: Last commit it knows (journaled).
        stored: Digests of layouts it has and could send.
        highest: Highest version it was ever told of.
    """

    node: NodeId
    floor: tuple[Term, Op]
    goal_seq: Count
    trainers: tuple[TrainerEntry, ...]
    receivers: tuple[ReceiverEntry, ...]
    lost: tuple[LostRank, ...] = ()
    planned: tuple[Planned, ...] = ()
    fetch: FetchState | None = None
    held: tuple[VersionKey, ...] = ()
    committed: VersionKey = NO_KEY
    stored: tuple[Digest, ...] = ()
    highest: Version = NO_VERSION


# ---------------------------------------------------------------- leader → node


class TrainerPlace(Part, frozen=True):
    """A trainer rank of an epoch: where it is, which incarnation, which layout."""

    rank: TrainerRank
    node: NodeId
    slot: SlotName
    boot: Boot
    layout_digest: Digest


class ReceiverPlace(Part, frozen=True):
    """A rollout rank of an epoch."""

    engine: EngineId
    k: EngineRank
    node: NodeId
    slot: SlotName
    boot: Boot
    layout_digest: Digest


class NodePlanDigest(Part, frozen=True):
    """The digest that a node's own plan must have."""

    node: NodeId
    digest: Digest
    landing_nbytes: Count
    fetch_nbytes: Count


class EpochSpec(Part, frozen=True):
    """One roster with one set of layouts: all that a node needs to plan for itself.

    ``plans`` is empty until the leader has proved coverage.  ``down`` are the ranks of engines that are down,
    with the last layouts known of them: nothing is planned for them, but what they need counts as used.
    """

    epoch: Epoch
    roster: Roster
    trainers: tuple[TrainerPlace, ...]
    receivers: tuple[ReceiverPlace, ...]
    bucket_limit_bytes: Count
    plans: tuple[NodePlanDigest, ...] = ()
    down: tuple[ReceiverPlace, ...] = ()


Stage = Literal["attaching", "idle", "paused", "collecting", "fetching", "prepared", "applying", "committed", "failed"]


class EngineOrder(Part, frozen=True):
    """The order for all ranks of one engine."""

    engine: EngineId
    order: Order
    op: Op
    key: VersionKey
    error: WireError | None = None


class RankRelease(Part, frozen=True):
    """A trainer rank's slot that may be overwritten."""

    rank: TrainerRank
    slot: Count
    key: VersionKey


class RanksRefused(Part, frozen=True):
    """Ranks that the run refuses with one report, each as (who as in LostRank, boot).

    One report for all: a refused run of hundreds of ranks must still fit a frame.
    """

    ranks: tuple[tuple[str, Boot], ...]
    error: WireError


class CommitNote(Part, frozen=True):
    """The last decision for good: ``key`` is committed for ``engines``."""

    key: VersionKey
    engines: tuple[EngineId, ...]


class Goal(Struct, frozen=True):
    """Whole goal of the leader for one run, the same for every node.

    Attributes:
        leader: Node that leads.
        op: Op of the version in hand.
        stage: Stage of the version in hand.
        key: The version in hand; ``NO_KEY`` in attaching, idle and paused.
        epoch: Adopted epoch; None before the first.
        next_epoch: Epoch that nodes are asked to plan; None if there is none.
        committed: Last commit.
        failures: Failed versions above the last commit.
        engines: Orders.
        release: Slots that may be overwritten.
        retained: Versions whose bytes nodes must keep.
        attempt_boot: Boot of trainer rank 0 in this term.
        next_version: Smallest number a publish may use.
        refused: Ranks that must be told so.
        waiting_for: What the stage waits for, with numbers, for status and errors.
        paused: Why publishes are refused, if so.
    """

    leader: NodeId
    op: Op
    stage: Stage
    key: VersionKey
    epoch: EpochSpec | None
    next_epoch: EpochSpec | None
    committed: CommitNote
    failures: tuple[VersionFailed, ...]
    engines: tuple[EngineOrder, ...]
    release: tuple[RankRelease, ...]
    retained: tuple[VersionKey, ...]
    attempt_boot: Boot
    next_version: Version
    refused: tuple[RanksRefused, ...] = ()
    waiting_for: str = ""
    paused: WireError | None = None


class Superseded(Struct, frozen=True):
    """Answer to a goal of a lower term: ``term`` is led by ``leader``; the older leader stops."""

    term: Term
    leader: NodeId


class Recover(Struct, frozen=True):
    """A daemon that is about to lead asks what a peer knows of the run."""


class Recovered(Struct, frozen=True):
    """Answer: highest term seen, last commit known, and the newest op's version and stage."""

    node: NodeId
    term: Term
    committed: VersionKey
    highest: Version = NO_VERSION


# ---------------------------------------------------------------- any direction


class BlobWanted(Struct, frozen=True):
    """Send me the blob of this digest, from chunk ``first`` on."""

    digest: Digest
    first: Count = 0


class BlobChunk(Struct, frozen=True):
    """One piece of a blob; ``count`` pieces in all, ``nbytes`` in all."""

    digest: Digest
    index: Count
    count: Count
    nbytes: Count
    data: bytes


class TicketWanted(Struct, frozen=True):
    """A node asks another for leave to read ``key`` of ``epoch`` from it."""

    epoch: Epoch
    key: VersionKey
    op: Op


class Ticket(Struct, frozen=True):
    """Leave to read: a one-time secret for the bulk streams, or why not.  ``token`` is 32 bytes."""

    key: VersionKey
    op: Op
    ticket: Count = 0
    token: bytes = b""
    error: WireError | None = None


class Bye(Struct, frozen=True):
    """A hook or a daemon leaves in order."""

    why: str = ""


class StatusWanted(Struct, frozen=True):
    """The command line asks a daemon for its status document."""


class Status(Struct, frozen=True):
    """The status document as JSON text."""

    document: bytes


Body = (
    TrainerHello
    | EngineHello
    | PublisherReport
    | ReceiverReport
    | Welcome
    | Refusal
    | PublisherGoal
    | ReceiverGoal
    | NodeReport
    | Goal
    | Superseded
    | Recover
    | Recovered
    | BlobWanted
    | BlobChunk
    | TicketWanted
    | Ticket
    | Bye
    | StatusWanted
    | Status
)


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every message carries around its body.

    Attributes:
        protocol: ``PROTOCOL`` of the sender.
        run: The run, or ``""`` for messages about the daemon itself (status).
        term: Newest term the sender knows.
        boot: The sender's incarnation.
        seq: Counts the sender's messages to this peer; an older one than the last is dropped.
        trace: 16 bytes that follow one version through all processes.
        sender: ``trainer 3``, ``E0[1]``, a node id, or ``cli``.
        body: The message.
    """

    protocol: int
    run: RunName | Literal[""]
    term: Term
    boot: Boot
    seq: Count
    trace: bytes
    sender: str
    body: Body
