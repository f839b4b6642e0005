"""The ZeroMQ wrapper on both event loops: nothing hangs, nothing is lost, nobody starves."""

import random
from collections.abc import Iterator

import anyio
import pytest
import zmq

from weightd.daemon.control.zsock import FAIR_OPERATIONS, ZSocket

pytestmark = [pytest.mark.net, pytest.mark.anyio]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    backend: str = request.param
    return backend


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


def pair(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, queued: int = 8) -> tuple[ZSocket, ZSocket]:
    ends = [context.socket(zmq.DEALER) for _ in range(2)]
    for end in ends:
        end.linger = 0
        end.sndhwm = end.rcvhwm = queued
    ends[0].bind(endpoint)
    ends[1].connect(ends[0].getsockopt_string(zmq.LAST_ENDPOINT))
    return ZSocket(ends[0]), ZSocket(ends[1])


@pytest.mark.parametrize("endpoint", ["inproc://stress", "tcp://127.0.0.1:*"])
async def test_every_message_comes_back_under_random_cancellation(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str
) -> None:
    """Five senders and three receivers that are cancelled at random share one socket with tiny queues."""
    count = 3000
    got: list[int] = []
    chance = random.Random(1)
    echoing, sending = pair(context, endpoint)

    async def echo() -> None:
        while True:
            await echoing.send([frame.bytes for frame in await echoing.receive()])

    async def send(first: int) -> None:
        for number in range(first, count, 5):
            await sending.send([b"%d" % number])

    async def receive() -> None:
        while len(got) < count:
            with anyio.move_on_after(chance.random() * 0.003):
                got.append(int((await sending.receive())[0].bytes))
        tasks.cancel_scope.cancel()

    with echoing, sending, anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(echo)
            for first in range(5):
                tasks.start_soon(send, first)
            for _ in range(3):
                tasks.start_soon(receive)

    assert list(range(count)) == sorted(got)


async def test_all_queued_messages_come_from_one_wake(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    receiving, sending = pair(context, "inproc://burst", queued=100)
    got: list[bytes] = []

    async def receive() -> None:
        while len(got) < 5:
            got.append((await receiving.receive())[0].bytes)

    with receiving, sending, anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive)
            await anyio.sleep(0.01)  # the receiver waits for the edge
            for number in range(5):
                sending.send_nowait([b"%d" % number])

    assert [b"0", b"1", b"2", b"3", b"4"] == got


async def test_a_send_does_not_swallow_the_edge_that_a_receiver_waits_for(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    ours, theirs = pair(context, "inproc://edge")
    got: list[bytes] = []

    async def receive() -> None:
        got.append((await ours.receive())[0].bytes)

    with ours, theirs, anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive)
            await anyio.sleep(0.05)
            theirs.send_nowait([b"x"])  # raises the edge
            ours.send_nowait([b"y"])  # reads it, before the loop can

    assert [b"x"] == got


async def test_a_follower_takes_the_lead_of_a_cancelled_leader(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    receiving, sending = pair(context, "inproc://lead")
    got: list[bytes] = []

    async def lead() -> None:
        with anyio.move_on_after(0.05):
            await receiving.receive()

    async def follow() -> None:
        got.append((await receiving.receive())[0].bytes)

    with receiving, sending, anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lead)
            await anyio.sleep(0.01)
            tasks.start_soon(follow)
            await anyio.sleep(0.1)
            sending.send_nowait([b"x"])

    assert [b"x"] == got


async def test_a_busy_socket_lets_others_run(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    receiving, sending = pair(context, "inproc://busy", queued=10_000)
    with receiving, sending:
        for _ in range(1000):
            sending.send_nowait([b"x"])
        received = 0
        with anyio.move_on_after(0):
            for _ in range(1000):
                await receiving.receive()
                received += 1

        assert received <= FAIR_OPERATIONS


async def test_closing_wakes_whoever_waits(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    receiving, sending = pair(context, "inproc://closing")
    ended = []

    async def receive() -> None:
        with pytest.raises(anyio.ClosedResourceError):
            await receiving.receive()
        ended.append(True)

    with sending, anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(receive)
            await anyio.sleep(0.01)
            receiving.close()

    assert [True, True, True] == ended
    with pytest.raises(anyio.ClosedResourceError):
        receiving.send_nowait([b"x"])
