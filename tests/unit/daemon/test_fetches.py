"""A fetch asks for tickets, fetches what is lacking, and tells one outcome; the transport is the test's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import anyio
import numpy as np
import pytest

from tests.unit.daemon.test_epochs import A, B, planned, spec
from weightd.core.plan.node_plan import Bucket
from weightd.core.session.events import FetchAdvanced, FetchEnded
from weightd.core.units import Attempt, Boot, NodeId, Op, Term, Version, VersionKey
from weightd.core.wire.faults import DigestMismatch, PeerLost, TicketRefused
from weightd.core.wire.messages import Ticket, TicketWanted
from weightd.daemon.bulk.landing import Halves, Landing, MemoryBudget
from weightd.daemon.bulk.mailbox import Mailbox
from weightd.daemon.bulk.port import FetchJob, FetchResult, Stop
from weightd.daemon.config import Config, load_config
from weightd.daemon.epochs import EpochPlans
from weightd.daemon.fetches import Fetches
from weightd.daemon.inbox import Inbox, RunEvent

pytestmark = pytest.mark.anyio

KEY = VersionKey(Version(1), Attempt(Boot(1), 1))
OP = Op(3)
PIECES = 3


@dataclass
class Transport:
    """Lands every bucket that is asked for; ``fail`` holds what each call ends with, None for success."""

    fail: list[Exception | None] = field(default_factory=list)
    jobs: list[list[int]] = field(default_factory=list)
    lands: int = PIECES

    def fetch(self, job: FetchJob, stop: Stop, on_bucket: Callable[[Bucket], None]) -> FetchResult:
        self.jobs.append([b.index for b in job.buckets])
        error = self.fail.pop(0) if self.fail else None
        landed = list(job.buckets) if error is None else list(job.buckets)[: self.lands]
        for bucket in landed:
            on_bucket(bucket)
        if error is not None:
            raise error
        nbytes = sum(b.nbytes for b in job.buckets)
        return FetchResult(nbytes, nbytes, 0, 0.0)


def in_pieces(plans: EpochPlans) -> EpochPlans:
    """Cut the one bucket that node a fetches into three."""
    plan = plans.plans[A]
    (whole,) = plan.fetch.buckets
    size = whole.nbytes // PIECES
    buckets = tuple(
        replace(whole, index=i, landing_offset=whole.landing_offset + i * size, nbytes=size) for i in range(PIECES)
    )
    plans.plans[A] = replace(plan, fetch=replace(plan.fetch, buckets=buckets))
    return plans


@pytest.fixture
def halves() -> Iterator[Halves]:
    landing = Landing("the landing of run r", MemoryBudget(1 << 20))
    yield landing.provide(4096)
    landing.close()


@pytest.fixture
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = tmp_path_factory.mktemp("config") / "weightd.toml"
    path.write_text(
        'node = "a"\n[deadlines]\nfetch_s = 5.0\n[peers.b]\ncontrol = "127.0.0.1:7710"\nbulk = "127.0.0.1:7711"\n'
    )
    return load_config(path, {})


async def outcome_of(
    config: Config, halves: Halves, transport: Transport, answers: Sequence[Ticket]
) -> tuple[list[RunEvent], Fetches, list[TicketWanted]]:
    """Fetch version 1 and return what the run was told, in order of arrival, the outcome first."""
    plans = in_pieces(planned(spec()))
    plans.halves = halves
    inbox, asked, due = Inbox(), list[TicketWanted](), list(answers)

    with Mailbox[Callable[[], None]]() as calls:
        fetches: Fetches

        def ask(node: NodeId, wanted: TicketWanted) -> None:
            assert node == B
            asked.append(wanted)
            fetches.ticket(node, due.pop(0) if len(due) > 1 else due[0])

        async def run_calls() -> None:
            async for call in calls:
                call()

        fetches = Fetches(config, transport, inbox, ask, calls.post, lambda: Term(1))
        events: list[RunEvent] = []
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                fetches.tasks = tasks
                tasks.start_soon(run_calls)
                fetches.start(plans, KEY, OP, 0)
                while not any(isinstance(e, FetchEnded) for e in events):
                    event = await inbox.next()
                    assert event is not None, "nobody nudges here"
                    events.append(event)
                tasks.cancel_scope.cancel()
        return events, fetches, asked


def ended(events: list[RunEvent]) -> FetchEnded:
    (found,) = (e for e in events if isinstance(e, FetchEnded))
    return found


def ticket(number: int = 6) -> Ticket:
    return Ticket(KEY, OP, number, bytes(32))


async def test_every_bucket_is_fetched_once(config: Config, halves: Halves) -> None:
    """The transport ends in the moment of its last bucket, which the loop has not heard of yet."""
    transport = Transport()
    events, fetches, asked = await outcome_of(config, halves, transport, [ticket()])

    assert ended(events) == FetchEnded(KEY, OP, 2)
    assert transport.jobs == [[0, 1, 2]]
    assert len(asked) == 1
    assert fetches.wire_nbytes(KEY) == 12
    assert all(isinstance(e, FetchAdvanced | FetchEnded) for e in events)


async def test_only_what_is_lacking_is_fetched_from_a_sender_that_came_back(config: Config, halves: Halves) -> None:
    lost = PeerLost("b", "a", str(KEY), 2, 3, 8, 12, "reset")
    transport = Transport([lost], lands=2)
    events, fetches, asked = await outcome_of(config, halves, transport, [ticket(6), ticket(7)])

    assert ended(events).error is None
    assert transport.jobs == [[0, 1, 2], [2]]
    assert len(asked) == 2
    assert fetches.wire_nbytes(KEY) == 12


async def test_a_sender_without_the_version_is_asked_again(config: Config, halves: Halves) -> None:
    refused = TicketRefused("b", 0, "epoch 1 is not planned here")
    answers = [Ticket(KEY, OP, error=refused.to_wire()), ticket()]
    events, _, asked = await outcome_of(config, halves, Transport(), answers)

    assert ended(events).error is None
    assert asked == [TicketWanted(spec().epoch, KEY, OP)] * 2


async def test_an_answer_to_an_older_question_is_no_leave(config: Config, halves: Halves) -> None:
    old = Ticket(KEY, Op(2), 5, bytes(32))
    transport = Transport()
    events, _, asked = await outcome_of(config, halves, transport, [old, ticket()])

    assert ended(events).error is None
    assert len(asked) == 2


async def test_bytes_that_are_wrong_end_the_fetch_at_once(config: Config, halves: Halves) -> None:
    wrong = DigestMismatch(1, 3, str(KEY), "b", "a", "00" * 16, "11" * 16, 4)
    transport = Transport([wrong])
    events, _, _ = await outcome_of(config, halves, transport, [ticket()])

    assert ended(events).error == wrong.to_wire()
    assert transport.jobs == [[0, 1, 2]]
    assert halves[0].generation % 2 == 1, "a half that is not whole says so"


async def test_buckets_that_landed_are_marked_in_the_landing(config: Config, halves: Halves) -> None:
    """A daemon that restarts finds them there, and fetches the rest."""
    stale = DigestMismatch(2, 3, str(KEY), "b", "a", "00" * 16, "11" * 16, 4)
    await outcome_of(config, halves, Transport([stale], lands=2), [ticket()])
    transport = Transport()
    events, _, _ = await outcome_of(config, halves, transport, [ticket()])

    assert ended(events).error is None
    assert transport.jobs == [[2]]
    np.testing.assert_equal(halves[0].generation, 2)
