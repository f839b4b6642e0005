"""``weightd status``: what the daemon of this node is doing, with one verdict on top."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from weightd.core.errors import WeightdError

UNREACHABLE = 2
"""Exit code where no daemon answers."""


def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print the status document.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Repeat until interrupted, or until no daemon answers.")
    ] = False,
    socket: Annotated[
        str | None, typer.Option(help="Control socket or runtime directory; WEIGHTD_SOCKET where not given.")
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="Longest wait for the answer, in seconds.")] = 5.0,
    every_s: Annotated[float, typer.Option(help="Seconds between two repeats of --watch.")] = 1.0,
) -> None:
    """Say which versions are served, what is in hand and what it waits for.

    Exit codes: 0 all is well, 1 something is degraded, 2 no daemon answers.
    """
    from weightd.daemon.status.client import ask_status
    from weightd.daemon.status.text import status_text
    from weightd.link.finding import daemon_paths

    paths = daemon_paths(socket)
    while True:
        try:
            document = ask_status(paths, timeout_s)
        except WeightdError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(UNREACHABLE) from None
        typer.echo(json.dumps(document, indent=None if watch else 2) if as_json else status_text(document))
        if not watch:
            raise typer.Exit(0 if document["verdict"] == "ok" else 1)
        time.sleep(every_s)
