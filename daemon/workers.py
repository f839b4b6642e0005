"""Jobs of worker threads and whether they go on, for the watchdog: it is fed only while all of them do.

The table is the process's, as threads are, and as what a watchdog does about a
stuck one: no thread can be ended, so the service manager starts the process anew.
A thread with no job is idle and owes nothing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar, TypeVarTuple

import anyio.to_thread

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

SLOWEST_BYTES_PER_S = 64 << 20
"""Taking and touching new pages went at 250 MiB/s on two busy virtual cores; slower is taken for no progress."""


@dataclass(slots=True)
class _Job:
    """What a thread does, and when it was last seen to go on.

    Attributes:
        what: For texts.
        allowance_s: Seconds it may take beyond the limit for all jobs, because its size is known.
        moved_at: On the clock of ``time.monotonic``.
    """

    what: str
    allowance_s: float
    moved_at: float


@dataclass(frozen=True, slots=True)
class Stuck:
    """A job that did not go on in time."""

    what: str
    still_s: float
    limit_s: float

    def __str__(self) -> str:
        return f"{self.what}: no progress for {self.still_s:.0f} s, limit {self.limit_s:.0f} s"


_jobs: dict[int, _Job] = {}
"""By thread.  Each thread writes its own entry only, so single operations on the table are all that is needed."""


@contextlib.contextmanager
def working(what: str, allowance_s: float = 0.0) -> Iterator[None]:
    """Have the calling thread counted as one that does a job until the end of the block."""
    me = threading.get_ident()
    before = _jobs.get(me)
    _jobs[me] = _Job(what, allowance_s, time.monotonic())
    try:
        yield
    finally:
        if before is None:
            del _jobs[me]
        else:
            before.moved_at = time.monotonic()
            _jobs[me] = before


def goes_on() -> None:
    """Note that the calling thread's job goes on; cheap, and nothing where it has none."""
    job = _jobs.get(threading.get_ident())
    if job is not None:
        job.moved_at = time.monotonic()


def stuck(limit_s: float) -> list[Stuck]:
    """Return the jobs that did not go on for ``limit_s`` and their allowance."""
    now = time.monotonic()
    return [
        Stuck(job.what, now - job.moved_at, limit_s + job.allowance_s)
        for job in list(_jobs.values())
        if now - job.moved_at > limit_s + job.allowance_s
    ]


def allowance_for(nbytes: int) -> float:
    """Return the seconds that a job over so much memory may take beyond the limit."""
    return nbytes / SLOWEST_BYTES_PER_S


async def in_worker(what: str, call: Callable[[*Ts], T], *args: *Ts, allowance_s: float = 0.0) -> T:
    """Call in a worker thread, as a job that the watchdog knows, and return what it returns."""

    def watched() -> T:
        with working(what, allowance_s):
            return call(*args)

    return await anyio.to_thread.run_sync(watched)
