"""What is decided, and which published bytes still wait for a decision.

Only the number orders.  Bytes are named (version, attempt) everywhere: what is
committed, failed or in hand is known by its key, never by its number alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightd.core.session.faults import VersionAbandoned, VersionNotGrowing
from weightd.core.session.view import rank_name
from weightd.core.units import NO_KEY, NO_VERSION, TrainerRank, Version, VersionKey
from weightd.core.wire.messages import CommitNote, RankRelease, VersionFailed

if TYPE_CHECKING:
    from weightd.core.errors import WeightdError, WireError
    from weightd.core.session.records import JournalState
    from weightd.core.session.view import View
    from weightd.core.units import Boot, EngineId, Term


REMEMBERED = 1000
"""Versions below the last commit whose keys are known by name: far more than slots can still show."""


class Ledger:
    """Commits, failures and the keys in between, of one term."""

    def __init__(self, journal: JournalState, attempt_boot: Boot) -> None:
        self.attempt_boot = attempt_boot
        self.committed: CommitNote = journal.committed
        self.previous: VersionKey = NO_KEY
        self.settled = True
        self.failures: dict[VersionKey, WireError] = {f.key: f.error for f in journal.failures}
        self._known: set[VersionKey] = {journal.committed.key}
        self._floor: Version = NO_VERSION
        own = journal.in_hand
        if own == NO_KEY or own.attempt.boot != attempt_boot or journal.highest > own.version:
            self._floor = journal.highest
        self._own_in_hand = own if own.attempt.boot == attempt_boot else NO_KEY

    # ------------------------------------------------------------ numbers

    @property
    def serving(self) -> Version:
        """Last committed version."""
        return self.committed.key.version

    @property
    def next_version(self) -> Version:
        """Smallest number that a publish may use."""
        return Version(max(self.serving, self._floor) + 1)

    def raise_floor(self, highest: Version) -> None:
        """Note a version that another leader started: what this one starts must exceed it.

        The version that this leader's own journal has in hand, for the same start of
        trainer rank 0, goes on under its own number.
        """
        if highest != self._own_in_hand.version:
            self._floor = Version(max(self._floor, highest))

    # ------------------------------------------------------------ decisions

    def start(self, key: VersionKey) -> None:
        """Note that a key is in hand."""
        self._known.add(key)

    def fail(self, key: VersionKey, error: WireError) -> None:
        """Note a failed key; told to the hooks from now on."""
        self._known.add(key)
        self.failures[key] = error

    def commit(self, key: VersionKey, engines: tuple[EngineId, ...]) -> None:
        """Note a commit that is journaled; v-1 stays leased until it is settled."""
        self.previous = self.committed.key
        self.committed = CommitNote(key, engines)
        self.settled = False
        self._known.add(key)
        self.failures = {k: e for k, e in self.failures.items() if k.version > key.version}

    def learn_commit(self, key: VersionKey, engines: tuple[EngineId, ...]) -> bool:
        """Take over a commit of an earlier leader; return whether it was news."""
        if key == NO_KEY:
            return False
        if key == self.committed.key:
            engines = tuple(dict.fromkeys((*self.committed.engines, *engines)))
        elif key.version <= self.serving:
            return False
        if (key, engines) == (self.committed.key, self.committed.engines):
            return False
        self.committed = CommitNote(key, engines)
        self._known.add(key)
        self.failures = {k: e for k, e in self.failures.items() if k.version > key.version}
        return True

    # ------------------------------------------------------------ published bytes

    def undecided(self, view: View) -> list[VersionKey]:
        """Return the published keys that wait for a decision, lowest version first, newest attempt first."""
        keys = {
            s.key
            for _, report in sorted(view.reports().items())
            for t in report.trainers
            for s in t.slots
            if self._is_undecided(s.key)
        }
        return sorted(keys, key=lambda k: (k.version, -k.attempt.number))

    def stray(self, view: View, term: Term) -> list[tuple[VersionKey, WeightdError]]:
        """Return published keys that nobody will ever move, with what their publisher is told."""
        found: dict[VersionKey, WeightdError] = {}
        for report in view.reports().values():
            for t in report.trainers:
                for s in t.slots:
                    error = self._stray(s.key, t.rank, term) if t.alive else None
                    if error is not None:
                        found.setdefault(s.key, error)
        return sorted(found.items(), key=lambda item: item[0])

    def failures_told(self) -> tuple[VersionFailed, ...]:
        """Return the failures that hooks are told."""
        return tuple(VersionFailed(k, e) for k, e in sorted(self.failures.items()))

    def releases(self, view: View, in_hand: VersionKey) -> tuple[RankRelease, ...]:
        """Return the slots that may be overwritten, exactly as the reports show them.

        Those of a live rank are free with the decision: a step waits for them.  Nothing of them is retained.
        """
        found: dict[RankRelease, None] = {}
        for _, report in sorted(view.reports().items()):
            for t in report.trainers:
                for s in t.slots:
                    if self._is_free(s.key, in_hand) or (t.live and self._is_decided(s.key)):
                        found[RankRelease(TrainerRank(t.rank), s.slot, s.key)] = None
        return tuple(found)

    def forget_unseen(self, view: View) -> None:
        """Drop what was kept only to answer slots that no node shows any more."""
        shown = {s.key for r in view.reports().values() for t in r.trainers for s in t.slots}
        self._known = {k for k in self._known if k.version + REMEMBERED > self.serving}
        self.failures = {k: e for k, e in self.failures.items() if k in shown or k.version > self.serving}

    # ------------------------------------------------------------ inside

    def _is_undecided(self, key: VersionKey) -> bool:
        return key != NO_KEY and key.version >= self.next_version and self._is_ours(key) and key not in self.failures

    def _is_ours(self, key: VersionKey) -> bool:
        return key.attempt.boot == self.attempt_boot

    def _stray(self, key: VersionKey, rank: TrainerRank, term: Term) -> WeightdError | None:
        if key == NO_KEY or key in self._known or key in self.failures or self._is_undecided(key):
            return None
        if not self._is_ours(key):
            if key.version <= self.serving:
                return None  # of an earlier start, and decided long ago: it is only released
            return VersionAbandoned(key.version, term, self.next_version, self.serving)
        return VersionNotGrowing(rank_name(rank), key.version, self.serving, self.next_version)

    def _is_decided(self, key: VersionKey) -> bool:
        return key != NO_KEY and (key in self.failures or key.version <= self.serving)

    def _is_free(self, key: VersionKey, in_hand: VersionKey) -> bool:
        """Return whether bytes may go: decided, answered, and nobody's last committed version."""
        if key in (NO_KEY, self.committed.key, in_hand) or self._is_undecided(key):
            return False
        if not self.settled and key == self.previous:
            return False
        return key in self.failures or key.version <= self.serving
