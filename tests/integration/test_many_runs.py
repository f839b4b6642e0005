"""A daemon outlives its runs: one that nobody uses any more gives way when there is no room for another."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.integration.test_foreign_hooks import hello
from tests.integration.test_service import configured, run, started
from weightd.core.units import Boot, RunName, Term
from weightd.core.wire import messages as m
from weightd.core.wire.codec import decode, encode

pytestmark = [pytest.mark.processes, pytest.mark.net]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = started(configured(tmp_path, "[limits]\nruns = 2\n[deadlines]\nrestart_s = 0.2\n"))
    yield process
    process.kill()
    process.communicate(timeout=10)


class Hook:
    """Trainer rank 0 of a run, over a real socket."""

    def __init__(self, folder: Path, name: str) -> None:
        self._name = RunName(name)
        self._seq = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.connect(f"ipc://{folder / 'run' / 'control.sock'}")

    def say(self, body: m.Body) -> None:
        self._seq += 1
        boot = Boot(7)
        envelope = m.Envelope(m.PROTOCOL, self._name, Term(0), boot, self._seq, bytes(16), "trainer 0", body)
        self._socket.send(encode(envelope))

    def greeted(self) -> m.Body:
        self.say(hello(os.getpid()))
        assert self._socket.poll(10_000)
        return decode(self._socket.recv()).body

    def leave(self) -> None:
        self.say(m.Bye("done"))
        self._socket.close()
        self._context.term()


def runs(folder: Path) -> list[str]:
    return sorted(json.loads(run("status", "--json", "--socket", str(folder / "run")).stdout)["runs"])


def test_a_run_in_use_stays_and_one_that_ended_gives_way(tmp_path: Path, daemon: subprocess.Popen[bytes]) -> None:
    first, second, third = (Hook(tmp_path, name) for name in ("first", "second", "third"))
    assert isinstance(first.greeted(), m.Welcome)
    assert isinstance(second.greeted(), m.Welcome)

    refusal = third.greeted()
    assert isinstance(refusal, m.Refusal)
    assert "2 runs are here" in refusal.error.text
    first.leave()
    assert runs(tmp_path) == ["first", "second"]  # it stays for who may come back, until the room is needed
    assert isinstance(third.greeted(), m.Welcome)

    assert runs(tmp_path) == ["second", "third"]
    assert daemon.poll() is None
    second.leave()
    third.leave()
