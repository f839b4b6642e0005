"""An epoch is planned from its spec alone; a rank's plan names the memory that it reads."""

from __future__ import annotations

import msgspec
import pytest

from weightd.core.errors import Refused
from weightd.core.layout.build import LayoutBuilder
from weightd.core.layout.columns import Layout
from weightd.core.roster.topology import EngineDecl, Place, Roster
from weightd.core.units import Boot, EngineId, EngineRank, Epoch, NodeId, RolloutRank, SlotName, TrainerRank
from weightd.core.wire.messages import EpochSpec, ReceiverPlace, TrainerPlace
from weightd.daemon.epochs import (
    EpochPlans,
    encode_plans,
    layout_digests,
    layout_nbytes,
    plan_epoch,
    topology_of,
    unknown_peers,
)

A, B = NodeId("a"), NodeId("b")


def rows(start: int, end: int, kind: str) -> Layout:
    """Rows [start, end) of a (5, 3) float32 tensor in a buffer of their own."""
    builder = LayoutBuilder()
    tensor = builder.add_tensor("w", (5, 3), "float32")
    buffer = builder.add_buffer("w", 12 * (end - start), "float32", kind)
    builder.add_piece(tensor, buffer, (start, 0), (end - start, 3))
    return builder.build()


LAYOUTS = {"t0": rows(0, 3, "slot"), "t1": rows(3, 5, "slot"), "e0": rows(0, 4, "param"), "e1": rows(4, 5, "param")}


def spec(boot1: int = 11, down: bool = False) -> EpochSpec:
    trainers = (
        TrainerPlace(TrainerRank(1), B, SlotName("s1"), Boot(boot1), "t1"),
        TrainerPlace(TrainerRank(0), A, SlotName("s0"), Boot(10), "t0"),
    )
    e0 = ReceiverPlace(EngineId("E0"), EngineRank(0), A, SlotName("x0"), Boot(20), "e0")
    e1 = ReceiverPlace(EngineId("E1"), EngineRank(0), B, SlotName("x1"), Boot(21), "e1")
    roster = Roster(2, (EngineDecl("E0", 1), EngineDecl("E1", 1)))
    return EpochSpec(Epoch(1), roster, trainers, (e0,) if down else (e0, e1), 1 << 20, down=(e1,) if down else ())


def planned(of: EpochSpec, serial: int = 0) -> EpochPlans:
    plans = plan_epoch(of, LAYOUTS, A)
    encode_plans(plans, A, serial)
    return plans


def test_trainer_ranks_are_ordered_whatever_the_order_of_the_spec() -> None:
    topology = topology_of(spec())

    assert topology.trainers == (Place(A, SlotName("s0")), Place(B, SlotName("s1")))
    assert list(topology.engines) == ["E0", "E1"]


def test_every_layout_is_named_once() -> None:
    assert sorted(layout_digests(spec())) == ["e0", "e1", "t0", "t1"]


def test_all_nodes_are_planned_and_the_remote_bytes_counted() -> None:
    plans = planned(spec())

    assert {n: sum(b.nbytes for b in p.fetch.buckets) for n, p in plans.plans.items()} == {A: 12, B: 0}
    assert plans.snapshot_nbytes == 5 * 3 * 4
    assert layout_nbytes(LAYOUTS["t1"]) == 2 * 3 * 4


def test_an_engine_that_is_down_counts_as_user_of_its_bytes_and_gets_no_plan() -> None:
    plans = planned(spec(down=True))

    assert RolloutRank(EngineId("E1"), EngineRank(0)) not in plans.plans[B].ranks
    assert RolloutRank(EngineId("E0"), EngineRank(0)) in plans.plans[A].ranks


def test_without_it_the_bytes_of_nobody_refuse_the_epoch() -> None:
    lone = spec(down=True)
    roster = msgspec.structs.replace(lone.roster, engines=lone.roster.engines[:1])

    with pytest.raises(Refused, match="E_SRC_UNUSED"):
        plan_epoch(msgspec.structs.replace(lone, roster=roster, down=()), LAYOUTS, A)


def test_a_restarted_local_trainer_or_another_landing_makes_another_rank_plan() -> None:
    """The same copies over other memory: a rank that kept its old views would read old bytes and not know."""
    rank = RolloutRank(EngineId("E0"), EngineRank(0))
    trainers = spec().trainers
    restarted = (trainers[0], msgspec.structs.replace(trainers[1], boot=Boot(99)))
    digests = [
        planned(spec()).rank_blobs[rank][0],
        planned(spec(), serial=1).rank_blobs[rank][0],
        planned(msgspec.structs.replace(spec(), trainers=restarted)).rank_blobs[rank][0],
    ]

    assert len(set(digests)) == 3
    assert planned(spec()).rank_blobs[rank][0] == digests[0]


def test_a_node_that_does_not_know_a_sender_says_so_with_the_bytes() -> None:
    plans = planned(spec())
    error = unknown_peers(plans, A, ())

    assert error is not None
    assert (error.unknown, error.nbytes) == (("b",), 12)
    assert unknown_peers(plans, A, (B,)) is None
    assert unknown_peers(plans, B, ()) is None
