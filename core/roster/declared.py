"""A roster as a user writes it: a table with the keys of a roster file.

The table is read strictly.  An unknown key is named and nothing is judged,
because a misspelt ``reserved_trainer_ranks`` would otherwise turn into a
report about ranks that the user did reserve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from weightd.core.errors import Refused, WeightdError
from weightd.core.roster.hello import declared_label, expected_size
from weightd.core.roster.judge import NOTHING_STARTED
from weightd.core.roster.seating import declared_seats, expected_ranks
from weightd.core.roster.shorthand import (
    Base,
    CountsAndOffsets,
    EqualEngines,
    Shorthand,
    base_slots,
    expand,
    shorthand_faults,
    size_limit_faults,
)
from weightd.core.roster.topology import EngineDecl, Mode, Registration, Roster, SlotLabel
from weightd.core.roster.violations import StaleRegistration, UnknownKeys, roster_value
from weightd.core.units import Boot, EngineId, EngineRank, NodeId, RolloutRank, SlotName, TrainerRank

SHORTHAND_KEYS = ("counts", "offsets", "total_slots", "per_engine", "base")
"""Keys of engines as a shorthand: inside ``engines``, or beside it."""

ROSTER_KEYS = (
    "nodes",
    "trainer_slots",
    "engines",
    *SHORTHAND_KEYS,
    "reserved_trainer_ranks",
    "mode",
    "strict_tiling",
    "allow_mixed_engine",
    "absent",
    "duplicate",
    "previous_epoch",
)
"""Keys of a roster file."""

CASE_KEYS = ("id", "title", "note", "expect", "identities", "placement", "node_shards")
"""Keys of a documented case that say what is expected of it; they are ignored."""

SLOT_LIMIT = 1 << 20
"""Slots a shorthand may stand for: far above any cluster, far below what a slip of the pen would allocate."""

T = TypeVar("T")


class _Engine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine with its slots, rank k on ``slots[k]``."""

    id: str
    slots: tuple[SlotLabel, ...]


class _Rank(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank of an engine, of which a file says that it is absent or there twice."""

    engine: str
    k: int

    def rank(self) -> RolloutRank:
        return RolloutRank(EngineId(self.engine), EngineRank(self.k))


@dataclass(frozen=True, slots=True)
class RosterFile:
    """A roster file: what it declares, and what it says of registrations.

    Attributes:
        roster: The declaration, shorthands expanded.
        absent: Rollout ranks that are taken as not registered.
        duplicate: Rollout ranks that are taken as registered once more.
        previous: Engines of the epoch before, whose registrations may be stale.
    """

    roster: Roster
    absent: tuple[RolloutRank, ...] = ()
    duplicate: tuple[RolloutRank, ...] = ()
    previous: tuple[EngineDecl, ...] = ()

    def registrations(self) -> tuple[Registration, ...]:
        """Return the registrations that the file describes.

        Every declared rank sits on its declared slot, but for absentees; a duplicate
        has the boot after that of the rank it doubles.  A process id is 0: a file
        names no process.
        """
        seats = declared_seats(self.roster)
        absent = set(self.absent)
        here = [who for who in expected_ranks(self.roster) if who not in absent]
        claims: dict[TrainerRank | RolloutRank, int] = {}
        found: list[Registration] = []
        for who in [*here, *self.duplicate]:
            claims[who] = claims.get(who, 0) + 1
            label = str(declared_label(self.roster, who))
            node = seats[label].node if label in seats else None
            size = expected_size(self.roster, who)
            place = node or NodeId(""), SlotName(label)
            found.append(Registration(who, size, *place, pid=0, boot=Boot(claims[who])))
        return tuple(found)

    def stale(self) -> tuple[StaleRegistration, ...]:
        """Return what the epoch before had and this roster does not: notices, no errors."""
        now = {(engine.id, k, str(slot)) for engine in self.roster.engines for k, slot in enumerate(engine.slots or ())}
        notices: list[StaleRegistration] = []
        for engine in self.previous:
            gone = [(k, slot) for k, slot in enumerate(engine.slots or ()) if (engine.id, k, str(slot)) not in now]
            if gone:
                ranks, slots = zip(*gone, strict=True)
                notices.append(StaleRegistration(engine.id, ranks, slots))
        return tuple(notices)

    def labels(self) -> dict[SlotName, SlotLabel]:
        """Return each slot's label as the file writes it, a number where it is one."""
        return {seat.name: seat.label for seat in declared_seats(self.roster).values()}


def roster_from_mapping(mapping: Mapping[str, Any], subject: str = "roster") -> RosterFile:
    """Return the roster that a table describes.

    Args:
        mapping: The table, as a TOML or JSON reader returns it.
        subject: What a report says was refused.

    Raises:
        UnknownKeys: It has keys that mean nothing; all of them are named.
        Refused: Values of the wrong type (E_ROSTER, all of them), or a shorthand that
            cannot be expanded (E_SHAPE, E_REMAINDER), which is reported alone.
    """
    unknown = _unknown_keys(mapping)
    if unknown:
        raise UnknownKeys(unknown, ROSTER_KEYS)
    reader = _Reader(mapping, subject)
    nodes: dict[str, tuple[SlotLabel, ...]] = reader.required("nodes", dict[str, tuple[SlotLabel, ...]], {})
    trainer_slots: tuple[SlotLabel, ...] = reader.required("trainer_slots", tuple[SlotLabel, ...], ())
    engines, base = _read_engines(reader)
    reserved: tuple[int, ...] = reader.optional("reserved_trainer_ranks", tuple[int, ...], ())
    mode: Mode = reader.optional("mode", Mode, "disaggregated")
    strict = reader.optional("strict_tiling", bool, False)
    mixed = reader.optional("allow_mixed_engine", bool, False)
    absent: tuple[_Rank, ...] = reader.optional("absent", tuple[_Rank, ...], ())
    twice: tuple[_Rank, ...] = reader.optional("duplicate", tuple[_Rank, ...], ())
    previous: tuple[_Engine, ...] = reader.optional("previous_epoch", tuple[_Engine, ...], ())
    reader.raise_faults()
    if not isinstance(engines, tuple):
        _raise_if(shorthand_faults(engines), subject)
        _raise_if(size_limit_faults(engines, SLOT_LIMIT), subject)
        engines = expand(engines, base, base_slots(base, nodes, trainer_slots))
    roster = Roster(len(trainer_slots), engines, reserved, mode, strict, mixed, nodes, trainer_slots)
    file = RosterFile(roster, _ranks(absent), _ranks(twice), _declarations(previous))
    _raise_if(_registration_faults(file), subject)
    return file


class _Reader:
    """Takes typed values out of a table and collects what is wrong with them."""

    def __init__(self, table: Mapping[str, Any], subject: str) -> None:
        self.table = table
        self.subject = subject
        self.faults: list[WeightdError] = []

    def required(self, key: str, kind: Any, instead: T) -> T:
        """Return a value that has to be there; ``instead`` where it is missing or wrong."""
        if key not in self.table:
            self.faults.append(roster_value(key, "(missing)", "a roster needs it"))
            return instead
        return self.optional(key, kind, instead)

    def optional(self, key: str, kind: Any, default: T) -> T:
        """Return a value, or ``default`` where it is missing or wrong."""
        if key not in self.table:
            return default
        return self.convert(key, self.table[key], kind, default)

    def convert(self, key: str, value: object, kind: Any, default: T) -> T:
        """Return ``value`` as ``kind``, or ``default`` with a fault."""
        try:
            converted: T = msgspec.convert(value, kind)
        except msgspec.ValidationError as wrong:
            self.faults.append(roster_value(key, value, str(wrong)))
            return default
        return converted

    def raise_faults(self) -> None:
        """Raise all that was wrong."""
        _raise_if(tuple(self.faults), self.subject)


def _read_engines(reader: _Reader) -> tuple[tuple[EngineDecl, ...] | Shorthand, Base]:
    """Return the engines as listed or as a shorthand, and the base of the latter."""
    beside = {key: reader.table[key] for key in SHORTHAND_KEYS if key in reader.table}
    written = reader.table.get("engines")
    if isinstance(written, Mapping):
        for key in beside:
            if key in written:
                reader.faults.append(roster_value(key, beside[key], "written inside engines and beside it"))
        return _read_shorthand(reader, {**beside, **written})
    if "engines" not in reader.table and set(beside) - {"base"}:
        return _read_shorthand(reader, beside)
    for key, value in beside.items():
        if (key, value) != ("base", "trainer"):
            reader.faults.append(roster_value(key, value, "belongs to a shorthand; these engines list their slots"))
    listed: tuple[_Engine, ...] = reader.required("engines", tuple[_Engine, ...], ())
    return _declarations(listed), "trainer"


def _read_shorthand(reader: _Reader, table: Mapping[str, Any]) -> tuple[Shorthand, Base]:
    """Return the shorthand of a table that has the keys of one, and its base."""
    base: Base = reader.convert("base", table.get("base", "trainer"), Base, "trainer")
    rest = {key: value for key, value in table.items() if key != "base"}
    if {"total_slots", "per_engine"} & set(rest):
        return reader.convert("engines", rest, EqualEngines, EqualEngines(1, 1)), base
    return reader.convert("engines", rest, CountsAndOffsets, CountsAndOffsets((), ())), base


def _unknown_keys(mapping: Mapping[str, Any]) -> tuple[str, ...]:
    """Return every key that means nothing, with its place."""
    found = [str(key) for key in mapping if key not in (*ROSTER_KEYS, *CASE_KEYS)]
    engines = mapping.get("engines")
    if isinstance(engines, Mapping):
        found += [f"engines.{key}" for key in engines if key not in SHORTHAND_KEYS]
    inner = {"engines": ("id", "slots"), "previous_epoch": ("id", "slots")}
    inner |= {"absent": ("engine", "k"), "duplicate": ("engine", "k")}
    for name, allowed in inner.items():
        entries: object = mapping.get(name)
        for i, entry in enumerate(entries if isinstance(entries, list) else []):
            if isinstance(entry, Mapping):
                found += [f"{name}[{i}].{key}" for key in entry if key not in allowed]
    return tuple(found)


def _registration_faults(file: RosterFile) -> tuple[WeightdError, ...]:
    """Return absentees and duplicates that the roster does not have, and ranks that are said to be both."""
    known = set(expected_ranks(file.roster))
    listed = [("absent", who) for who in file.absent] + [("duplicate", who) for who in file.duplicate]
    faults: list[WeightdError] = [
        roster_value(field, str(who), "the roster has no such rank") for field, who in listed if who not in known
    ]
    both = sorted(set(file.absent) & set(file.duplicate) & known)
    faults += [roster_value("absent", str(who), "also listed as duplicate") for who in both]
    return tuple(faults)


def _declarations(engines: tuple[_Engine, ...]) -> tuple[EngineDecl, ...]:
    """Return listed engines as declarations."""
    return tuple(EngineDecl(engine.id, len(engine.slots), engine.slots) for engine in engines)


def _ranks(ranks: tuple[_Rank, ...]) -> tuple[RolloutRank, ...]:
    """Return rank entries as ranks."""
    return tuple(entry.rank() for entry in ranks)


def _raise_if(faults: tuple[WeightdError, ...], subject: str) -> None:
    """Raise the report if there is anything to report."""
    if faults:
        raise Refused(subject, faults, NOTHING_STARTED)
