"""The status document as a text: the verdict first, then tables that grep."""

from __future__ import annotations

from typing import Any

from weightd.core.errors import binary_size


def status_text(document: dict[str, Any]) -> str:
    """Return a status document for people."""
    lines = [
        f"{document['verdict']}",
        (
            f"node {document['node']}, pid {document['pid']}, up {document['up_s']:.0f} s, "
            f"{len(document['hooks'])} hooks, landings {binary_size(document['landing_nbytes'])} "
            f"of {binary_size(document['landing_limit_nbytes'])}"
        ),
    ]
    if document.get("cut"):
        lines.append(f"too long for a message; left out: {', '.join(document['cut'])}")
    for node, peer in document["peers"].items():
        heard = "never heard" if peer["heard_s_ago"] is None else f"heard {peer['heard_s_ago']} s ago"
        lines.append(f"peer {node} at {peer['control']}, {heard}")
    for name, run in document["runs"].items():
        lines += ["", *_run(name, run)]
    return "\n".join(lines)


def _run(name: str, run: dict[str, Any]) -> list[str]:
    leader, node = run["leader"], run["node"]
    if leader is None:
        lines = [f"run {name}, led by node {node.get('leader') or '(nobody yet)'}"]
        lines += [f"  {key}: {value}" for key, value in node.items() if isinstance(value, str | int | float)]
        return lines
    if not leader["ranks"]:
        ended = f"run {name}, term {leader['term']}: nobody is attached, last committed v{leader['committed'] or 0}"
        return [ended, "", *_versions(run["versions"])] if run["versions"] else [ended]
    epoch = f"epoch {leader['epoch']}" if leader["epoch"] else "no epoch"
    head = f"run {name}, term {leader['term']}, {epoch}, stage {leader['stage']}"
    if leader["version"]:
        head += f" v{leader['version']}"
    lines = [f"{head}, committed v{leader['committed'] or 0}, next v{leader['next_version']}"]
    if leader["waiting_for"]:
        due = f", {leader['next_deadline_s']} s left" if leader["next_deadline_s"] is not None else ""
        lines.append(f"  waiting for {', '.join(leader['waiting_for'][:8])}{due}")
    if leader["paused"]:
        lines.append(f"  paused: {leader['paused']}")
    live = leader.get("live") or []
    if live:
        shown = ", ".join(live[:8]) + (f" and {len(live) - 8} more" if len(live) > 8 else "")
        lines.append(f"  live memory: {shown}; their pieces are not retained behind a version's decision")
    for engine, state in leader["engines"].items():
        served = f"v{state['version']}" if state.get("version") else "nothing"
        lines.append(
            f"  engine {engine}: {state['phase']}, {served}" + (f", {state['cause']}" if state.get("cause") else "")
        )
    if run["versions"]:
        lines += ["", *_versions(run["versions"])]
    return lines


def _versions(rows: list[dict[str, Any]]) -> list[str]:
    def cell(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    names = ("version", "stage", "update s", "eta", "alpha", "kappa", "sigma", "needed")
    widths = (7, -10, 9, 6, 6, 6, 6, 10)
    table = ["  " + " ".join(f"{n:>{w}}" if w > 0 else f"{n:<{-w}}" for n, w in zip(names, widths, strict=True))]
    table += [
        f"  {row['version']:>7} {row['stage']:10} {cell(row['update_s'], 3):>9} {cell(row['eta'], 3):>6} "
        f"{cell(row['alpha'], 3):>6} {cell(row['kappa'], 3):>6} {cell(row['sigma'], 3):>6} "
        f"{binary_size(row['needed_nbytes']):>10}"
        for row in rows
    ]
    return table
