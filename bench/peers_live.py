"""weightd with live memory as a pattern of bench_peers: the trainer's arena lies in the publisher's shared memory.

Workers and daemons are those of ``bench.peers_snapshot``.  A trainer's shards are views of one torch storage;
``attach`` moves it into shared memory, and the harness goes on writing there.  An update is one ``publish()``,
which copies nothing, and the wait of the next step for the decision; workers copy straight from the trainers' memory.
"""

from __future__ import annotations

from typing import Any

import torch

from bench.peers_snapshot import ATTACH_S, RUN, Context, Daemons, Worker, engines, runtime_dir
from weightd.link.memory import HEADER_BYTES
from weightd.trainer_hooks.live.slots import LIVE
from weightd.trainer_hooks.publisher import Publisher

__all__ = ["Trainer", "Worker"]


class Trainer:
    """A trainer rank whose arena is live."""

    def __init__(self, ctx: Context, bucket_mib: int = 32, streams: int = 2) -> None:
        self._daemons = Daemons(ctx, bucket_mib, streams) if ctx.rank == 0 else None
        held = torch.empty(len(ctx.arena.array), dtype=torch.uint8)
        shards = [_shard(ctx, held, source) for source in ctx.model.sources]
        self._publisher = Publisher.from_shards(
            shards,
            run=RUN,
            rank=ctx.rank,
            world=ctx.trainer.ranks,
            slot=f"trainer-{ctx.rank}",
            engines=engines(ctx),
            memory="live",
            optimizer=(),
            socket=runtime_dir(ctx),
            attach_s=ATTACH_S,
        )
        del held
        self._publisher.attach()
        attachment = self._publisher._attachment
        assert attachment is not None
        pool = attachment.slots.pools[LIVE]
        address, payload = shards[0][-1].untyped_storage().data_ptr(), pool.payload
        first = address - int(payload.ctypes.data)
        ctx.replace_arena(payload[first:].data, pool.fd, HEADER_BYTES + first)

    def run(self, _step: int) -> None:
        """Publish what the arena holds, and wait until it may be written."""
        self._publisher.publish()
        self._publisher.before_step()

    def close(self) -> None:
        """Leave; rank 0 ends the daemons."""
        self._publisher.close()
        if self._daemons is not None:
            self._daemons.close()
        self.__dict__.clear()


def _shard(
    ctx: Context, held: torch.Tensor, source: Any
) -> tuple[str, tuple[int, int], tuple[int, int], tuple[int, int], torch.Tensor]:
    rect, slot = ctx.trainer.rect(source, ctx.rank), ctx.slots[source.name]
    matrix = held[slot.offset : slot.offset + slot.nbytes].view(torch.bfloat16).view(slot.rows, slot.cols)
    return source.name, (source.rows, source.cols), (rect.r0, rect.c0), (rect.rows, rect.cols), matrix
