"""Versions through a real daemon into an engine of two ranks whose layouts were traced."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.hooks.engine_loaders import VllmLike, vllm_checkpoint
from tests.integration.cluster import ANSWER_S, HOOK_DEADLINES, Cluster
from weightd.rollout_hooks.receiver import Receiver
from weightd.rollout_hooks.trace import trace
from weightd.trainer_hooks.publisher import Publisher

pytestmark = pytest.mark.processes

SIZE = 2


def version_of(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {n: torch.randn(s, generator=generator) for n, s in vllm_checkpoint().items()}


def test_what_is_received_is_what_the_loader_would_have_loaded(folder: Path) -> None:
    """The checkpoint is fp32 and the engine bfloat16: the trace demands bfloat16, and the publisher casts."""
    masters = version_of(0)
    engines = [VllmLike(SIZE, k) for k in range(SIZE)]
    layouts = []
    for engine in engines:
        engine.load_weights(masters.items())
        traced = trace(engine, masters)
        traced.probe(engine, masters)
        layouts.append(traced.layout())
    with Cluster(folder, nodes=("a",)) as cluster, ThreadPoolExecutor(SIZE + 1) as pool:
        socket = cluster.nodes.socket("a")
        publisher = Publisher(
            masters,
            run="run",
            rank=0,
            world=1,
            engines={"E0": SIZE},
            dtype=torch.bfloat16,
            socket=socket,
            attach_s=ANSWER_S,
            deadlines=HOOK_DEADLINES,
        )
        receivers = [
            Receiver(
                engine,
                run="run",
                engine="E0",
                k=k,
                size=SIZE,
                slot=f"e{k}",
                socket=socket,
                layout=layout,
                attach_s=ANSWER_S,
                deadlines=HOOK_DEADLINES,
            )
            for k, (engine, layout) in enumerate(zip(engines, layouts, strict=True))
        ]
        attaching: list[Future[object]] = [pool.submit(publisher.attach)]
        attaching.extend(pool.submit(r.attach) for r in receivers)
        for call in attaching:
            call.result(ANSWER_S)
        for number in (1, 2):
            for name, tensor in version_of(number).items():
                masters[name].copy_(tensor)
            publisher.publish()
            receiving = [pool.submit(r.receive, timeout_s=ANSWER_S) for r in receivers]

            assert [number] * SIZE == [received.result(ANSWER_S) for received in receiving]
            assert [[]] * SIZE == [differing(engine, number) for engine in engines]
        for receiver in receivers:
            receiver.close()
        publisher.close()


def differing(engine: VllmLike, number: int) -> list[str]:
    """Return the parameters that are not what the rank's own loader makes of a version."""
    expected = VllmLike(SIZE, engine.k)
    expected.load_weights(version_of(number).items())
    found = engine.state_dict()
    return [name for name, tensor in expected.state_dict().items() if not torch.equal(found[name], tensor)]
