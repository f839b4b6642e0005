"""The layout of a live rank: the storages of its parameters as they lie, then what is copied at each publish.

Copied is what a trainer may write between two steps (persistent buffers: a forward writes running statistics) and
what is not the local tensor's own bytes (computed shards).  Both are small beside the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

from weightd.core.dtypes import dtype_named
from weightd.core.layout.boxes import Pieces, moved
from weightd.core.layout.build import LayoutBuilder
from weightd.trainer_hooks.describe import Described, Place, UnusedSpec, add_tensor, add_unused, aligned
from weightd.trainer_hooks.live.composing import composed
from weightd.trainer_hooks.live.homes import Home, Stand, homes_of
from weightd.trainer_hooks.shards import Holdings, Shard, dtype_name
from weightd.trainer_hooks.ties import tie_check


@dataclass(frozen=True, slots=True, eq=False)
class LiveDescribed(Described):
    """A live rank as a layout; its places are those of what is copied.

    Attributes:
        homes: The storages that are moved, with their places.
    """

    homes: tuple[Home, ...] = field(default=())


@dataclass(slots=True)
class _Section:
    """The part of the payload for one element type."""

    itemsize: int
    homes: list[Home] = field(default_factory=list)
    copied: list[Shard] = field(default_factory=list)
    base: int = 0

    @property
    def nbytes(self) -> int:
        copied = sum(aligned(prod(shard.local_shape), self.itemsize) for shard in self.copied)
        return sum(home.room for home in self.homes) + copied * self.itemsize

    def offsets(self) -> dict[int, int]:
        """Return the element of the section where each copied shard begins, by the shard's id."""
        at = sum(home.room for home in self.homes) // self.itemsize
        found: dict[int, int] = {}
        for shard in self.copied:
            found[id(shard)] = at
            at += aligned(prod(shard.local_shape), self.itemsize)
        return found


def describe_live(
    holdings: Holdings, is_copied: Callable[[Shard], bool], unused: Iterable[UnusedSpec], whose: str
) -> LiveDescribed:
    """Return the layout of a live rank.

    Args:
        holdings: What the adapter found.
        is_copied: Says of a shard that has bytes whether they are copied at each publish.
        unused: What nobody is to take.
        whose: Subject of a report.

    Raises:
        LiveMemoryRefused: A shard cannot live in shared memory.
        LayoutError: Two shards of one tensor disagree about it.
        Refused: The layout breaks a rule.
    """
    sections = _sections(holdings.shards, is_copied)
    builder = LayoutBuilder()
    buffers = {k: builder.add_buffer(k, s.nbytes, k, "live", 0, s.base) for k, s in sections.items()}
    stands = {id(st.shard): (h, st) for s in sections.values() for h in s.homes for st in h.stands}
    copied = {key: at for s in sections.values() for key, at in s.offsets().items()}
    places: list[Place] = []
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    for shard in holdings.shards:
        kind = dtype_name(shard.name, shard.dtype)
        for part in shard.parts:
            row = add_tensor(builder, tensors, part, kind)
            if len(part.pieces) and id(shard) in stands:
                home, stand = stands[id(shard)]
                builder.add_pieces(_living(shard, part.pieces, home, stand, sections[kind]), row, buffers[kind])
            elif len(part.pieces):
                builder.add_pieces(moved(part.pieces, copied[id(shard)]), row, buffers[kind])
        if id(shard) in copied:
            places.append(Place(shard, shard.dtype, sections[kind].base, copied[id(shard)]))
    for alias, canonical in holdings.aliases:
        builder.add_alias(alias, canonical)
    for entry in unused:
        add_unused(builder, entry)
    payload = max((s.base + s.nbytes for s in sections.values()), default=0)
    layout = builder.build(whose)
    verify = tuple(tie_check(layout, *tie) for tie in holdings.ties)
    homes = tuple(home for s in sections.values() for home in s.homes)
    return LiveDescribed(layout, tuple(places), payload, holdings.stray, holdings.prepare, verify, homes)


def _living(shard: Shard, pieces: Pieces, home: Home, stand: Stand, section: _Section) -> Pieces:
    first = (home.first_byte - section.base) // section.itemsize + stand.start
    return composed(shard.name, pieces, shard.local_shape, first, stand.strides)


def _sections(shards: Sequence[Shard], is_copied: Callable[[Shard], bool]) -> dict[str, _Section]:
    """Return the sections, widest elements first, with every storage in its place."""
    sections: dict[str, _Section] = {}
    for shard in shards:
        sections.setdefault(dtype_name(shard.name, shard.dtype), _Section(shard.dtype.itemsize))
    held = [shard for shard in shards if shard.numel]
    copied = {id(shard) for shard in held if shard.render is not None or is_copied(shard)}
    for home in homes_of(shard for shard in held if id(shard) not in copied):
        sections[dtype_name(home.name, home.dtype)].homes.append(home)
    for shard in held:
        if id(shard) in copied:
            sections[dtype_name(shard.name, shard.dtype)].copied.append(shard)
    base = 0
    ordered = {k: sections[k] for k in sorted(sections, key=lambda k: (-dtype_named(k).nbytes, k))}
    for section in ordered.values():
        section.base = base
        for home in section.homes:
            home.first_byte, base = base, base + home.room
        base = section.base + section.nbytes
    return ordered
