"""The records of a journal that still say something.

A journal grows by a few records a version.  What a machine learns from it is
small: the term, the epoch, the last commit, failures above it, what is in hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from weightd.core.session.records import (
    Committed,
    EpochTaken,
    Failed,
    Fenced,
    Held,
    Prepared,
    Started,
    TermTaken,
    from_plain,
    replay,
    replay_node,
)
from weightd.core.units import NO_VERSION


def compacted(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the records, oldest first, that a replay cannot do without.

    The result is compared with the original: where they do not add up to the same, nothing is left out.
    """
    whole = list(records)
    typed = [from_plain(r) for r in whole]
    last_commit = max((r.key.version for r in typed if isinstance(r, Committed)), default=NO_VERSION)
    keep: set[int] = set()
    newest: dict[type, int] = {}
    highest: tuple[int, int] = (NO_VERSION, -1)
    for i, record in enumerate(typed):
        match record:
            case Committed(key=key):
                if key.version == last_commit:
                    keep.add(i)
            case Failed(key=key):
                if key.version > last_commit:
                    keep.add(i)
            case TermTaken(term=term):
                at = newest.get(TermTaken)
                known = typed[at] if at is not None else None
                if not isinstance(known, TermTaken) or term >= known.term:
                    newest[TermTaken] = i
            case EpochTaken() | Started() | Prepared() | Held() | Fenced():
                newest[type(record)] = i
        if isinstance(record, Started | Prepared | Held):
            highest = max(highest, (int(record.key.version), i))
    keep |= set(newest.values()) | {highest[1]}
    kept = [r for i, r in enumerate(whole) if i in keep]
    same = replay(kept) == replay(whole) and replay_node(kept) == replay_node(whole)
    return kept if same else whole
