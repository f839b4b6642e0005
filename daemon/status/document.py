"""The status document: everything that an operator may ask of one daemon, as plain values."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from weightd.core.wire.limits import MAX_BINARY_BYTES

if TYPE_CHECKING:
    from weightd.core.units import Boot, NodeId, RunName
    from weightd.daemon.attached import AttachedHooks
    from weightd.daemon.bulk.landing import MemoryBudget
    from weightd.daemon.config import Config
    from weightd.daemon.supervisor import RunSupervisor

FORMAT = 1
"""Number of the document's form; readers look at it first."""


class House(Protocol):
    """What is said of a daemon."""

    config: Config
    boot: Boot
    started_at: float
    hooks: AttachedHooks
    runs: dict[RunName, RunSupervisor]
    heard_at: dict[NodeId, float]
    memcpy_bytes_per_s: float
    budget: MemoryBudget
    dropped: int


def status_document(daemon: House) -> dict[str, Any]:
    """Return what the daemon knows of itself, its peers and its runs."""
    now = anyio.current_time()
    limit_s = daemon.config.deadlines.heartbeat_timeout_s
    runs = {
        str(name): {
            "node": run.node.status(now),
            "leader": run.leader.status(now) if run.leader is not None else None,
            "versions": run.versions.document(),
            "dropped_repeats": run.inbox.dropped,
        }
        for name, run in daemon.runs.items()
    }
    peers = {
        str(node): {
            "control": str(peer.control),
            "heard_s_ago": round(now - daemon.heard_at[node], 1) if node in daemon.heard_at else None,
        }
        for node, peer in daemon.config.peers.items()
    }
    return {
        "format": FORMAT,
        "verdict": verdict_of(runs, peers, limit_s),
        "node": daemon.config.node,
        "pid": os.getpid(),
        "boot": daemon.boot,
        "up_s": round(time.time() - daemon.started_at, 1),
        "hooks": [
            {"run": h.run, "who": h.name, "pid": h.pid, "slot": h.hello.slot, "ready": h.ready} for h in daemon.hooks
        ],
        "peers": peers,
        "memcpy_bytes_per_s": round(daemon.memcpy_bytes_per_s),
        "landing_nbytes": daemon.budget.taken_nbytes,
        "landing_limit_nbytes": daemon.budget.limit_nbytes,
        "dropped_messages": daemon.dropped,
        "runs": runs,
    }


def encode_document(document: dict[str, Any], limit_nbytes: int = MAX_BINARY_BYTES) -> bytes:
    """Return the document as JSON that a message carries; ``cut`` says what was left out of a longer one."""
    data = json.dumps(document).encode()
    left_out: list[str] = []
    for what, cut in _CUTS.items():
        if len(data) <= limit_nbytes:
            break
        left_out.append(what)
        document = {**cut(document), "cut": [*left_out, f"of {len(data):,} bytes, {limit_nbytes:,} fit a message"]}
        data = json.dumps(document).encode()
    return data


def _of_runs(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda document: {**document, "runs": {name: change(run) for name, run in document["runs"].items()}}


_CUTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "versions of runs": _of_runs(lambda run: {**run, "versions": []}),
    "hooks": lambda document: {**document, "hooks": []},
    "ranks of nodes": _of_runs(lambda run: {**run, "node": {**run["node"], "ranks": {}, "lost": {}}}),
    "runs": lambda document: {**document, "runs": {}},
}
"""What is left out of a document that no message carries, what is missed least first."""


def verdict_of(runs: dict[str, dict[str, Any]], peers: dict[str, dict[str, Any]], limit_s: float) -> str:
    """Return ``ok``, or the first thing that an operator should look at."""
    for name, run in runs.items():
        leader = run["leader"]
        if leader is None or not leader["ranks"]:
            continue  # led elsewhere, or nobody takes part any more
        if leader["paused"]:
            return f"run {name} is paused: {leader['paused'].splitlines()[0]}"
        for engine, state in leader["engines"].items():
            if leader["committed"] and not state.get("up", False) and leader["stage"] == "idle":
                return f"run {name}: engine {engine} is {state['phase']}"
    if any(run["leader"] and run["leader"]["ranks"] for run in runs.values()):
        for node, peer in peers.items():
            if peer["heard_s_ago"] is None or peer["heard_s_ago"] > limit_s:
                heard = "was never heard" if peer["heard_s_ago"] is None else f"is silent for {peer['heard_s_ago']} s"
                return f"node {node} {heard}"
    return "ok"
