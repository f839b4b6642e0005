"""``weightd demo``: four trainer ranks feed an engine on two nodes, every byte compared; then a rank is missing."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

INTERRUPTED = 130


def demo(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document; progress goes to stderr.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the folder with logs, journals and tensors.")] = False,
) -> None:
    """Watch three versions go from four FSDP2 ranks into one engine on two nodes, and what a missing rank leads to.

    Starts two daemons, four trainer ranks and four engine ranks as processes on this machine.

    Exit codes: 0 every byte was equal and the incomplete run was refused, 1 otherwise.
    """
    from weightd.daemon.local_nodes import short_folder

    folder = short_folder("weightd-demo-")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        status = _run(folder, as_json, keep)
    except KeyboardInterrupt:
        status = INTERRUPTED
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    raise typer.Exit(status)


def _run(folder: Path, as_json: bool, keep: bool) -> int:
    from rich.console import Console

    from weightd.daemon.children import Children
    from weightd.daemon.cli.demo_report import document, print_delivery, print_refusal
    from weightd.daemon.cli.demo_scene import Scene, SceneFailed
    from weightd.daemon.local_nodes import NodeNotUp

    console = Console(stderr=as_json, highlight=False)
    began = time.monotonic()

    def tell(text: str) -> None:
        console.print(f"{time.monotonic() - began:6.1f} s  {text}", markup=False, soft_wrap=True)

    with Children(folder / "logs") as children, console.status("") as spinner:
        scene = Scene(folder, children, tell, spinner.update)
        outcome = scene.outcome
        try:
            scene.deliver()
            if not as_json:
                print_delivery(console, outcome)
            scene.leave_one_out()
        except (SceneFailed, NodeNotUp) as error:
            tell(str(error))
        else:
            if not as_json:
                print_refusal(console, outcome)
    outcome.seconds["all"] = time.monotonic() - began
    ok = outcome.delivered and outcome.refused
    tell(
        "every byte was equal, and the incomplete run was refused" if ok else "the demo did NOT show what it is to show"
    )
    if keep:
        tell(f"kept {folder}")
    if as_json:
        typer.echo(json.dumps(document(outcome, str(folder) if keep else None)))
    return 0 if ok else 1
