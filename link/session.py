"""A hook's attachment to its node's daemon: both threads, and waiting with a deadline for what they bring.

The hook's state lives behind one lock, ``changed``, a condition that is notified whenever
anything arrives.  User threads wait on it; the two threads of the link only take it for a moment.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from weightd.core.errors import WeightdError
from weightd.core.session.deadlines import Deadlines
from weightd.core.units import NO_KEY, NO_TERM, RunName, Term, VersionKey
from weightd.core.wire.messages import (
    EngineHello,
    PublisherGoal,
    PublisherReport,
    ReceiverGoal,
    ReceiverReport,
    TrainerHello,
    Welcome,
)
from weightd.link.control import ControlLink
from weightd.link.errands import Errand, Errands
from weightd.link.faults import DaemonAbsent, PeerGone
from weightd.link.finding import daemon_paths, why_silent
from weightd.link.forks import in_child

T = TypeVar("T")

_LOOK_S = 0.25
"""A waiting thread looks this often whether the daemon is still there; everything else wakes it."""

_ERRAND_S = 30.0
"""For one call on the descriptor socket: the daemon checks and maps what is offered, with all pages."""


class HookSession:
    """Base of a hook: identity, lock, blobs, health of the link.

    Subclasses are the ``Face`` of the control thread: they give ``hello`` and ``report`` and take goals,
    all under ``changed``.

    Attributes:
        changed: The lock of all state below it, notified on every change.
        deadlines: Limits of this hook's own waits.
        node: Id of the daemon's node, once it has welcomed.
    """

    def __init__(
        self,
        run: str,
        sender: str,
        socket: str | os.PathLike[str] | None,
        deadlines: Deadlines,
        changed: threading.Condition | None = None,
    ) -> None:
        """Begin a session.

        Args:
            run: The run.
            sender: ``trainer 3`` or ``E0[1]``.
            socket: See ``daemon_paths``.
            deadlines: Limits of this hook's own waits.
            changed: A lock that several sessions share, because one thread waits for all of them.
        """
        self.changed = changed or threading.Condition(threading.RLock())
        self.deadlines = deadlines
        self.node = ""
        self.run = RunName(run)
        self.sender = sender
        self.paths = daemon_paths(socket)
        self.refusal: WeightdError | None = None
        self.blobs: dict[str, bytes] = {}
        self._pid = os.getpid()
        self._link: ControlLink | None = None
        self._errands: Errands | None = None
        self._welcome: Welcome | None = None
        in_child(self, HookSession._leave_to_parent)

    # ------------------------------------------------------------ for subclasses to give

    def hello(self) -> TrainerHello | EngineHello:
        """Return the greeting."""
        raise NotImplementedError

    def report(self) -> PublisherReport | ReceiverReport:
        """Return the whole state."""
        raise NotImplementedError

    def goal_arrived(self, goal: PublisherGoal | ReceiverGoal) -> None:
        """Take the daemon's goal."""
        raise NotImplementedError

    def first_errands(self) -> list[Errand]:
        """Return what is due on the descriptor socket of a new session; called on the errands thread."""
        return []

    def blob_arrived(self, digest: str, blob: bytes) -> None:
        """Take a blob that was asked for."""

    def term_and_key(self) -> tuple[Term, VersionKey]:
        """Return the newest term known, and the version in hand."""
        return NO_TERM, NO_KEY

    # ------------------------------------------------------------ the rest of the control thread's face

    def blob(self, digest: str) -> bytes | None:
        """Return a blob that the daemon asks for."""
        return self.blobs.get(digest)

    def welcomed(self, welcome: Welcome) -> None:
        """The daemon answered the greeting."""
        with self.changed:
            self._welcome = welcome
            self.node = welcome.node
            self.changed.notify_all()
        if self._errands is not None:
            self._errands.session(welcome.session)

    def refused(self, error: WeightdError) -> None:
        """The daemon, or one of the link's threads, refuses to go on."""
        with self.changed:
            if self.refusal is None:
                self.refusal = error
            self.changed.notify_all()

    # ------------------------------------------------------------ opening, waiting, closing

    @property
    def forked(self) -> str:
        """Say that this process was forked from the one that attached; empty if it is that one."""
        if self._pid == os.getpid():
            return ""
        return f"attached in process {self._pid}, of which this one is a fork"

    @property
    def reachable(self) -> bool:
        """Whether the daemon answers, as far as this side knows."""
        return self._link is not None and self._link.silent_s() == 0.0

    def open(self, deadline_at: float) -> None:
        """Start the link and wait for the daemon's welcome.

        Args:
            deadline_at: On the clock of ``time.monotonic``.

        Raises:
            DaemonAbsent: Nobody answers until the deadline.
            WeightdError: The daemon refuses.
        """
        begun = time.monotonic()
        self._pid = os.getpid()
        self.refusal, self._welcome = None, None
        self._link = ControlLink(self.paths, self.run, self.sender, self, self.deadlines)
        self._errands = Errands(
            self.paths.descriptors, self.run, _ERRAND_S, self.first_errands, self._daemon_ended, self.refused
        )
        self._errands.start()
        self._link.start()
        with self.changed:
            while not self._answered():
                left = deadline_at - time.monotonic()
                if left <= 0:
                    why = why_silent(self.paths.control, self._link.unanswered)
                    raise DaemonAbsent(self.paths.control, time.monotonic() - begun, why)
                self.changed.wait(left)

    def _answered(self) -> bool:
        """Say whether the daemon welcomed the hook; raise its refusal."""
        if self.refusal is not None:
            raise self.refusal
        return self._welcome is not None

    def tell(self) -> None:
        """The state changed: wake whoever waits here, and report it."""
        with self.changed:
            self.changed.notify_all()
        if self._link is not None:
            self._link.changed()

    def want(self, digest: str, nbytes: int) -> None:
        """Ask the daemon for a blob."""
        if self._link is not None:
            self._link.want(digest, nbytes)

    def errand(self, errand: Errand) -> None:
        """Have something done on the descriptor socket."""
        if self._errands is not None:
            self._errands.run(errand)

    def wait_for(self, look: Callable[[], T], deadline_at: float | None, doing: str) -> T | None:
        """Wait until ``look`` returns something, and return it; None at the deadline.

        Args:
            look: Called under ``changed``; may raise what the wait is to end with.
            deadline_at: On the clock of ``time.monotonic``; None for no limit of this wait's own.
            doing: For the error.

        Raises:
            PeerGone: The daemon has not been heard for ``restart_s``.
            WeightdError: The daemon refuses this hook.
        """
        with self.changed:
            while True:
                found = look()
                if found is not None:
                    return found
                self._raise_trouble(doing)
                left = _LOOK_S if deadline_at is None else min(_LOOK_S, deadline_at - time.monotonic())
                if left <= 0:
                    return None
                self.changed.wait(left)

    def _raise_trouble(self, doing: str) -> None:
        """Raise what makes waiting pointless."""
        if self.refusal is not None:
            raise self.refusal
        if self._link is None or self.forked:
            why = self.forked or "the hook is closed"
            raise PeerGone(f"the daemon at {self.paths.control}", doing, f"{why}; attach here anew")
        if self._link.silent_s() > self.deadlines.restart_s:
            raise self.gone(doing)

    def gone(self, doing: str) -> PeerGone:
        """Return the error of a daemon that is not there, with all that can be found out about it."""
        assert self._link is not None
        why = f"not heard for {self._link.silent_s():.1f} s (restart_s {self.deadlines.restart_s:.1f}): "
        why += why_silent(self.paths.control, self._link.unanswered)
        if self._errands is not None and self._errands.trouble:
            why += f"; {self._errands.trouble}"
        return PeerGone(f"the daemon at {self.paths.control}", doing, why)

    def shut(self, why: str) -> None:
        """End the link: the last report and a goodbye are sent if anybody listens.  Harmless when done twice."""
        link, errands, self._link, self._errands = self._link, self._errands, None, None
        if self._pid != os.getpid():
            return  # the threads belong to the parent
        if link is not None:
            link.close(why)
        if errands is not None:
            errands.close()
        with self.changed:
            self.changed.notify_all()

    def _leave_to_parent(self) -> None:
        """In a forked child: be without a link, and without a lock that a thread of the parent may have held."""
        self.changed.__init__(threading.RLock())  # type: ignore[misc]
        errands, self._link, self._errands = self._errands, None, None
        if errands is not None:
            errands.leave_to_parent()

    def _daemon_ended(self) -> None:
        if self._link is not None:
            self._link.daemon_ended()


def process_start_time() -> int:
    """Return when this process started, in clock ticks since boot: a pid and this name one process for good."""
    fields = Path("/proc/self/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    return int(fields[19])
