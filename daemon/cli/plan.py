"""``weightd plan``: judge a roster file, without a daemon.

The command is a chain of values: the file, the judged roster, the document or
the text.  ``JudgedRoster.topology`` is what a plan over exported layouts starts
from; what that adds goes into the document beside the roster's own keys.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from weightd.core.errors import WeightdError, flatten
from weightd.core.roster.counts import groups, identities, pairs, placement
from weightd.core.roster.declared import RosterFile, roster_from_mapping
from weightd.core.roster.explain import explain_topology
from weightd.core.roster.judge import judge
from weightd.core.roster.topology import Topology
from weightd.core.roster.violations import StaleRegistration
from weightd.daemon.cli.roster_file import read_roster_table


@dataclass(frozen=True, slots=True)
class JudgedRoster:
    """A roster file in which nothing is wrong.

    Attributes:
        file: What it says.
        topology: What it adds up to.
    """

    file: RosterFile
    topology: Topology

    @property
    def notices(self) -> tuple[StaleRegistration, ...]:
        """What the epoch before left behind."""
        return self.file.stale()


def plan(
    roster: Annotated[Path, typer.Argument(metavar="ROSTER", help="Roster file, .toml or .json.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    layouts: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the exported layout of every rank: proves coverage and plans all nodes.",
            exists=True,
            file_okay=False,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Judge a roster: who receives through whom, or every reason why not."""
    try:
        judged = plan_roster(roster)
        document, text = ({}, "") if layouts is None else _plan_layouts(judged.topology, layouts)
    except WeightdError as error:
        _print_error(error, as_json)
        raise typer.Exit(error.exit_code) from None
    if as_json:
        typer.echo(json.dumps(roster_document(judged) | document))
    else:
        typer.echo("\n".join(filter(None, [roster_text(judged), text])))


def _plan_layouts(topology: Topology, directory: Path) -> tuple[dict[str, Any], str]:
    """Return what the layouts add to the document, and to the text."""
    from weightd.daemon.cli.plan_layouts import layouts_document, layouts_text, plan_layouts  # a roster needs no numpy

    summary = plan_layouts(topology, directory)
    return {"plan": layouts_document(summary)}, layouts_text(summary)


def plan_roster(path: Path) -> JudgedRoster:
    """Return the judged roster of a file.

    Raises:
        RosterFileUnreadable: The file cannot be read as one table (exit code 2).
        UnknownKeys: It has keys that mean nothing (exit code 2).
        Refused: Every violation (exit code 1).
    """
    subject = f"roster {path.name}"
    file = roster_from_mapping(read_roster_table(path), subject)
    return JudgedRoster(file, judge(file.roster, file.registrations(), subject=subject))


def roster_document(judged: JudgedRoster) -> dict[str, Any]:
    """Return a judged roster as plain values; slots as the file writes them."""
    topology, labels = judged.topology, judged.file.labels()
    shards = {
        engine: [
            {"node": shard.node, "slots": [labels[place.slot] for place in shard.places], "k": list(shard.ranks)}
            for shard in group
        ]
        for engine, group in groups(topology).items()
    }
    document: dict[str, Any] = {
        "groups": shards,
        "pairs": {engine: [pair._asdict() for pair in shared] for engine, shared in pairs(topology).items()},
        "placement": placement(topology),
        "node_shards": sum(len(group) for group in shards.values()),
        "identities": list(identities(topology)),
    }
    if judged.notices:
        document["notices"] = [{**notice.fields(), "text": str(notice)} for notice in judged.notices]
    return document


def roster_text(judged: JudgedRoster) -> str:
    """Return a judged roster as a text for people."""
    table = explain_topology(judged.topology, judged.file.labels())
    return "\n".join([table, *map(str, judged.notices)])


def error_document(error: WeightdError) -> dict[str, Any]:
    """Return an error as plain values, a report as its violations."""
    violations = flatten([error])
    return {"errors": [{"code": v.code, "fields": v.fields(), "text": str(v)} for v in violations]}


def _print_error(error: WeightdError, as_json: bool) -> None:
    """Print the report where the answer is expected, and an unreadable file as a complaint."""
    if as_json:
        typer.echo(json.dumps(error_document(error)))
    if not as_json or error.exit_code != 1:
        typer.echo(str(error), err=error.exit_code != 1)
