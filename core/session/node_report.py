"""A node's whole state, as one message, and messages without what changes by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from weightd.core.units import NO_OP
from weightd.core.wire.messages import FetchState, NodeReport, PublisherGoal, ReceiverGoal

if TYPE_CHECKING:
    from weightd.core.session.node_parts import NodeParts


def report_of(node: NodeParts) -> NodeReport:
    """Return the whole state of a node for one run."""
    following, attached = node.following, node.attached
    goal = following.goal
    return NodeReport(
        node.node,
        (following.term, goal.op if goal is not None else NO_OP),
        following.goal_seq,
        attached.trainer_entries(),
        attached.receiver_entries(),
        attached.lost_ranks(),
        node.plans.reported(),
        _fetch_state(node),
        node.landing.held(),
        node.records.committed,
        tuple(sorted({h.hello.layout_digest for h in attached.hooks.values() if h.ready})),
        node.highest,
    )


def _fetch_state(node: NodeParts) -> FetchState | None:
    """Return how far the version in hand is on this node; complete means recorded."""
    goal = node.following.goal
    if goal is None or goal.epoch is None or goal.stage not in ("fetching", "prepared", "applying"):
        return None
    fetch = node.landing.fetch
    half = node.landing.whole(goal.epoch.epoch, goal.key)
    if half is not None:
        nbytes = node.plans.fetch_nbytes
        return FetchState(goal.key, goal.op, nbytes, nbytes, complete=True, wire_nbytes=half.wire_nbytes)
    if fetch is None or (fetch.epoch, fetch.key) != (goal.epoch.epoch, goal.key):
        return None
    return FetchState(goal.key, goal.op, fetch.planned_nbytes, fetch.received_nbytes, complete=False, error=fetch.error)


def steady(report: NodeReport) -> NodeReport:
    """Return a report without counters of progress: they travel with the heartbeat."""
    fetch = report.fetch
    receivers = tuple(
        msgspec.structs.replace(r, report=msgspec.structs.replace(r.report, applied_nbytes=0))
        if r.report.state == "applying"
        else r
        for r in report.receivers
    )
    return msgspec.structs.replace(
        report,
        goal_seq=0,
        receivers=receivers,
        fetch=None if fetch is None else msgspec.structs.replace(fetch, received_nbytes=0),
    )


def steady_goal(goal: PublisherGoal | ReceiverGoal) -> PublisherGoal | ReceiverGoal:
    """Return a hook's goal without its clock, which travels with repeats."""
    return msgspec.structs.replace(goal, waiting_for="")
