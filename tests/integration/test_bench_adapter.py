"""The adapter for bench_peers does what a harness asks for, here one of a single trainer rank and a single worker."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from bench.peers_snapshot import Trainer, Worker

pytestmark = pytest.mark.processes


class Rect(NamedTuple):
    r0: int
    r1: int
    c0: int
    c1: int

    @property
    def rows(self) -> int:
        return self.r1 - self.r0

    @property
    def cols(self) -> int:
        return self.c1 - self.c0


class Source(NamedTuple):
    name: str
    rows: int
    cols: int


class Slot(NamedTuple):
    rows: int
    cols: int

    @property
    def nbytes(self) -> int:
        return 2 * self.rows * self.cols


class Piece(NamedTuple):
    source: str
    rect: Rect
    row: int


@dataclass
class Model:
    sources: list[Source]

    @property
    def by_name(self) -> dict[str, Source]:
        return {s.name: s for s in self.sources}


class Whole:
    """A trainer of one rank, and a rollout of one worker."""

    ranks = workers = tp = 1

    def rect(self, s: Source, _rank: int) -> Rect:
        return Rect(0, s.rows, 0, s.cols)


@dataclass
class Spec:
    tmp: str
    two_node: bool = False
    link_bytes: int = 0

    def node(self, _role: str, _rank: int) -> str:
        return "a"


@dataclass
class Context:
    spec: Spec
    role: str
    tensors: dict[str, torch.Tensor]
    pieces: dict[str, list[Piece]]
    model: Model
    rank: int = 0
    node: str = "a"
    trainer: Whole = field(default_factory=Whole)
    rollout: Whole = field(default_factory=Whole)
    moved: Counter[str] = field(default_factory=Counter)
    extra_pids: set[int] = field(default_factory=set)

    @property
    def slots(self) -> dict[str, Slot]:
        return {name: Slot(*t.shape) for name, t in self.tensors.items()}

    def matrix(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def test_two_steps_through_the_adapter(folder: Path) -> None:
    model = Model([Source("gate", 5, 3), Source("up", 4, 3)])
    spec = Spec(str(folder))
    held = {s.name: torch.zeros(s.rows, s.cols, dtype=torch.bfloat16) for s in model.sources}
    wanted = {"gate_up": torch.full((9, 3), -1.0, dtype=torch.bfloat16)}
    pieces = {"gate_up": [Piece("gate", Rect(0, 5, 0, 3), 0), Piece("up", Rect(0, 4, 0, 3), 5)]}
    trainer_side = Context(spec, "trainer", held, {}, model)
    worker_side = Context(spec, "worker", wanted, pieces, model)

    with ThreadPoolExecutor(1) as other:
        building = other.submit(Worker, worker_side)
        trainer = Trainer(trainer_side)
        worker = building.result(30)
        for step in (1, 2):
            for i, tensor in enumerate(held.values()):
                tensor.fill_(10 * step + i)
            receiving = other.submit(worker.run, step)
            trainer.run(step)
            receiving.result(30)
            assert torch.equal(wanted["gate_up"], torch.cat(list(held.values())))
        other.submit(worker.close).result(30)
        trainer.close()

    assert len(trainer_side.extra_pids) == 1
    assert trainer_side.moved["snapshot"] == worker_side.moved["apply"] == 2 * 9 * 3 * 2
