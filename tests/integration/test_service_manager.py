"""The daemon as a process of a service manager: ready when it answers, watched while it works, stopping in words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.manager import Manager
from tests.integration.test_foreign_hooks import hello, say
from tests.integration.test_service import QUIET, WEIGHTD, configured
from weightd.core.wire import messages as m
from weightd.daemon.status.client import ask_status
from weightd.link.faults import DaemonAbsent
from weightd.link.finding import daemon_paths

pytestmark = [pytest.mark.processes, pytest.mark.net]

WATCHDOG_S = 1.0
ROOT = Path(__file__).parents[2]


@pytest.fixture
def manager(folder: Path) -> Iterator[Manager]:
    made = Manager.at(folder, WATCHDOG_S)
    yield made
    made.close()


@pytest.fixture
def hanging(folder: Path, manager: Manager) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon that hangs when ``folder / "hang"`` is made, and stands on SIGUSR1."""
    config = configured(folder, "[deadlines]\nworker_s = 0.5\ndrain_s = 1.0\n")
    argv = [sys.executable, "-m", "tests.integration.hanging_daemon", str(folder / "hang")]
    process = launched([*argv, "serve", "--config", str(config)], manager)
    manager.wait_for("READY=1")
    yield process
    (folder / "hang").unlink(missing_ok=True)
    process.kill()
    process.communicate(timeout=10)


def launched(argv: list[str], manager: Manager) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, stderr=subprocess.PIPE, env=QUIET | manager.environ, cwd=ROOT)


def answers(folder: Path) -> bool:
    try:
        return bool(ask_status(daemon_paths(folder / "run" / "control.sock"), 5.0)["node"] == "a")
    except DaemonAbsent:
        return False


def test_it_is_ready_when_status_answers_and_says_what_it_does(folder: Path, manager: Manager) -> None:
    process = launched([*WEIGHTD, "serve", "--config", str(configured(folder))], manager)
    try:
        first = manager.wait_for("READY=1")
        assert 1 == first
        assert answers(folder)
        assert "STATUS=node a: 0 hooks, 0 runs" in manager.heard[0].split("\n")

        fed = manager.wait_for("WATCHDOG=1", after=first)
        fed = manager.wait_for("WATCHDOG=1", after=fed)
        assert isinstance(say(folder, 1, hello(os.getpid()), 2)[0], m.Welcome)
        manager.wait_for("STATUS=node a: 1 hook, 1 run; r: attaching, no version yet", after=fed)

        process.send_signal(signal.SIGTERM)
        manager.wait_for("STOPPING=1", after=fed)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.communicate(timeout=10)


def test_a_configuration_that_cannot_stand_is_never_ready(folder: Path, manager: Manager) -> None:
    process = launched([*WEIGHTD, "serve", "--config", str(configured(folder, control="10.0.0.1:7700"))], manager)
    process.communicate(timeout=30)

    assert 78 == process.returncode
    assert [] == manager.listen()


def test_a_loop_that_stands_feeds_no_watchdog(manager: Manager, hanging: subprocess.Popen[bytes]) -> None:
    fed = manager.wait_for("WATCHDOG=1")
    hanging.send_signal(signal.SIGUSR1)
    manager.quiet_for("WATCHDOG=1", 0.2)  # one may have been on its way

    assert manager.quiet_for("WATCHDOG=1", 2 * WATCHDOG_S)
    hanging.send_signal(signal.SIGUSR2)
    manager.wait_for("WATCHDOG=1", after=max(fed, len(manager.heard)))


def test_a_frozen_process_feeds_no_watchdog(manager: Manager, hanging: subprocess.Popen[bytes]) -> None:
    manager.wait_for("WATCHDOG=1")
    hanging.send_signal(signal.SIGSTOP)
    manager.quiet_for("WATCHDOG=1", 0.2)

    assert manager.quiet_for("WATCHDOG=1", 2 * WATCHDOG_S)
    hanging.send_signal(signal.SIGCONT)
    manager.wait_for("WATCHDOG=1", after=len(manager.heard))


def test_a_worker_on_a_disk_that_hangs_feeds_no_watchdog_though_the_loop_turns(
    folder: Path, manager: Manager, hanging: subprocess.Popen[bytes]
) -> None:
    log: list[str] = []
    reader = threading.Thread(target=_read, args=(hanging, log), daemon=True)
    reader.start()
    manager.wait_for("WATCHDOG=1")
    (folder / "hang").touch()
    say(folder, 1, hello(os.getpid()), 0)
    while manager.quiet_for("WATCHDOG=1", 2 * WATCHDOG_S) is False:
        assert manager.heard.count("WATCHDOG=1") < 40, "it is fed on and on"

    assert answers(folder)
    assert any("opening a journal: no progress for" in line for line in log), log
    (folder / "hang").unlink()
    manager.wait_for("WATCHDOG=1", after=len(manager.heard))


def test_the_end_by_a_watchdog_says_where_every_thread_stood(manager: Manager, folder: Path) -> None:
    process = launched([*WEIGHTD, "serve", "--config", str(configured(folder))], manager)
    manager.wait_for("READY=1")
    process.send_signal(signal.SIGABRT)  # as systemd does when the watchdog is not fed
    said = process.communicate(timeout=10)[1].decode()

    assert -signal.SIGABRT == process.returncode
    assert "Current thread" in said
    assert "tcp_server.py" in said


def _read(process: subprocess.Popen[bytes], log: list[str]) -> None:
    assert process.stderr is not None
    log.extend(line.decode() for line in process.stderr)
