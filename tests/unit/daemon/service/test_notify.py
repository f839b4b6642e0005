"""Messages arrive whole on a real datagram socket, and only where a manager asked for them."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

import pytest

from tests.fakes.manager import Manager
from weightd.daemon.service.notify import Notifier


def test_lines_are_one_datagram(folder: Path) -> None:
    manager = Manager.at(folder)

    assert manager.notifier.send("READY=1", "STATUS=node a: 0 hooks, 0 runs")
    assert ["READY=1\nSTATUS=node a: 0 hooks, 0 runs"] == manager.listen()
    manager.close()


def test_an_abstract_address_is_reached() -> None:
    manager = Manager(f"@weightd-test-{uuid.uuid4()}")

    assert manager.notifier.send("WATCHDOG=1")
    assert ["WATCHDOG=1"] == manager.listen()
    manager.close()


def test_a_full_socket_is_said_and_never_waited_for(folder: Path) -> None:
    manager = Manager.at(folder)
    sent = 0
    while manager.notifier.send("WATCHDOG=1"):
        sent += 1
        assert sent < 100_000

    assert sent == len(manager.listen())
    assert manager.notifier.send("WATCHDOG=1")
    manager.close()


def test_a_manager_that_is_gone_is_an_error(folder: Path) -> None:
    manager = Manager.at(folder)
    manager.close()

    with pytest.raises(ConnectionRefusedError):
        manager.notifier.send("WATCHDOG=1")


@pytest.mark.parametrize("address", ["", "relative", "vsock:2:1234"])
def test_without_an_address_on_this_host_there_is_no_manager(address: str) -> None:
    assert Notifier.of({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000000"}) is None
    assert Notifier.of({}) is None


@pytest.mark.parametrize(
    "environ, watchdog_s",
    [
        ({}, None),
        ({"WATCHDOG_USEC": "2500000"}, 2.5),
        ({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": "7"}, 2.5),
        ({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_is_the_one_that_is_meant_for_this_process(
    environ: dict[str, str], watchdog_s: float | None
) -> None:
    found = Notifier.of({"NOTIFY_SOCKET": "/run/notify", **environ}, pid=7)

    assert Notifier("/run/notify", watchdog_s) == found


def test_its_own_pid_is_the_one_that_is_asked_for() -> None:
    environ = {"NOTIFY_SOCKET": "/run/notify", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": str(os.getpid())}

    assert Notifier("/run/notify", 1.0) == Notifier.of(environ)


def test_no_descriptor_is_left(folder: Path) -> None:
    manager = Manager.at(folder)
    with socket.socket() as probe:
        before = probe.fileno()
    for _ in range(3):
        manager.notifier.send("WATCHDOG=1")
    with socket.socket() as probe:
        assert before == probe.fileno()
    manager.close()
