"""What one hook says binds no other: a rank is spoken for by the process that greeted, for as long as it is there."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.integration.test_service import configured, run, started
from weightd.core.roster.topology import EngineDecl, Roster
from weightd.core.units import Boot, RunName, SlotName, Term, TrainerRank
from weightd.core.wire import messages as m
from weightd.core.wire.codec import decode, encode
from weightd.core.wire.limits import MAX_BLOB_BYTES

pytestmark = [pytest.mark.processes, pytest.mark.net, pytest.mark.timeout(180)]

BOOT = Boot(7)
"""Boots are no secret: that of trainer rank 0 is part of every version's name."""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = started(configured(tmp_path))
    yield process
    process.kill()
    process.communicate(timeout=10)


def say(folder: Path, seq: int, body: m.Body, answers: int) -> list[m.Body]:
    """Send a message as trainer rank 0, and return what comes back."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    found: list[m.Body] = []
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 2000)
        socket.connect(f"ipc://{folder / 'run' / 'control.sock'}")
        socket.send(encode(m.Envelope(m.PROTOCOL, RunName("r"), Term(0), BOOT, seq, bytes(16), "trainer 0", body)))
        while len(found) < answers and socket.poll(5000):
            found.append(decode(socket.recv()).body)
    context.term()
    return found


def from_another_process(folder: Path, seq: int, body: m.Body, answers: int) -> list[m.Body]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(say, (folder, seq, body, answers))


def hello(pid: int, digest: str = "d1", layout_nbytes: int = 1) -> m.TrainerHello:
    roster = Roster(1, (EngineDecl("E0", 1),), (), "disaggregated")
    regions = (m.Region(0, 0, 8192),)
    return m.TrainerHello(TrainerRank(0), 1, pid, 1, SlotName("s"), digest, layout_nbytes, regions, roster)


def hooks(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run("status", "--json", "--socket", str(folder / "run")).stdout)["hooks"]
    return found


def test_another_process_does_not_take_a_rank_off(tmp_path: Path, daemon: subprocess.Popen[bytes]) -> None:
    assert isinstance(say(tmp_path, 1, hello(os.getpid()), 2)[0], m.Welcome)
    from_another_process(tmp_path, 2, m.Bye("not mine to say"), 0)

    assert [(h["who"], h["pid"]) for h in hooks(tmp_path)] == [("trainer 0", os.getpid())]
    say(tmp_path, 3, m.Bye("mine to say"), 0)
    assert hooks(tmp_path) == []


def test_another_process_is_not_welcomed_as_a_rank_that_is_here(
    tmp_path: Path, daemon: subprocess.Popen[bytes]
) -> None:
    say(tmp_path, 1, hello(os.getpid()), 2)
    answer = from_another_process(tmp_path, 2, hello(os.getpid()), 1)

    assert isinstance(answer[0], m.Refusal)
    assert answer[0].error.code == "E_ADMISSION"
    assert str(os.getpid()) in answer[0].error.text


def test_a_layout_that_never_came_leaves_room_for_others(tmp_path: Path, daemon: subprocess.Popen[bytes]) -> None:
    pid = os.getpid()
    say(tmp_path, 1, hello(pid, "huge", MAX_BLOB_BYTES), 2)
    say(tmp_path, 2, m.Bye("it gave up"), 0)
    answers = say(tmp_path, 3, hello(pid, "small", 100), 2)

    assert [type(a) for a in answers] == [m.Welcome, m.BlobWanted]
