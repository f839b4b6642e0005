"""What one ``publish()`` takes in a trainer, beside one memcpy of the bytes that the trainer holds.

A real daemon, one engine rank in a process of its own that takes every version, and a trainer rank in this one; the
engine takes most of its time after a publish has returned, so what is measured is what a training loop waits for.
Every round copies the same bytes between two plain buffers first, so that both sides meet the same machine.

    python -m bench.publish                                    bfloat16 as held, float32 published as bfloat16,
                                                               and bfloat16 in live memory
    python -m bench.publish --mib 512 --versions 50 --model moe
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from weightd.daemon.children import Children
from weightd.daemon.local_nodes import LocalNodes, short_folder
from weightd.rollout_hooks.receiver import Receiver
from weightd.trainer_hooks.live.choice import Memory
from weightd.trainer_hooks.publisher import Publisher

RUN = "bench-publish"
WARM = 3
"""Versions before the clock runs: each slot is written once, and the engine has mapped both."""

LIMIT_S = 600.0
MODES = ("bf16", "fp32-as-bf16", "bf16-live")


@dataclass(frozen=True)
class Figures:
    """What one mode took; times are ratios to a memcpy of the source bytes in the same round."""

    mode: str
    tensors: int
    source_mib: float
    publish_over_memcpy: float
    worst: float
    extra_memory_over_source: float
    rss_growth_mib: float
    fds_growth: int
    versions: int


def shapes(model: str, mib: int, itemsize: int) -> dict[str, tuple[int, ...]]:
    """Return tensors of about ``mib`` MiB: a few hundred large ones, or thousands of small ones."""
    left, table = (mib << 20) // itemsize, {}
    kinds = [(2048, 704), (1024, 1024), (1024, 2816), (1024,)] if model == "dense" else [(512, 96), (96, 256), (256,)]
    while left > 0:
        for kind in kinds:
            table[f"layers.{len(table)}.weight"] = kind
            left -= int(np.prod(kind))
    return table


def resident() -> int:
    """Return this process's resident bytes, shared memory included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fds() -> int:
    """Return how many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


def serve_engine(table: Mapping[str, tuple[int, ...]], socket: str) -> None:
    """Take every version until the run ends."""
    params = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in table.items()}
    with Receiver(params, run=RUN, engine="E0", k=0, size=1, slot="engine", socket=socket) as receiver:
        version = 0
        print("ready", flush=True)
        while sys.stdin.readline():
            version = receiver.receive(version + 1, timeout_s=LIMIT_S)


class Source:
    """The trainer's tensors, views of one buffer, and the memcpy of them."""

    def __init__(self, table: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        sizes = [int(np.prod(shape)) for shape in table.values()]
        self._all = torch.ones(sum(sizes), dtype=dtype)
        parts = torch.split(self._all, sizes)
        self.tensors = {name: part.view(shape) for (name, shape), part in zip(table.items(), parts, strict=True)}
        self._from = np.ones(self._all.nbytes, np.uint8)
        self._to = np.ones_like(self._from)
        self.nbytes = self._all.nbytes

    def step(self) -> None:
        """Change every element, as a training step does."""
        self._all.add_(1)

    def memcpy(self) -> float:
        """Return the seconds of one copy of as many bytes."""
        begun = time.perf_counter()
        self._to[...] = self._from
        return time.perf_counter() - begun


def measure(mode: str, table: Mapping[str, tuple[int, ...]], versions: int, engine: "Engine", socket: Path) -> Figures:
    """Publish ``versions`` versions and return what they took."""
    source = Source(table, torch.float32 if mode.startswith("fp32") else torch.bfloat16)
    before = resident()
    cast = torch.bfloat16 if mode.startswith("fp32") else None
    memory: Memory = "live" if mode.endswith("live") else "snapshot"
    with Publisher(
        source.tensors,
        run=RUN,
        rank=0,
        world=1,
        slot="trainer",
        engines={"E0": 1},
        dtype=cast,
        socket=socket,
        memory=memory,
    ) as publisher:
        extra = resident() - before
        ratios, at_start = [], (0, 0)
        for number in range(WARM + versions):
            publisher.before_step()
            source.step()
            limit = source.memcpy()
            begun = time.perf_counter()
            version = publisher.publish()
            took = time.perf_counter() - begun
            engine.take()
            publisher.wait(version, timeout_s=LIMIT_S)
            if number >= WARM:
                ratios.append(took / limit)
            else:
                at_start = resident(), fds()
        growth = resident() - at_start[0], fds() - at_start[1]
    return Figures(
        mode,
        len(table),
        source.nbytes / 2**20,
        round(statistics.median(ratios), 3),
        round(max(ratios), 3),
        round(extra / source.nbytes, 3),
        round(growth[0] / 2**20, 2),
        growth[1],
        versions,
    )


class Engine:
    """The engine's process."""

    def __init__(self, table: Mapping[str, tuple[int, ...]], socket: Path) -> None:
        command = [sys.executable, "-m", "bench.publish", "--engine", str(socket)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._say(json.dumps(list(table.items())))

    def take(self) -> None:
        """Let it take one version."""
        self._say("take")

    def close(self) -> None:
        """End it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


def run_mode(mode: str, model: str, mib: int, versions: int) -> Figures:
    """Measure one mode with a daemon and an engine of its own."""
    table = shapes(model, mib, 4 if mode.startswith("fp32") else 2)
    home = short_folder("weightd-bench-")
    children = Children(home / "logs")
    try:
        local = LocalNodes(home, ["a"], {"attach_s": 120.0})
        local.start(children, "a")
        local.wait_until_up(children)
        engine = Engine(table, home / "a" / "run")
        try:
            return measure(mode, table, versions, engine, home / "a" / "run")
        finally:
            engine.close()
    finally:
        children.stop_all()
        shutil.rmtree(home, ignore_errors=True)


def main() -> int:
    """Print a line and a JSON object for each mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="MiB of the source")
    parser.add_argument("--versions", type=int, default=50)
    parser.add_argument("--model", choices=("dense", "moe"), default="dense")
    parser.add_argument("--mode", choices=MODES, action="append", help="only these; all by default")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)  # one memcpy is one thread's, and so is a publish
    if options.engine:
        serve_engine({name: tuple(shape) for name, shape in json.loads(sys.stdin.readline())}, options.engine)
        return 0
    for mode in options.mode or MODES:
        figures = run_mode(mode, options.model, options.mib, options.versions)
        print(json.dumps(vars(figures)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
