"""Clocks of waits: when one began, when it ends, and one that stands still."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StallClock:
    """Runs while nothing progresses; stands still while a waited-for party may come back.

    Progress is more planned bytes, never a message.
    """

    limit_s: float
    at: float
    checked_at: float
    progress: int = 0

    def expired(self, progress: int, *, held: bool, now: float) -> bool:
        """Note the progress; return whether the limit has passed without any."""
        if progress > self.progress:
            self.progress, self.at = progress, now
        elif held:
            self.at += now - self.checked_at
        self.checked_at = now
        return now - self.at >= self.limit_s

    @property
    def ends_at(self) -> float:
        """When it expires if nothing happens."""
        return self.at + self.limit_s


def stall_clock(limit_s: float, now: float) -> StallClock:
    """Return a clock that starts now."""
    return StallClock(limit_s, now, now)
