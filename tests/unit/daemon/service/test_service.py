"""A watchdog is fed while loop and workers go on, and by nobody else; a manager that does not hear harms nobody."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import msgspec
import pytest

from tests.fakes.manager import Manager
from weightd.core.units import RunName
from weightd.daemon.attached import AttachedHooks
from weightd.daemon.config import Config, load_config
from weightd.daemon.service.service import Service
from weightd.daemon.supervisor import RunSupervisor
from weightd.daemon.workers import in_worker

pytestmark = pytest.mark.anyio

WATCHDOG_S = 0.4


class Node:
    """What is told of a daemon."""

    def __init__(self, worker_s: float = 60.0) -> None:
        config = load_config(None, {"WEIGHTD_NODE": "a"})
        deadlines = msgspec.structs.replace(config.deadlines, worker_s=worker_s, drain_s=12.0)
        self.config: Config = msgspec.structs.replace(config, deadlines=deadlines)
        self.hooks = AttachedHooks(8)
        self.runs: dict[RunName, RunSupervisor] = {}


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    backend: str = request.param
    return backend


@pytest.fixture
def manager(folder: Path) -> Iterator[Manager]:
    made = Manager.at(folder, WATCHDOG_S)
    yield made
    made.close()


async def fed(manager: Manager, times: int, limit_s: float = 10.0) -> None:
    """Return once the watchdog was fed so often from now on."""
    wanted = manager.listen().count("WATCHDOG=1") + times
    with anyio.fail_after(limit_s):
        while manager.listen().count("WATCHDOG=1") < wanted:  # noqa: ASYNC110 - heard from a socket of its own
            await anyio.sleep(0.01)


async def test_ready_is_told_first_with_a_status_and_then_the_watchdog_is_fed(manager: Manager) -> None:
    service = Service(Node(), manager.environ)
    async with anyio.create_task_group() as tasks:
        await tasks.start(service.serve)
        assert "READY=1\nSTATUS=node a: 0 hooks, 0 runs" == manager.listen()[0]
        begun = anyio.current_time()
        await fed(manager, 4)
        assert anyio.current_time() - begun >= 3 * WATCHDOG_S / 2 - 0.05
        tasks.cancel_scope.cancel()


async def test_a_worker_that_hangs_ends_the_feeding_until_it_goes_on(
    manager: Manager, caplog: pytest.LogCaptureFixture
) -> None:
    hang = threading.Event()
    service = Service(Node(worker_s=0.2), manager.environ)
    async with anyio.create_task_group() as tasks:
        await tasks.start(service.serve)
        tasks.start_soon(in_worker, "writing a journal", hang.wait, 30.0)
        with caplog.at_level(logging.ERROR, "weightd.service"), anyio.fail_after(10):
            while not caplog.records:  # noqa: ASYNC110 - a log record tells nobody
                await anyio.sleep(0.01)
        before = manager.listen().count("WATCHDOG=1")
        await anyio.sleep(3 * WATCHDOG_S)
        assert before == manager.listen().count("WATCHDOG=1")
        assert "writing a journal: no progress for" in str(vars(caplog.records[0])["facts"])

        hang.set()
        await fed(manager, 2)
        tasks.cancel_scope.cancel()


async def test_stopping_says_how_long_it_may_take_and_ends_the_status(manager: Manager) -> None:
    service = Service(Node(), manager.environ)
    async with anyio.create_task_group() as tasks:
        await tasks.start(service.serve)
        await service.stopping()
        await fed(manager, 2)
        tasks.cancel_scope.cancel()

    (said,) = [message for message in manager.listen() if message.startswith("STOPPING=1")]
    assert "EXTEND_TIMEOUT_USEC=27000000" in said.split("\n")
    assert "up to 12 s" in said


async def test_without_a_manager_nothing_is_told(manager: Manager) -> None:
    service = Service(Node(), {"WATCHDOG_USEC": "100000"})
    async with anyio.create_task_group() as tasks:
        await tasks.start(service.serve)
    await service.stopping()

    assert service.notifier is None
    assert [] == manager.listen()


async def test_without_a_watchdog_none_is_fed(manager: Manager) -> None:
    service = Service(Node(), {"NOTIFY_SOCKET": manager.address})
    async with anyio.create_task_group() as tasks:
        await tasks.start(service.serve)
        await anyio.sleep(WATCHDOG_S)
        tasks.cancel_scope.cancel()

    assert 0 == manager.listen().count("WATCHDOG=1")


async def test_a_manager_that_is_gone_is_said_once_and_served_on(
    manager: Manager, caplog: pytest.LogCaptureFixture
) -> None:
    manager.close()
    service = Service(Node(), manager.environ)
    with caplog.at_level(logging.WARNING, "weightd.service"):
        async with anyio.create_task_group() as tasks:
            await tasks.start(service.serve)
            await anyio.sleep(2 * WATCHDOG_S)
            tasks.cancel_scope.cancel()

    assert ["the service manager does not hear"] == [record.getMessage() for record in caplog.records]
