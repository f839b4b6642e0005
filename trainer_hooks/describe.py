"""Shards as a layout, and where each lies in a slot: one section per element type, every tensor on a cache line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from weightd.core.dtypes import dtype_named
from weightd.core.errors import ConfigError
from weightd.core.layout.boxes import row_major
from weightd.core.layout.build import LayoutBuilder
from weightd.core.layout.checks import BASE_ALIGN
from weightd.core.layout.columns import Layout, Unused
from weightd.core.layout.faults import BadEntry
from weightd.trainer_hooks.shards import Holdings, Shard, Stray, dtype_name, no_stray

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
    """

    layout: Layout
    places: tuple[Place, ...]
    payload_nbytes: int
    stray: Callable[[], Stray | None] = no_stray


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
    dtypes = _published(holdings.shards, casts)
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
        _add_tensor(builder, tensors, shard, kind)
        if not shard.boxes:
            continue
        offset = fill[kind]
        fill[kind] += _aligned(prod(shard.local_shape), dtype.itemsize)
        places.append(Place(shard, dtype, sections[kind][0], offset))
        strides = row_major(shard.local_shape)
        row = builder.tensor_row(shard.name)
        assert row is not None
        for box in shard.boxes:
            first = offset + sum(at * stride for at, stride in zip(box.local, strides, strict=True))
            builder.add_piece(row, buffers[kind], box.start, box.extent, first, strides)
    for alias, canonical in holdings.aliases:
        builder.add_alias(alias, canonical)
    for entry in unused:
        _add_unused(builder, entry)
    payload = max((base + nbytes for base, nbytes in sections.values()), default=0)
    return Described(builder.build(whose), tuple(places), payload, holdings.stray)


def _published(shards: Sequence[Shard], casts: Casts) -> list[torch.dtype]:
    """Return the element type in which each shard is published."""
    if casts is None:
        return [s.dtype for s in shards]
    if isinstance(casts, torch.dtype):
        return [casts if s.dtype.is_floating_point else s.dtype for s in shards]
    unknown = sorted(set(casts) - {s.name for s in shards})
    if unknown:
        raise ConfigError("dtype", unknown[0], f"this rank holds no tensor of that name ({len(unknown)} such names)")
    return [casts.get(s.name, s.dtype) for s in shards]


def _aligned(numel: int, itemsize: int) -> int:
    """Return elements rounded up to whole cache lines."""
    per_line = BASE_ALIGN // itemsize
    return -(-numel // per_line) * per_line


def _sections(shards: Sequence[Shard], dtypes: Sequence[torch.dtype]) -> dict[str, tuple[int, int]]:
    """Return (base, nbytes) of each section, widest elements first."""
    elements: dict[str, int] = {}
    for shard, dtype in zip(shards, dtypes, strict=True):
        kind = dtype_name(shard.name, dtype)
        held = _aligned(prod(shard.local_shape), dtype.itemsize) if shard.boxes else 0
        elements[kind] = elements.get(kind, 0) + held
    sections: dict[str, tuple[int, int]] = {}
    base = 0
    for kind in sorted(elements, key=lambda k: (-dtype_named(k).nbytes, k)):
        nbytes = elements[kind] * dtype_named(kind).nbytes
        sections[kind] = base, nbytes
        base += nbytes
    return sections


def _add_tensor(builder: LayoutBuilder, known: dict[str, tuple[tuple[int, ...], str]], shard: Shard, kind: str) -> None:
    found = shard.shape, kind
    if shard.name not in known:
        known[shard.name] = found
        builder.add_tensor(shard.name, shard.shape, kind)
    elif known[shard.name] != found:
        raise BadEntry("tensors", shard.name, f"declared as {known[shard.name]} and as {found} on one rank")


def _add_unused(builder: LayoutBuilder, entry: UnusedSpec) -> None:
    if isinstance(entry, str):
        builder.add_unused(entry, None, "declared by the trainer")
    elif isinstance(entry, Unused):
        rows = None if entry.rows is None else (entry.rows.start, entry.rows.end)
        builder.add_unused(entry.name, rows, entry.why)
    else:
        builder.add_unused(entry[0], entry[1], "declared by the trainer")
