"""The commands of ``weightd``.

A command is a function in a module of its own, imported and listed here.  Such a
module imports at its top what every start can afford: typer, the standard
library and ``core.errors``; sockets, event loops and tensors are imported by the
function that needs them, so that ``weightd plan`` answers without them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from weightd.core.errors import WeightdError
from weightd.daemon.cli.demo import demo
from weightd.daemon.cli.install_units import install_units
from weightd.daemon.cli.keygen import keygen
from weightd.daemon.cli.plan import plan
from weightd.daemon.cli.serve import serve
from weightd.daemon.cli.status import status

COMMANDS = (serve, status, plan, demo, keygen, install_units)
"""Every command; its function's name is the command's, with - for _."""

app = typer.Typer(
    name="weightd",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback is for developers, who want it whole
)


@app.callback()
def _weightd() -> None:
    """Move new model weights from trainer ranks into rollout engines, and prove coverage first."""


for _command in COMMANDS:
    app.command()(_command)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and leave the process with its exit code.

    Args:
        argv: Arguments after the program's name; those of the process where None.

    Raises:
        SystemExit: Always.  0: done; 1: refused, with a report; 2: the command or its
            file cannot be read; others as the error's class says.
    """
    try:
        app(args=None if argv is None else list(argv), prog_name="weightd")
    except WeightdError as error:
        typer.echo(str(error), err=True)
        sys.exit(error.exit_code)
