"""The version table: what became of each version, in seconds and in the four ratios.

Watched from outside: after every turn of the crank the leader's stage is looked
at, so that no machine has to know a clock's name for its own history.

- eta: floor over update time.  The floor is the largest rank's bytes at this host's own copy
  speed, measured when the daemon started; the update runs from the first publish to the commit.
- alpha: bytes on the wire over the bytes that had to cross, each once per node.
- kappa: bytes copied inside hosts (snapshots and applies) over the bytes that the ranks need.
- sigma: share of the update in which engines were paused.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from weightd.core.session.leader import LeaderMachine
from weightd.core.units import NO_KEY, RolloutRank, VersionKey

PAUSED_STAGES = frozenset({"prepared", "applying", "committed"})
"""Stages in which engines stand paused: from the first pause to the last acknowledged commit."""


@dataclass(slots=True)
class VersionRow:
    """One attempt of a version.

    Attributes:
        key: Its name.
        stage: Newest stage; ``committed`` or ``failed`` in the end.
        began_at: Loop time of its first publish.
        seconds: Time spent in each stage that ended.
        engines: Engines that it was committed for.
        needed_nbytes: Bytes that the ranks of those engines need.
        applied_nbytes: Bytes that they copied.
        snapshot_nbytes: Bytes that the trainer ranks copied into their slots.
        wire_nbytes: Bytes that crossed between nodes.
        minimum_wire_nbytes: Bytes that had to.
        floor_s: The update's floor.
    """

    key: VersionKey
    stage: str
    began_at: float
    seconds: dict[str, float] = field(default_factory=dict)
    engines: tuple[str, ...] = ()
    needed_nbytes: int = 0
    applied_nbytes: int = 0
    snapshot_nbytes: int = 0
    wire_nbytes: int = 0
    minimum_wire_nbytes: int = 0
    floor_s: float = 0.0
    committed_after_s: float | None = None

    def document(self) -> dict[str, Any]:
        """Return the row as plain values; a ratio without a denominator is None."""
        update_s = self.committed_after_s
        paused_s = sum(s for stage, s in self.seconds.items() if stage in PAUSED_STAGES)
        whole_s = sum(self.seconds.values())
        return {
            "version": self.key.version,
            "attempt": str(self.key.attempt),
            "stage": self.stage,
            "update_s": update_s,
            "seconds": {k: round(v, 6) for k, v in self.seconds.items()},
            "engines": list(self.engines),
            "needed_nbytes": self.needed_nbytes,
            "applied_nbytes": self.applied_nbytes,
            "copied_nbytes": self.applied_nbytes + self.snapshot_nbytes,
            "wire_nbytes": self.wire_nbytes,
            "minimum_wire_nbytes": self.minimum_wire_nbytes,
            "floor_s": self.floor_s,
            "eta": _ratio(self.floor_s, update_s),
            "alpha": _ratio(self.wire_nbytes, self.minimum_wire_nbytes),
            "kappa": _ratio(self.applied_nbytes + self.snapshot_nbytes, self.needed_nbytes),
            "sigma": _ratio(paused_s, whole_s),
        }


def _ratio(numerator: float, denominator: float | None) -> float | None:
    return round(numerator / denominator, 4) if denominator else None


class VersionTable:
    """The newest rows of a run, on its leader's node."""

    def __init__(self, kept: int) -> None:
        self.rows: deque[VersionRow] = deque(maxlen=kept)
        self._stage = ""
        self._key = NO_KEY
        self._since = 0.0

    def observe(self, leader: LeaderMachine, now: float, snapshot_nbytes: int, copy_bytes_per_s: float) -> None:
        """Look at the leader after a turn.

        Args:
            leader: The machine.
            now: Loop time.
            snapshot_nbytes: Bytes of all trainer ranks' layouts in the adopted epoch.
            copy_bytes_per_s: This host's copy speed.
        """
        state = leader.state
        if (state.stage, state.key) == (self._stage, self._key):
            return
        row = self.rows[-1] if self.rows and self.rows[-1].key == self._key != NO_KEY else None
        if row is not None:
            row.seconds[self._stage] = row.seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._key, self._since = state.stage, state.key, now
        if state.key == NO_KEY:
            return
        if row is None or row.key != state.key:
            row = VersionRow(state.key, state.stage, now, snapshot_nbytes=snapshot_nbytes)
            self.rows.append(row)
        row.stage = state.stage
        if state.stage == "committed":
            self._committed(row, leader, now, copy_bytes_per_s)

    def _committed(self, row: VersionRow, leader: LeaderMachine, now: float, copy_bytes_per_s: float) -> None:
        state = leader.state
        row.committed_after_s = now - row.began_at
        row.engines = tuple(state.ledger.committed.engines)
        needed: dict[RolloutRank, int] = {
            w: n for w, n in state.epochs.rank_nbytes.items() if w.engine in state.ledger.committed.engines
        }
        row.needed_nbytes = sum(needed.values())
        if needed and copy_bytes_per_s:
            row.floor_s = max(needed.values()) / copy_bytes_per_s
        for report in state.view.reports().values():
            row.applied_nbytes += sum(
                e.report.applied_nbytes for e in report.receivers if e.report.key == row.key and e.engine in row.engines
            )
            if report.fetch is not None and report.fetch.key == row.key:
                row.wire_nbytes += report.fetch.wire_nbytes
                row.minimum_wire_nbytes += report.fetch.planned_nbytes

    def document(self) -> list[dict[str, Any]]:
        """Return the rows as plain values, oldest first."""
        return [row.document() for row in self.rows]
