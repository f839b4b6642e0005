"""What the journals say, and what a machine knows after reading one.

A record is a plain dict with a ``type``.  The shell appends it, syncs it and
checks it on reading; nobody but this module looks inside.  Replaying is total:
a record of a type that this build does not know is refused, never skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from weightd.core.errors import WireError
from weightd.core.units import NO_KEY, NO_TERM, NO_VERSION, EngineId, Epoch, NodeId, Op, Term, Version, VersionKey
from weightd.core.wire.messages import CommitNote, EpochSpec, VersionFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """One entry of a journal."""


class TermTaken(Record, frozen=True, tag="term"):
    """``leader`` leads ``term``.  In a leader's journal it is its own; in a node's, the one it follows."""

    term: Term
    leader: NodeId


class EpochTaken(Record, frozen=True, tag="epoch"):
    """An epoch was adopted.  ``rank_nbytes``: planned bytes of each (engine, k)."""

    spec: EpochSpec
    rank_nbytes: tuple[tuple[str, int, int], ...] = ()


class Started(Record, frozen=True, tag="start"):
    """A version is in hand."""

    key: VersionKey
    op: Op
    epoch: Epoch


class Prepared(Record, frozen=True, tag="prepared"):
    """Every node holds all bytes; from here on the version is driven to a decision."""

    key: VersionKey
    op: Op
    epoch: Epoch


class Failed(Record, frozen=True, tag="fail"):
    """An attempt that failed, with its report."""

    key: VersionKey
    error: WireError


class Committed(Record, frozen=True, tag="commit"):
    """The decision for good, for these engines."""

    key: VersionKey
    engines: tuple[EngineId, ...]


class Held(Record, frozen=True, tag="complete"):
    """All bytes of a version are whole on this node."""

    key: VersionKey


class Fenced(Record, frozen=True, tag="fence"):
    """An engine of this node was left out of a version."""

    engine: EngineId
    key: VersionKey
    op: Op


AnyRecord = TermTaken | EpochTaken | Started | Prepared | Failed | Committed | Held | Fenced


def to_plain(record: AnyRecord) -> dict[str, object]:
    """Return a record as the plain dict that a journal stores."""
    plain: dict[str, object] = msgspec.to_builtins(record)
    return plain


def from_plain(plain: Mapping[str, Any]) -> AnyRecord:
    """Return the record that a journal stored.

    Raises:
        msgspec.ValidationError: It is no record of this build.
    """
    record: AnyRecord = msgspec.convert(dict(plain), AnyRecord)
    return record


NO_NODE = NodeId("")
NO_COMMIT = CommitNote(NO_KEY, ())


@dataclass(frozen=True, slots=True)
class JournalState:
    """What a leader's journal adds up to.

    Attributes:
        term: Highest term.
        epoch: Newest epoch, None before the first.
        rank_nbytes: Planned bytes of the ranks of that epoch.
        committed: Last commit.
        failures: Failed versions above it.
        in_hand: Version that was started and neither committed nor failed.
        prepared: Whether that one was prepared.
        highest: Highest version that was ever started.
    """

    term: Term = NO_TERM
    epoch: EpochSpec | None = None
    rank_nbytes: tuple[tuple[str, int, int], ...] = ()
    committed: CommitNote = NO_COMMIT
    failures: tuple[VersionFailed, ...] = ()
    in_hand: VersionKey = NO_KEY
    prepared: bool = False
    highest: Version = NO_VERSION


@dataclass(slots=True)
class _Replay:
    """A journal state while it is read."""

    term: Term = NO_TERM
    epoch: EpochTaken | None = None
    committed: CommitNote = NO_COMMIT
    failures: dict[VersionKey, WireError] = field(default_factory=dict)
    in_hand: VersionKey = NO_KEY
    prepared: bool = False
    highest: Version = NO_VERSION

    def read(self, record: AnyRecord) -> None:
        match record:
            case TermTaken(term=term):
                self.term = max(self.term, term)
            case EpochTaken():
                self.epoch = record
            case Started(key=key):
                self.in_hand, self.prepared = key, False
                self.highest = max(self.highest, key.version)
            case Prepared(key=key):
                self.in_hand, self.prepared = key, True
                self.highest = max(self.highest, key.version)
            case Failed(key=key, error=error):
                self.failures[key] = error
                self._decided(key)
            case Committed(key=key, engines=engines):
                self._commit(key, engines)
            case Held() | Fenced():
                pass  # a node's; the leader of a run that has one journal for both skips them

    def _decided(self, key: VersionKey) -> None:
        if self.in_hand == key:
            self.in_hand, self.prepared = NO_KEY, False

    def _commit(self, key: VersionKey, engines: tuple[EngineId, ...]) -> None:
        if key == self.committed.key:
            engines = tuple(dict.fromkeys((*self.committed.engines, *engines)))
        elif key.version < self.committed.key.version:
            return
        self.committed = CommitNote(key, engines)
        self.highest = max(self.highest, key.version)
        self.failures = {k: e for k, e in self.failures.items() if k.version > key.version}
        self._decided(key)


def replay(records: Iterable[Mapping[str, Any]]) -> JournalState:
    """Return what the leader's journal says, oldest record first."""
    seen = _Replay()
    for plain in records:
        seen.read(from_plain(plain))
    return JournalState(
        seen.term,
        seen.epoch.spec if seen.epoch else None,
        seen.epoch.rank_nbytes if seen.epoch else (),
        seen.committed,
        tuple(VersionFailed(k, e) for k, e in seen.failures.items()),
        seen.in_hand,
        seen.prepared,
        seen.highest,
    )


@dataclass(frozen=True, slots=True)
class NodeJournalState:
    """What a node's journal adds up to.

    Attributes:
        term: Highest term it has followed.
        leader: Who led it.
        committed: Last commit it learnt.
        highest: Highest version it was ever told of or held.
    """

    term: Term = NO_TERM
    leader: NodeId = NO_NODE
    committed: CommitNote = NO_COMMIT
    highest: Version = NO_VERSION


def replay_node(records: Iterable[Mapping[str, Any]]) -> NodeJournalState:
    """Return what a node's journal says, oldest record first."""
    term, leader, committed, highest = NO_TERM, NO_NODE, NO_COMMIT, NO_VERSION
    for plain in records:
        record = from_plain(plain)
        match record:
            case TermTaken():
                if record.term >= term:
                    term, leader = record.term, record.leader
            case Committed(key=key, engines=engines):
                if key.version > committed.key.version:
                    committed = CommitNote(key, engines)
                highest = max(highest, key.version)
            case Held(key=key) | Started(key=key):
                highest = max(highest, key.version)
            case _:
                pass
    return NodeJournalState(term, leader, committed, highest)
