"""Every wait of a session has a name and a limit; these are the limits."""

from __future__ import annotations

import msgspec


class Deadlines(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits in seconds (specification of the session, section 8).

    Attributes:
        attach_s: For every declared rank to attach and the epoch to be ready.
        barrier_s: For a paused rank to wait for the rest of its engine before it asks to leave.
        collect_s: For all trainer ranks to publish, from the first.
        plan_s: For an epoch in planning.
        fetch_s: For all nodes to hold all bytes.
        fetch_stall_s: For the next planned byte.
        apply_wait_s: For an engine to reach a safe point.
        apply_s: For an engine to copy.
        apply_stall_s: For its next planned byte.
        commit_ack_s: For an engine to acknowledge a commit.
        release_s: For a publish to get a free slot.
        step_wait_s: For an optimizer step to wait until live memory is released, before a copy stands in for it.
        restart_s: For a process that vanished to come back.
        heartbeat_s: Between two repeats.
        heartbeat_timeout_s: Without a repeat, until a node counts as silent.
        drain_s: For an orderly stop to wait for versions that engines stand in.
        worker_s: For a job of a worker thread to go on, before the daemon's watchdog counts it as stuck.
    """

    attach_s: float = 300.0
    barrier_s: float = 5.0
    collect_s: float = 600.0
    plan_s: float = 60.0
    fetch_s: float = 1800.0
    fetch_stall_s: float = 30.0
    apply_wait_s: float = 600.0
    apply_s: float = 600.0
    apply_stall_s: float = 30.0
    commit_ack_s: float = 30.0
    release_s: float = 900.0
    step_wait_s: float = 60.0
    refill_s: float = 600.0
    refill_retries: int = 3
    restart_s: float = 30.0
    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 5.0
    drain_s: float = 20.0
    worker_s: float = 120.0
