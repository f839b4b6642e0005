"""Trainer and engine ranks that do as they are told: what runs inside their processes.

A rank is a class whose methods are commands.  The test sends a command's name
and arguments over a pipe and gets what the method returned, or the error as plain values.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.integration.weights import POISON, Bits, Cut, Shard, shards
from weightd.core.errors import ConfigError, WeightdError, flatten
from weightd.core.layout.cuts import balanced_sizes, spans
from weightd.core.roster.topology import EngineDecl, Mode
from weightd.core.session.deadlines import Deadlines
from weightd.link import copies
from weightd.rollout_hooks.declare import Declaration
from weightd.rollout_hooks.receiver import Receiver
from weightd.trainer_hooks.faults import TieBroken
from weightd.trainer_hooks.publisher import Publisher


@dataclass(frozen=True)
class TrainerSpec:
    """A trainer rank.

    Attributes:
        socket: Its node's daemon.
        rank: Its rank.
        world: Number of trainer ranks that it believes in.
        run: Name of the run.
        slot: Declared place; engine ranks on the same place are colocated.
        engines: The roster, or its file, from rank 0.
        reserved: Of the roster.
        mode: Of the roster.
        skip: Tensors that it does not hold.
        rename: Tensors that it calls otherwise.
        dtype: Element types that it publishes in, by name of ``torch``.
        wider: Tensors of which it claims one more row than they have.
        attach_s: Limit of attach.
        deadlines: The hook's own.
    """

    socket: Path
    rank: int
    world: int
    run: str = "run"
    slot: str | None = None
    engines: dict[str, int] | tuple[EngineDecl, ...] | Path | None = None
    reserved: tuple[int, ...] = ()
    mode: Mode | None = None
    skip: tuple[str, ...] = ()
    rename: dict[str, str] = field(default_factory=dict)
    dtype: dict[str, str] = field(default_factory=dict)
    wider: tuple[str, ...] = ()
    attach_s: float = 15.0
    deadlines: Deadlines = field(default_factory=Deadlines)


@dataclass(frozen=True)
class EngineSpec:
    """An engine rank.

    Attributes:
        socket: Its node's daemon.
        engine: Name of the engine.
        k: Its rank.
        size: Number of ranks that it believes in.
        run: Name of the run.
        slot: Declared place.
        dwell_s: How long its pause callback takes.
        attach_s: Limit of attach.
        deadlines: The hook's own.
    """

    socket: Path
    engine: str
    k: int
    size: int
    run: str = "run"
    slot: str | None = None
    dwell_s: float = 0.0
    attach_s: float = 15.0
    deadlines: Deadlines = field(default_factory=Deadlines)


def tensor_of(bits: Bits) -> torch.Tensor:
    """Return bits as a bfloat16 tensor of its own memory."""
    return torch.from_numpy(bits.astype(np.int16, casting="unsafe")).view(torch.bfloat16)


def bits_of(tensor: torch.Tensor) -> Bits:
    """Return a bfloat16 tensor's memory as bits."""
    return tensor.detach().view(torch.int16).numpy().view(np.uint16)


def _broken(_: object) -> None:
    raise TieBroken("head", "emb", "(1,) bfloat16", "(1,) bfloat16", 1, 1)


class TrainerRank:
    """Holds its shards of the test's model."""

    def __init__(self, spec: TrainerSpec) -> None:
        self._shards = [s for s in shards(spec.world, spec.rank) if s.name not in spec.skip]
        self._tensors = [tensor_of(s.bits(0)) for s in self._shards]
        declared = [self._declared(s, t, spec) for s, t in zip(self._shards, self._tensors, strict=True)]
        self._publisher = Publisher.from_shards(
            declared,
            run=spec.run,
            rank=spec.rank,
            world=spec.world,
            slot=spec.slot,
            engines=spec.engines,
            reserved=spec.reserved,
            mode=spec.mode,
            dtype={spec.rename.get(n, n): getattr(torch, d) for n, d in spec.dtype.items()} or None,
            socket=spec.socket,
            attach_s=spec.attach_s,
            deadlines=spec.deadlines,
        )

    @staticmethod
    def _declared(s: Shard, tensor: torch.Tensor, spec: TrainerSpec) -> Any:
        shape = (s.shape[0] + 1, *s.shape[1:]) if s.name in spec.wider else s.shape
        return spec.rename.get(s.name, s.name), shape, s.start, s.extent, tensor

    def prepare(self) -> None:
        """Be constructed, so that attaching takes no longer than it does."""

    def attach(self) -> None:
        """Attach to the run."""
        self._publisher.attach()

    def publish(self, version: int | None = None, contents: int | None = None) -> int:
        """Fill the shards with what ``contents`` (or the version) holds, and publish."""
        number = self._publisher.next_version if version is None else version
        for s, tensor in zip(self._shards, self._tensors, strict=True):
            bits_of(tensor)[...] = s.bits(number if contents is None else contents)
        return int(self._publisher.publish(version))

    def publish_untied(self, contents: int) -> int:
        """Be refused over what lies in the slot, as a rank with a broken tie is."""
        assert self._publisher._attachment is not None
        slots = self._publisher._attachment.slots
        checks, slots._verify = slots._verify, (_broken,)
        try:
            return self.publish(contents=contents)
        finally:
            slots._verify = checks

    def scribble(self) -> None:
        """Overwrite the shards, as a trainer does once ``publish`` has returned."""
        for tensor in self._tensors:
            bits_of(tensor)[...] = POISON

    def begin_to_overwrite(self) -> None:
        """Begin to write into the slots, published ones included: what no publisher does, and a reader must notice."""
        attachment = self._publisher._attachment
        assert attachment is not None
        for pool in attachment.slots.pools:
            pool.bump()

    def change_layout(self, digest: str) -> None:
        """Say from now on that what is published has another layout: what a publisher that was changed would do."""
        attachment = self._publisher._attachment
        assert attachment is not None
        attachment.slots._digest = digest

    def wait(self, version: int, until: Any = "committed", timeout_s: float | None = 20.0) -> int:
        """Wait for a version's outcome."""
        return int(self._publisher.wait(version, until, timeout_s))

    def committed(self) -> int:
        """Return the last committed version."""
        return int(self._publisher.committed)

    def next_version(self) -> int:
        """Return the smallest number that may be published."""
        return int(self._publisher.next_version)

    def close(self) -> None:
        """Leave the run."""
        self._publisher.close()


class EngineRank:
    """Holds the parameters of one rank of an engine that cuts the test's model."""

    def __init__(self, spec: EngineSpec) -> None:
        self._cut, self._k, self._dwell_s = Cut(spec.size), spec.k, spec.dwell_s
        shapes = {name: bits.shape for name, bits in self._cut.expected(spec.k, 0).items()}
        self._params = {name: tensor_of(np.full(shape, POISON, np.uint16)) for name, shape in shapes.items()}
        self.callbacks: list[str] = []
        self._refused: set[int] = set()
        self._run_pairs = copies.run_pairs
        self._receiver = Receiver(
            self._params,
            run=spec.run,
            engine=spec.engine,
            k=spec.k,
            size=spec.size,
            slot=spec.slot,
            socket=spec.socket,
            layout=declare(self._cut, spec.k),
            before_apply=self._before,
            after_apply=self._after,
            attach_s=spec.attach_s,
            deadlines=spec.deadlines,
        )

    def _before(self, version: int) -> None:
        self.callbacks.append(f"before {version}")
        if version in self._refused:
            raise ConfigError("version", str(version), "is not wanted here")
        time.sleep(self._dwell_s)

    def _after(self, version: int) -> None:
        self.callbacks.append(f"after {version}")

    def prepare(self) -> None:
        """Be constructed, so that attaching takes no longer than it does."""

    def attach(self) -> None:
        """Attach to the run."""
        self._receiver.attach()

    def receive(self, version: int | None = None, timeout_s: float | None = 20.0) -> int:
        """Receive a version."""
        return int(self._receiver.receive(version, timeout_s))

    def refuse_pause(self, version: int) -> None:
        """Let the callback before version ``version`` raise."""
        self._refused.add(version)

    def copy_slowly(self, pair_s: float) -> None:
        """Take this long over every pair from now on, and, if told before attaching, look up after each.

        What is copied, and how, is as ever: only the middle of a copy lasts long enough to be met.
        """

        def slowly(pairs: Iterable[copies.Pair]) -> int:
            done = 0
            for pair in pairs:
                done += at_once([pair])
                time.sleep(pair_s)
            return done

        at_once = self._run_pairs
        copies.run_pairs, copies.BLOCK_BYTES = slowly, 1

    def differing(self, contents: int) -> list[str]:
        """Return the parameters of which any byte differs from version ``contents``; 0 stands for none received."""
        expected = self._cut.expected(self._k, contents)
        if contents == 0:
            expected = {name: np.full_like(bits, POISON) for name, bits in expected.items()}
        return [n for n, bits in expected.items() if not np.array_equal(bits_of(self._params[n]), bits)]

    def version(self) -> int:
        """Return the committed version that is whole in the parameters."""
        return int(self._receiver.version)

    def state(self) -> str:
        """Return the receiver's state."""
        return str(self._receiver.state)

    def assert_servable(self) -> None:
        """Raise if the engine may not serve."""
        self._receiver.assert_servable()

    def called_back(self) -> list[str]:
        """Return the callbacks so far."""
        return self.callbacks

    def close(self) -> None:
        """Leave the run."""
        self._receiver.close()


def declare(cut: Cut, k: int) -> Declaration:
    """Return what rank ``k`` needs, in the words of a user of the hook."""
    from tests.integration.weights import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, SHAPES, VOCAB

    d = Declaration("bfloat16")
    kv = balanced_sizes(KV_HEADS, cut.size)
    q = [n * HEADS // KV_HEADS for n in kv]
    inner = balanced_sizes(INNER, cut.size)
    attention = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
    d.vocabulary("embed_tokens.weight", (VOCAB, HIDDEN), [cut.vocab_rows] * cut.size, k)
    d.qkv("self_attn.qkv_proj.weight", attention, HEAD_DIM, spans(q), spans(kv), k, (HIDDEN,))
    d.row("self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM), [n * HEAD_DIM for n in q], k)
    d.gate_up("mlp.gate_up_proj.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), (INNER, HIDDEN), inner, k)
    d.row("mlp.down_proj.weight", (HIDDEN, INNER), inner, k)
    for name in ("norm.weight", "few.weight", "scale"):
        d.replicated(name, SHAPES[name])
    return d


def live(pipe: multiprocessing.connection.Connection, spec: TrainerSpec | EngineSpec) -> None:
    """Be a rank until the pipe ends."""
    obey(pipe, lambda: TrainerRank(spec) if isinstance(spec, TrainerSpec) else EngineRank(spec))


def obey(pipe: multiprocessing.connection.Connection, make: Callable[[], object]) -> None:
    """Do what is told over the pipe, by name, with what the first command makes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    rank: object | None = None
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            os._exit(0)  # the test is over: no goodbye, the daemons are going, too
        try:
            if rank is None:
                rank = make()
            answer = {"value": getattr(rank, command)(**arguments)}
        except WeightdError as error:
            codes = [e.code for e in flatten([error])]
            fields = [e.fields() for e in flatten([error])]
            answer = {"error": {"code": error.code, "codes": codes, "fields": fields, "text": str(error)}}
        pipe.send(answer)
