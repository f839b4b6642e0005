"""The bounded mailbox of a run: repeats may be dropped, outcomes may not.

Messages of hooks and peers are level-triggered, so the oldest of them gives way
when the box is full, and is counted.  Outcomes of effects are bounded by the
effects themselves and are always kept.
"""

from __future__ import annotations

from collections import deque

import anyio

from weightd.core.session.events import LeaderEvent, NodeEvent

REPEATS = 4096
"""Messages kept; at one a second from each of a thousand ranks, four seconds of a stalled loop."""

RunEvent = NodeEvent | LeaderEvent


class Inbox:
    """Events of one run, in order of arrival, outcomes first."""

    def __init__(self) -> None:
        self._outcomes: deque[RunEvent] = deque()
        self._repeats: deque[RunEvent] = deque()
        self._wake = anyio.Event()
        self.dropped = 0
        self._nudged = False

    def outcome(self, event: RunEvent) -> None:
        """Put in the outcome of an effect, or the end of a hook."""
        self._outcomes.append(event)
        self._wake.set()

    def repeat(self, event: RunEvent) -> None:
        """Put in a message that its sender will repeat."""
        if len(self._repeats) >= REPEATS:
            self._repeats.popleft()
            self.dropped += 1
        self._repeats.append(event)
        self._wake.set()

    def nudge(self) -> None:
        """End the wait for the next event: whoever waits has something else to look at."""
        self._nudged = True
        self._wake.set()

    async def next(self) -> RunEvent | None:
        """Return the next event, or None where it was only nudged; waits for either.

        The caller bounds the wait by its machines' deadline.
        """
        while not self._outcomes and not self._repeats:
            if self._nudged:
                self._nudged = False
                return None
            self._wake = anyio.Event()
            await self._wake.wait()
        return self._outcomes.popleft() if self._outcomes else self._repeats.popleft()
