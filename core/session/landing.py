"""What a node holds of a version from other nodes: two halves, and one fetch.

The half that holds the last committed version is never written; neither is one
that a local rank may still be reading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightd.core.session.events import StartFetch, StopFetch

if TYPE_CHECKING:
    from weightd.core.errors import WireError
    from weightd.core.session.events import FetchAdvanced, FetchEnded, NodeEffect
    from weightd.core.units import Epoch, Op, VersionKey


@dataclass(frozen=True, slots=True)
class Half:
    """One half of the landing, whole."""

    epoch: Epoch
    key: VersionKey
    generation: int
    wire_nbytes: int = 0


@dataclass(slots=True)
class Fetch:
    """A fetch under way, or ended badly.

    Attributes:
        planned_nbytes: Bytes that it must bring.
        received_nbytes: Bytes that are there and checked.
        ended: All bytes are there; the record of it is not durable yet.
        error: Why it ended without.
    """

    epoch: Epoch
    key: VersionKey
    op: Op
    half: int
    planned_nbytes: int
    received_nbytes: int = 0
    generation: int = 0
    wire_nbytes: int = 0
    ended: bool = False
    error: WireError | None = None


class Landing:
    """The landing of one run on one node."""

    def __init__(self) -> None:
        self.halves: list[Half | None] = [None, None]
        self.fetch: Fetch | None = None

    def holds(self, epoch: Epoch, key: VersionKey) -> int | None:
        """Return the half that holds a version as an epoch planned it."""
        for i, half in enumerate(self.halves):
            if half is not None and (half.epoch, half.key) == (epoch, key):
                return i
        return None

    def whole(self, epoch: Epoch, key: VersionKey) -> Half | None:
        """Return the half that holds a version, itself."""
        i = self.holds(epoch, key)
        return None if i is None else self.halves[i]

    def held(self) -> tuple[VersionKey, ...]:
        """Return the versions whose bytes are whole here."""
        return tuple(half.key for half in self.halves if half is not None)

    def want(
        self, epoch: Epoch, key: VersionKey, op: Op, planned_nbytes: int, kept: set[VersionKey]
    ) -> list[NodeEffect]:
        """Return what to do so that the landing comes to hold a version.

        Args:
            epoch: The adopted epoch.
            key: The version.
            op: Of the goal that wants it.
            planned_nbytes: Bytes that come from other nodes.
            kept: Versions whose halves are not to be written.
        """
        if self.holds(epoch, key) is not None:
            return self.stop() if self.fetch is not None and not self.fetch.ended else []
        running = self.fetch
        if running is not None and (running.epoch, running.key) == (epoch, key):
            if running.error is None or running.op == op:
                return []
        elif running is not None and running.ended and running.error is None:
            return []  # its record is on the way
        out = self.stop()
        half = self._free_half(kept - {key})
        if half is None:
            return out
        self.halves[half] = None
        self.fetch = Fetch(epoch, key, op, half, planned_nbytes)
        return [*out, StartFetch(epoch, key, op, half)]

    def stop(self) -> list[NodeEffect]:
        """Return what to do so that nothing is fetched."""
        running, self.fetch = self.fetch, None
        if running is None or running.ended or running.error is not None:
            return []
        return [StopFetch(running.key, running.op)]

    def advance(self, event: FetchAdvanced) -> None:
        """Note progress."""
        if self.fetch is not None and (self.fetch.key, self.fetch.op) == (event.key, event.op):
            self.fetch.received_nbytes = max(self.fetch.received_nbytes, event.received_nbytes)

    def end(self, event: FetchEnded) -> Fetch | None:
        """Note the end of a fetch; return it if its bytes are there and now have to be recorded."""
        running = self.fetch
        if running is None or (running.key, running.op) != (event.key, event.op) or running.ended:
            return None
        running.error = event.error
        if event.error is not None:
            return None
        running.ended, running.generation, running.wire_nbytes = True, event.generation, event.wire_nbytes
        running.received_nbytes = running.planned_nbytes
        return running

    def complete(self, fetch: Fetch) -> None:
        """The record is durable: the half holds the version, unless it was given up meanwhile."""
        if self.fetch is fetch:
            self.halves[fetch.half] = Half(fetch.epoch, fetch.key, fetch.generation, fetch.wire_nbytes)
            self.fetch = None

    def refuse(self, key: VersionKey, error: WireError) -> None:
        """The record could not be written: the bytes are there, and nobody vouches for them."""
        if self.fetch is not None and self.fetch.key == key:
            self.fetch.ended, self.fetch.error = False, error

    def drop(self, kept: set[VersionKey]) -> None:
        """Let go of halves that nobody needs."""
        self.halves = [half if half is not None and half.key in kept else None for half in self.halves]

    def _free_half(self, kept: set[VersionKey]) -> int | None:
        for i, half in enumerate(self.halves):
            if half is None or half.key not in kept:
                return i
        return None
