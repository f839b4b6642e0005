"""Records on their way to the journal, and what follows once they are durable.

One record may be *awaited*: the machine takes no step of a version until its
outcome is known.  The others run beside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightd.core.session.records import to_plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightd.core.session.records import AnyRecord

    Continuation = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Writing:
    """A record whose outcome is not known yet."""

    record: AnyRecord
    at: float
    awaited: bool
    then: Continuation | None


class JournalWriter:
    """Numbers records and remembers what follows them."""

    def __init__(self) -> None:
        self._token = 0
        self._open: dict[int, Writing] = {}

    def write(
        self, record: AnyRecord, now: float, then: Continuation | None = None, *, awaited: bool = True
    ) -> tuple[int, dict[str, object]]:
        """Return the token and the plain record to append."""
        self._token += 1
        self._open[self._token] = Writing(record, now, awaited, then)
        return self._token, to_plain(record)

    def close(self, token: int) -> Writing | None:
        """Return the record whose outcome came; None for one that is not open."""
        return self._open.pop(token, None)

    def awaited(self) -> Writing | None:
        """Return the record that steps wait for."""
        return next((w for w in self._open.values() if w.awaited), None)

    def oldest_at(self) -> float | None:
        """Return when the oldest open record was written."""
        return min((w.at for w in self._open.values()), default=None)
