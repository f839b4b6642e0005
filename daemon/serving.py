"""Gives other nodes leave to read this node's slots, and counts who reads."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import anyio

from weightd.core.errors import WeightdError
from weightd.core.plan.node_plan import FetchPlan, TrainerSource
from weightd.core.session.events import ReadersChanged
from weightd.core.units import Epoch, NodeId, RunName, TrainerRank, VersionKey
from weightd.core.wire.faults import TicketRefused
from weightd.core.wire.messages import SlotState, Ticket, TicketWanted
from weightd.daemon.attached import AttachedHooks
from weightd.daemon.bulk.gather import Gather, Lease
from weightd.daemon.bulk.port import BulkServer, Grant, new_token
from weightd.daemon.inbox import Inbox
from weightd.daemon.planning import Planning
from weightd.daemon.workers import in_worker
from weightd.link.fd_messages import PoolKey
from weightd.link.memory import Pool

KEPT_GATHERS = 64
"""Prepared views kept: two slots for each of some nodes; the rest is built again."""

_Slots = tuple[tuple[TrainerRank, int], ...]


@dataclass(slots=True)
class _Reader:
    """A ticket that is out: what it reads, from which slots, over how many streams; 1 before the first."""

    key: VersionKey
    slots: _Slots
    count: int = 1


@dataclass
class Serving:
    """Tickets of one run on one node.

    Attributes:
        run: The run.
        node: This node.
        hooks: Whose pools are read.
        planning: Plans of the nodes that ask.
        server: The transport.
        readable: The run's machine: which local slots hold a version and may be read.
        inbox: Told how many read.
        soon: Runs a call on the event loop, from any thread.
        valid_s: For a ticket that nobody uses.
    """

    run: RunName
    node: NodeId
    hooks: AttachedHooks
    planning: Planning
    server: BulkServer
    readable: Callable[[VersionKey], Mapping[TrainerRank, SlotState]]
    inbox: Inbox
    soon: Callable[[Callable[[], None]], None]
    valid_s: float
    _readers: dict[int, _Reader] = field(default_factory=dict)
    _unused: set[int] = field(default_factory=set)
    _gathers: dict[tuple[Epoch, NodeId, _Slots], tuple[dict[TrainerSource, Pool], Gather]] = field(default_factory=dict)

    async def ticket(self, receiver: NodeId, wanted: TicketWanted) -> Ticket:
        """Return leave to read for a node, or why it has none."""
        try:
            lease, slots = await self._lease(receiver, wanted)
        except WeightdError as error:
            return Ticket(wanted.key, wanted.op, error=error.to_wire())
        number, token = secrets.randbits(62), new_token()
        expires_at = time.monotonic() + self.valid_s

        def readers(count: int) -> None:
            self.soon(partial(self._count, number, count))

        # Counted from now on: between the ticket and its first stream nothing may be overwritten either.
        self._readers[number] = _Reader(wanted.key, slots)
        self._tell(wanted.key)
        self._unused.add(number)
        self.server.grant(Grant(number, token, receiver, lease, expires_at, readers))
        return Ticket(wanted.key, wanted.op, number, token)

    async def _lease(self, receiver: NodeId, wanted: TicketWanted) -> tuple[Lease, _Slots]:
        plans = self.planning.find(wanted.epoch)
        if plans is None or receiver not in plans.plans:
            raise TicketRefused(self.node, 0, f"epoch {wanted.epoch} is not planned here")
        fetch = plans.plans[receiver].fetch
        needed = _needed(fetch, self.node)
        slots = self.readable(wanted.key)
        lacking = sorted({s.rank for s in needed} - slots.keys())
        if lacking:
            raise TicketRefused(self.node, 0, f"{wanted.key} is not readable here from trainer ranks {lacking}")
        ranks = frozenset(s.rank for s in needed)
        offered = self.hooks.offered(self.run, plans.boots)
        pools: dict[TrainerSource, Pool] = {}
        for source in needed:
            pool = offered.get(PoolKey(source.rank, slots[source.rank].slot, source.region))
            if pool is None:
                raise TicketRefused(self.node, 0, f"region {source.region} of trainer {source.rank} is not here")
            pools[source] = pool
        named = self._named(wanted.key, ranks)
        known = self._gathers.get((wanted.epoch, receiver, named))
        # Numbers of epochs may come again, with another plan; a restarted rank has other pools.
        if known is None or known[1].fetch is not fetch or any(known[0][s] is not pools[s] for s in needed):
            known = pools, await in_worker("preparing a fetch", Gather, fetch, self.node, pools)
            while len(self._gathers) >= KEPT_GATHERS:
                del self._gathers[next(iter(self._gathers))]
            self._gathers[wanted.epoch, receiver, named] = known
            if self._named(wanted.key, ranks) != named:  # released, or moved, while the views were made
                raise TicketRefused(self.node, 0, f"{wanted.key} is in other slots by now")
        gather = known[1]
        return Lease(gather, wanted.key, {s: slots[s.rank].generation for s in needed}), named

    def _named(self, key: VersionKey, ranks: Iterable[TrainerRank]) -> _Slots:
        slots = self.readable(key)
        return tuple((r, slots[r].slot) for r in sorted(ranks) if r in slots)

    def forget_unplanned(self) -> None:
        """Let go of the views of epochs that are no longer planned here, and with them of their pools' memory."""
        self._gathers = {k: known for k, known in self._gathers.items() if self.planning.find(k[0]) is not None}

    def end(self, key: VersionKey, rank: TrainerRank, slot: int) -> None:
        """Void every ticket that reads ``key`` from a slot; who holds one asks again."""
        for ticket, reader in list(self._readers.items()):
            if reader.key == key and (rank, slot) in reader.slots:
                self.server.revoke(ticket)  # its streams count themselves off as they end
                if ticket in self._unused:
                    self._count(ticket, 0)

    def _count(self, ticket: int, count: int) -> None:
        """Note the streams of a ticket; the machine holds the slots until all have ended."""
        self._unused.discard(ticket)
        reader = self._readers.get(ticket)
        if reader is None:
            return  # voided before its first stream
        reader.count = count
        if count == 0:
            del self._readers[ticket]
        self._tell(reader.key)

    def _tell(self, key: VersionKey) -> None:
        reading = [r for r in self._readers.values() if r.key == key]
        slots = frozenset(s for r in reading for s in r.slots)
        self.inbox.outcome(ReadersChanged(key, sum(r.count for r in reading), slots))

    async def expire(self, ticket: int) -> None:
        """Void a ticket that nobody has used for ``valid_s``: its version is no longer held for it."""
        await anyio.sleep(self.valid_s)
        if ticket in self._unused:
            self.server.revoke(ticket)
            self._count(ticket, 0)


def _needed(fetch: FetchPlan, sender: NodeId) -> tuple[TrainerSource, ...]:
    """Return the pools of ``sender`` that a receiver's buckets read."""
    rows = [slice(b.first_row, b.last_row) for b in fetch.buckets if b.source_node == sender]
    used = sorted({int(s) for r in rows for s in fetch.gather.source[r]})
    return tuple(fetch.sources[s] for s in used)
