"""What a sender reads: the buckets that another node fetches, as views of this node's pools.

Views are built once for each epoch and slot, and bounds-checked while they are.  A
bucket whose rows follow each other in memory is sent from where it lies; the rest
are packed into a staging buffer by numpy, which holds no lock while it copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from weightd.core.errors import InternalInvariantBroken
from weightd.core.wire.faults import StaleSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from weightd.core.plan.node_plan import Bucket, Copies, FetchPlan, TrainerSource
    from weightd.core.units import NodeId, VersionKey
    from weightd.link.memory import Pool

_CARRIERS: dict[int, np.dtype[np.generic]] = {n: np.dtype(f"{'c' if n == 16 else 'u'}{n}") for n in (1, 2, 4, 8, 16)}
"""Element types that move bytes unchanged, by size."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One copy: a view of a pool, and where it goes within the bucket."""

    source: NDArray[np.generic]
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Filled:
    """How a bucket is filled: by one run of memory, or by rows."""

    run: NDArray[np.uint8] | None
    rows: tuple[_Row, ...]
    sources: tuple[TrainerSource, ...]
    gaps: bool


class Gather:
    """The buckets of one receiver that this node sends, over one choice of slots."""

    def __init__(self, fetch: FetchPlan, sender: NodeId, pools: Mapping[TrainerSource, Pool]) -> None:
        """Build all views.

        Args:
            fetch: The receiver's fetch plan.
            sender: This node; buckets of others are left out.
            pools: The pool of each source that those buckets name, in the slot to read.

        Raises:
            InternalInvariantBroken: A copy does not lie in its pool or in its bucket.
        """
        self.sender = sender
        self.fetch = fetch
        self._pools = dict(pools)
        self.buckets = {b.index: b for b in fetch.buckets if b.source_node == sender}
        self._filled = {b.index: self._fill(b) for b in self.buckets.values()}
        packed = [b.nbytes for b in self.buckets.values() if self._filled[b.index].run is None]
        self.staging_nbytes = max(packed, default=0)

    def sources(self, index: int) -> tuple[TrainerSource, ...]:
        """Return the pools that a bucket reads."""
        return self._filled[index].sources

    def generation(self, source: TrainerSource) -> int:
        """Return the generation that the pool of a source is at; -1 once it is closed."""
        try:
            return self._pools[source].generation
        except ValueError:
            return -1

    def read(self, index: int, staging: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], bool]:
        """Return the bytes of a bucket, and whether they are a copy.

        Args:
            index: The bucket.
            staging: At least ``staging_nbytes`` long; overwritten if the bucket has to be packed.
        """
        filled, nbytes = self._filled[index], self.buckets[index].nbytes
        if filled.run is not None:
            return filled.run, False
        target = staging[:nbytes]
        if filled.gaps:
            target[:] = 0  # no byte of an earlier bucket, perhaps of another run, may travel in a gap
        for row in filled.rows:
            view = np.ndarray(row.source.shape, row.source.dtype, target, row.offset, row.strides)
            view[...] = row.source
        return target, True

    def _fill(self, bucket: Bucket) -> _Filled:
        copies, rows = self.fetch.gather, range(bucket.first_row, bucket.last_row)
        sources = tuple(dict.fromkeys(self.fetch.sources[int(copies.source[r])] for r in rows))
        built = tuple(self._row(copies, r, bucket) for r in rows)
        covered = sum(row.source.nbytes for row in built)
        run = self._run(copies, bucket, sources) if covered == bucket.nbytes else None
        return _Filled(run, () if run is not None else built, sources, covered != bucket.nbytes)

    def _row(self, copies: Copies, r: int, bucket: Bucket) -> _Row:
        source = self.fetch.sources[int(copies.source[r])]
        payload = self._pools[source].payload
        itemsize = int(copies.itemsize[r])
        extent = tuple(int(n) for n in copies.extent[r])
        strides = tuple(int(n) for n in copies.source_stride[r])
        onto = tuple(int(n) for n in copies.target_stride[r])
        dtype = _CARRIERS.get(itemsize)
        if dtype is None:  # an element of odd size moves as bytes, along one more dimension
            dtype, extent, strides, onto = _CARRIERS[1], (*extent, itemsize), (*strides, 1), (*onto, 1)
        offset = int(copies.target_offset[r]) - bucket.landing_offset
        try:
            view: NDArray[np.generic] = np.ndarray(extent, dtype, payload, int(copies.source_offset[r]), strides)
        except (ValueError, TypeError) as error:
            facts = f"row {r} of {source}: extent {extent}, strides {strides} in {payload.nbytes:,} bytes: {error}"
            raise InternalInvariantBroken("a copy lies in its pool", facts) from error
        last = offset + sum((n - 1) * s for n, s in zip(extent, onto, strict=True)) + dtype.itemsize
        if view.size and not 0 <= offset <= last <= bucket.nbytes:
            facts = f"row {r}: bytes {offset} to {last} of bucket {bucket.index} of {bucket.nbytes:,}"
            raise InternalInvariantBroken("a copy lies in its bucket", facts)
        return _Row(view, offset, onto)

    def _run(self, copies: Copies, bucket: Bucket, sources: tuple[TrainerSource, ...]) -> NDArray[np.uint8] | None:
        """Return the bucket as one stretch of a pool, if it is one; its rows cover it."""
        if len(sources) != 1:
            return None
        rows = slice(bucket.first_row, bucket.last_row)
        start, into, nbytes = copies.source_offset[rows], copies.target_offset[rows], copies.nbytes[rows]
        ends = np.cumsum(nbytes)
        begins = ends - nbytes
        in_order = np.array_equal(start - start[0], begins) and np.array_equal(into - bucket.landing_offset, begins)
        if not (in_order and _whole(copies, rows, copies.source_stride) and _whole(copies, rows, copies.target_stride)):
            return None
        first = int(start[0])
        return self._pools[sources[0]].payload[first : first + bucket.nbytes]


def _whole(copies: Copies, rows: slice, strides: NDArray[np.int64]) -> bool:
    """Say whether each row is one run of memory: its strides are those of a dense array in C order."""
    extent = copies.extent[rows]
    inner = np.cumprod(extent[:, ::-1], axis=1)[:, ::-1]  # elements from this dimension inward
    dense = np.concatenate([inner[:, 1:], np.ones((len(extent), 1), dtype=np.int64)], axis=1)
    dense = dense * copies.itemsize[rows][:, None]
    return bool(np.all((extent == 1) | (strides[rows] == dense)))


@dataclass(frozen=True, slots=True)
class Lease:
    """A version that may be read: the views, and the generation at which each source held it."""

    gather: Gather
    key: VersionKey
    generations: Mapping[TrainerSource, int]

    def check(self, index: int) -> None:
        """Check, before and after a read, that a bucket's sources hold the version.

        Raises:
            StaleSource: One of them was, or is being, overwritten.
        """
        for source in self.gather.sources(index):
            expected, found = self.generations[source], self.gather.generation(source)
            if found != expected or found % 2:
                name = f"trainer {source.rank} region {source.region}"
                raise StaleSource(index, str(self.key), self.gather.sender, name, expected, found)
