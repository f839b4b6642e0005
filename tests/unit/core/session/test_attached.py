"""What answers which order of a rollout rank."""

import pytest

from tests.fakes.leader_bench import key
from weightd.core.session.attached import Hook, acknowledged
from weightd.core.units import NO_KEY, Boot, EngineRank, Op
from weightd.core.wire.messages import EngineHello, Order, ReceiverGoal, ReceiverReport, ReceiverState

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
