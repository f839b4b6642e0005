"""A DeepSpeed trainer of four ranks and an engine of four ranks, each a process, under daemons that run already.

Started as ``python -m tests.integration.deepspeed_ranks FOLDER SOCKET_A SOCKET_B``, which forks them, run by run.
Each rank writes what it found and ends in order whatever that is: the test judges all of them together.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from tests.hooks.deepspeed_model import HIDDEN, VOCAB, Setting, build, micro_batch, preload, start, truth
from tests.hooks.forks import free_port, run_forked
from tests.integration.cluster import HOOK_DEADLINES
from tests.integration.ranks import bits_of, tensor_of
from tests.integration.weights import POISON, Bits, split
from weightd.core.errors import WeightdError
from weightd.rollout_hooks.declare import Declaration, Part
from weightd.rollout_hooks.receiver import Receiver
from weightd.trainer_hooks.adapters import autotp
from weightd.trainer_hooks.publisher import Publisher

TP, DP, SIZE = 2, 2, 4
"""The trainer's tensor and data parallelism, and the engine's ranks."""

INNER = 18
"""9 and 9 on the trainer's ranks; 5, 5, 4 and 4 on the engine's."""

SETTINGS = {
    "zero-1": Setting(1, TP, inner=INNER),
    "zero-2": Setting(2, TP, inner=INNER),
    "zero-3": Setting(3, TP, inner=INNER),
    "zero-3-init": Setting(3, TP, init=True, inner=INNER),
}

VERSIONS = (1, 2)
"""Before a training step, and behind it."""

WAIT_S, ATTACH_S, RUN_S = 40.0, 60.0, 120.0

DEADLINES = msgspec.structs.replace(HOOK_DEADLINES, collect_s=30.0, fetch_s=30.0, apply_wait_s=30.0)


class Run(NamedTuple):
    """One trainer and one engine.

    Attributes:
        setting: Name of the trainer's setting.
        swapped: Whether each trainer rank takes its memory for that of its neighbour in tensor parallelism.
    """

    setting: str
    swapped: bool

    @property
    def name(self) -> str:
        """The run's name."""
        return f"{self.setting}{'-swapped' if self.swapped else ''}"

    def verdict(self, who: str) -> str:
        """Name of the file with a rank's verdict."""
        return f"{self.name}.{who}.json"


RUNS = [Run(setting, swapped) for swapped in (False, True) for setting in SETTINGS]


def attempt(call: Callable[..., Any], *arguments: Any) -> list[str]:
    """Return the text of the error that a call raises."""
    try:
        call(*arguments)
    except WeightdError as error:
        return [str(error)]
    return []


# ---------------------------------------------------------------- trainer


def trainer(rank: int, port: int, run: Run, folder: Path, socket: str) -> None:
    """Publish once before a step and once behind it."""
    start(rank, TP * DP, port)
    if run.swapped:
        own = autotp._rank_in_group
        autotp._rank_in_group = lambda leaf: TP - 1 - own(leaf)
    setting = SETTINGS[run.setting]
    engine = build(setting)
    publisher = Publisher(
        engine,
        run=run.name,
        slot=f"trainer-{rank}",
        engines={"E0": SIZE},
        unused=["seen"],
        socket=socket,
        attach_s=ATTACH_S,
        deadlines=DEADLINES,
    )
    wrong = together(attempt(publisher.attach))
    for version in VERSIONS:
        if wrong:
            break
        if version > 1:
            micro_batch(engine, rank // TP)
        keep(truth(engine, setting), folder / f"{run.name}.{version}.npz")
        wrong = together(attempt(publisher.publish) or attempt(publisher.wait, version, "committed", WAIT_S))
    publisher.close()
    (folder / run.verdict(f"trainer-{rank}")).write_text(json.dumps(wrong))
    dist.barrier()
    dist.destroy_process_group()


def together(wrong: list[str]) -> list[str]:
    """Return the errors of all ranks, so that they go on together or not at all."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, wrong)
    return [text for found in every for text in found]


def keep(whole: Mapping[str, torch.Tensor] | None, path: Path) -> None:
    """Write the truth for the engine's ranks; only rank 0, before it publishes and so before anybody may look."""
    if whole is not None and dist.get_rank() == 0:
        found: dict[str, Any] = {name: bits_of(t) for name, t in whole.items() if t.dtype == torch.bfloat16}
        np.savez(path, **found)


# ---------------------------------------------------------------- engine

HEADS, WIDTHS = split(HIDDEN, SIZE), split(INNER, SIZE)
ROWS = -(-VOCAB // SIZE)
REPLICATED = {
    "layers.0.norm.weight": (HIDDEN,),
    "layers.0.norm.bias": (HIDDEN,),
    "layers.0.o_proj.bias": (HIDDEN,),
    "layers.0.down.bias": (HIDDEN,),
    "odd": (7, 5, 3),
    "one": (1,),
    "frozen": (4, 3),
}


def declare(k: int) -> Declaration:
    """Return what rank ``k`` needs."""
    d = Declaration("bfloat16")
    d.vocabulary("embed.weight", (VOCAB, HIDDEN), [ROWS] * SIZE, k)
    d.tied("head.weight", "embed.weight")
    fuse(d, "layers.0.qkv_proj.weight", 3, (HIDDEN, HIDDEN), HEADS, k)
    fuse(d, "layers.0.qkv_proj.bias", 3, (HIDDEN,), HEADS, k)
    fuse(d, "layers.0.gate_up.weight", 2, (INNER, HIDDEN), WIDTHS, k)
    d.row("layers.0.o_proj.weight", (HIDDEN, HIDDEN), HEADS, k)
    d.column("layers.0.up.weight", (INNER, HIDDEN), WIDTHS, k)
    d.column("layers.0.up.bias", (INNER,), WIDTHS, k)
    d.row("layers.0.down.weight", (HIDDEN, INNER), WIDTHS, k)
    for name, shape in REPLICATED.items():
        d.replicated(name, shape)
    return d


def fuse(d: Declaration, name: str, parts: int, part: tuple[int, ...], sizes: list[int], k: int) -> None:
    """Declare a tensor of several that are stacked, each of which is cut."""
    shape, rows = (parts * part[0], *part[1:]), rows_of(sizes, k)
    stacked = [(i * part[0] + rows.start, i * part[0] + rows.stop) for i in range(parts)]
    d.fused(name, [Part(name, shape, some) for some in stacked])


def rows_of(sizes: list[int], k: int) -> slice:
    return slice(sum(sizes[:k]), sum(sizes[: k + 1]))


def expected(whole: Mapping[str, Bits], k: int) -> dict[str, Bits]:
    """Return what rank ``k`` must hold, by slices of what DeepSpeed exported."""
    heads, widths = rows_of(HEADS, k), rows_of(WIDTHS, k)
    embed = np.full((ROWS, HIDDEN), POISON, np.uint16)
    some = whole["embed.weight"][k * ROWS : (k + 1) * ROWS]
    embed[: len(some)] = some
    found = {name: whole[name] for name in REPLICATED}
    found["embed.weight"] = embed
    for name in ("layers.0.qkv_proj.weight", "layers.0.qkv_proj.bias"):
        found[name] = np.concatenate([part[heads] for part in np.split(whole[name], 3)])
    gate_up = np.split(whole["layers.0.gate_up.weight"], 2)
    found["layers.0.gate_up.weight"] = np.concatenate([part[widths] for part in gate_up])
    found["layers.0.o_proj.weight"] = whole["layers.0.o_proj.weight"][:, heads]
    found["layers.0.down.weight"] = whole["layers.0.down.weight"][:, widths]
    for name in ("layers.0.up.weight", "layers.0.up.bias"):
        found[name] = whole[name][widths]
    return found


def engine(k: int, run: Run, folder: Path, socket: str) -> None:
    """Receive both versions and compare every byte."""
    torch.set_num_threads(1)
    declared = declare(k)
    params = {
        name: tensor_of(np.full(p.shape, POISON, np.uint16))
        for name, p in declared.parameters().items()
        if name != "head.weight"
    }
    receiver = Receiver(
        params,
        run=run.name,
        engine="E0",
        k=k,
        size=SIZE,
        slot=f"engine-{k}",
        layout=declared,
        socket=socket,
        attach_s=ATTACH_S,
        deadlines=DEADLINES,
    )
    found: dict[str, list[str]] = {"attach": attempt(receiver.attach)}
    for version in VERSIONS:
        if not any(found.values()) or run.swapped:
            found[str(version)] = attempt(receiver.receive, version, WAIT_S) or differing(
                params, np.load(folder / f"{run.name}.{version}.npz"), k
            )
    receiver.close()
    (folder / run.verdict(f"engine-{k}")).write_text(json.dumps(found))


def differing(params: Mapping[str, torch.Tensor], whole: Mapping[str, Bits], k: int) -> list[str]:
    """Return the parameters of which any byte is not as it is to be."""
    return sorted(n for n, bits in expected(whole, k).items() if not np.array_equal(bits_of(params[n]), bits))


def main() -> None:
    folder, sockets = Path(sys.argv[1]), sys.argv[2:4]
    preload()
    for run in RUNS:
        port = free_port()
        ranks = [(trainer, (r, port, run, folder, sockets[r // TP])) for r in range(TP * DP)]
        engines = [(engine, (k, run, folder, sockets[k // TP])) for k in range(SIZE)]
        codes = run_forked([*ranks, *engines], RUN_S)
        if any(codes):
            sys.exit(f"{run.name}: ranks ended with {codes}")


if __name__ == "__main__":
    main()
