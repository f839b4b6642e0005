"""What a trainer rank knows of versions: which number is next, which attempt, and what became of each.

Pure: fed with goals and with what this rank published.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from weightd.core.errors import WireError
from weightd.core.session.faults import VersionNotGrowing, VersionSkew
from weightd.core.units import NO_KEY, NO_TERM, NO_VERSION, Attempt, TrainerRank, Version, VersionKey
from weightd.core.wire.messages import PublisherGoal
from weightd.trainer_hooks.faults import OutcomeUnknown


@dataclass(slots=True)
class Ledger:
    """The versions of a run, as one trainer rank was told.

    Attributes:
        rank: The rank.
        goal: Newest goal.
    """

    rank: TrainerRank
    goal: PublisherGoal = field(default_factory=PublisherGoal)
    _published: dict[Version, VersionKey] = field(default_factory=dict)
    _refused: set[VersionKey] = field(default_factory=set)
    _committed: set[Version] = field(default_factory=set)
    _failed: dict[VersionKey, WireError] = field(default_factory=dict)

    def goal_arrived(self, goal: PublisherGoal, held: Iterable[VersionKey] = ()) -> None:
        """Take the newest goal; one of a lower term is below the floor.

        Args:
            goal: The goal.
            held: What this rank's slots hold.  A failure is told for as long as its slot shows, so what lies
                below the last commit and is not told as failed was committed.
        """
        if goal.term == NO_TERM != self.goal.term:
            self.goal = msgspec.structs.replace(self.goal, paused=goal.paused, key=NO_KEY)  # nobody leads
            return
        if goal.term < self.goal.term:
            return
        self.goal = goal
        if goal.committed.version:
            self._committed.add(goal.committed.version)
        for failure in goal.failures:
            self._failed[failure.key] = failure.error
        for key in held:
            if NO_VERSION < key.version < goal.committed.version and key not in self._failed:
                self._committed.add(key.version)

    @property
    def next_version(self) -> Version:
        """Number that this rank publishes under if it is not told one.

        A number under which this rank was refused counts like one that it published: the others did, and a loop that
        goes on must not bring this rank's next step into their version.  Nor does any rank go back to a number that
        another has gone past.
        """
        open_ones = [key.version for key in self._refused if key not in self._failed]
        passed = [key.version for key, error in self._failed.items() if _is_skew(error)]
        return Version(max(self._smallest, max([*open_ones, *passed], default=0) + 1))

    @property
    def _smallest(self) -> Version:
        """Smallest number that this rank may publish under."""
        open_ones = [v for v, key in self._published.items() if key not in self._failed]
        return Version(max(self.goal.next_version, max(open_ones, default=0) + 1))

    def key_for(self, version: Version | None) -> VersionKey:
        """Return the name of the bytes that a publish of ``version`` (None: the next one) carries.

        Raises:
            VersionNotGrowing: The number does not grow.
        """
        due = self._smallest
        number = self.next_version if version is None else version
        if number < due:
            raise VersionNotGrowing(f"trainer rank {self.rank}", number, self.goal.committed.version, due)
        failures = [f.key for f in self.goal.failures if f.key.version == number]
        told = [k.attempt.number for k in failures if k.attempt.boot == self.goal.attempt_boot]
        return VersionKey(number, Attempt(self.goal.attempt_boot, 1 + max([len(failures), *told])))

    def published(self, key: VersionKey) -> None:
        """This rank published ``key``."""
        self._published[key.version] = key

    def refused(self, key: VersionKey) -> None:
        """This rank was to publish ``key``, and could not; it may still, if it is told the number."""
        self._refused.add(key)

    def key_of(self, version: Version) -> VersionKey | None:
        """Return the bytes that this rank published last under ``version``."""
        return self._published.get(version)

    def committed(self, version: Version) -> bool:
        """Say whether ``version`` is known to be committed.

        Raises:
            OutcomeUnknown: It was decided and this rank was not told how.
        """
        if version in self._committed:
            return True
        if self.goal.committed.version > version and self.failure(version) is None:
            raise OutcomeUnknown(version, self.goal.committed.version)
        return False

    def failure(self, version: Version) -> WireError | None:
        """Return why ``version`` failed, if it did: of this rank's own attempt, where it made one."""
        mine = self._published.get(version)
        if mine is not None:
            return self._failed.get(mine)
        return next((error for key, error in self._failed.items() if key.version == version), None)


def _is_skew(error: WireError) -> bool:
    return error.code == VersionSkew.code or any(_is_skew(cause) for cause in error.causes)
