"""A node whose daemon plans something else than the leader: nothing may be fetched or written by such a plan."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from tests.integration.test_service import configured, free_port, started
from weightd.core.errors import WeightdError, flatten
from weightd.core.layout.message import encode_layout
from weightd.core.session.faults import PlanDiffers
from weightd.core.units import NO_KEY, NO_OP, Boot, NodeId, RunName, SlotName, Term, TrainerRank
from weightd.core.wire import messages as m
from weightd.core.wire.blobs import blob_digest
from weightd.core.wire.codec import decode, encode
from weightd.rollout_hooks.receiver import Receiver
from weightd.trainer_hooks import Publisher

pytestmark = [pytest.mark.processes, pytest.mark.net]

RUN = RunName("r")
REPEAT_MS = 100
FOREIGN = "0123456789abcdef" * 2


def publisher_of(folder: Path) -> Publisher:
    """Rank 0 of two replicas; the other one is on node b."""
    w = torch.arange(12.0).reshape(4, 3)
    return Publisher(
        {"w": w}, run=RUN, rank=0, world=2, engines={"E0": 1}, slot="gpu-0", socket=folder / "run", attach_s=20.0
    )


def report_of_b(layout: bytes, goal: m.Goal | None) -> m.NodeReport:
    """What node b says: it has trainer rank 1, and a plan of the epoch that is asked for which nobody else has."""
    digest = blob_digest(layout)
    rank_1 = m.TrainerEntry(TrainerRank(1), 2, SlotName("gpu-0"), 1, Boot(8), digest, len(layout), (), ready=True)
    asked = goal.next_epoch if goal is not None else None
    planned = (m.Planned(asked.epoch, FOREIGN),) if asked is not None else ()
    return m.NodeReport(NodeId("b"), (Term(1), NO_OP), 0, (rank_1,), (), planned=planned)


def heard(socket: zmq.Socket[bytes], before: m.Goal | None) -> m.Goal | None:
    """Return the newest goal that came within ``REPEAT_MS``, else the one before."""
    goal = before
    while socket.poll(REPEAT_MS if goal is before else 0):
        body = decode(socket.recv_multipart()[-1]).body
        goal = body if isinstance(body, m.Goal) else goal
    return goal


def repeat(leader: int, own: int, layout: bytes, over: threading.Event) -> None:
    """Repeat node b's state to the leader until it is over."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.DEALER) as out, context.socket(zmq.ROUTER) as incoming:
        for socket in (out, incoming):
            socket.setsockopt(zmq.LINGER, 0)
        incoming.bind(f"tcp://127.0.0.1:{own}")
        out.connect(f"tcp://127.0.0.1:{leader}")
        goal, seq = None, 0
        while not over.is_set():
            goal = heard(incoming, goal)
            for body in (m.Recovered(NodeId("b"), Term(0), NO_KEY), report_of_b(layout, goal)):
                seq += 1
                out.send(encode(m.Envelope(m.PROTOCOL, RUN, Term(1), Boot(9), seq, bytes(16), "b", body)))
    context.term()


@contextlib.contextmanager
def node_b(leader: int, own: int, layout: bytes) -> Iterator[None]:
    """Be node b until the block ends."""
    over = threading.Event()
    thread = threading.Thread(target=repeat, args=(leader, own, layout, over))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_node_that_plans_something_else(folder: Path) -> None:
    port, own, params = free_port(), free_port(), {"w": torch.full((4, 3), float("nan"))}
    extra = f'[peers.b]\ncontrol = "127.0.0.1:{own}"\nbulk = "127.0.0.1:{free_port()}"\n'
    daemon = started(configured(folder, extra, control=f"127.0.0.1:{port}"))
    publisher = publisher_of(folder)
    receiver = Receiver(params, run=RUN, engine="E0", k=0, size=1, slot="gpu-1", socket=folder / "run", attach_s=20.0)
    try:
        with node_b(port, own, encode_layout(publisher.describe())), ThreadPoolExecutor(2) as threads:
            calls: list[Future[Any]] = [threads.submit(publisher.attach), threads.submit(receiver.attach)]
            for error in [call.exception(25) for call in calls]:
                assert isinstance(error, WeightdError)
                [differs] = flatten([error])
                assert isinstance(differs, PlanDiffers)
                assert (differs.code, differs.node, differs.got) == ("E_PLAN_DIGEST", "b", FOREIGN)
    finally:
        daemon.kill()
        daemon.communicate(timeout=10)

    assert bool(torch.isnan(params["w"]).all())
