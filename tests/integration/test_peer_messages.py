"""What another daemon may send at any moment must not end this one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests import wire_samples
from tests.integration.test_service import configured, free_port, run, started
from weightd.core.units import Boot, Epoch, Op, RunName, Term
from weightd.core.wire import messages as m
from weightd.core.wire.codec import encode

pytestmark = [pytest.mark.processes, pytest.mark.net]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    port, peer = free_port(), f"127.0.0.1:{free_port()}"
    extra = f'[peers.b]\ncontrol = "{peer}"\nbulk = "127.0.0.1:{free_port()}"\n'
    (tmp_path / "port").write_text(str(port))
    process = started(configured(tmp_path, extra, control=f"127.0.0.1:{port}"))
    yield process
    process.kill()
    process.communicate(timeout=10)


RUN = RunName("r")


def tell(folder: Path, *bodies: m.Body) -> None:
    """Send messages of node b, one right behind the other."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 2000)
        socket.connect(f"tcp://127.0.0.1:{(folder / 'port').read_text()}")
        for seq, body in enumerate(bodies, 1):
            socket.send(encode(m.Envelope(m.PROTOCOL, RUN, Term(1), Boot(7), seq, bytes(16), "b", body)))
    context.term()


def test_a_ticket_is_asked_for_in_the_moment_in_which_a_run_begins(
    tmp_path: Path, daemon: subprocess.Popen[bytes]
) -> None:
    """A daemon that comes back finds both in its queue: the leader's goal, and what its fetch asks for."""
    wanted = m.TicketWanted(Epoch(1), wire_samples.KEY, Op(5))
    tell(tmp_path, m.Recover(), *[wanted] * 5)

    status = run("status", "--json", "--socket", str(tmp_path / "run"))

    assert daemon.poll() is None
    assert status.returncode == 0, status.stderr
    assert list(json.loads(status.stdout)["runs"]) == [RUN]


def test_every_message_that_is_none_of_a_peer_or_comes_too_early(
    tmp_path: Path, daemon: subprocess.Popen[bytes]
) -> None:
    tell(tmp_path, m.Recover(), *wire_samples.BODIES, *wire_samples.BODIES)

    status = run("status", "--json", "--socket", str(tmp_path / "run"))

    assert daemon.poll() is None
    assert status.returncode == 0, status.stderr
    document = json.loads(status.stdout)
    assert document["dropped_messages"] > 0
    assert list(document["runs"]) == [RUN]
    daemon.terminate()
    said = daemon.communicate(timeout=10)[1].decode()
    assert "ended by a fault" not in said, said
