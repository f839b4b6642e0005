"""One line on all runs, for the service manager: what ``systemctl status weightd`` shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from weightd.core.units import RunName
    from weightd.daemon.attached import AttachedHooks
    from weightd.daemon.config import Config
    from weightd.daemon.supervisor import RunSupervisor

SHOWN = 8
"""Runs that are named; who wants to see more asks ``weightd status``."""


class House(Protocol):
    """What is said of a daemon."""

    config: Config
    hooks: AttachedHooks
    runs: dict[RunName, RunSupervisor]


def status_line(daemon: House) -> str:
    """Return what the daemon does, as one line."""
    said = [_of_run(name, run) for name, run in list(daemon.runs.items())[:SHOWN]]
    more = len(daemon.runs) - len(said)
    head = f"node {daemon.config.node}: {_count(len(daemon.hooks), 'hook')}, {_count(len(daemon.runs), 'run')}"
    return "; ".join([head, *said, *([f"and {more} more"] if more else [])])


def _of_run(name: RunName, run: RunSupervisor) -> str:
    if run.leader is not None:
        stage: str = run.leader.state.stage
        committed = run.leader.state.ledger.committed.key.version
    else:
        goal = run.node.following.goal
        stage = goal.stage if goal is not None else "not led"
        committed = run.node.committed.version
    return f"{name}: {stage}, " + (f"version {committed}" if committed else "no version yet")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
