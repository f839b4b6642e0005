"""The command line: one module a command, each a function that is listed in ``app``."""

from weightd.daemon.cli.app import main

__all__ = ["main"]
