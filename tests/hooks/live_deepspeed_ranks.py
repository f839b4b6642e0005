"""DeepSpeed ranks whose parameters live in shared memory: what real steps write there, against DeepSpeed's own export.

Started as ``python -m tests.hooks.live_deepspeed_ranks FOLDER``, which forks them.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.hooks.deepspeed_model import Setting, build, micro_batch, preload, start, truth
from tests.hooks.deepspeed_ranks import bits_of, carve, compare
from tests.hooks.forks import free_port, run_forked
from weightd.core.errors import WeightdError
from weightd.core.layout.columns import Layout
from weightd.core.units import TrainerRank
from weightd.trainer_hooks.adapters.pick import holdings_of
from weightd.trainer_hooks.live.choice import written_between_steps
from weightd.trainer_hooks.live.layout import describe_live
from weightd.trainer_hooks.live.slots import LIVE, LiveSlots

WORLD, LIMIT_S = 3, 120.0

CASES = {
    "ZeRO-1": Setting(1),
    "ZeRO-2": Setting(2),
    "ZeRO-3": Setting(3),
    "ZeRO-3 and zero.Init": Setting(3, init=True),
    "ZeRO-3, some persistent": Setting(3, persistence=20),
}


def moved(engine: Any) -> tuple[LiveSlots, Layout]:
    """Move what a rank publishes into live memory."""
    described = describe_live(holdings_of(engine), written_between_steps(engine), (), "a test")
    assert [place.shard.name for place in described.places] == ["seen"], "only buffers are copied"
    return LiveSlots(TrainerRank(0), described, ""), described.layout


def check(engine: Any, slots: LiveSlots, layout: Layout, setting: Setting, when: str) -> list[str]:
    """Return what is wrong with what is in the memory, on rank 0."""
    expected = truth(engine, setting)
    assert slots._storages is not None
    replaced = slots._storages.settle()
    if replaced:
        return [f"{when}: {replaced} storages are elsewhere"]
    slots.fill(LIVE)
    mine = carve(layout, slots.pools[LIVE].payload)
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, mine)
    if expected is None:
        return []
    return [f"{when}: {w}" for w in compare(expected, every, bits_of, lambda found: found)]


def case(setting: Setting, rank: int) -> list[str]:
    """Step in live memory, save and load, and step again once it is given back."""
    engine = build(setting)
    try:
        slots, layout = moved(engine)
    except WeightdError as error:
        engine.destroy()
        return [str(error)]
    wrong = check(engine, slots, layout, setting, "before")
    first = slots.pools[LIVE].payload.copy()
    for step in range(2):
        slots.begin_writing()
        micro_batch(engine, rank + step)
        wrong += check(engine, slots, layout, setting, f"after step {step + 1}")
    if np.array_equal(first, slots.pools[LIVE].payload):
        wrong.append("steps changed nothing in the memory")
    published = slots.pools[LIVE].payload.copy()
    payload = slots.pools[LIVE].payload
    slots.close()
    before = truth(engine, setting)
    micro_batch(engine, rank)
    after = truth(engine, setting)
    if not np.array_equal(published, payload):
        wrong.append("a step wrote memory that was given back")
    if before is not None and after is not None and torch.equal(before["odd"], after["odd"]):
        wrong.append("a step after the end changed nothing")
    engine.destroy()
    return wrong


def rank_of(rank: int, port: int, folder: Path) -> None:
    """Be one rank in all cases."""
    start(rank, WORLD, port)
    verdicts = {name: case(setting, rank) for name, setting in CASES.items()}
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, verdicts)
    if rank == 0:
        (folder / "verdicts.json").write_text(json.dumps(every))
    dist.destroy_process_group()


def main() -> None:
    folder = Path(sys.argv[1])
    preload()
    port = free_port()
    codes = run_forked([(rank_of, (r, port, folder)) for r in range(WORLD)], LIMIT_S)
    sys.exit(int(any(codes)))


if __name__ == "__main__":
    main()
