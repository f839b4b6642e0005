"""The ranks of the DeepSpeed tests: each builds every case, publishes into slots, and compares with DeepSpeed's export.

Started as ``python -m tests.hooks.deepspeed_ranks FOLDER``, which forks them.  Verdicts are gathered first and
written by rank 0, so that a rank that is wrong does not leave the others in a collective.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.hooks.deepspeed_model import Setting, build, micro_batch, preload, start, truth
from tests.hooks.forks import free_port, run_forked
from weightd.core.errors import WeightdError
from weightd.core.layout.columns import Layout
from weightd.core.layout.message import encode_layout
from weightd.trainer_hooks.adapters.pick import holdings_of
from weightd.trainer_hooks.describe import Casts, Described, describe_holdings
from weightd.trainer_hooks.faults import UnsupportedPlacement
from weightd.trainer_hooks.publisher import Publisher
from weightd.trainer_hooks.slots import Slots

Bits = np.ndarray[Any, Any]

ALL = 1 << 30

WORLDS = {1: 3, 2: 4}
"""Ranks, by ranks of tensor parallelism: three cut nothing evenly, four are two by two."""

LIMIT_S = 240.0
"""For all cases of one world: thirty seconds on two cores, were they not as busy as they can be."""


def cases(tp: int) -> dict[str, Setting]:
    """Return every setting with ``tp`` ranks of tensor parallelism."""
    return {
        "no ZeRO": Setting(0, tp),
        "ZeRO-1": Setting(1, tp),
        "ZeRO-2": Setting(2, tp),
        "ZeRO-3": Setting(3, tp),
        "ZeRO-3 and zero.Init": Setting(3, tp, init=True),
        "ZeRO-2, round robin": Setting(2, tp, round_robin=True),
        "ZeRO-2, offload": Setting(2, tp, offload=True),
        "ZeRO-3, offload": Setting(3, tp, offload=True),
        "ZeRO-3, all persistent": Setting(3, tp, persistence=ALL),
        "ZeRO-3, some persistent": Setting(3, tp, persistence=20),
        "ZeRO-3, fp32": Setting(3, tp, fp32=True),
        "ZeRO-1, fp32": Setting(1, tp, fp32=True),
    }


ACCUMULATION = Setting(2, accumulation=3)
"""A step of three micro-batches."""


# ---------------------------------------------------------------- what was published, by the layout's numbers only


def carve(layout: Layout, payload: Bits) -> dict[str, list[tuple[Any, Any, Bits]]]:
    """Return (first index, extent, bits) of every piece."""
    found: dict[str, list[tuple[Any, Any, Bits]]] = {t.name: [] for t in layout.tensors}
    for row in range(layout.pieces):
        tensor, buffer = layout.tensors[layout.tensor[row]], layout.buffers[layout.buffer[row]]
        size = getattr(torch, buffer.dtype).itemsize
        n = len(tensor.shape)
        flat = payload[buffer.base : buffer.base + buffer.nbytes].view(f"u{size}")
        first, extent = layout.start[row, :n].tolist(), layout.extent[row, :n].tolist()
        strides = [size * s for s in layout.stride[row, :n].tolist()]
        piece = np.lib.stride_tricks.as_strided(flat[layout.offset[row] :], extent, strides)
        found[tensor.name].append((first, extent, piece.copy()))
    return found


def rebuilt(every: list[Any], expected: dict[str, Tensor]) -> dict[str, tuple[Bits, Bits]]:
    """Return bits and number of holders of every element, put together from all ranks."""
    result: dict[str, tuple[Bits, Bits]] = {}
    for name in every[0]:
        bits, seen = np.zeros(expected[name].shape, np.uint64), np.zeros(expected[name].shape, int)
        for first, extent, piece in (p for held in every for p in held[name]):
            box = tuple(slice(s, s + e) for s, e in zip(first, extent, strict=True))
            bits[box], seen[box] = piece, seen[box] + 1
        result[name] = bits, seen
    return result


def bits_of(tensor: Tensor) -> Bits:
    size = tensor.element_size()
    bits = tensor.detach().contiguous().view({2: torch.int16, 4: torch.int32}[size]).numpy()
    return bits.view(f"u{size}")


def rounded(bits: Bits) -> Bits:
    """Return fp32 bits as the bits of their bfloat16 rounding."""
    return bits_of(torch.from_numpy(bits.astype(np.uint32).view(np.float32)).to(torch.bfloat16))


# ---------------------------------------------------------------- one engine


class Scene:
    """An engine with a publisher's slots for what it computes with, for its masters, and for these cast."""

    def __init__(self, setting: Setting, rank: int, world: int) -> None:
        self.setting, self.rank, self.world = setting, rank, world
        self.engine = build(setting)
        self.bits = self._described()
        # Refused, see the unit tests: without ZeRO the masters cannot be reached from the parameters, and where
        # round_robin_gradients has put them is recorded wrongly.
        readable = setting.stage > 0 and not setting.round_robin
        self.masters = self._described(masters=True) if readable else None
        self.cast = self._described(torch.bfloat16, masters=True) if readable else None

    def _described(self, casts: Casts = None, masters: bool = False) -> Described:
        """Describe on one rank after the other, so that a collective could not come to its end."""
        found: Described | None = None
        for turn in range(self.world):
            if turn == self.rank:
                found = describe_holdings(holdings_of(self.engine, masters), casts, (), "a test")
            dist.barrier()
        assert found is not None
        return found

    def published(self, described: Described) -> list[Any]:
        """Publish on one rank after the other; return what each holds."""
        mine: Any = None
        for turn in range(self.world):
            if turn == self.rank:
                slots = Slots(0, described, "", 1)  # type: ignore[arg-type]
                slots.fill(0)
                mine = carve(described.layout, slots.pools[0].payload)
                slots.close()
            dist.barrier()
        every: list[Any] = [None] * self.world
        dist.all_gather_object(every, mine)
        return every

    def check(self, when: str) -> list[str]:
        """Return what is wrong, on rank 0."""
        expected = truth(self.engine, self.setting)
        with copies_spoilt(self.engine):
            bits, masters, cast = (self.published(d) if d else [] for d in (self.bits, self.masters, self.cast))
        if expected is None or self.rank:
            return []
        wrong = compare(expected, bits, bits_of, lambda found: found)
        if masters:
            wrong += self._wrong_masters(expected, masters, cast)
        return [f"{when}: {w}" for w in wrong]

    def _wrong_masters(self, expected: dict[str, Tensor], masters: list[Any], cast: list[Any]) -> list[str]:
        exact = {n: t for n, t in expected.items() if n in ("frozen", "seen")} if not self.setting.fp32 else expected
        plain = {n: t for n, t in expected.items() if n not in exact}
        wrong = [f"masters: {w}" for w in compare(exact, masters, bits_of, lambda found: found)]
        wrong += [f"masters: {w}" for w in compare(plain, masters, bits_of, rounded)]
        half = {n: t.to(torch.bfloat16) for n, t in expected.items()}
        return wrong + [f"masters, cast: {w}" for w in compare(half, cast, bits_of, lambda found: found)]


def named(module: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """Return every tensor that is to be published."""
    return [*module.named_parameters(), *module.named_buffers()]


def compare(
    expected: dict[str, Tensor], every: list[Any], bits: Callable[[Tensor], Bits], as_published: Callable[[Bits], Bits]
) -> list[str]:
    """Return the tensors that differ, or that ranks hold unequally often."""
    names = [n for n in every[0] if n in expected]
    wrong = []
    for name, (found, seen) in rebuilt([{n: held[n] for n in names} for held in every], expected).items():
        if seen.min() == 0 or seen.min() != seen.max():
            wrong.append(f"{name}: held {seen.min()} to {seen.max()} times")
        elif not np.array_equal(as_published(found), bits(expected[name])):
            wrong.append(f"{name}: other bits than DeepSpeed's export")
    return wrong


@contextmanager
def copies_spoilt(engine: Any) -> Iterator[None]:
    """Spoil what is no weight: padding of ZeRO-3 partitions, and the gathered copies of persistent parameters."""
    saved: list[tuple[Tensor, Tensor]] = []
    for param in engine.module.parameters():
        if not hasattr(param, "ds_tensor"):
            continue
        shard = param.ds_tensor
        low = min(param.ds_zero_partition_rank * shard.ds_numel, param.ds_numel)
        padding = shard[min(param.ds_numel - low, shard.ds_numel) :]
        for tensor in (padding, param.data):
            saved.append((tensor, tensor.clone()))
            tensor.fill_(float("nan"))
    yield
    for tensor, before in saved:
        tensor.copy_(before)


def case(setting: Setting, rank: int, world: int) -> list[str]:
    """Compare before and after a step, and with everything gathered."""
    scene = Scene(setting, rank, world)
    tied = scene.bits.layout.aliases == (("head.weight", "embed.weight"),)
    wrong = [] if tied else [f"aliases {scene.bits.layout.aliases}"]
    if {t.name for t in scene.bits.layout.tensors} != {n for n, _ in named(scene.engine.module)}:
        wrong.append(f"tensors {[t.name for t in scene.bits.layout.tensors]}")
    if encode_layout(Publisher(scene.engine, run="r").describe()) != encode_layout(scene.bits.layout):
        wrong.append("the publisher describes something else")
    if setting.round_robin:
        wrong += unrefused_masters(scene.engine)
    first = truth(scene.engine, setting)
    wrong += scene.check("before")
    micro_batch(scene.engine, rank // setting.tp)
    wrong += scene.check("after")
    if setting.stage == 3:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(scene.engine.module.parameters())):
            gathered = scene.published(scene.bits)
        expected = truth(scene.engine, setting)
        if expected is not None and rank == 0:
            wrong += [f"gathered: {w}" for w in compare(expected, gathered, bits_of, lambda found: found)]
    last = truth(scene.engine, setting)
    if first is not None and last is not None:
        same = [n for n, t in first.items() if torch.equal(t, last[n])]
        if sorted(same) != ["frozen", "seen"]:
            wrong.append(f"not changed by a step: {same}")
    scene.engine.destroy()
    return wrong


def unrefused_masters(engine: Any) -> list[str]:
    """Return what does not refuse masters that are not where DeepSpeed records them: the engine, or its module."""
    accepted = []
    for source in (engine, engine.module):
        try:
            holdings_of(source, masters=True)
        except UnsupportedPlacement:
            continue
        accepted.append(type(source).__name__)
    # A rank with masters of one parameter only has nothing to compare; the other ranks refuse.
    return accepted if "DeepSpeedEngine" in accepted or len(fragments(engine)) > 1 else []


def fragments(engine: Any) -> list[Any]:
    return [p for p in engine.module.parameters() if getattr(p, "_hp_mapping", None) is not None]


def refused(setting: Setting, rank: int) -> list[str]:
    """Return what a publish says before a step, in the middle of it, and behind it."""
    engine = build(setting)
    slots = Slots(0, describe_holdings(holdings_of(engine), None, (), "a test"), "", 1)  # type: ignore[arg-type]
    said = [outcome(slots)]
    for seed in range(setting.accumulation):
        micro_batch(engine, seed + 10 * rank)
        said.append(outcome(slots))
    engine.set_gradient_accumulation_boundary(False)
    said.append(outcome(slots))
    slots.close()
    engine.destroy()
    return said


def outcome(slots: Slots) -> str:
    try:
        slots.fill(0)
    except WeightdError as error:
        return str(error)
    return "published"


def rank_of(rank: int, world: int, port: int, folder: Path, tp: int) -> None:
    """Be one rank in all cases of one degree of tensor parallelism."""
    start(rank, world, port)
    verdicts = {name: case(setting, rank, world) for name, setting in cases(tp).items()}
    if tp == 1:
        verdicts["accumulation"] = refused(ACCUMULATION, rank)
    every: list[Any] = [None] * world
    dist.all_gather_object(every, verdicts)
    if rank == 0:
        (folder / f"verdicts-{tp}.json").write_text(json.dumps(every))
    dist.destroy_process_group()


def main() -> None:
    folder = Path(sys.argv[1])
    preload()
    for tp, world in WORLDS.items():
        port = free_port()
        codes = run_forked([(rank_of, (rank, world, port, folder, tp)) for rank in range(world)], LIMIT_S)
        if any(codes):
            sys.exit(f"tensor parallelism {tp}: ranks ended with {codes}")


if __name__ == "__main__":
    main()
