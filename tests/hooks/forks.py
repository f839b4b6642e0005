"""Ranks that are forked from one process, which has imported what they need: ten seconds of it for DeepSpeed, once."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkProcess
from typing import Any

Call = tuple[Callable[..., None], tuple[Any, ...]]
"""What a rank runs, with its arguments."""


def run_forked(calls: Sequence[Call], limit_s: float) -> list[int | None]:
    """Run each call in a process of its own, and return their exit codes.

    Once one has failed, or after ``limit_s``, the others are killed: they may wait for it.
    """
    context = multiprocessing.get_context("fork")
    ranks: list[ForkProcess] = [
        context.Process(target=_rank, args=(target, *arguments), daemon=True) for target, arguments in calls
    ]
    for rank in ranks:
        rank.start()
    end = time.monotonic() + limit_s
    while any(r.is_alive() for r in ranks) and not any(r.exitcode for r in ranks) and time.monotonic() < end:
        living = [r.sentinel for r in ranks if r.is_alive()]
        multiprocessing.connection.wait(living, max(end - time.monotonic(), 0.0))
    for rank in ranks:
        if rank.is_alive():
            rank.kill()
        rank.join(5)
    return [rank.exitcode for rank in ranks]


def _rank(target: Callable[..., None], *arguments: Any) -> None:
    target(*arguments)
    os._exit(0)  # nothing of the parent's is to be cleaned up here


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
