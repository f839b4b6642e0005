"""What answers which order of a rollout rank."""

import pytest

from tests.fakes.leader_bench import key
from weightd.core.session.attached import Attached, Hook, acknowledged
from weightd.core.session.events import HookGreeted, HookLost, HookReported
from weightd.core.units import NO_KEY, Boot, EngineRank, Op, SlotName, TrainerRank
from weightd.core.wire.messages import (
    EngineHello,
    Order,
    PublisherReport,
    ReceiverGoal,
    ReceiverReport,
    ReceiverState,
    SlotRelease,
    SlotState,
    TrainerHello,
)

V1, V2 = key(1), key(2)


@pytest.mark.parametrize(
    "order,report,expected",
    [
        ("idle", ReceiverReport("unready"), True),
        ("pause", ReceiverReport("serving", base=V1, op=Op(3)), False),
        ("pause", ReceiverReport("pausing", V2, op=Op(4)), True),
        ("pause", ReceiverReport("paused", V2, op=Op(3)), False),
        ("write", ReceiverReport("paused", V2, op=Op(4)), False),
        ("write", ReceiverReport("applying", V2, op=Op(4)), True),
        ("write", ReceiverReport("applied", V1, op=Op(4)), False),
        ("commit", ReceiverReport("applied", V2, op=Op(4)), False),
        ("commit", ReceiverReport("applied", V2, committed=V2, op=Op(4)), True),
        ("resume", ReceiverReport("applied", V2, committed=V2, op=Op(4)), False),
        ("resume", ReceiverReport("serving", base=V2, committed=V2, op=Op(4)), True),
        ("abort", ReceiverReport("applied", V2, op=Op(4)), False),
        ("abort", ReceiverReport("torn", op=Op(4)), True),
        ("left", ReceiverReport("serving", base=V1, op=Op(4), leave=True), False),
        ("left", ReceiverReport("serving", base=V1, op=Op(4)), True),
        ("fence", ReceiverReport("fenced", V2, op=Op(3)), False),
        ("fence", ReceiverReport("fenced", V2, op=Op(4)), True),
    ],
)
def test_a_state_answers_an_order_or_not(order: Order, report: ReceiverReport, expected: bool) -> None:
    goal = ReceiverGoal(order=order, op=Op(4), key=V2)

    assert expected is acknowledged(goal, report)


@pytest.mark.parametrize(
    "state,op,read",
    [
        ("paused", 4, False),
        ("applying", 4, False),
        ("applied", 4, True),
        ("torn", 4, True),
        ("serving", 3, False),
        ("pausing", 5, False),
        ("paused", 5, True),
    ],
)
def test_a_rank_has_read_its_last_byte_once_its_state_says_so(state: ReceiverState, op: int, read: bool) -> None:
    hello = EngineHello("E0", EngineRank(0), 1, 7, 5, "slot", "layout", 9)
    hook = Hook(1, hello, Boot(1), 0.0, reads=V2, reads_op=Op(4))

    hook.hear(ReceiverReport(state, V2, op=Op(op)), 1)

    assert (NO_KEY if read else V2) == hook.reads


def test_a_slot_that_was_released_is_not_kept_for_a_rank_that_ended() -> None:
    """Its process may have begun to overwrite it: what it last reported is no word for its bytes."""
    attached, boot, rank = Attached(), Boot(1), TrainerRank(0)
    hello = TrainerHello(rank, 1, 7, 5, SlotName("slot"), "layout", 9, ())
    attached.greet(HookGreeted(1, hello, boot), 0.0, refused=False)
    slots = (SlotState(0, V1, 2, "layout"), SlotState(1, V2, 2, "layout"))
    attached.hear(HookReported(1, PublisherReport(slots), 1))
    attached.hooks[1].freed = frozenset({SlotRelease(0, V1)})

    attached.lose(HookLost(1, "killed by signal 9", False))

    [entry] = attached.trainer_entries()
    assert [V2] == [s.key for s in entry.slots]
    assert None is attached.slot_with(rank, boot, V1)
    kept = attached.slot_with(rank, boot, V2)
    assert kept is not None
    assert 1 == kept.slot
