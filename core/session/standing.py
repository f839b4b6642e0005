"""The leader's part of the status document: what stands, since when, and what it waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightd.core.session.view import rank_name
from weightd.core.wire.messages import TrainerEntry

if TYPE_CHECKING:
    from weightd.core.session.attaching import Attaching
    from weightd.core.session.run_state import RunState
    from weightd.core.session.stages import Stages


def standing_of(s: RunState, attaching: Attaching, stages: Stages, now: float) -> dict[str, object]:
    """Return what the leader knows of its run, as plain values."""
    ends_at = attaching.deadline() if s.stage == "attaching" else stages.ends_at()
    waiting = attaching.waits() if s.stage == "attaching" else s.waiting
    return {
        "run": s.run,
        "term": s.term,
        "leader": s.node,
        "stage": s.stage,
        "version": s.key.version or None,
        "attempt": str(s.key.attempt) if s.key.version else None,
        "age_s": round(now - s.since, 1),
        "waiting_for": list(waiting),
        "next_deadline_s": None if ends_at is None else round(ends_at - now, 1),
        "epoch": s.epoch.epoch if s.epoch else None,
        "next_epoch": s.epochs.upcoming.state if s.epochs.upcoming else None,
        "committed": s.serving or None,
        "next_version": s.ledger.next_version,
        "failed": [str(k) for k in s.ledger.failures],
        "paused": str(s.paused) if s.paused else None,
        "engines": {str(e): _engine(s, now, e) for e in [x.id for x in s.roster.engines]},
        "ranks": {rank_name(w): str(m.registration.node) for w, m in s.members.here.items()},
        "live": [rank_name(t.rank) for _, t in s.view.entries() if isinstance(t, TrainerEntry) and t.live],
        "missing": list(s.names(s.members.missing(s.roster))),
        "late_reports": s.view.late_reports,
    }


def _engine(s: RunState, now: float, engine: str) -> dict[str, object]:
    turn = next((t for t in s.turns.values() if t.engine == engine), None)
    if turn is None:
        return {"phase": "not attached"}
    return {
        "phase": turn.phase.name.lower(),
        "up": turn.up,
        "version": turn.key.version or None,
        "age_s": round(now - turn.since, 1),
        "waiting_for": list(turn.waiting),
        "cause": str(turn.cause) if turn.cause else None,
    }
