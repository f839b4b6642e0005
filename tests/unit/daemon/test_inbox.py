"""A run's mailbox drops repeats when it must, outcomes never."""

from __future__ import annotations

import anyio
import pytest
from anyio.lowlevel import checkpoint

from weightd.core.session.events import HookLost, HookReported
from weightd.core.wire.messages import PublisherReport
from weightd.daemon.inbox import REPEATS, Inbox

pytestmark = pytest.mark.anyio


def report(session: int) -> HookReported:
    return HookReported(session, PublisherReport(()))


async def test_outcomes_come_before_repeats_and_both_in_order() -> None:
    inbox = Inbox()
    inbox.repeat(report(1))
    inbox.outcome(HookLost(7, "a"))
    inbox.repeat(report(2))
    inbox.outcome(HookLost(8, "b"))

    assert [await inbox.next() for _ in range(4)] == [HookLost(7, "a"), HookLost(8, "b"), report(1), report(2)]


async def test_the_oldest_repeat_gives_way_and_is_counted() -> None:
    inbox = Inbox()
    for session in range(REPEATS + 3):
        inbox.repeat(report(session))

    assert inbox.dropped == 3
    assert await inbox.next() == report(3)


async def test_a_waiting_reader_is_woken() -> None:
    inbox = Inbox()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(inbox.next)
            await checkpoint()
            inbox.outcome(HookLost(1, "x"))
