"""weightd in snapshot mode as a pattern of bench_peers: real daemons, real ``Publisher``, real ``Receiver``.

One daemon a simulated node, started by trainer rank 0.  Trainers declare their
shards where the harness has put them (``from_shards`` over ``ctx.arena``), workers declare
what each param is made of; both attach in their constructor, untimed.  An
update is one ``publish()`` on every trainer rank and one ``receive()`` on every worker.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from weightd.core.units import Version
from weightd.daemon.children import Children
from weightd.daemon.local_nodes import LocalNodes
from weightd.rollout_hooks.declare import Declaration
from weightd.rollout_hooks.receiver import Receiver
from weightd.trainer_hooks.publisher import Publisher

RUN = "bench"
ATTACH_S = 120.0
UPDATE_S = 240.0

Context = Any
"""The harness's ``procs.Ctx``, which this module takes as it comes: it must run without the harness's types."""


def home(ctx: Context) -> Path:
    """Return the folder of this scenario's daemons."""
    return Path(ctx.spec.tmp) / "w"


def runtime_dir(ctx: Context) -> Path:
    """Return where the daemon of this process's node is, before and after it is there."""
    return Path(home(ctx), ctx.node, "run")


def engines(ctx: Context) -> dict[str, int]:
    """Return the size of every engine."""
    tp = ctx.rollout.tp
    return {f"E{i}": tp for i in range(ctx.rollout.workers // tp)}


class Daemons:
    """One daemon a node; they end with the process that made them."""

    def __init__(self, ctx: Context, bucket_mib: int, streams: int) -> None:
        nodes = ("a", "b") if ctx.spec.two_node else ("a",)
        limits = {"bucket_bytes": bucket_mib << 20, "bulk_streams": streams}
        self._home = home(ctx)
        self._children = Children(self._home / "logs")
        local = LocalNodes(self._home, nodes, {"attach_s": ATTACH_S}, limits)
        try:
            ctx.extra_pids.update(local.start(self._children, node).pid for node in nodes)
            local.wait_until_up(self._children)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop them and remove what they wrote."""
        self._children.stop_all()
        shutil.rmtree(self._home, ignore_errors=True)


class Trainer:
    """A trainer rank."""

    def __init__(self, ctx: Context, bucket_mib: int = 32, streams: int = 2) -> None:
        self._ctx = ctx
        self._daemons = Daemons(ctx, bucket_mib, streams) if ctx.rank == 0 else None
        self._nbytes = sum(slot.nbytes for slot in ctx.slots.values())
        self._publisher = Publisher.from_shards(
            [self._shard(source) for source in ctx.model.sources],
            run=RUN,
            rank=ctx.rank,
            world=ctx.trainer.ranks,
            slot=f"trainer-{ctx.rank}",
            engines=engines(ctx),
            socket=runtime_dir(ctx),
            attach_s=ATTACH_S,
        )
        self._publisher.attach()

    def _shard(self, source: Any) -> tuple[str, tuple[int, int], tuple[int, int], tuple[int, int], Any]:
        rect = self._ctx.trainer.rect(source, self._ctx.rank)
        tensor = self._ctx.matrix(source.name)
        return source.name, (source.rows, source.cols), (rect.r0, rect.c0), (rect.rows, rect.cols), tensor

    def run(self, _step: int) -> None:
        """Publish what the arena holds."""
        self._publisher.publish()
        self._ctx.moved["snapshot"] += self._nbytes

    def close(self) -> None:
        """Leave; rank 0 ends the daemons."""
        self._publisher.close()
        if self._daemons is not None:
            self._daemons.close()
        self.__dict__.clear()


class Worker:
    """A rollout worker: rank ``worker % tp`` of engine ``worker // tp``."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        tp = ctx.rollout.tp
        self._version = Version(0)
        self._nbytes = sum(slot.nbytes for slot in ctx.slots.values())
        params = {name: ctx.matrix(name) for name, slot in ctx.slots.items() if slot.nbytes}
        self._receiver = Receiver(
            params,
            run=RUN,
            engine=f"E{ctx.rank // tp}",
            k=ctx.rank % tp,
            size=tp,
            slot=f"worker-{ctx.rank}",
            layout=declare(ctx),
            socket=runtime_dir(ctx),
            attach_s=ATTACH_S,
        )
        self._receiver.attach()
        # The first worker of node b speaks for the node, whose daemon fetches once for all of them.
        first = ctx.rank == min(w for w in range(ctx.rollout.workers) if ctx.spec.node(ctx.role, w) == ctx.node)
        self._landed = ctx.spec.link_bytes if first and ctx.node == "b" else 0

    def run(self, _step: int) -> None:
        """Return when the arena holds the new params."""
        self._version = self._receiver.receive(self._version + 1, timeout_s=UPDATE_S)
        self._ctx.moved["apply"] += self._nbytes
        self._ctx.moved["landing"] += self._landed

    def close(self) -> None:
        """Leave."""
        self._receiver.close()
        self.__dict__.clear()


def declare(ctx: Context) -> Declaration:
    """Return what a worker's params are made of."""
    declared = Declaration("bfloat16")
    for param, pieces in ctx.pieces.items():
        slot = ctx.slots[param]
        if not slot.nbytes:
            continue
        declared.parameter(param, (slot.rows, slot.cols))
        for piece in pieces:
            source, rect = ctx.model.by_name[piece.source], piece.rect
            shape, start, extent = (source.rows, source.cols), (rect.r0, rect.c0), (rect.rows, rect.cols)
            declared.take(param, piece.source, shape, start, extent, at=(piece.row, 0))
    return declared
