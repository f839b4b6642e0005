"""The two slots of a live rank: its parameters themselves, and room for a copy when a step cannot wait.

The room costs no memory before it is used.  A generation is odd from the moment that a step may write until the
next publish, so that a reader who comes too late never takes bytes of a step for those of a version.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from weightd.core.units import NO_KEY, TrainerRank, VersionKey
from weightd.core.wire.messages import SlotRelease
from weightd.link.memory import Pool
from weightd.trainer_hooks.faults import LiveMemoryWritten
from weightd.trainer_hooks.live.layout import LiveDescribed
from weightd.trainer_hooks.live.samples import Samples
from weightd.trainer_hooks.live.storages import LiveStorages
from weightd.trainer_hooks.slots import Slots

log = logging.getLogger("weightd.live")

LIVE, COPY = 0, 1
"""The slot that the parameters lie in, and the one that a copy goes to."""


class LiveSlots(Slots):
    """The slots of one live trainer rank."""

    live = True

    def __init__(self, rank: TrainerRank, described: LiveDescribed, layout_digest: str) -> None:
        """Make the memory and move the parameters into it.

        Raises:
            MemoryExhausted: The system does not give the memory; nothing is left behind.
            LiveMemoryRefused: A parameter cannot be moved; none is.
        """
        self._storages: LiveStorages | None = None
        self._written: LiveMemoryWritten | None = None
        super().__init__(rank, described, layout_digest)
        payload = self.pools[LIVE].payload
        try:
            self._storages = LiveStorages(payload, described.homes)
        except BaseException:
            self.close()
            raise
        self._samples = Samples(payload, described.homes)

    def _make_pool(self, name: str, slot: int, nbytes: int) -> Pool:
        return Pool.create(name, nbytes, reserve=slot == LIVE, inherited=slot == LIVE)

    # ------------------------------------------------------------ states

    def free(self) -> int | None:
        """Return the live slot if nobody reads it."""
        return LIVE if self._keys[LIVE] == NO_KEY else None

    def release(self, releases: Iterable[SlotRelease]) -> None:
        """Free slots; look first whether the live one was written meanwhile."""
        before = self._keys[LIVE]
        super().release(releases)
        if before != NO_KEY and self._keys[LIVE] == NO_KEY:
            name = self._samples.changed()
            if name:
                self._written = LiveMemoryWritten(name, before.version)

    def raise_written(self) -> None:
        """Raise once what was found at a release.

        Raises:
            LiveMemoryWritten: The parameters were written while they were published.
        """
        written, self._written = self._written, None
        if written is not None:
            raise written

    # ------------------------------------------------------------ bytes

    def begin_writing(self) -> None:
        """A step may write from here on."""
        self._begin(self.pools[LIVE])

    def copy(self) -> int:
        """Copy the live slot to the other one and return the bytes copied.

        Raises:
            MemoryExhausted: There is no memory for it.
        """
        pool = self.pools[COPY]
        pool.reserve()
        pool.bump()
        try:
            pool.payload[...] = self.pools[LIVE].payload
        finally:
            pool.bump()
        return pool.payload_nbytes

    def copied(self, key: VersionKey) -> bool:
        """Say that the copy holds ``key``, too, unless it was released meanwhile."""
        if self._keys[LIVE] != key:
            return False
        self.published(COPY, key, self._labels[LIVE])
        return True

    def close(self) -> None:
        """Give the parameters memory of their own again, and let go: what was published stays as it is."""
        storages, self._storages = self._storages, None
        if storages is not None:
            storages.leave()
        super().close()

    def _begin(self, pool: Pool) -> None:
        if pool.generation % 2 == 0:
            super()._begin(pool)

    def _write(self, slot: int) -> int:
        """Copy what is not live; the parameters are there already."""
        assert self._storages is not None, "a closed publisher publishes nothing"
        replaced = self._storages.settle()
        if replaced:
            log.info("%d parameters were replaced since the last publish and moved into live memory again", replaced)
        nbytes = super()._write(slot)
        self._samples.keep()
        return nbytes
