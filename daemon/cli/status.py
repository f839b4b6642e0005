"""``weightd status``: what the daemon of this node is doing, with one verdict on top."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from weightd.core.errors import WeightdError

UNREACHABLE = 2
"""Exit code where no daemon answers."""


def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print the status document.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat until interrupted.")] = False,
    socket: Annotated[
        str | None, typer.Option(help="Control socket or runtime directory; WEIGHTD_SOCKET where not given.")
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="Longest wait for the answer, in seconds.")] = 5.0,
    every_s: Annotated[float, typer.Option(help="Seconds between two repeats of --watch.")] = 1.0,
    away_s: Annotated[
        float, typer.Option(help="Seconds for which --watch waits for a daemon that answered before.")
    ] = 60.0,
) -> None:
    """Say which versions are served, what is in hand and what it waits for.

    Exit codes: 0 all is well, 1 something is degraded, 2 no daemon answers.
    """
    from weightd.daemon.status.client import ask_status
    from weightd.link.finding import daemon_paths

    ask = partial(ask_status, daemon_paths(socket), timeout_s)
    if watch:
        with contextlib.suppress(KeyboardInterrupt):
            _watch(ask, as_json, every_s, away_s)
        return
    try:
        document = ask()
    except WeightdError as error:
        raise _unreachable(error) from None
    _print(document, as_json, indent=2)
    raise typer.Exit(0 if document["verdict"] == "ok" else 1)


def _watch(ask: Callable[[], dict[str, Any]], as_json: bool, every_s: float, away_s: float) -> None:
    """Repeat; a daemon that answered before may be away for ``away_s``, as one that is started again is."""
    heard_at: float | None = None
    while True:
        try:
            document = ask()
        except WeightdError as error:
            silent_s = None if heard_at is None else time.monotonic() - heard_at
            if silent_s is None or silent_s >= away_s:
                raise _unreachable(error) from None
            typer.echo(f"the daemon is away since {silent_s:.0f} of {away_s:.0f} s: {error}", err=True)
        else:
            heard_at = time.monotonic()
            _print(document, as_json, indent=None)
        time.sleep(every_s)


def _print(document: dict[str, Any], as_json: bool, indent: int | None) -> None:
    from weightd.daemon.status.text import status_text

    typer.echo(json.dumps(document, indent=indent) if as_json else status_text(document))


def _unreachable(error: WeightdError) -> typer.Exit:
    typer.echo(str(error), err=True)
    return typer.Exit(UNREACHABLE)
