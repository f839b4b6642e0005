"""Shards as a layout, and where each lies in a slot: one section per element type, every tensor on a cache line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from weightd.core.dtypes import dtype_named
from weightd.core.errors import ConfigError
from weightd.core.layout.boxes import moved
from weightd.core.layout.build import LayoutBuilder
from weightd.core.layout.checks import BASE_ALIGN
from weightd.core.layout.columns import Layout, Unused
from weightd.core.layout.faults import BadEntry
from weightd.link.copies import Bytes
from weightd.trainer_hooks.shards import Holdings, Part, Shard, Stray, dtype_name, no_stray
from weightd.trainer_hooks.ties import tie_check

Casts = torch.dtype | Mapping[str, torch.dtype] | None
"""Element type that is published: one for all floating tensors, or by name; None publishes what is held."""

UnusedSpec = str | tuple[str, tuple[int, int]] | Unused
"""A name, a name with its rows ``[first, last)``, or the layout's own entry."""


@dataclass(frozen=True, slots=True)
class Place:
    """A shard and its place in every slot.

    Attributes:
        shard: The shard.
        dtype: Element type in the slot.
        base: Byte of the payload where its section begins.
        offset: Element of the section where it begins; it lies there row-major and whole.
    """

    shard: Shard
    dtype: torch.dtype
    base: int
    offset: int

    @property
    def first_byte(self) -> int:
        """First byte in the payload."""
        return self.base + self.offset * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """A rank as a layout.

    Attributes:
        layout: The layout; its buffers are the sections of a slot.
        places: Every shard that holds an element.
        payload_nbytes: Bytes of one slot.
        stray: Looks whether the shards still are the model's.
        prepare: Runs before every publish, in order.
        verify: Look at the payload of a slot that was written, in order, and raise where it may not be published.
    """

    layout: Layout
    places: tuple[Place, ...]
    payload_nbytes: int
    stray: Callable[[], Stray | None] = no_stray
    prepare: tuple[Callable[[], None], ...] = ()
    verify: tuple[Callable[[Bytes], None], ...] = ()


def describe_holdings(holdings: Holdings, casts: Casts, unused: Iterable[UnusedSpec], whose: str) -> Described:
    """Return the layout of a rank.

    Args:
        holdings: What the adapter found.
        casts: Element types to publish in.
        unused: What nobody is to take.
        whose: Subject of a report.

    Raises:
        ConfigError: ``casts`` names a tensor that is not held.
        LayoutError: Two shards of one tensor disagree about it.
        Refused: The layout breaks a rule.
    """
    dtypes = _published(holdings, casts)
    sections = _sections(holdings.shards, dtypes)
    builder = LayoutBuilder()
    buffers: dict[str, int] = {}
    for name, (base, nbytes) in sections.items():
        buffers[name] = builder.add_buffer(name, nbytes, name, "slot", 0, base)
    fill = dict.fromkeys(sections, 0)
    places: list[Place] = []
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    for shard, dtype in zip(holdings.shards, dtypes, strict=True):
        kind = dtype_name(shard.name, dtype)
        offset = fill.get(kind, 0)
        for part in shard.parts:
            row = add_tensor(builder, tensors, part, kind)
            if len(part.pieces):
                builder.add_pieces(moved(part.pieces, offset), row, buffers[kind])
        if shard.numel:
            fill[kind] += aligned(prod(shard.local_shape), dtype.itemsize)
            places.append(Place(shard, dtype, sections[kind][0], offset))
    for alias, canonical in holdings.aliases:
        builder.add_alias(alias, canonical)
    for entry in unused:
        add_unused(builder, entry)
    payload = max((base + nbytes for base, nbytes in sections.values()), default=0)
    layout = builder.build(whose)
    verify = tuple(tie_check(layout, *tie) for tie in holdings.ties)
    return Described(layout, tuple(places), payload, holdings.stray, holdings.prepare, verify)


def _published(holdings: Holdings, casts: Casts) -> list[torch.dtype]:
    """Return the element type in which each shard is published.

    Names are published ones; a name of the model counts where nothing is published under it.
    """
    shards = holdings.shards
    if casts is None:
        return [s.dtype for s in shards]
    if isinstance(casts, torch.dtype):
        return [casts if s.dtype.is_floating_point else s.dtype for s in shards]
    tied: dict[str, set[str]] = {}
    for name, canonical in holdings.aliases:
        tied.setdefault(canonical, set()).add(name)
    names = [{n for part in s.parts for n in (part.name, *tied.get(part.name, ()))} for s in shards]
    published = set().union(*names)
    names = [found | ({s.name} - published) for found, s in zip(names, shards, strict=True)]
    unknown = sorted(set(casts) - set().union(*names))
    if unknown:
        raise ConfigError("dtype", unknown[0], f"this rank holds no tensor of that name ({len(unknown)} such names)")
    return [_cast_of(s, casts, n) for s, n in zip(shards, names, strict=True)]


def _cast_of(shard: Shard, casts: Mapping[str, torch.dtype], names: set[str]) -> torch.dtype:
    wanted = {casts[name] for name in names if name in casts}
    if len(wanted) > 1:
        found = ", ".join(sorted(str(dtype) for dtype in wanted))
        raise ConfigError("dtype", shard.name, f"what it holds is one tensor here, and is to be cast to {found}")
    return wanted.pop() if wanted else shard.dtype


def aligned(numel: int, itemsize: int) -> int:
    """Return elements rounded up to whole cache lines."""
    per_line = BASE_ALIGN // itemsize
    return -(-numel // per_line) * per_line


def _sections(shards: Sequence[Shard], dtypes: Sequence[torch.dtype]) -> dict[str, tuple[int, int]]:
    """Return (base, nbytes) of each section, widest elements first."""
    elements: dict[str, int] = {}
    for shard, dtype in zip(shards, dtypes, strict=True):
        kind = dtype_name(shard.name, dtype)
        held = aligned(prod(shard.local_shape), dtype.itemsize) if shard.numel else 0
        elements[kind] = elements.get(kind, 0) + held
    sections: dict[str, tuple[int, int]] = {}
    base = 0
    for kind in sorted(elements, key=lambda k: (-dtype_named(k).nbytes, k)):
        nbytes = elements[kind] * dtype_named(kind).nbytes
        sections[kind] = base, nbytes
        base += nbytes
    return sections


def add_tensor(builder: LayoutBuilder, known: dict[str, tuple[tuple[int, ...], str]], part: Part, kind: str) -> int:
    """Return the row of a part's tensor, which several shards may hold parts of."""
    found = part.shape, kind
    if part.name not in known:
        known[part.name] = found
        return builder.add_tensor(part.name, part.shape, kind)
    if known[part.name] != found:
        raise BadEntry("tensors", part.name, f"declared as {known[part.name]} and as {found} on one rank")
    row = builder.tensor_row(part.name)
    assert row is not None
    return row


def add_unused(builder: LayoutBuilder, entry: UnusedSpec) -> None:
    """Add what nobody is to take."""
    if isinstance(entry, str):
        builder.add_unused(entry, None, "declared by the trainer")
    elif isinstance(entry, Unused):
        rows = None if entry.rows is None else (entry.rows.start, entry.rows.end)
        builder.add_unused(entry.name, rows, entry.why)
    else:
        builder.add_unused(entry[0], entry[1], "declared by the trainer")
