"""A run's landing on a node: two halves of shared memory for bytes that come from other nodes.

While one half is read by the engines' ranks, the next version lands in the other.
Both are made once, for an epoch's plan, and used again by every version and every
later epoch that fits.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from weightd.core.units import NO_TERM
from weightd.daemon.bulk.faults import BudgetExceeded
from weightd.link.header import Description, pool_nbytes
from weightd.link.memory import Pool

if TYPE_CHECKING:
    from weightd.core.plan.node_plan import Bucket

HALVES = 2
"""The last committed version stays readable while the next one lands."""


class MemoryBudget:
    """Bytes of all landings of a node; may be asked by several threads."""

    def __init__(self, limit_nbytes: int) -> None:
        """Begin with nothing taken.

        Args:
            limit_nbytes: Bytes of all halves of all runs together.
        """
        self.limit_nbytes = limit_nbytes
        self._taken = 0
        self._lock = threading.Lock()

    @property
    def taken_nbytes(self) -> int:
        """Bytes of the landings that are there."""
        return self._taken

    def take(self, name: str, nbytes: int) -> None:
        """Take bytes before they are allocated.

        Raises:
            BudgetExceeded: There are not that many left; none was taken.
        """
        with self._lock:
            if self._taken + nbytes > self.limit_nbytes:
                raise BudgetExceeded(name, nbytes, self._taken, self.limit_nbytes)
            self._taken += nbytes

    def give_back(self, nbytes: int) -> None:
        """Give back what was taken."""
        with self._lock:
            self._taken -= nbytes


class Landing:
    """Both halves.  ``provide`` and ``close`` take time and belong in a worker thread.

    Attributes:
        name: For texts: ``the landing of run grpo-7``.
    """

    def __init__(self, name: str, budget: MemoryBudget) -> None:
        self.name = name
        self._budget = budget
        self._halves: tuple[Pool, ...] = ()
        self._outgrown: tuple[Pool, ...] = ()

    @property
    def halves(self) -> tuple[Pool, ...]:
        """The pools, by half; none before the first ``provide``."""
        return self._halves

    @property
    def nbytes(self) -> int:
        """Payload of one half."""
        return self._halves[0].payload_nbytes if self._halves else 0

    def provide(self, nbytes: int) -> None:
        """Have halves that carry ``nbytes`` each; what is large enough stays as it is.

        Larger halves take the whole contents of the smaller ones over, so that a committed version
        stays readable.  The smaller ones are kept until the next growth: a fetch or a rank may
        still use them.

        Raises:
            BudgetExceeded: The node's budget does not allow it; nothing changed.
            MemoryExhausted: The host does not; nothing changed.
        """
        if self._halves and nbytes <= self.nbytes:
            return
        self._drop(self._outgrown)
        self._outgrown = ()
        total = HALVES * pool_nbytes(nbytes)
        self._budget.take(self.name, total)
        made: list[Pool] = []
        try:
            for half in range(HALVES):
                made.append(Pool.create(f"{self.name}, half {half}", nbytes))  # noqa: PERF401 - closed where one fails
        except BaseException:
            self._budget.give_back(total)
            for pool in made:
                pool.close()
            raise
        for old, new in zip(self._halves, made, strict=False):
            _take_over(old, new)
        self._outgrown, self._halves = self._halves, tuple(made)

    def begin(self, half: int, held: Description) -> None:
        """Say what is going to land in a half, before the first byte: its generation becomes odd.

        Described as it is already and not complete, it keeps the buckets that are marked: the fetch goes on.
        """
        pool = self._halves[half]
        if pool.generation % 2 == 0:
            pool.bump()
            pool.header.describe(held)
        elif pool.description != held:
            pool.header.describe(held)

    def mark(self, half: int, bucket: Bucket) -> None:
        """Say that a bucket has landed and was checked, so that a restarted daemon need not fetch it again."""
        header = self._halves[half].header
        if header.buckets_per_bit == 1:  # a bit that several buckets share says nothing of any one of them
            header.mark((bucket.index,))

    def landed(self, half: int, held: Description) -> frozenset[int]:
        """Return the indices of the buckets of ``held`` that are in the half already."""
        header = self._halves[half].header
        if header.description != held or header.buckets_per_bit != 1:
            return frozenset()
        return header.marked()

    def finish(self, half: int) -> int:
        """Say that all bytes are there, after the last one; return the generation that readers compare with."""
        pool = self._halves[half]
        return pool.bump() if pool.generation % 2 else pool.generation

    def close(self) -> None:
        """Give everything back; ranks that have mapped a half keep it until they let go."""
        self._drop((*self._halves, *self._outgrown))
        self._halves = self._outgrown = ()

    def _drop(self, pools: tuple[Pool, ...]) -> None:
        for pool in pools:
            pool.close()
            self._budget.give_back(pool.nbytes)


def _take_over(old: Pool, new: Pool) -> None:
    """Copy a complete half into a larger one; one that is being written is left behind."""
    if old.generation % 2 or old.description.term == NO_TERM:
        return
    np.copyto(new.payload[: old.payload_nbytes], old.payload)
    new.header.continue_from(old.header)
