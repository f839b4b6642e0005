"""From threads to the event loop, on both of them."""

import threading

import anyio
import pytest

from weightd.daemon.bulk.mailbox import Mailbox

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    backend: str = request.param
    return backend


async def test_everything_arrives_in_the_order_of_its_thread() -> None:
    with Mailbox[tuple[int, int]]() as mailbox:

        def post(thread: int) -> None:
            for number in range(200):
                mailbox.post((thread, number))

        threads = [threading.Thread(target=post, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        with anyio.fail_after(5):
            got = [await anext(mailbox) for _ in range(600)]

    for n in range(3):
        assert list(range(200)) == [number for thread, number in got if thread == n]


async def test_a_cancelled_reader_takes_nothing() -> None:
    with Mailbox[int]() as mailbox, anyio.fail_after(5):
        with anyio.move_on_after(0.01):
            await anext(mailbox)
        mailbox.post(1)

        assert 1 == await anext(mailbox)


async def test_a_reader_that_waits_is_woken() -> None:
    with Mailbox[int]() as mailbox, anyio.fail_after(5):
        timer = threading.Timer(0.05, mailbox.post, [7])
        timer.start()

        assert 7 == await anext(mailbox)


async def test_posting_after_the_end_is_harmless() -> None:
    with Mailbox[int]() as mailbox:
        pass

    mailbox.post(1)
