"""FSDP2 ranks whose parameters live in shared memory: what real steps write there, against ``full_tensor()``.

Started as ``python -m tests.hooks.live_fsdp2_ranks PORT FOLDER``, which forks all ranks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.hooks.forks import run_forked
from tests.hooks.fsdp2_models import CASES, WORLD, Case, Training
from tests.hooks.fsdp2_ranks import Rank, compared
from weightd.core.errors import WeightdError
from weightd.core.units import TrainerRank
from weightd.trainer_hooks.adapters.pick import holdings_of
from weightd.trainer_hooks.live.choice import written_between_steps
from weightd.trainer_hooks.live.layout import describe_live
from weightd.trainer_hooks.live.slots import LiveSlots
from weightd.trainer_hooks.shards import Holdings

LIMIT_S = 400.0

LIVE_CASES = {name: case for name, case in CASES.items() if case.dtype is None}
"""A cast needs a copy."""


class LiveRank(Rank):
    """This rank's part of one case, in live memory."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        Training.__init__(self, case)
        holdings = Holdings(()) if self.model is None else holdings_of(self.model)
        self.described = describe_live(holdings, written_between_steps(self.model), (), "a test")
        self.slots = LiveSlots(TrainerRank(dist.get_rank()), self.described, "")

    def strays(self) -> int:
        """Return the storages that are not in the memory any more."""
        assert isinstance(self.slots, LiveSlots)
        assert self.slots._storages is not None
        return self.slots._storages.settle()


def check(case: Case) -> list[str]:
    """Return what is wrong with a case."""
    rank = LiveRank(case)
    before = rank.truth()
    wrong = compared("before a step", case, rank.published(), before)
    rank.forward()
    wrong += compared("behind a forward", case, rank.published(), before)
    for number in (1, 2):
        rank.step()
        astray = rank.strays()
        wrong += [f"step {number}: {astray} storages are elsewhere"] if astray else []
        wrong += compared(f"behind step {number}", case, rank.published(), rank.truth())
    after = rank.truth()
    wrong += [f"the steps left {n} as it was" for n in after if n != "seen" and torch.equal(after[n], before[n])]
    payload = rank.slots.pools[0].payload
    published = payload.copy()
    rank.slots.close()
    rank.step()
    wrong += [] if (published == payload).all() else ["a step wrote memory that was given back"]
    return wrong


def live(rank: int, port: int, folder: Path) -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    verdicts: dict[str, list[str]] = {}
    for name, case in LIVE_CASES.items():
        try:
            verdicts[name] = check(case)
        except WeightdError as error:
            verdicts[name] = [str(error)]
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, verdicts)
    if rank == 0:
        (folder / "verdicts.json").write_text(json.dumps(every))
    dist.destroy_process_group()


def main() -> None:
    """Be the parent of all ranks."""
    port, folder = int(sys.argv[1]), Path(sys.argv[2])
    sys.exit(int(any(run_forked([(live, (rank, port, folder)) for rank in range(WORLD)], LIMIT_S))))


if __name__ == "__main__":
    main()
