"""PEFT models in DeepSpeed engines of two ranks, against PEFT's merge of the whole model.

Started as ``python -m tests.hooks.deepspeed_peft FOLDER``, which forks the ranks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import get_peft_model_state_dict
from torch import Tensor

from tests.hooks.deepspeed_model import Setting, preload, start
from tests.hooks.forks import free_port, run_forked
from tests.hooks.peft_models import Net, adapted, merged_by_peft
from tests.hooks.published import Rank, unequal, whole

WORLD, LIMIT_S = 2, 120.0
STAGES = (2, 3)


def in_bfloat16(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what DeepSpeed keeps of these whole numbers, which are small enough to be exact."""
    return {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in tensors.items()}


def published(engine: Any, lora: str) -> dict[str, Tensor]:
    """Return what both ranks publish together."""
    rank = Rank(engine, dist.get_rank(), WORLD, lora=lora)
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, rank.fill())
    return whole(every)


def check(stage: int) -> dict[str, list[str]]:
    """Return what differs of the merged model, of its names, and of the adapter alone."""
    import deepspeed

    model = adapted(modules_to_save=["lm_head"], target_modules=["q", "o", "emb"])
    merged = in_bfloat16(merged_by_peft(model))
    alone = in_bfloat16(dict(get_peft_model_state_dict(model, save_embedding_layers=False)))
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(trained, lr=0.1), config=Setting(stage).config()
    )
    found = in_bfloat16(published(engine, "merged"))
    return {
        "merged": unequal(found, merged),
        "names": sorted(set(found) ^ set(Net().state_dict())),
        "adapter": unequal(in_bfloat16(published(engine, "adapter")), alone),
    }


def rank_of_two(rank: int, port: int, folder: Path) -> None:
    """Check both stages on one rank."""
    start(rank, WORLD, port)
    found = {str(stage): check(stage) for stage in STAGES}
    (folder / f"found-{rank}.json").write_text(json.dumps(found))


def main() -> None:
    folder, port = Path(sys.argv[1]), free_port()
    preload()
    codes = run_forked([(rank_of_two, (rank, port, folder)) for rank in range(WORLD)], LIMIT_S)
    if any(codes):
        sys.exit(f"ranks ended with {codes}")


if __name__ == "__main__":
    main()
