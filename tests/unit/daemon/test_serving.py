"""A ticket holds its version from the moment it is given until its last stream, or its own end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import anyio
import pytest

from tests.unit.daemon.test_epochs import A, B, spec
from tests.unit.daemon.test_planning import planned, stored
from weightd.core.session.events import ReadersChanged
from weightd.core.units import Attempt, Boot, Epoch, Op, RunName, SlotName, TrainerRank, Version, VersionKey
from weightd.core.wire.messages import Region, SlotState, TicketWanted, TrainerHello
from weightd.daemon.attached import AttachedHooks, Hook
from weightd.daemon.bulk.landing import Landing, MemoryBudget
from weightd.daemon.bulk.port import Grant
from weightd.daemon.inbox import Inbox
from weightd.daemon.planning import Planning
from weightd.daemon.serving import Serving
from weightd.link.memory import Pool

pytestmark = pytest.mark.anyio

RUN = RunName("r")
KEY = VersionKey(Version(1), Attempt(Boot(1), 1))
WANTED = TicketWanted(Epoch(1), KEY, Op(3))
VALID_S = 0.2


@dataclass
class Server:
    """Keeps what it is granted."""

    grants: dict[int, Grant] = field(default_factory=dict)
    port: int = 0

    def grant(self, grant: Grant) -> None:
        self.grants[grant.ticket] = grant

    def revoke(self, ticket: int) -> None:
        self.grants.pop(ticket, None)

    def close(self) -> None:
        """Nothing is open."""


@dataclass
class Node:
    """Node b, whose trainer rank 1 holds what node a lacks."""

    hooks: AttachedHooks
    planning: Planning
    inbox: Inbox = field(default_factory=Inbox)
    server: Server = field(default_factory=Server)
    slots: dict[TrainerRank, SlotState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots[TrainerRank(1)] = SlotState(0, KEY, 2, "t1")
        self.serving = Serving(
            RUN,
            B,
            self.hooks,
            self.planning,
            self.server,
            lambda key: self.slots if key == KEY else {},
            self.inbox,
            self.run_now,
            VALID_S,
        )

    @staticmethod
    def run_now(call: Callable[[], None]) -> None:
        call()

    def trainer(self, boot: int) -> Hook:
        """Attach an incarnation of trainer rank 1; slot 0 of each is at generation 2."""
        regions = (Region(0, 0, 8192), Region(1, 0, 8192))
        hello = TrainerHello(TrainerRank(1), 2, 1, 1, SlotName("s1"), "t1", 1, regions)
        hook = self.hooks.add(RUN, Boot(boot), hello, 1, b"id")
        hook.pools = {key: Pool.create(str(key), 4096) for key in hook.due}
        for pool in hook.pools.values():
            pool.payload[:] = boot
            pool.bump()
            pool.bump()
        hook.ready = True
        return hook

    async def readers(self) -> list[int]:
        """Return what the machine was told, in order."""
        told = []
        with anyio.move_on_after(0.05):
            while True:
                event = await self.inbox.next()
                assert isinstance(event, ReadersChanged)
                told.append(event.readers)
        return told


@pytest.fixture
def node() -> Iterator[Node]:
    landing = Landing("the landing of run r", MemoryBudget(1 << 20))
    made = Node(AttachedHooks(10), Planning(B, stored(), 1.0, landing))
    yield made
    made.hooks.close()
    landing.close()


def first_bytes(grant: Grant) -> set[int]:
    (index,) = grant.lease.gather.buckets
    staging = grant.lease.gather.staging_nbytes
    data, _ = grant.lease.gather.read(index, Pool.create("staging", max(staging, 1)).payload)
    grant.lease.check(index)
    return set(data.tolist())


async def test_a_version_is_held_from_its_ticket_on(node: Node) -> None:
    await planned(node.planning, spec())
    node.trainer(11)
    ticket = await node.serving.ticket(A, WANTED)

    assert ticket.error is None
    assert await node.readers() == [1]
    grant = node.server.grants[ticket.ticket]
    for count in (1, 2, 1, 0):
        grant.on_readers(count)
    assert await node.readers() == [1, 2, 1, 0]


async def test_a_ticket_that_nobody_uses_lets_go(node: Node) -> None:
    await planned(node.planning, spec())
    node.trainer(11)
    ticket = await node.serving.ticket(A, WANTED)
    await node.serving.expire(ticket.ticket)

    assert await node.readers() == [1, 0]
    assert node.server.grants == {}


async def test_a_ticket_in_use_is_not_expired(node: Node) -> None:
    await planned(node.planning, spec())
    node.trainer(11)
    ticket = await node.serving.ticket(A, WANTED)
    node.server.grants[ticket.ticket].on_readers(1)
    await node.serving.expire(ticket.ticket)

    assert await node.readers() == [1, 1]
    assert ticket.ticket in node.server.grants


async def test_tickets_of_a_slot_that_moved_are_void_and_the_next_one_reads_the_other(node: Node) -> None:
    await planned(node.planning, spec())
    node.trainer(11)
    unused = await node.serving.ticket(A, WANTED)
    in_use = await node.serving.ticket(A, WANTED)
    streams = node.server.grants[in_use.ticket].on_readers
    streams(2)
    node.slots[TrainerRank(1)] = SlotState(1, KEY, 2, "t1")
    await node.readers()
    node.serving.end(KEY, TrainerRank(1), 0)

    assert node.server.grants == {}
    assert await node.readers() == [2]

    after = await node.serving.ticket(A, WANTED)
    node.serving.end(KEY, TrainerRank(1), 0)
    streams(0)

    assert list(node.server.grants) == [after.ticket]
    assert await node.readers() == [3, 1]
    assert unused.error is None


async def test_what_is_not_here_is_refused(node: Node) -> None:
    missing = await node.serving.ticket(A, WANTED)
    await planned(node.planning, spec())
    no_pool = await node.serving.ticket(A, WANTED)
    node.trainer(11)
    node.slots.clear()
    no_slot = await node.serving.ticket(A, WANTED)

    errors = [t.error for t in (missing, no_pool, no_slot)]
    assert [e is not None and e.code for e in errors] == ["E_TICKET"] * 3
    texts = [str(e.text) for e in errors if e is not None]
    assert "epoch 1 is not planned here" in texts[0]
    assert "region 0 of trainer 1 is not here" in texts[1]
    assert "not readable here from trainer ranks [1]" in texts[2]
    assert await node.readers() == []


async def test_the_bytes_are_those_of_the_incarnation_that_published(node: Node) -> None:
    """A second process of the rank, with a slot of the same name at the same generation, changes nothing."""
    await planned(node.planning, spec())
    node.trainer(11)
    before = await node.serving.ticket(A, WANTED)
    node.trainer(12)
    after = await node.serving.ticket(A, WANTED)

    assert [first_bytes(node.server.grants[t.ticket]) for t in (before, after)] == [{11}, {11}]


async def test_views_are_built_once_and_go_with_their_epoch(node: Node) -> None:
    await planned(node.planning, spec())
    node.trainer(11)
    one, two = [await node.serving.ticket(A, WANTED) for _ in range(2)]
    gathers = [node.server.grants[t.ticket].lease.gather for t in (one, two)]

    assert gathers[0] is gathers[1]
    node.planning.adopt(Epoch(2))
    node.serving.forget_unplanned()
    assert node.serving._gathers == {}
