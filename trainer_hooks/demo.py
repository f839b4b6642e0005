"""One FSDP2 rank of the demo: trains a small model and publishes every step.

``python -m weightd.trainer_hooks.demo`` is started by ``weightd demo``, once a rank; it
also shows all that a trainer adds to its loop: one ``Publisher`` and, behind every
step, one ``publish``.  What it does is said in lines of JSON on standard output, and orders
come in lines of JSON on standard input.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from weightd.core.errors import WeightdError, flatten
from weightd.trainer_hooks.demo_model import CausalLM, ModelConfig, read_config
from weightd.trainer_hooks.publisher import Publisher

BATCH, TOKENS = 2, 24
COMMIT_S = 60.0


def say(event: str, **facts: object) -> None:
    """Tell the parent one thing that happened."""
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


def next_order() -> dict[str, Any]:
    """Return the parent's next order; the end of the input is the order to stop."""
    line = sys.stdin.readline()
    return json.loads(line) if line else {"order": "stop"}


def build_model(config: ModelConfig) -> CausalLM:
    """Return the model, sharded over the default process group, computing in bfloat16 and stored in float32."""
    torch.manual_seed(0)  # the same initial weights on every rank
    model = CausalLM(config)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    return model


def train_step(model: CausalLM, optimizer: torch.optim.Optimizer, ids: Tensor) -> float:
    """Take one step and return the loss before it."""
    loss = model(ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def write_oracle(model: nn.Module, folder: Path, version: int) -> None:
    """Gather every whole tensor (a collective) and let rank 0 write them, for the engines to compare with.

    Nothing of the product takes part: ``full_tensor()`` is torch's own way to the truth.
    """
    listing: list[dict[str, object]] = []
    offset = 0
    chief = dist.get_rank() == 0
    with (folder / f"v{version}.bin").open("wb") if chief else open(os.devnull, "wb") as out:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            bits = whole.detach().to(torch.bfloat16).contiguous().view(torch.int16)
            listing.append({"name": name, "shape": list(whole.shape), "offset": offset})
            offset += bits.numel()
            out.write(bits.numpy().tobytes())
    if chief:
        part = folder / f"v{version}.json.part"
        part.write_text(json.dumps(listing))
        part.replace(folder / f"v{version}.json")


def local_nbytes(model: nn.Module) -> int:
    """Return the bytes that this rank publishes of its shards in bfloat16."""
    local = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return sum(shard.numel() for shard in local) * torch.bfloat16.itemsize


def train_and_publish(model: CausalLM, publisher: Publisher, config: ModelConfig, folder: Path, versions: int) -> None:
    """Take ``versions`` steps and publish after each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(publisher.rank)
    nbytes = local_nbytes(model)
    for step in range(1, versions + 1):
        ids = torch.randint(config.vocab_size, (BATCH, TOKENS), generator=draw)
        began = time.monotonic()
        loss = train_step(model, optimizer, ids)
        trained = time.monotonic()
        version = publisher.publish(label=f"step {step}")
        published = time.monotonic()
        say("trained", step=step, loss=loss, seconds=trained - began)
        say("published", version=version, nbytes=nbytes, seconds=published - trained)
        write_oracle(model, folder, version)
        # The next step begins while engines still receive this version: its bytes lie in a slot of their own.
    publisher.wait(versions, timeout_s=COMMIT_S)


def take_part(model: CausalLM, config: ModelConfig, folder: Path, versions: int, order: dict[str, Any]) -> None:
    """Attach to the run that ``order`` names, and stay in it until the next order."""
    publisher = Publisher(
        model, run=order["run"], engines=order["engines"], dtype=torch.bfloat16, socket=order["socket"]
    )
    began = time.monotonic()
    try:
        publisher.attach()
    except WeightdError as error:
        say("refused", codes=[e.code for e in flatten([error])], text=str(error), seconds=time.monotonic() - began)
        return
    say("attached", seconds=time.monotonic() - began)
    with publisher:
        train_and_publish(model, publisher, config, folder, versions)
        say("finished")
        next_order()


def main() -> None:
    """Be one rank until the parent's orders end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--versions", type=int, default=3)
    parser.add_argument("--folder", type=Path, required=True, help="holds config.json; the gathered tensors go there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{args.folder}/rendezvous", rank=args.rank, world_size=args.world
    )
    config = read_config(args.folder / "config.json")
    model = build_model(config)
    say("ready")
    try:
        while (order := next_order())["order"] == "run":
            take_part(model, config, args.folder, args.versions, order)
    except WeightdError as error:
        say("failed", text=str(error))
        sys.exit(1)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
