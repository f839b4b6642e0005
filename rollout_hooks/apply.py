"""The plan of an epoch as it is used: pools mapped, pairs built, and one pass per version.

Per epoch: the plan is decoded and checked, the pools are taken, the pairs are built.  Per
version: generations are read, the pass runs, generations are read again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping

from weightd.core.plan.node_plan import LandingSource, RankPlan, Source, TrainerSource
from weightd.core.units import TrainerRank, VersionKey
from weightd.core.wire.messages import SourceSlot
from weightd.link.copies import CopyPlan
from weightd.link.fd_messages import LANDING, PoolKey
from weightd.link.memory import Pool
from weightd.rollout_hooks.faults import PlanUnusable, SourceChanged
from weightd.rollout_hooks.targets import Targets

LookUp = Callable[[int], bool]
"""Called with the bytes copied so far; True ends the pass early."""


class PlanInUse:
    """One rank plan with everything that a version needs.

    Attributes:
        digest: The plan's digest, as goals name it.
        nbytes: Bytes of one pass.
    """

    def __init__(self, who: str, digest: str, plan: RankPlan, pools: Mapping[PoolKey, Pool], targets: Targets) -> None:
        """Build the pairs for every slot of every source; the pools belong to the plan from here on.

        Args:
            who: The rank, for errors.
            digest: The plan's digest.
            plan: A plan that was checked against the layout and ``readable(pools)``.
            pools: Every slot of every source.
            targets: The rank's own memory.

        Raises:
            PlanUnusable: A row reaches outside of its memory all the same.
        """
        self.digest = digest
        self.nbytes = plan.nbytes
        self._who = who
        self._plan = plan
        self._pools = dict(pools)
        memory = {
            (row, key.slot): pool.payload
            for row, source in enumerate(plan.sources)
            for key, pool in pools.items()
            if (key.owner, key.region) == _owner_and_region(source)
        }
        try:
            self._copies = CopyPlan(plan.copies, targets.buffers, memory)
        except (ValueError, TypeError, IndexError) as error:  # numpy: a view outside of its buffer
            raise PlanUnusable(who, digest, str(error)) from error

    def apply(self, key: VersionKey, slots: Iterable[SourceSlot], look_up: LookUp) -> int:
        """Copy a version into the parameters and return the bytes copied; fewer than planned if told to stop.

        Args:
            key: The version, for errors.
            slots: Where it lies.
            look_up: See ``LookUp``.

        Raises:
            SourceChanged: A source does not stand still; ``when == "before"`` if no byte was copied.
            PlanUnusable: The order names no slot of a source.
        """
        named = {slot.rank: slot for slot in slots}
        try:
            rows = {r: named[_owner_and_region(s)[0]].slot for r, s in enumerate(self._plan.sources)}
            pools = self._sources(named)
        except KeyError as error:
            raise PlanUnusable(self._who, self.digest, f"the order names no slot of source {error}") from error
        self._check_generations(key, pools, "before")
        done = self._copies.run(rows, look_up)
        self._check_generations(key, pools, "after")
        return done

    def same_memory(self, digest: str, pools: Mapping[PoolKey, Pool]) -> bool:
        """Say whether this plan was built over exactly these pools: the same memory, not only the same names."""
        return digest == self.digest and _inodes(pools) == _inodes(self._pools)

    def close(self) -> None:
        """Let go of the pools; a pass that still runs keeps its views."""
        for pool in self._pools.values():
            pool.close()

    def _sources(self, named: Mapping[int, SourceSlot]) -> list[tuple[Pool, int]]:
        """Return each pool that is read, with the generation that it must show."""
        found: list[tuple[Pool, int]] = []
        for source in self._plan.sources:
            owner, region = _owner_and_region(source)
            slot = named[owner]
            found.append((self._pools[PoolKey(owner, slot.slot, region)], slot.generation))
        return found

    def _check_generations(self, key: VersionKey, pools: Iterable[tuple[Pool, int]], when: str) -> None:
        for pool, expected in pools:
            found = pool.generation
            if found != expected:
                raise SourceChanged(self._who, str(key), pool.name, expected, found, when)


def _owner_and_region(source: Source) -> tuple[int, int]:
    return (LANDING, 0) if isinstance(source, LandingSource) else (int(source.rank), source.region)


def _inodes(pools: Mapping[PoolKey, Pool]) -> dict[PoolKey, tuple[int, int]]:
    """Return the identity of each pool's memory: a restarted trainer's has the same name and size, and is another."""
    found: dict[PoolKey, tuple[int, int]] = {}
    for key, pool in pools.items():
        status = os.fstat(pool.fd)
        found[key] = status.st_dev, status.st_ino
    return found


def readable(pools: Mapping[PoolKey, Pool]) -> dict[Source, int]:
    """Return the bytes that may be read of each source, whichever slot a version is in."""
    found: dict[Source, int] = {}
    for key, pool in pools.items():
        source = LandingSource() if key.owner == LANDING else TrainerSource(TrainerRank(key.owner), key.region)
        found[source] = min(found.get(source, pool.payload_nbytes), pool.payload_nbytes)
    return found


def close_pools(pools: Iterable[Pool]) -> None:
    """Close pools that no plan took over."""
    for pool in pools:
        pool.close()
