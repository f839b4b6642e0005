"""What a node vouches for, on its way to the node's journal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightd.core.session.events import JournalNode
from weightd.core.session.records import Committed, Fenced
from weightd.core.session.writing import JournalWriter

if TYPE_CHECKING:
    from weightd.core.session.events import NodeEffect, NodeJournaled
    from weightd.core.session.records import AnyRecord
    from weightd.core.session.writing import Continuation, Writing
    from weightd.core.units import EngineId, Op, VersionKey
    from weightd.core.wire.messages import Goal


class NodeRecords:
    """The records of one run on one node.

    Attributes:
        committed: Last commit that is in the journal.
    """

    def __init__(self, committed: VersionKey, retry_s: float) -> None:
        self.committed = committed
        self._retry_s = retry_s
        self._retry_at = 0.0
        self._journal = JournalWriter()
        self._open: set[AnyRecord] = set()
        self._fences: set[tuple[EngineId, Op]] = set()

    def write(self, record: AnyRecord, now: float, then: Continuation | None = None) -> list[NodeEffect]:
        """Return the effect that writes a record; ``then`` follows once it is durable."""
        self._open.add(record)
        token, plain = self._journal.write(record, now, then, awaited=False)
        return [JournalNode(token, plain)]

    def write_again(self, record: AnyRecord, now: float, then: Continuation) -> list[NodeEffect]:
        """Write a record that is asked for again and again, unless it is on its way or just failed."""
        return [] if record in self._open or now < self._retry_at else self.write(record, now, then)

    def decisions(self, goal: Goal, now: float) -> list[NodeEffect]:
        """Return the effects that write commits and fences as they are learnt."""
        out: list[NodeEffect] = []
        note = goal.committed
        if note.key.version > self.committed.version:
            out += self.write_again(Committed(note.key, note.engines), now, self._learn(note.key))
        for order in goal.engines:
            if order.order == "fence" and (order.engine, order.op) not in self._fences:
                self._fences.add((order.engine, order.op))
                out += self.write(Fenced(order.engine, order.key, order.op), now)
        return out

    def close(self, event: NodeJournaled, now: float) -> Writing | None:
        """Note an outcome, and let follow what follows; return a record that could not be written.

        What could not be recorded is not vouched for; what is asked for again is tried again after a while.
        """
        writing = self._journal.close(event.token)
        if writing is None:
            return None
        self._open.discard(writing.record)
        if event.error is not None:
            self._retry_at = now + self._retry_s
            return writing
        if writing.then is not None:
            writing.then(now)
        return None

    def new_term(self) -> None:
        """Ops count anew: a fence of an old one is another's."""
        self._fences.clear()

    def _learn(self, key: VersionKey) -> Continuation:
        def learn(_: float) -> None:
            if key.version > self.committed.version:
                self.committed = key

        return learn
