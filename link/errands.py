"""A hook's second thread: descriptors, and whatever else takes too long for the control thread.

It binds the descriptor socket to each new session, runs the hook's errands on it one
after the other, and in between watches for its end, which tells at once that the
daemon's process has ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from weightd.core.errors import InternalInvariantBroken, WeightdError
from weightd.core.units import RunName
from weightd.link.faults import HookDeadline, PeerGone
from weightd.link.fds import FdChannel

Errand = Callable[[FdChannel], None]
"""Something to do with the channel of the current session."""

_RETRY_S = 0.2
"""After an errand or a binding that failed because the daemon went away."""

_GRACE_S = 1.0
"""For the errand in hand, when the thread is to end."""


class Errands:
    """The thread.

    Attributes:
        limit_s: For one binding.
        trouble: Why the last binding failed; empty if it did not.
    """

    def __init__(
        self,
        path: str,
        run: RunName,
        limit_s: float,
        first: Callable[[], list[Errand]],
        on_end: Callable[[], None],
        on_error: Callable[[WeightdError], None],
    ) -> None:
        """Prepare the thread.

        Args:
            path: The daemon's descriptor socket.
            run: The hook's run.
            limit_s: Seconds for one binding.
            first: Returns what is due on the channel of a new session; errands of an older one are forgotten.
            on_end: Called when the daemon's end of the socket has closed.
            on_error: Called with an error that is not the end of the daemon.
        """
        self.limit_s = limit_s
        self.trouble = ""
        self._path = path
        self._run = run
        self._first = first
        self._on_end = on_end
        self._on_error = on_error
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._session: int | None = None
        self._queue: deque[Errand] = deque()
        self._stopping = False
        self._channel: FdChannel | None = None
        self._thread = threading.Thread(target=self._live, name="weightd errands", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def session(self, session: int) -> None:
        """Serve a session, as the daemon's welcome told it; one that is served already is left alone."""
        with self._lock:
            if session == self._session:
                return
            self._session = session
        self._nudge()

    def run(self, errand: Errand) -> None:
        """Run an errand on the current session's channel, after those before it."""
        with self._lock:
            self._queue.append(errand)
        self._nudge()

    def leave_to_parent(self) -> None:
        """In a forked child: close its copy of the socket, so that the daemon learns at once when the parent ends."""
        if self._channel is not None:
            self._channel.close()

    def close(self) -> None:
        """End the thread after the errand in hand; harmless when done twice.

        An errand that waits for a daemon which does not answer is not waited for.
        """
        if self._stopping:
            return
        self._stopping = True
        self._nudge()
        if self._thread.ident is not None:
            self._thread.join(_GRACE_S)
            channel = self._channel
            if channel is not None and self._thread.is_alive():
                channel.abandon()
            self._thread.join(self.limit_s)
        if not self._thread.is_alive():
            os.close(self._wake)

    def _nudge(self) -> None:
        with contextlib.suppress(OSError):  # closed: nobody is there to be told
            os.eventfd_write(self._wake, 1)

    def _live(self) -> None:
        channel: FdChannel | None = None
        bound: int | None = None
        try:
            while not self._stopping:
                with self._lock:
                    session = self._session
                if session != bound or (channel is not None and not channel.alive()):
                    channel, bound = self._bound(channel, bound, session)
                elif channel is None or not self._run_one(channel):
                    self._sleep(channel)
        except Exception as error:  # noqa: BLE001  (a thread that died unseen would leave the hook waiting for ever)
            self._on_error(InternalInvariantBroken("the errands thread lives", f"{type(error).__name__}: {error}"))
        finally:
            if channel is not None:
                channel.close()

    def _bound(
        self, channel: FdChannel | None, bound: int | None, session: int | None
    ) -> tuple[FdChannel | None, int | None]:
        """Drop a channel whose daemon has ended, or bind one to a new session."""
        if channel is not None:
            channel.close()
        if session is None or session == bound:
            with self._lock:
                if self._session == session:
                    self._session = None  # only a new welcome makes a new channel
                    self._queue.clear()
            if session is not None:
                self._on_end()
            return None, None
        try:
            deadline_at = time.monotonic() + self.limit_s
            channel = FdChannel.connect(self._path, self._run, session, deadline_at, self._connected)
        except WeightdError as error:
            # Also a refusal may only mean that the daemon restarted since its welcome: greet again, and remember why.
            self.trouble = str(error)
        else:
            self.trouble = ""
            due = deque(self._first())
            with self._lock:
                self._queue = due
            return channel, session
        with self._lock:
            if self._session == session:
                self._session = None
        time.sleep(_RETRY_S)
        self._on_end()
        return None, None

    def _connected(self, channel: FdChannel) -> None:
        self._channel = channel
        if self._stopping:
            channel.abandon()

    def _run_one(self, channel: FdChannel) -> bool:
        """Run the next errand; say whether there was one."""
        with self._lock:
            errand = self._queue.popleft() if self._queue else None
        if errand is None:
            return False
        try:
            errand(channel)
        except (PeerGone, HookDeadline):
            channel.close()  # the next turn finds it dead
        except WeightdError as error:
            self._on_error(error)
        return True

    def _sleep(self, channel: FdChannel | None) -> None:
        """Wait for a nudge or for the end of the daemon."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if channel is not None:
            poll.register(channel.fileno(), select.POLLRDHUP)
        if any(fd == self._wake for fd, _ in poll.poll()):
            os.eventfd_read(self._wake)
