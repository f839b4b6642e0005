"""What trainer ranks have published of a version, and whether it can still be completed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightd.core.session.faults import LayoutSkew, RankLost, VersionSkew
from weightd.core.session.view import rank_name
from weightd.core.units import NO_KEY

if TYPE_CHECKING:
    from weightd.core.session.run_state import RunState
    from weightd.core.units import VersionKey
    from weightd.core.wire.messages import EpochSpec, TrainerPlace


def not_published(s: RunState, spec: EpochSpec, key: VersionKey) -> list[TrainerPlace]:
    """Return the trainer ranks of which no slot holds ``key``; memory of ended processes counts."""
    return [p for p in spec.trainers if s.view.slot_with(p.rank, p.node, p.boot, key) is None]


def layout_skew(s: RunState, spec: EpochSpec, key: VersionKey) -> LayoutSkew | None:
    """Return the first rank that published ``key`` with another layout than the epoch was planned with."""
    for p in spec.trainers:
        slot = s.view.slot_with(p.rank, p.node, p.boot, key)
        if slot is not None and slot.layout_digest != p.layout_digest:
            return LayoutSkew(key.version, p.rank, slot.layout_digest, p.layout_digest, spec.epoch, s.serving)
    return None


def version_skew(s: RunState, spec: EpochSpec, key: VersionKey) -> VersionSkew | None:
    """Return the ranks that have gone past ``key`` without publishing it: it will never be complete."""
    missing = not_published(s, spec, key)
    elsewhere: dict[str, str] = {}
    for p in missing:
        entry = s.view.trainer(p.rank, p.node, p.boot)
        past = [x.key for x in entry.slots if _is_past(s, x.key, key)] if entry else []
        if past:
            elsewhere[rank_name(p.rank)] = str(min(past))
    if not elsewhere:
        return None
    gone = {p.rank for p in missing}
    published = tuple(int(p.rank) for p in spec.trainers if p.rank not in gone)
    return VersionSkew(key.version, published, elsewhere, len(spec.trainers), s.serving)


def publishers_lost(s: RunState, missing: list[TrainerPlace], now: float) -> tuple[RankLost, ...]:
    """Return the ranks that have not published and never will."""
    presences = [(p, s.view.rank(p.rank, p.node, p.boot, now)) for p in missing]
    return tuple(rank_lost(s, p, presence.why) for p, presence in presences if presence.kind == "gone")


def rank_lost(s: RunState, place: TrainerPlace, why: str) -> RankLost:
    """Return the error for a trainer rank of the version in hand."""
    pid = s.pid_of(place.rank, place.boot)
    return RankLost(rank_name(place.rank), place.node, pid, why, s.stage, s.key.version, s.serving)


def _is_past(s: RunState, shown: VersionKey, key: VersionKey) -> bool:
    """Whether a rank that shows ``shown``, and not ``key``, has gone past it."""
    if shown == NO_KEY or shown in s.ledger.failures or shown.attempt.boot != s.ledger.attempt_boot:
        return False
    return shown.version > key.version or (shown.version == key.version and shown != key)
