"""Small tensors that trainer ranks show each other, within a limit; the model itself never goes this way.

Plain bytes and integers over ``all_gather``: the object collectives of ``torch.distributed`` pickle.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from weightd.core.errors import ConfigError
from weightd.trainer_hooks.faults import ExchangeFailed
from weightd.trainer_hooks.identity import Identity


class Exchange:
    """Gathers over a process group of its own; a collective, so every rank takes part in the same order.

    The group is made at the first gathering.  The trainer's own collectives never meet a message of an exchange that
    one rank missed; and after that nothing is exchanged any more, because the ranks no longer mean the same one.

    Attributes:
        rank: This trainer rank.
    """

    def __init__(self, identity: Identity, setting: str, limit_s: float) -> None:
        """Look whether the trainer's ranks can reach each other; nothing is sent yet.

        Args:
            identity: This rank.
            setting: What needs the exchange, for errors.
            limit_s: Limit of each gathering in seconds (``collect_s``).

        Raises:
            ConfigError: ``torch.distributed`` is not initialised, is of another world, or has no gloo for CPU tensors.
        """
        _refuse_unreachable(identity, setting)
        self._identity = identity
        self.rank = int(identity.rank)
        self._setting = setting
        self._limit_s = limit_s
        self._group: dist.ProcessGroup | None = None
        self._broken = ""
        self._turn = 0

    def gather(self, mine: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in the order of the group.

        Args:
            mine: A CPU tensor, of one shape and element type on all ranks.

        Raises:
            ExchangeFailed: It did not end in time, a rank is gone or at another exchange, or one before it failed.
        """
        self._turn += 1
        mine = mine.contiguous()
        # Of one size whatever comes behind it: gloo ends the process where two sizes meet in one collective, as they
        # would when a rank that missed an exchange comes to the next one.
        turns = [t.tolist() for t in self._all_gather(torch.tensor([self._turn, mine.nbytes], dtype=torch.int64))]
        if any(turn != turns[0] for turn in turns):
            self._broken = f"the ranks are at different exchanges, (number, bytes) by rank: {turns}"
            raise self._failed(0.0, self._broken)
        return self._all_gather(mine)

    def _all_gather(self, mine: Tensor) -> list[Tensor]:
        if self._broken:
            raise self._failed(0.0, f"one before it failed ({self._broken})")
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        begun, limit = time.monotonic(), timedelta(seconds=self._limit_s)
        try:
            if self._group is None:
                group = dist.new_group(backend="gloo", timeout=limit)
                assert isinstance(group, dist.ProcessGroup), "every rank is a member"
                self._group = group
            work = dist.all_gather(every, mine, group=self._group, async_op=True)
            assert work is not None
            work.wait(limit)
        except RuntimeError as error:  # torch's only class for a time-out and a lost peer
            self._broken = _first_line(error)
            raise self._failed(time.monotonic() - begun, self._broken) from error
        return every

    def _failed(self, waited_s: float, why: str) -> ExchangeFailed:
        rank, world = self._identity
        return ExchangeFailed(self._setting, rank, world, waited_s, self._limit_s, why)

    def gather_bytes(self, mine: bytes | bytearray) -> list[bytes]:
        """Return every rank's bytes, of any length.

        Raises:
            ExchangeFailed: As in ``gather``.
        """
        lengths = [int(n) for n in self.gather(torch.tensor([len(mine)], dtype=torch.int64))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        if mine:
            padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        every = self.gather(padded) if max(lengths) else [padded] * len(lengths)
        return [data[:n].numpy().tobytes() for data, n in zip(every, lengths, strict=True)]

    def gather_ranks(self) -> list[int]:
        """Return the trainer rank of each member of the group."""
        return [int(r) for r in self.gather(torch.tensor([self._identity.rank], dtype=torch.int64))]


def gather_numbers(exchange: Exchange, mine: Sequence[int]) -> list[list[int]]:
    """Return every rank's numbers; each gives as many, of 64 bits."""
    found: list[list[int]] = [t.tolist() for t in exchange.gather(torch.tensor(list(mine), dtype=torch.int64))]
    return found


def _refuse_unreachable(identity: Identity, setting: str) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        why = "it needs torch.distributed to reach the other trainer ranks, and no process group is initialised"
        raise ConfigError(setting, "", why)
    if dist.get_world_size() != identity.world:
        why = f"the process group has {dist.get_world_size()} ranks, this trainer {identity.world}"
        raise ConfigError(setting, "", why)
    if not dist.is_gloo_available():
        raise ConfigError(setting, "", "this build of torch has no gloo, which carries CPU tensors")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
