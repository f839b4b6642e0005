"""The ranks of the FSDP2 tests: each builds every case, publishes it into slots, and compares with ``full_tensor()``.

Started as ``python -m tests.hooks.fsdp2_ranks PORT FOLDER SOCKET SOCKET``, which forks all ranks: importing torch eight
times takes longer than all cases.
Verdicts are gathered first and written by rank 0, so that a rank that is wrong does not leave the others in a
collective.  After the cases, some models are published through real daemons.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from tests.hooks.delivery import Held, Params, delivered, differing
from tests.hooks.fsdp2_models import CASES, WORLD, Case, Training, declaration, expected, whole
from weightd.core.errors import WeightdError
from weightd.core.layout.columns import Layout
from weightd.core.layout.message import decode_layout, encode_layout
from weightd.core.session.deadlines import Deadlines
from weightd.core.units import TrainerRank
from weightd.trainer_hooks.adapters.pick import holdings_of
from weightd.trainer_hooks.describe import describe_holdings
from weightd.trainer_hooks.publisher import Publisher
from weightd.trainer_hooks.shards import Holdings
from weightd.trainer_hooks.slots import Slots

SIZES = (1, 3, 4)
"""Ranks of the engines."""

LIMIT_S = 280.0

ATTACH_S = 120.0

THROUGH_DAEMONS = ("HSDP+TP, 7 rows", "FSDP+TP, 9 rows on 4 x 2", "mixed precision, bf16 published")


class Rank(Training):
    """This rank's part of one case, and the slot that it is published into."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        super().__init__(case)
        self.wrong: list[str] = []
        try:
            holdings = Holdings(()) if self.model is None else holdings_of(self.model)
        except WeightdError as error:  # told with the others, so that they do not wait for this rank
            holdings = Holdings(())
            self.wrong.append(str(error))
        self.described = describe_holdings(holdings, case.dtype, (), "a test")
        self.slots = Slots(TrainerRank(dist.get_rank()), self.described, "", 1)

    def published(self) -> list[Held]:
        """Publish, and return what all ranks have published."""
        try:
            self.slots.fill(0)
        except WeightdError as error:
            self.wrong.append(str(error))
        every: list[Any] = [None] * WORLD
        dist.all_gather_object(every, (encode_layout(self.described.layout), self.slots.pools[0].payload.tobytes()))
        return [(decode_layout(layout), np.frombuffer(payload, np.uint8)) for layout, payload in every]

    def truth(self) -> Params:
        """Return every whole tensor."""
        return {} if self.model is None else whole(self.model)


def check(case: Case) -> list[str]:
    """Return what is wrong with a case; what is delivered is looked at by rank 0."""
    rank = Rank(case)
    wrong = _own_faults(rank)
    first = rank.published()
    before = rank.truth()
    wrong += compared("before a step", case, first, before)
    visible = rank.forward()
    if rank.model is not None and "cube" not in visible:
        wrong.append(f"nothing is gathered behind a forward: {visible}")
    wrong += compared("behind a forward", case, rank.published(), before)
    rank.step()
    stepped = rank.published()
    after = rank.truth()
    wrong += compared("behind a step", case, stepped, after)
    wrong += [f"the step left {n} as it was" for n in after if n != "seen" and torch.equal(after[n], before[n])]
    rank.slots.close()
    return rank.wrong + wrong


def _own_faults(rank: Rank) -> list[str]:
    if rank.model is None or rank.wrong:
        return []
    layout: Layout = Publisher(rank.model, run="r", dtype=rank.case.dtype, adapter="fsdp2").describe()
    aliases = (("head.weight", "emb.weight"),) if rank.case.tied else ()
    wrong = [] if layout.aliases == aliases else [f"aliases {layout.aliases}"]
    if "scratch" in {t.name for t in layout.tensors}:
        wrong.append("a buffer that is not persistent is published")
    return wrong


def compared(when: str, case: Case, trainers: Sequence[Held], truth: Params) -> list[str]:
    """Return each parameter of each engine that is not what ``full_tensor()`` says."""
    if dist.get_rank() != 0:
        return []
    wrong = []
    for size in SIZES:
        node = "a" if size > 1 else "b"  # the same node, and another one
        try:
            params = delivered(trainers, size, partial(declaration, case, size), node)
        except WeightdError as error:
            return [f"{when}, TP{size}: {error}"]
        for k in range(size):
            names = differing(params[k], expected(case, truth, size, k))
            wrong += [f"{when}, TP{size}[{k}]: {name} is not equal to full_tensor()" for name in names]
    return wrong


def refusal_of_partial() -> str:
    tensor = DTensor.from_local(torch.ones(2, 3), init_device_mesh("cpu", (WORLD,)), [Partial()], run_check=False)
    try:
        holdings_of({"layer.weight": tensor})
    except WeightdError as error:
        return str(error)
    return "not refused"


# ------------------------------------------------------------ through daemons


def file_of(folder: Path, name: str, version: int) -> Path:
    """Return where rank 0 leaves the truth of a version."""
    return folder / f"{THROUGH_DAEMONS.index(name)}-{version}.npz"


def publish_all(folder: Path, sockets: Sequence[Path]) -> None:
    """Publish two versions of each chosen case to an engine of three ranks, half of the ranks on each node."""
    rank = dist.get_rank()
    for name in THROUGH_DAEMONS:
        torch.manual_seed(1)
        case = CASES[name]
        training = Training(case)
        assert training.model is not None
        publisher = Publisher(
            training.model,
            run=f"run-{THROUGH_DAEMONS.index(name)}",
            rank=rank,
            world=WORLD,
            engines={"E0": 3} if rank == 0 else None,
            dtype=case.dtype,
            slot=f"t{rank}",
            socket=sockets[rank // 4],
            deadlines=Deadlines(attach_s=ATTACH_S),
        )
        with publisher:
            for version in (1, 2):
                publisher.publish()  # what the step left gathered is let go of only behind it, by whole()
                _leave(file_of(folder, name, version), whole(training.model))
                publisher.wait(version, timeout_s=60.0)
                training.step()


def _leave(path: Path, truth: Params) -> None:
    if dist.get_rank() == 0:
        arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in truth.items()}
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.savez(file, **arrays)
        part.rename(path)


def truth_of(path: Path) -> Params:
    """Read what rank 0 left."""
    with np.load(path) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


# ------------------------------------------------------------ process


def live(rank: int, port: int, folder: Path, sockets: Sequence[Path]) -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    verdicts: dict[str, list[str]] = {name: check(case) for name, case in CASES.items()}
    verdicts["partial"] = [refusal_of_partial()]
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, verdicts)
    if rank == 0:
        (folder / "verdicts.json").write_text(json.dumps(every))
    publish_all(folder, sockets)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Be the parent of all ranks, and end as the worst of them."""
    port, folder, sockets = int(sys.argv[1]), Path(sys.argv[2]), [Path(text) for text in sys.argv[3:]]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=live, args=(rank, port, folder, sockets)) for rank in range(WORLD)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(LIMIT_S)
    sys.exit(max(1 if rank.exitcode is None else abs(rank.exitcode) for rank in ranks))


if __name__ == "__main__":
    main()
