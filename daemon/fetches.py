"""Carries out ``StartFetch``: tickets from the nodes that have the bytes, streams into the landing, one outcome.

A sender that vanished may come back: what is still lacking is asked for again
until ``fetch_s`` is over.  Bytes that are wrong or stale end the fetch at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from weightd.core.errors import WeightdError, error_from_wire
from weightd.core.plan.node_plan import Bucket, FetchPlan
from weightd.core.session.events import FetchAdvanced, FetchEnded
from weightd.core.units import NodeId, Op, Term, VersionKey
from weightd.core.wire.faults import PeerLost, TicketRefused, TransferCancelled, TransferDeadline
from weightd.core.wire.messages import Ticket, TicketWanted
from weightd.daemon.bulk.port import BulkClient, FetchJob, Stop
from weightd.daemon.config import Config
from weightd.daemon.epochs import EpochPlans
from weightd.daemon.inbox import Inbox
from weightd.link.header import Description

log = logging.getLogger("weightd.fetch")

ASK_EVERY_S = 0.5
"""Between two requests for a ticket, and before a sender that vanished is tried again."""


@dataclass
class _Running:
    """One fetch."""

    plans: EpochPlans
    key: VersionKey
    op: Op
    half: int
    deadline_at: float
    stop: Stop = field(default_factory=Stop)
    ended: anyio.Event = field(default_factory=anyio.Event)
    landed: set[int] = field(default_factory=set)
    nbytes: int = 0


@dataclass
class Fetches:
    """Fetches of one run on one node; one is under way at a time.

    Attributes:
        config: The daemon's.
        client: The transport.
        inbox: Gets progress and outcome.
        ask: Sends a request for a ticket to a node.
        soon: Runs a call on the event loop, from any thread.
        term: Newest term of the run.
    """

    config: Config
    client: BulkClient
    inbox: Inbox
    ask: Callable[[NodeId, TicketWanted], None]
    soon: Callable[[Callable[[], None]], None]
    term: Callable[[], Term]
    tasks: TaskGroup | None = None
    _running: _Running | None = None
    _tickets: dict[NodeId, Ticket] = field(default_factory=dict)
    _ticket_came: anyio.Event = field(default_factory=anyio.Event)
    _wire: dict[VersionKey, int] = field(default_factory=dict)

    def start(self, plans: EpochPlans, key: VersionKey, op: Op, half: int) -> None:
        """Begin to fetch ``key`` into ``half``; a fetch before it is stopped first."""
        before = self._running
        if before is not None:
            before.stop.set()
        self._running = _Running(plans, key, op, half, time.monotonic() + self.config.deadlines.fetch_s)
        self._wire = {k: n for k, n in self._wire.items() if k == key}
        if self.tasks is None:
            raise RuntimeError("the run does not turn yet")
        self.tasks.start_soon(self._fetch, self._running, before)

    def stop(self, key: VersionKey, op: Op) -> None:
        """Stop the fetch of ``key``; its outcome says so."""
        if self._running is not None and (self._running.key, self._running.op) == (key, op):
            self._running.stop.set()

    def stop_all(self) -> None:
        """End the fetch under way, at the end of the daemon."""
        if self._running is not None:
            self._running.stop.set()

    def ticket(self, node: NodeId, ticket: Ticket) -> None:
        """Take a node's answer to a request for a ticket."""
        self._tickets[node] = ticket
        came, self._ticket_came = self._ticket_came, anyio.Event()
        came.set()

    def wire_nbytes(self, key: VersionKey) -> int:
        """Return the bytes that crossed for a version so far, repeated buckets included."""
        return self._wire.get(key, 0)

    async def _fetch(self, running: _Running, before: _Running | None) -> None:
        if before is not None:
            await before.ended.wait()  # its threads may still write into the half; ``stop`` ends them at once
        try:
            generation = await self._land(running)
        except WeightdError as error:
            outcome = FetchEnded(running.key, running.op, 0, error.to_wire())
        else:
            outcome = FetchEnded(running.key, running.op, generation)
        finally:
            running.ended.set()
        self.inbox.outcome(outcome)

    async def _land(self, running: _Running) -> int:
        plan = running.plans.plans[self.config.node]
        held = Description(self.term(), running.key, plan.digest, len(plan.fetch.buckets))
        halves = running.plans.halves
        halves.begin(running.half, held)
        running.landed = set(halves.landed(running.half, held))
        running.nbytes = sum(b.nbytes for b in plan.fetch.buckets if b.index in running.landed)
        failures: list[WeightdError] = []
        async with anyio.create_task_group() as tasks:
            for sender in sorted({b.source_node for b in plan.fetch.buckets}):
                tasks.start_soon(self._from_sender, running, plan.fetch, sender, failures)
        if failures:
            raise failures[0]
        if running.stop.is_set:
            raise TransferCancelled("every node", str(running.key))
        return halves.finish(running.half)

    async def _from_sender(
        self, running: _Running, fetch: FetchPlan, sender: NodeId, failures: list[WeightdError]
    ) -> None:
        """Fetch all buckets of one sender, through as many connections as it takes."""
        before: PeerLost | TicketRefused | None = None
        while True:
            lacking = [b for b in fetch.buckets if b.source_node == sender and b.index not in running.landed]
            if not lacking:
                return
            try:
                ticket = await self._ticket_from(running, sender)
                await self._through(running, fetch, sender, ticket, lacking)
            except (PeerLost, TicketRefused) as error:
                if running.stop.is_set or time.monotonic() >= running.deadline_at:
                    failures.append(error)
                    running.stop.set()
                    return
                before = error
                log.warning("fetching goes on", extra={"facts": {"from": sender, "error": str(error)}})
                await anyio.sleep(ASK_EVERY_S)
            except WeightdError as error:
                # No time for another ticket: what ended the connection before says more than that.
                late = before is not None and isinstance(error, TransferDeadline) and error.bucket < 0
                failures.append(before if late and before is not None else error)
                running.stop.set()
                return

    async def _ticket_from(self, running: _Running, sender: NodeId) -> Ticket:
        """Ask a node for leave to read until it answers.

        Raises:
            WeightdError: Why it gives none; TransferDeadline if it does not answer.
        """
        begun = time.monotonic()
        self._tickets.pop(sender, None)
        wanted = TicketWanted(running.plans.spec.epoch, running.key, running.op)
        while time.monotonic() < running.deadline_at:
            if running.stop.is_set:
                raise TransferCancelled(sender, str(running.key))
            self.ask(sender, wanted)
            with anyio.move_on_after(ASK_EVERY_S):
                while (ticket := self._tickets.get(sender)) is None:
                    await self._ticket_came.wait()
                if (ticket.key, ticket.op) == (running.key, running.op):
                    if ticket.error is not None:
                        raise error_from_wire(ticket.error)
                    return ticket
                self._tickets.pop(sender, None)
        limit_s = self.config.deadlines.fetch_s
        waited_s = time.monotonic() - begun
        node = self.config.node
        raise TransferDeadline(sender, node, str(running.key), -1, "a ticket", waited_s, limit_s, "fetch_s")

    async def _through(
        self, running: _Running, fetch: FetchPlan, sender: NodeId, ticket: Ticket, lacking: list[Bucket]
    ) -> None:
        deadlines, address = self.config.deadlines, self.config.peers[sender].bulk
        job = FetchJob(
            sender=sender,
            receiver=self.config.node,
            host=address.host,
            port=address.port,
            ticket=ticket.ticket,
            token=ticket.token,
            key=running.key,
            buckets=lacking,
            of=len(fetch.buckets),
            landing=running.plans.halves[running.half].payload,
            streams=self.config.limits.bulk_streams,
            deadline_at=running.deadline_at,
            fetch_s=deadlines.fetch_s,
            stall_s=deadlines.fetch_stall_s,
        )
        stop = Stop()  # one connection's error closes its own streams; the fetch goes on with the next
        running.stop.on_set(stop.set)

        def landed(bucket: Bucket) -> None:
            self.soon(partial(self._landed, running, bucket))

        # Not abandoned on cancel: a thread that still writes into the landing must have ended before it is reused.
        try:
            result = await anyio.to_thread.run_sync(self.client.fetch, job, stop, landed)
        finally:
            stop.set()
            # Its last buckets may still be on their way from the thread: nothing that is here is fetched again.
            told = anyio.Event()
            self.soon(told.set)
            await told.wait()
        extra = result.wire_nbytes - result.nbytes
        self._wire[running.key] = self._wire.get(running.key, 0) + extra

    def _landed(self, running: _Running, bucket: Bucket) -> None:
        if running.ended.is_set() or bucket.index in running.landed:
            return  # with the run, the landing may have ended
        running.landed.add(bucket.index)
        running.nbytes += bucket.nbytes
        self._wire[running.key] = self._wire.get(running.key, 0) + bucket.nbytes
        running.plans.halves.mark(running.half, bucket)
        self.inbox.repeat(FetchAdvanced(running.key, running.op, running.nbytes))
