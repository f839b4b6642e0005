"""What the demo shows at its end: the verdict of every rank, the versions with their ratios, the refusal's report."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from weightd.core.errors import binary_size
from weightd.daemon.cli.demo_scene import ENGINES, TRAINERS, Outcome
from weightd.daemon.cli.demo_sizes import ENGINE_NODES, VERSIONS

NUMBERS = range(1, VERSIONS + 1)


def verdict_table(outcome: Outcome) -> Table:
    """Return one row an engine rank: what it holds, and whether each version arrived byte by byte."""
    table = _table("every engine rank against slices of full_tensor()")
    for heading in ("rank", "node", "parameters", "bytes", *(f"version {v}" for v in NUMBERS)):
        table.add_column(heading, justify="right" if heading in ("parameters", "bytes") else "left")
    for rank, node in zip(ENGINES, ENGINE_NODES, strict=True):
        said = outcome.compared.get(rank, {})
        last = said.get(max(said, default=0), {})
        verdicts = (_verdict(said.get(v)) for v in NUMBERS)
        table.add_row(rank, node, str(last.get("tensors", "-")), f"{last.get('nbytes', 0):,}", *verdicts)
    return table


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )


def _verdict(said: dict[str, Any] | None) -> str:
    if said is None:
        return "not received"
    return "equal" if said["equal"] else f"{len(said['different'])} parameters differ"


def version_table(outcome: Outcome) -> Table:
    """Return one row a version, from the leading daemon's records."""
    table = _table("versions, from the first publish to the commit")
    for heading in ("version", "stage", "seconds", "paused", "on the wire", "η", "α", "κ", "σ"):
        table.add_column(heading, justify="left" if heading == "stage" else "right", no_wrap=True)
    for row in outcome.versions:
        stood = [said[row["version"]]["seconds"] for said in outcome.compared.values() if row["version"] in said]
        table.add_row(
            str(row["version"]),
            row["stage"],
            _number(row["update_s"]),
            _number(max(stood, default=None)),
            binary_size(row["wire_nbytes"]),
            *(_number(row[ratio]) for ratio in ("eta", "alpha", "kappa", "sigma")),
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


RATIOS = """\
seconds: publish to commit; paused: the longest that an engine rank stood still
η: one memcpy of the largest rank's bytes, over the seconds
α: bytes on the wire over those that had to cross, each once per node
κ: bytes copied inside nodes over those that the ranks need
σ: share of the time in which engines stood paused"""


def print_delivery(console: Console, outcome: Outcome) -> None:
    """Print both tables."""
    console.print(verdict_table(outcome))
    console.print(version_table(outcome))
    console.print(RATIOS, style="dim", highlight=False)


def print_refusal(console: Console, outcome: Outcome) -> None:
    """Print the report as trainer rank 0 raised it, and who else was told."""
    first = outcome.refusals.get(TRAINERS[0], {})
    console.print("\nattach() of trainer rank 0 raised:\n")
    console.print(first.get("text", "nothing"), markup=False, highlight=False, soft_wrap=True)
    told = [name for name, said in outcome.refusals.items() if "E_RANK_MISSING" in said["codes"]]
    console.print(f"\n{len(told)} of the {len(outcome.refusals)} attached ranks raised it", highlight=False)


def document(outcome: Outcome, folder: str | None) -> dict[str, Any]:
    """Return everything as plain values, for ``--json``."""
    return {
        "ok": outcome.delivered and outcome.refused,
        "delivered": outcome.delivered,
        "refused": outcome.refused,
        "compared": {
            rank: [outcome.compared[rank][v] for v in sorted(outcome.compared[rank])] for rank in outcome.compared
        },
        "versions": outcome.versions,
        "refusals": outcome.refusals,
        "seconds": {act: round(s, 3) for act, s in outcome.seconds.items()},
        "folder": folder,
    }
