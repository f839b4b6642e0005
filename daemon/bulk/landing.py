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
    from collections.abc import Iterable

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


class Halves(tuple[Pool, ...]):
    """The pools of a landing, by half; an epoch's plan keeps those it was made over.

    While an epoch with a larger landing is planned, a version of the epoch before it is still fetched
    into, and read from, the halves that its ranks have mapped.
    """

    __slots__ = ()

    @property
    def nbytes(self) -> int:
        """Payload of one half."""
        return self[0].payload_nbytes if self else 0

    def begin(self, half: int, held: Description) -> None:
        """Say what is going to land in a half, before the first byte: its generation becomes odd.

        Described as it is already and not complete, it keeps the buckets that are marked: the fetch goes on.
        """
        pool = self[half]
        if pool.generation % 2 == 0:
            pool.bump()
            pool.header.describe(held)
        elif pool.description != held:
            pool.header.describe(held)

    def mark(self, half: int, bucket: Bucket) -> None:
        """Say that a bucket has landed and was checked, so that a restarted daemon need not fetch it again."""
        header = self[half].header
        if header.buckets_per_bit == 1:  # a bit that several buckets share says nothing of any one of them
            header.mark((bucket.index,))

    def landed(self, half: int, held: Description) -> frozenset[int]:
        """Return the indices of the buckets of ``held`` that are in the half already."""
        header = self[half].header
        if header.description != held or header.buckets_per_bit != 1:
            return frozenset()
        return header.marked()

    def finish(self, half: int) -> int:
        """Say that all bytes are there, after the last one; return the generation that readers compare with."""
        pool = self[half]
        return pool.bump() if pool.generation % 2 else pool.generation


class Landing:
    """A run's landing.  ``provide`` and ``close`` take time and belong in a worker thread.

    Attributes:
        name: For texts: ``the landing of run grpo-7``.
        halves: The newest pools; none before the first ``provide``.
    """

    def __init__(self, name: str, budget: MemoryBudget) -> None:
        self.name = name
        self.halves = Halves()
        self._budget = budget
        self._outgrown: list[Halves] = []

    def provide(self, nbytes: int) -> Halves:
        """Return halves that carry ``nbytes`` each; those that are large enough stay as they are.

        Larger halves take the whole contents of the smaller ones over, so that a committed version
        stays readable.  The smaller ones are kept until ``retire``.

        Raises:
            BudgetExceeded: The node's budget does not allow it; nothing changed.
            MemoryExhausted: The host does not; nothing changed.
        """
        if self.halves and nbytes <= self.halves.nbytes:
            return self.halves
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
        for old, new in zip(self.halves, made, strict=False):
            _take_over(old, new)
        if self.halves:
            self._outgrown.append(self.halves)
        self.halves = Halves(made)
        return self.halves

    def retire(self, used: Iterable[Halves]) -> None:
        """Give outgrown halves back that no plan in hand was made over."""
        kept = {id(halves) for halves in used}
        for halves in [h for h in self._outgrown if id(h) not in kept]:
            self._outgrown.remove(halves)
            self._drop(halves)

    def close(self) -> None:
        """Give everything back; ranks that have mapped a half keep it until they let go."""
        for halves in (*self._outgrown, self.halves):
            self._drop(halves)
        self._outgrown, self.halves = [], Halves()

    def _drop(self, halves: Halves) -> None:
        for pool in halves:
            self._budget.give_back(pool.nbytes)
            pool.close()


def _take_over(old: Pool, new: Pool) -> None:
    """Copy a complete half into a larger one; one that is being written is left behind."""
    if old.generation % 2 or old.description.term == NO_TERM:
        return
    np.copyto(new.payload[: old.payload_nbytes], old.payload)
    new.header.continue_from(old.header)
