"""A hook's process that was stopped for a while: it did not listen, and does not say that its daemon is gone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fakes.small_daemon import SmallDaemon
from weightd.link.control import ListeningClock

pytestmark = [pytest.mark.net, pytest.mark.timeout(60)]

HOOK = """
import sys
from weightd.core.session.deadlines import Deadlines
from weightd.core.wire.messages import EngineHello, ReceiverReport
from weightd.link.session import HookSession

class Hook(HookSession):
    def hello(self):
        return EngineHello("E0", 1, 2, 1, 1, "cpu", "", 0)
    def report(self):
        return ReceiverReport("unready")
    def goal_arrived(self, goal):
        pass

limits = Deadlines(heartbeat_s=0.1, heartbeat_timeout_s=0.4, restart_s=1.5)
hook = Hook("r", "E0[1]", sys.argv[1], limits)
import time
hook.open(time.monotonic() + 10)
print("open", flush=True)
hook.wait_for(lambda: None, time.monotonic() + float(sys.argv[2]), "waiting")
print("waited", flush=True)
hook.shut("done")
"""


def test_the_clock_counts_no_gap() -> None:
    clock = ListeningClock(0.05)
    time.sleep(0.2)
    clock.tick()
    time.sleep(0.01)

    assert 0.055 < clock.now() < 0.11


def test_a_hook_that_was_stopped_gives_its_daemon_time_to_answer(tmp_path: Path) -> None:
    """The connection broke meanwhile, as it does by ZeroMQ's heartbeats: the hook greets before it gives up."""
    argv = [sys.executable, "-c", HOOK, str(tmp_path), "4.5"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as hook:
        with SmallDaemon(tmp_path):
            assert hook.stdout is not None
            assert hook.stdout.readline() == "open\n"
            os.kill(hook.pid, signal.SIGSTOP)
        with SmallDaemon(tmp_path):
            time.sleep(3.0)
            os.kill(hook.pid, signal.SIGCONT)
            said, errors = hook.communicate(timeout=20)

    assert said == "waited\n", errors
