"""Room for descriptors: every hook costs some, and ZeroMQ ends the process when a connection finds none."""

from __future__ import annotations

import os
import resource

RESERVE = 64
"""Kept for connections that nobody can refuse, and for files of the daemon's own."""

_MOST = 1 << 20


def raise_limit() -> None:
    """Use as many open files as the system lets this process have; the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def why_full() -> str:
    """Return why no more hooks can be taken on, or nothing if they can.

    The kernel gives the lowest free number, so that all below it are in use.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return ""
    try:
        lowest = os.dup(0)
    except OSError:
        lowest = limit
    else:
        os.close(lowest)
    if lowest + RESERVE <= limit:
        return ""
    return f"{lowest:,} files are open of {limit:,}, and {RESERVE} are kept back"
