"""``weightd serve``: the daemon of this node."""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path
from typing import Annotated

import typer


def serve(
    config: Annotated[
        Path | None, typer.Option(help="Configuration file (TOML); WEIGHTD_CONFIG where not given.", show_default=False)
    ] = None,
) -> None:
    """Serve this node until SIGTERM or SIGINT; exit 78 on a configuration that cannot stand."""
    from weightd.daemon.config import load_config
    from weightd.daemon.logs import configure_logging
    from weightd.daemon.open_files import raise_limit

    settings = load_config(config, os.environ)
    configure_logging(settings.log_level, os.environ)
    raise_limit()
    # A watchdog ends a stuck daemon by SIGABRT: the log then says in which line each thread stood.
    faulthandler.enable()

    import anyio

    from weightd.daemon.app import serve_node

    anyio.run(serve_node, settings, os.environ)
