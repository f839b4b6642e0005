"""Engines written as counts and offsets, or as slots divided by a size, and the slots they stand for.

A shorthand counts in one of two spaces, which are never guessed: ``trainer``
counts trainer ranks, ``rollout`` counts the slots that host none, in the
nodes' order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from weightd.core.roster.topology import EngineDecl, SlotLabel
from weightd.core.roster.violations import Remainder, RosterShape, RosterValue, roster_value

if TYPE_CHECKING:
    from weightd.core.errors import WeightdError

Base = Literal["trainer", "rollout"]


class CountsAndOffsets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Engine i has ``counts[i]`` ranks on consecutive slots from ``offsets[i]`` of the base."""

    counts: tuple[int, ...]
    offsets: tuple[int, ...]


class EqualEngines(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first ``total_slots`` slots of the base, divided into engines of ``per_engine`` ranks."""

    total_slots: int
    per_engine: int


Shorthand = CountsAndOffsets | EqualEngines


def shorthand_faults(shorthand: Shorthand) -> tuple[WeightdError, ...]:
    """Return why a shorthand cannot be expanded; nothing else can be judged then."""
    if isinstance(shorthand, EqualEngines):
        for count in (shorthand.per_engine, shorthand.total_slots):
            if count < 1:
                return (RosterShape(engine="E0", count=count),)
        rest = shorthand.total_slots % shorthand.per_engine
        return (Remainder(shorthand.total_slots, shorthand.per_engine, rest),) if rest else ()
    faults: list[WeightdError] = []
    if len(shorthand.counts) != len(shorthand.offsets):
        faults.append(RosterShape(counts=len(shorthand.counts), offsets=len(shorthand.offsets)))
    faults += [RosterShape(engine=f"E{i}", count=count) for i, count in enumerate(shorthand.counts) if count < 1]
    faults += [RosterValue("offsets", offset, "an offset counts from 0") for offset in shorthand.offsets if offset < 0]
    return tuple(faults)


def expand(shorthand: Shorthand, base: Base, slots: tuple[SlotLabel, ...]) -> tuple[EngineDecl, ...]:
    """Return the engines E0, E1, … of a shorthand without faults.

    A place past the end of the base gets a label that is on no node, so that the
    engine is reported as out of the world with its numbers.  It must not fall on
    a slot that happens to bear that number.

    Args:
        shorthand: The engines.
        base: What offsets count.
        slots: The slots of the base, in its order.
    """
    if isinstance(shorthand, EqualEngines):
        spans = [(at, shorthand.per_engine) for at in range(0, shorthand.total_slots, shorthand.per_engine)]
    else:
        spans = list(zip(shorthand.offsets, shorthand.counts, strict=True))
    return tuple(
        EngineDecl(f"E{i}", count, tuple(_slot_at(slots, at, base) for at in range(start, start + count)))
        for i, (start, count) in enumerate(spans)
    )


def base_slots(
    base: Base, nodes: dict[str, tuple[SlotLabel, ...]], trainer_slots: tuple[SlotLabel, ...]
) -> tuple[SlotLabel, ...]:
    """Return the slots that a shorthand counts, in order."""
    if base == "trainer":
        return trainer_slots
    hosting = {str(label) for label in trainer_slots}
    return tuple(label for slots in nodes.values() for label in slots if str(label) not in hosting)


def size_limit_faults(shorthand: Shorthand, limit: int) -> tuple[WeightdError, ...]:
    """Return an error where a shorthand would expand to more than ``limit`` slots."""
    total = shorthand.total_slots if isinstance(shorthand, EqualEngines) else sum(shorthand.counts)
    if total <= limit:
        return ()
    return (roster_value("engines", total, f"slots in all engines; at most {limit} are expanded"),)


def _slot_at(slots: tuple[SlotLabel, ...], at: int, base: Base) -> SlotLabel:
    """Return the slot at a place of the base, or a label that is on no node."""
    return slots[at] if at < len(slots) else f"{base} slot {at}"
