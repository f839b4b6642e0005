"""One message of every type with every field in use; small numbers, so that golden bytes can be read by eye."""

from weightd.core.errors import WireError
from weightd.core.roster.topology import EngineDecl, Roster
from weightd.core.units import (
    Attempt,
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
from weightd.core.wire import messages as m

KEY = VersionKey(Version(3), Attempt(Boot(9), 1))
OLD = VersionKey(Version(2), Attempt(Boot(9), 1))
ERROR = WireError("E_SOME", {"rank": 1, "node": "a", "ranks": [1, 2]}, "some text", (WireError("E_PART", {}, "part"),))
ROSTER = Roster(
    world=2,
    engines=(EngineDecl("E0", 1, (2,), required=True),),
    reserved=(1,),
    mode="mixed",
    strict_tiling=True,
    allow_mixed_engine=True,
    nodes={"a": (0, 1, "gpu-x")},
    trainer_slots=(0, 1),
)
SLOT = m.SlotState(0, KEY, 4, "d1", "step 30")
REPORT = m.ReceiverReport(
    state="refused",
    key=KEY,
    base=OLD,
    committed=OLD,
    op=Op(5),
    in_receive=True,
    leave=True,
    applied_nbytes=6,
    plan_digest="d2",
    error=ERROR,
    closing=True,
)
PLACE = m.ReceiverPlace(EngineId("E0"), EngineRank(0), NodeId("a"), SlotName("gpu-x"), Boot(8), "d3")
EPOCH = m.EpochSpec(
    epoch=Epoch(1),
    roster=ROSTER,
    trainers=(m.TrainerPlace(TrainerRank(0), NodeId("a"), SlotName("0"), Boot(9), "d1"),),
    receivers=(PLACE,),
    bucket_limit_bytes=4096,
    plans=(m.NodePlanDigest(NodeId("a"), "d4", 10, 7),),
    down=(PLACE,),
)

BODIES: tuple[m.Body, ...] = (
    m.TrainerHello(TrainerRank(1), 2, 70, 80, "gpu-x", "d1", 90, (m.Region(0, 0, 8192),), ROSTER, True),
    m.EngineHello("E0", EngineRank(0), 1, 71, 81, "gpu-x", "d3", 91),
    m.PublisherReport((SLOT, m.SlotState(1)), closing=True),
    REPORT,
    m.Welcome(NodeId("a"), 12, 1.0, 5.0, 8388608),
    m.Refusal(ERROR),
    m.PublisherGoal(
        term=Term(1),
        epoch=Epoch(1),
        attempt_boot=Boot(9),
        committed=OLD,
        next_version=Version(3),
        failures=(m.VersionFailed(KEY, ERROR),),
        release=(m.SlotRelease(1, OLD),),
        stage="fetching",
        key=KEY,
        waiting_for="node b, 3 of 7 bytes",
        paused=ERROR,
    ),
    m.ReceiverGoal(
        term=Term(1),
        epoch=Epoch(1),
        plan_digest="d2",
        plan_nbytes=100,
        order="write",
        op=Op(5),
        key=KEY,
        sources=(m.SourceSlot(-1, 0, 2), m.SourceSlot(1, 0, 4)),
        committed=OLD,
        stage="applying",
        waiting_for="E0[0]",
        error=ERROR,
    ),
    m.NodeReport(
        node=NodeId("a"),
        floor=(Term(1), Op(5)),
        goal_seq=33,
        trainers=(
            m.TrainerEntry(
                TrainerRank(1), 2, SlotName("1"), 70, Boot(9), "d1", 90, (SLOT,), True, ROSTER, True, False, True
            ),
        ),
        receivers=(
            m.ReceiverEntry(EngineId("E0"), EngineRank(0), 1, SlotName("2"), 71, Boot(8), "d3", 91, REPORT, True),
        ),
        lost=(m.LostRank("trainer 0", Boot(7), "its process ended"),),
        planned=(m.Planned(Epoch(1), "d4", 7, ERROR),),
        fetch=m.FetchState(KEY, Op(5), 7, 3, False, ERROR, 4),
        held=(OLD,),
        committed=OLD,
        highest=Version(3),
        stored=("d1", "d3"),
    ),
    m.Goal(
        leader=NodeId("a"),
        op=Op(5),
        stage="applying",
        key=KEY,
        epoch=EPOCH,
        next_epoch=None,
        committed=m.CommitNote(OLD, (EngineId("E0"),)),
        failures=(m.VersionFailed(KEY, ERROR),),
        engines=(m.EngineOrder(EngineId("E0"), "pause", Op(5), KEY, ERROR),),
        release=(m.RankRelease(TrainerRank(1), 0, OLD),),
        retained=(OLD,),
        attempt_boot=Boot(9),
        next_version=Version(4),
        refused=(m.RanksRefused((("E1[0]", Boot(6)),), ERROR),),
        waiting_for="E0[0]",
        paused=ERROR,
    ),
    m.Superseded(Term(2), NodeId("b")),
    m.Recover(),
    m.Recovered(NodeId("b"), Term(1), OLD, Version(3)),
    m.BlobWanted("d1", 2),
    m.BlobChunk("d1", 0, 1, 3, b"abc"),
    m.TicketWanted(Epoch(1), KEY, Op(5)),
    m.Ticket(KEY, Op(5), 6, bytes(range(32)), ERROR),
    m.Bye("done"),
    m.StatusWanted(),
    m.Status(b"{}"),
)


def envelope(body: m.Body) -> m.Envelope:
    """Return a message around ``body``."""
    return m.Envelope(m.PROTOCOL, RunName("grpo-7"), Term(1), Boot(9), 4, bytes(range(16)), "trainer 1", body)
