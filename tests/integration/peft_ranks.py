"""A PEFT model under FSDP2 on two trainer ranks, and an engine of one, under a daemon that runs already.

Started as ``python -m tests.integration.peft_ranks FOLDER SOCKET``, which forks them.  The engine writes what differs
from PEFT's own merge of the whole model, version by version.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.hooks.forks import free_port, run_forked
from tests.hooks.peft_models import adapted, merged_by_peft
from tests.integration.cluster import HOOK_DEADLINES
from weightd.rollout_hooks.declare import Declaration
from weightd.rollout_hooks.receiver import Receiver
from weightd.trainer_hooks.facts import Facts
from weightd.trainer_hooks.publisher import Publisher

WORLD, VERSIONS = 2, (1, 2, 3)
WAIT_S, LIMIT_S = 30.0, 90.0
DEADLINES = msgspec.structs.replace(HOOK_DEADLINES, attach_s=60.0, collect_s=30.0, release_s=30.0)
RENAMED = {"": "language_model", "lm_head": "lm_head"}
"""The engine serves a tower that the trainer has alone."""


def step(model: torch.nn.Module) -> None:
    """Change every parameter that trains; small integers stay small integers."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
                local.neg_().add_(1)


def expected(version: int) -> dict[str, Tensor]:
    """Return what the engine is to hold: PEFT's merge of the whole model, under the engine's names."""
    model = adapted(modules_to_save=["lm_head"])
    for _ in range(version - 1):
        step(model)
    merged = merged_by_peft(model)
    return {n if n.startswith("lm_head") else f"language_model.{n}": t for n, t in merged.items()}


def trainer(rank: int, port: int, socket: str) -> None:
    """Publish the merged model, step after step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    model = adapted(modules_to_save=["lm_head"])
    for block in model.base_model.model.layers:
        fully_shard(block)
    fully_shard(model)
    with Publisher(
        model,
        run="adapters",
        slot=f"trainer-{rank}",
        engines={"E0": 1},
        lora="merged",
        renamed=RENAMED,
        facts=Facts(frozen=["language_model.emb.*"]),
        check_replicas=True,
        socket=socket,
        deadlines=DEADLINES,
    ) as publisher:
        for version in VERSIONS:
            publisher.wait(publisher.publish(label=f"step {version}"), timeout_s=WAIT_S)
            step(model)


def engine(folder: Path, socket: str) -> None:
    """Receive every version and write what differs from the oracle."""
    torch.set_num_threads(1)
    declaration, params = Declaration("float32"), {}
    for name, tensor in expected(1).items():
        declaration.replicated(name, tensor.shape)
        params[name] = torch.full_like(tensor, float("nan"))
    declaration.kept("visual.proj", (2, 2))
    params["visual.proj"] = torch.ones(2, 2)
    found: dict[str, list[str]] = {}
    with Receiver(
        params,
        run="adapters",
        engine="E0",
        k=0,
        size=1,
        slot="engine",
        layout=declaration,
        socket=socket,
        deadlines=DEADLINES,
    ) as receiver:
        for version in VERSIONS:
            receiver.receive(version, WAIT_S)
            found[str(version)] = unequal(params, expected(version) | {"visual.proj": torch.ones(2, 2)})
    (folder / "found.json").write_text(json.dumps(found))


def unequal(params: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """Return the names of which any element differs."""
    return [name for name, tensor in wanted.items() if not torch.equal(params[name], tensor)]


def main() -> None:
    folder, socket, port = Path(sys.argv[1]), sys.argv[2], free_port()
    calls = [(trainer, (rank, port, socket)) for rank in range(WORLD)]
    codes = run_forked([*calls, (engine, (folder, socket))], LIMIT_S)
    if any(codes):
        sys.exit(f"ranks ended with {codes}")


if __name__ == "__main__":
    main()
