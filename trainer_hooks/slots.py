"""The shared memory that a rank publishes through, and the one copy of a publish.

Two slots: one keeps the last committed version readable while the next is written.
Each is a pool that is made and faulted in once; the pairs of (slot, parameter) views
are built once and only looked at again where a framework has re-bound a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from weightd.core.units import NO_KEY, TrainerRank, VersionKey
from weightd.core.wire.messages import Region, SlotRelease, SlotState
from weightd.link.copies import Bytes, Pair, View, run_pairs
from weightd.link.memory import Pool
from weightd.trainer_hooks.describe import Described, Place
from weightd.trainer_hooks.faults import FrozenChanged, HoldingsChanged

SLOTS = 2
"""One of the version in hand and one of the last committed version (policy ``wait``)."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers that carry an element's bytes to numpy, which knows no bfloat16."""

_Rendered = tuple[Tensor, Callable[[Tensor], None]]
"""A place in a slot and what writes its values there."""

_Work = tuple[list[Pair], list[_Rendered]]
"""What is copied as it is, and what torch writes."""

_Seen = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]
"""What a parameter was when its views were made: address, shape, strides, element type."""


class Slots:
    """The slots of one trainer rank.  Their states are serialised by the owner's lock; only ``fill`` runs outside.

    Attributes:
        live: Whether the first slot is the memory of the parameters themselves.
        pools: The memory of each.
    """

    live = False

    def __init__(self, rank: TrainerRank, described: Described, layout_digest: str, count: int = SLOTS) -> None:
        """Make the pools and build all views.

        Raises:
            MemoryExhausted: The system does not give the memory; nothing is left behind.
        """
        self._digest = layout_digest
        self._keys: list[VersionKey] = [NO_KEY] * count
        self._labels: list[str | None] = [None] * count
        self._places = described.places
        self._stray = described.stray
        self._prepare = described.prepare
        self._verify = described.verify
        self.pools: list[Pool] = []
        try:
            for slot in range(count):
                name = f"trainer {rank} slot {slot} region 0"
                self.pools.append(self._make_pool(name, slot, described.payload_nbytes))
        except BaseException:
            self.close()
            raise
        self._slot_views = [[_slot_view(pool.payload, place) for place in self._places] for pool in self.pools]
        self._reads = [place.shard.read for place in self._places]
        self._seen: list[_Seen] = [(-1, (), (), torch.uint8)] * len(self._places)
        self._work: list[_Work] = [([], []) for _ in self.pools]
        self._frozen_work: list[_Work] = [([], []) for _ in self.pools]
        self._filled = [False] * count
        """Whether a slot holds the frozen shards."""
        self._frozen = {index: -1 for index, place in enumerate(self._places) if place.shard.frozen}
        """Torch's count of writes to each frozen shard, once it was copied."""
        self._bind()

    # ------------------------------------------------------------ states

    def regions(self) -> tuple[Region, ...]:
        """Return the pools as a hello announces them."""
        return tuple(Region(slot, 0, pool.nbytes) for slot, pool in enumerate(self.pools))

    def states(self) -> tuple[SlotState, ...]:
        """Return what each slot holds."""
        return tuple(
            SlotState(slot, key, pool.generation, self._digest if key != NO_KEY else "", self._labels[slot])
            for slot, (key, pool) in enumerate(zip(self._keys, self.pools, strict=True))
        )

    @property
    def keys(self) -> tuple[VersionKey, ...]:
        """What each slot holds."""
        return tuple(self._keys)

    def free(self) -> int | None:
        """Return a slot that may be written, or None."""
        return self._keys.index(NO_KEY) if NO_KEY in self._keys else None

    def holds(self, key: VersionKey) -> bool:
        """Say whether a slot holds ``key``."""
        return key in self._keys

    def taken(self) -> tuple[str, ...]:
        """Return each slot with what it holds, for an error."""
        return tuple(f"slot {slot} holds {key}" for slot, key in enumerate(self._keys))

    def release(self, releases: Iterable[SlotRelease]) -> None:
        """Free slots; a release of other bytes than a slot holds is late and ignored."""
        for release in releases:
            if release.slot < len(self._keys) and self._keys[release.slot] == release.key != NO_KEY:
                self._keys[release.slot] = NO_KEY
                self._labels[release.slot] = None

    def raise_written(self) -> None:
        """Raise if what was published was written meanwhile; a slot is written by nobody else."""

    def published(self, slot: int, key: VersionKey, label: str | None) -> None:
        """Say that the slot holds ``key``, whole."""
        self._keys[slot] = key
        self._labels[slot] = label

    # ------------------------------------------------------------ bytes

    def fill(self, slot: int) -> int:
        """Copy every shard into a free slot, frozen ones once, and return the bytes written.

        Raises:
            HoldingsChanged: A parameter is not what was attached; nothing was copied.
            FrozenChanged: A frozen shard was written; nothing was copied.
            TrainerHookError: A check refuses what lies in the slot; it stays free.
        """
        for prepare in self._prepare:
            prepare()
        stray = self._stray()
        if stray is not None:
            raise HoldingsChanged(*stray)
        self._bind()
        self._check_frozen()
        pool = self.pools[slot]
        self._begin(pool)
        try:
            nbytes = self._write(slot)
        finally:
            pool.bump()
        for verify in self._verify:
            verify(pool.payload)
        return nbytes

    def close(self) -> None:
        """Let go of the memory; readers that mapped it keep it for as long as they need."""
        self._slot_views = []
        self._work, self._frozen_work = [], []
        for pool in self.pools:
            pool.close()

    def _make_pool(self, name: str, slot: int, nbytes: int) -> Pool:
        """Return the memory of a slot."""
        return Pool.create(name, nbytes)

    def _begin(self, pool: Pool) -> None:
        """Make the generation odd: whoever reads from here on discards what it read."""
        pool.bump()

    def _write(self, slot: int) -> int:
        """Copy every shard, frozen ones once, and return the bytes written."""
        nbytes = _run(self._work[slot])
        if not self._filled[slot]:
            nbytes += _run(self._frozen_work[slot])
            self._filled[slot] = True
        return nbytes

    def _bind(self) -> None:
        """Make the views again if any parameter's memory is elsewhere than when they were made.

        Runs at every publish over every parameter, so it makes no object where nothing has moved.
        """
        moved: dict[int, _Seen] = {}  # noted only once all are looked at: one that is refused leaves all as they were
        for index, (read, (address, shape, strides, dtype)) in enumerate(zip(self._reads, self._seen, strict=True)):
            tensor = read()
            same = tensor.data_ptr() == address and tensor.shape == shape and tensor.stride() == strides
            if same and tensor.dtype is dtype:
                continue
            _check_unchanged(self._places[index], tensor)
            if self._frozen.get(index, -1) >= 0:
                raise FrozenChanged(self._places[index].shard.name, "is another tensor")
            moved[index] = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if moved:
            tensors = [read() for read in self._reads]
            every = list(enumerate(zip(self._places, tensors, strict=True)))
            for slot, views in enumerate(self._slot_views):
                triples = [(place, views[at], tensor) for at, (place, tensor) in every]
                self._work[slot] = _pair_up([t for t in triples if not t[0].shard.frozen])
                self._frozen_work[slot] = _pair_up([t for t in triples if t[0].shard.frozen])
            for index, seen in moved.items():
                self._seen[index] = seen

    def _check_frozen(self) -> None:
        """Compare torch's counts of writes with those of the first copy."""
        for index, copied in self._frozen.items():
            found = self._places[index].shard.written
            if copied not in (-1, found):
                raise FrozenChanged(self._places[index].shard.name, f"was written {found - copied} times")
            self._frozen[index] = found


def byte_view(tensor: Tensor) -> View:
    """Return a CPU tensor as a numpy view of its own memory, in integers that carry its bytes."""
    size = tensor.element_size()
    bits: View = tensor.detach().view(_BITS[size]).numpy().view(np.dtype(f"u{size}"))
    return bits


def _slot_view(payload: Bytes, place: Place) -> View:
    size = place.dtype.itemsize
    view: View = np.ndarray(place.shard.local_shape, np.dtype(f"u{size}"), payload.data, place.first_byte)
    return view


def _run(work: _Work) -> int:
    """Write what is to be written, and return the bytes."""
    pairs, rendered = work
    nbytes = run_pairs(pairs)
    for destination, write in rendered:
        write(destination)
        nbytes += destination.nbytes
    return nbytes


def _pair_up(triples: Sequence[tuple[Place, View, Tensor]]) -> _Work:
    """Return what is copied as it is, and what torch writes: casts (numpy knows no bfloat16) and computed values."""
    pairs: list[Pair] = []
    rendered: list[_Rendered] = []
    for place, view, tensor in triples:
        if place.shard.render is None and place.dtype == tensor.dtype:
            pairs.append((view, byte_view(tensor)))
            continue
        size = place.dtype.itemsize
        carrier = torch.from_numpy(view.view(np.dtype(f"{'i' if size > 1 else 'u'}{size}"))).view(place.dtype)
        rendered.append((carrier, place.shard.render or partial(_cast, tensor.detach())))
    return pairs, rendered


def _cast(source: Tensor, destination: Tensor) -> None:
    destination.copy_(source)


def _check_unchanged(place: Place, tensor: Tensor) -> None:
    shard = place.shard
    attached = f"{shard.local_shape} {shard.dtype} on cpu"
    found = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device.type}"
    if attached != found:
        raise HoldingsChanged(shard.name, attached, found)
