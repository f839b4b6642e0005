"""A node's part of the status document: who is attached, what it holds, whom it follows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightd.core.session.view import rank_name
from weightd.core.units import RolloutRank

if TYPE_CHECKING:
    from weightd.core.session.attached import Hook
    from weightd.core.session.deadlines import Deadlines
    from weightd.core.session.node_parts import NodeParts


def standing_of(node: NodeParts, limits: Deadlines, now: float) -> dict[str, object]:
    """Return what a node knows, as plain values."""
    following, landing = node.following, node.landing
    goal, fetch = following.goal, landing.fetch
    silent = following.silent_for(now)
    return {
        "run": node.run,
        "node": node.node,
        "term": following.term,
        "leader": following.leader or None,
        "leader_silent_s": round(silent, 1),
        "leader_lost": silent >= limits.heartbeat_timeout_s + limits.restart_s,
        "stage": goal.stage if goal else None,
        "version": goal.key.version or None if goal else None,
        "waiting_for": goal.waiting_for if goal else "a leader",
        "committed": node.records.committed.version or None,
        "epoch": node.plans.epoch or None,
        "holds": [str(k) for k in landing.held()],
        "fetch": None
        if fetch is None
        else {"version": fetch.key.version, "received": fetch.received_nbytes, "planned": fetch.planned_nbytes},
        "ranks": {rank_name(h.who): _rank(h, now) for h in node.attached.hooks.values()},
        "lost": {lost.who: lost.why for lost in node.attached.lost_ranks()},
        "late_goals": following.late_goals,
    }


def _rank(hook: Hook, now: float) -> dict[str, object]:
    known: dict[str, object] = {"pid": hook.hello.pid, "ready": hook.ready, "attached_s": round(now - hook.since, 1)}
    if hook.refused is not None:
        return {**known, "state": "refused", "why": hook.refused.text}
    if isinstance(hook.who, RolloutRank):
        r = hook.receiver
        return {**known, "state": r.state, "version": r.base.version or None, "about": r.key.version or None}
    return {**known, "slots": {s.slot: str(s.key) for s in hook.publisher.slots}}
