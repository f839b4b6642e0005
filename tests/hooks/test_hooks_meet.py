"""Publisher and Receiver in one process, the real planner between them, and a small daemon that gives the orders."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.small_daemon import SmallDaemon
from weightd.core.errors import Refused, WeightdError
from weightd.core.layout.cuts import spans
from weightd.core.layout.message import decode_layout
from weightd.core.plan.message import encode_rank_plan
from weightd.core.plan.planner import plan_node
from weightd.core.plan.proof import prove_coverage
from weightd.core.roster.topology import Place, Topology
from weightd.core.session.deadlines import Deadlines
from weightd.core.session.faults import EnginePoisoned, RunPaused, VersionNotGrowing, VersionSkew
from weightd.core.units import (
    NO_KEY,
    Attempt,
    Boot,
    EngineId,
    EngineRank,
    Epoch,
    NodeId,
    Op,
    RolloutRank,
    SlotName,
    Term,
    Version,
    VersionKey,
)
from weightd.core.wire import messages as m
from weightd.core.wire.blobs import blob_digest
from weightd.link.faults import DaemonAbsent, PeerGone
from weightd.link.fd_messages import PoolKey
from weightd.link.memory import Pool
from weightd.rollout_hooks.declare import Declaration, Part
from weightd.rollout_hooks.faults import NotServable, ReceiveTimeout, SourceChanged
from weightd.rollout_hooks.receiver import Receiver
from weightd.trainer_hooks.faults import HoldingsChanged, NotAttached, OutcomeUnknown, SlotNotFree, VersionNotDecided
from weightd.trainer_hooks.publisher import Publisher

pytestmark = [pytest.mark.net, pytest.mark.timeout(60)]

QUICK = Deadlines(barrier_s=0.3, restart_s=1.0, heartbeat_s=0.1, heartbeat_timeout_s=0.5, release_s=0.4)
NODE = NodeId("node")
BOOT = Boot(77)
T, E = "trainer 0", "E0[0]"
RANK = RolloutRank(EngineId("E0"), EngineRank(0))


def key(version: int, count: int = 1) -> VersionKey:
    return VersionKey(Version(version), Attempt(BOOT, count))


class Scene:
    """One trainer rank, one engine rank (rank 1 of a tensor-parallel pair, declared), and whoever gives orders."""

    def __init__(self, daemon: SmallDaemon, folder: Path) -> None:
        self.daemon = daemon
        self.folder = folder
        self.pool = ThreadPoolExecutor(4)
        self.calls: list[tuple[str, int, str]] = []
        self.before_raises: Exception | None = None
        self.pub_goal = m.PublisherGoal(Term(1), Epoch(1), BOOT, stage="idle")
        self.rec_goal = m.ReceiverGoal(Term(1), Epoch(1), stage="idle")
        self.q, self.k = torch.zeros(4, 3, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.bfloat16)
        self.down = torch.zeros(3, 5)
        self.scale = torch.zeros(())
        self.params = {
            "qk": torch.full((3, 3), float("nan"), dtype=torch.bfloat16),
            "down": torch.full((3, 2), float("nan")),
            "scale": torch.full((), float("nan")),
        }
        self.publisher = Publisher(
            {"q": self.q, "k": self.k, "down": self.down, "scale": self.scale},
            run="r",
            rank=0,
            world=1,
            engines={"E0": 1},
            unused=[("q", (0, 2)), ("k", (0, 1)), ("down", (0, 3))],
            socket=folder,
            attach_s=10.0,
            deadlines=QUICK,
        )
        self.receiver = Receiver(
            self.params,
            run="r",
            engine="E0",
            k=0,
            size=1,
            layout=declaration(),
            socket=folder,
            before_apply=self.before,
            after_apply=lambda v: self.calls.append(("after", int(v), self.receiver.state)),
            attach_s=10.0,
            deadlines=QUICK,
        )

    def before(self, version: Version) -> None:
        self.calls.append(("before", int(version), self.receiver.state))
        if self.before_raises is not None:
            raise self.before_raises

    # ------------------------------------------------------------ orders

    def tell_publisher(self, **fields: Any) -> None:
        self.pub_goal = replaced(self.pub_goal, fields)
        self.daemon.say(T, self.pub_goal)

    def order(self, order: m.Order, version: int, op: int, **fields: Any) -> None:
        named = fields.pop("key", key(version) if version else NO_KEY)
        self.rec_goal = replaced(self.rec_goal, {"order": order, "op": Op(op), "key": named, **fields})
        self.daemon.say(E, self.rec_goal)

    def state(self, state: str) -> None:
        self.daemon.wait(lambda: self.daemon.receiver(E).state == state, f"receiver {state}")

    def is_in(self, who: str, state: str) -> bool:
        return self.daemon.receiver(who).state == state

    def sources(self) -> tuple[m.SourceSlot, ...]:
        held = [s for s in self.daemon.publisher(T).slots if s.key != NO_KEY]
        newest = max(held, key=lambda s: s.key.version)
        return (m.SourceSlot(0, newest.slot, newest.generation),)

    def write(self, version: int, op: int, **fields: Any) -> None:
        self.order("write", version, op, **{"sources": self.sources(), **fields})

    # ------------------------------------------------------------ steps of a test

    def attach(self) -> None:
        attaching: list[Future[Any]] = [self.pool.submit(self.publisher.attach), self.pool.submit(self.receiver.attach)]
        self.daemon.hook(E)
        plan = self.plan()
        self.daemon.blobs[blob_digest(plan)] = plan
        self.rec_goal = replaced(self.rec_goal, {"plan_digest": blob_digest(plan), "plan_nbytes": len(plan)})
        self.daemon.given = self.daemon.hooks[T].pools
        self.order("idle", 0, 0)
        self.tell_publisher()
        for call in attaching:
            call.result(10)

    def plan(self) -> bytes:
        source, target = self.daemon.hook(T).layout, self.daemon.hook(E).layout
        assert source is not None
        assert target is not None
        topology = Topology(
            (Place(NODE, SlotName("t")),), {RANK.engine: (Place(NODE, SlotName("e")),)}, frozenset(), "disaggregated"
        )
        proof = prove_coverage(topology, [decode_layout(source)], {RANK: decode_layout(target)})
        return encode_rank_plan(plan_node(proof, NODE, 1 << 20).ranks[RANK], "")

    def fill(self, base: int) -> None:
        for n, tensor in enumerate((self.q, self.k, self.down, self.scale)):
            tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + base + 20 * n)

    def expected(self, base: int) -> dict[str, torch.Tensor]:
        q, k, down, scale = (
            (torch.arange(t.numel()).reshape(t.shape) + base + 20 * n).to(t.dtype)
            for n, t in enumerate((self.q, self.k, self.down, self.scale))
        )
        return {"qk": torch.cat([q[2:], k[1:]]), "down": down[:, 3:], "scale": scale}

    def received(self, base: int) -> None:
        for name, expected in self.expected(base).items():
            assert torch.equal(self.params[name], expected), name

    def receive(self, **arguments: Any) -> Future[Version]:
        return self.pool.submit(self.receiver.receive, **arguments)

    def deliver(self, version: int, op: int) -> None:
        """Take a version from published to served."""
        call = self.receive()
        self.order("pause", version, op)
        self.state("paused")
        self.write(version, op)
        self.state("applied")
        self.order("commit", version, op)
        self.daemon.wait(lambda: self.daemon.receiver(E).committed == key(version), "commit acknowledged")
        self.order("resume", version, op)
        assert call.result(10) == version
        self.tell_publisher(committed=key(version), next_version=Version(version + 1))

    def close(self) -> None:
        self.publisher.close()
        self.receiver.close()
        self.pool.shutdown()


def replaced(goal: Any, fields: dict[str, Any]) -> Any:
    return type(goal)(**{**{f: getattr(goal, f) for f in goal.__struct_fields__}, **fields})


def declaration() -> Declaration:
    d = Declaration("bfloat16")
    rows_q, rows_k = spans((2, 2))[1], spans((1, 1))[1]
    d.fused("qk", [Part("q", (4, 3), rows_q), Part("k", (2, 3), rows_k)])
    d.row("down", (3, 5), (3, 2), 1, dtype="float32")
    d.replicated("scale", (), dtype="float32")
    return d


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SmallDaemon]:
    with SmallDaemon(tmp_path) as daemon:
        yield daemon


@pytest.fixture
def scene(daemon: SmallDaemon, tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(daemon, tmp_path)
    yield scene
    scene.close()


@pytest.fixture
def attached(scene: Scene) -> Scene:
    scene.attach()
    return scene


def test_versions_arrive_byte_exact_and_training_goes_on_at_once(attached: Scene) -> None:
    for version in (1, 2, 3):
        attached.fill(100 * version)
        assert attached.publisher.publish(label=f"step {version}") == version
        attached.fill(-1)  # the next step overwrites the parameters before anybody has read them
        attached.deliver(version, version)
        attached.received(100 * version)
        assert attached.publisher.wait(version, timeout_s=5) == version
        assert attached.receiver.version == version
        attached.receiver.assert_servable()
        held = [s.key for s in attached.daemon.publisher(T).slots if s.key.version == version - 1]
        attached.tell_publisher(release=tuple(m.SlotRelease(s, k) for s in (0, 1) for k in held))

    assert attached.calls == [
        (what, v, state) for v in (1, 2, 3) for what, state in (("before", "pausing"), ("after", "serving"))
    ]


def test_slots_are_named_by_version_and_attempt_with_an_even_generation(attached: Scene) -> None:
    attached.publisher.publish(label=7)
    state = attached.daemon.wait(lambda: [s for s in attached.daemon.publisher(T).slots if s.key != NO_KEY], "slot")[0]

    assert (state.key, state.generation, state.label) == (key(1), 2, "7")
    assert state.layout_digest == attached.daemon.hooks[T].hello.layout_digest
    assert attached.daemon.hooks[T].pools[0, state.slot, 0].generation == 2  # type: ignore[index]


def test_roster_is_told_by_rank_0(attached: Scene) -> None:
    hello = attached.daemon.hooks[T].hello

    assert isinstance(hello, m.TrainerHello)
    assert hello.roster is not None
    assert (hello.roster.world, [(e.id, e.size) for e in hello.roster.engines]) == (1, [("E0", 1)])


def test_number_that_does_not_grow(attached: Scene) -> None:
    attached.tell_publisher(committed=key(6), next_version=Version(7))
    attached.daemon.wait(lambda: attached.publisher.next_version == 7, "goal")
    with pytest.raises(VersionNotGrowing) as caught:
        attached.publisher.publish(6)

    assert caught.value.next_version == 7
    assert attached.publisher.publish() == 7


def test_publish_that_is_refused_here_has_used_its_number(attached: Scene) -> None:
    """Other ranks published under it: the next step of this one must not become a part of that version."""
    source: Any = attached.publisher._source
    source["down"] = torch.zeros(4, 5)
    with pytest.raises(HoldingsChanged):
        attached.publisher.publish()
    source["down"] = attached.down

    assert attached.publisher.next_version == 2
    assert attached.publisher.publish(1) == 1
    assert attached.publisher.publish() == 2


def test_slot_that_does_not_become_free(attached: Scene) -> None:
    attached.publisher.publish()
    attached.publisher.publish()
    attached.tell_publisher(waiting_for="E0[0] to pause, 1 of 600 s")
    with pytest.raises(SlotNotFree, match="E0\\[0\\] to pause") as caught:
        attached.publisher.publish()

    assert caught.value.version == 3
    attached.tell_publisher(release=(m.SlotRelease(0, key(9)), m.SlotRelease(1, key(1))))
    with pytest.raises(SlotNotFree):
        attached.publisher.publish()  # neither release names what its slot holds
    attached.tell_publisher(release=(m.SlotRelease(0, key(1)),))
    assert attached.publisher.publish() == 3


def test_failed_version_raises_its_report_and_the_next_attempt_counts_on(attached: Scene) -> None:
    report = Refused("version 1", (VersionSkew(1, (0,), {"trainer 1": "version 2"}, 2, 0),), "nothing was moved")
    attached.publisher.publish()
    attached.tell_publisher(failures=(m.VersionFailed(key(1), report.to_wire()),))
    with pytest.raises(Refused) as caught:
        attached.publisher.wait(1, timeout_s=5)

    assert str(caught.value) == str(report)
    attached.tell_publisher(release=(m.SlotRelease(0, key(1)),))
    assert attached.publisher.publish(1) == 1
    attached.daemon.wait(
        lambda: [s for s in attached.daemon.publisher(T).slots if s.key == key(1, 2)], "the second attempt"
    )


def test_wait_ends_by_its_limit_by_pause_and_by_release(attached: Scene) -> None:
    attached.publisher.publish()
    attached.tell_publisher(stage="fetching", key=key(1), waiting_for="node b: 3 of 7 MiB")
    with pytest.raises(VersionNotDecided, match="node b: 3 of 7 MiB"):
        attached.publisher.wait(1, timeout_s=0.3)
    paused = RunPaused("r", "trainer 1 is lost", ("trainer 1",), 0)
    attached.tell_publisher(stage="paused", key=NO_KEY, paused=paused.to_wire())
    with pytest.raises(RunPaused):
        attached.publisher.wait(1, timeout_s=5)
    with pytest.raises(RunPaused):
        attached.publisher.publish()
    attached.tell_publisher(stage="idle", committed=key(1), paused=None, next_version=Version(2))
    attached.daemon.wait(lambda: attached.publisher.committed == 1, "goal")
    assert attached.publisher.wait(1) == 1
    with pytest.raises(VersionNotDecided):
        attached.publisher.wait(1, until="released", timeout_s=0.2)
    attached.tell_publisher(release=(m.SlotRelease(0, key(1)),))
    assert attached.publisher.wait(1, until="released", timeout_s=5) == 1


def test_outcome_that_nobody_told_is_not_taken_for_success(attached: Scene) -> None:
    attached.tell_publisher(committed=key(5), next_version=Version(6))
    attached.daemon.wait(lambda: attached.publisher.committed == 5, "goal")
    with pytest.raises(OutcomeUnknown):
        attached.publisher.wait(4)
    assert attached.publisher.wait(5) == 5


def test_receive_times_out_outside_of_a_version(attached: Scene) -> None:
    with pytest.raises(ReceiveTimeout, match=r"received no version >= 1 in 0\.[23]") as caught:
        attached.receiver.receive(timeout_s=0.2)

    assert not caught.value.left_barrier
    assert attached.receiver.report.in_receive is False
    with pytest.raises(NotServable, match="it is unready"):
        attached.receiver.assert_servable()


def test_rank_leaves_the_barrier_and_the_pause_stands_for_its_next_call(attached: Scene) -> None:
    attached.publisher.publish()
    call = attached.receive(timeout_s=0.1)
    attached.order("pause", 1, 1)
    attached.state("paused")
    attached.daemon.wait(lambda: attached.daemon.receiver(E).leave, "asks to leave")
    attached.order("left", 1, 1)
    with pytest.raises(ReceiveTimeout, match="not all ranks of its engine came"):
        call.result(10)
    attached.order("pause", 1, 1)
    time.sleep(0.2)
    assert attached.receiver.state == "unready"
    call = attached.receive()
    attached.state("paused")
    attached.write(1, 1)
    attached.state("applied")
    attached.order("resume", 1, 1)

    assert call.result(10) == 1
    assert [c[0] for c in attached.calls] == ["before", "after", "before", "after"]


def test_begun_apply_runs_to_its_outcome_whatever_the_limit_says(attached: Scene) -> None:
    attached.publisher.publish()
    call = attached.receive(timeout_s=0.3)
    attached.order("pause", 1, 1)
    attached.state("paused")
    attached.write(1, 1)
    attached.state("applied")
    time.sleep(0.8)
    assert not call.done()
    attached.order("resume", 1, 1)

    assert call.result(10) == 1


def test_refused_pause_raises_here_and_is_told(attached: Scene) -> None:
    attached.publisher.publish()
    attached.before_raises = ValueError("the cache is busy")
    call = attached.receive()
    attached.order("pause", 1, 1)
    with pytest.raises(ValueError, match="the cache is busy"):
        call.result(10)
    attached.state("refused")
    report = attached.daemon.receiver(E)

    assert report.error is not None
    assert "the cache is busy" in report.error.text
    assert all(torch.isnan(p).all() for p in attached.params.values())


def test_source_that_changes_while_it_is_read_is_torn(attached: Scene) -> None:
    attached.publisher.publish()
    call = attached.receive()
    attached.order("pause", 1, 1)
    attached.state("paused")
    attached.write(1, 1, sources=(m.SourceSlot(0, 0, 4),))
    with pytest.raises(SourceChanged) as caught:
        call.result(10)

    assert (caught.value.expected, caught.value.found, caught.value.when) == (4, 2, "before")
    assert all(torch.isnan(p).all() for p in attached.params.values())
    attached.state("torn")


def test_engine_that_is_fenced_raises_why(attached: Scene) -> None:
    attached.publisher.publish()
    call = attached.receive()
    attached.order("pause", 1, 1)
    attached.state("paused")
    poisoned = EnginePoisoned("E0", 1, 0, "E0[1] is lost")
    attached.order("fence", 1, 1, error=poisoned.to_wire())
    with pytest.raises(EnginePoisoned, match="E0\\[1\\] is lost"):
        call.result(10)
    with pytest.raises(NotServable, match="E0\\[1\\] is lost"):
        attached.receiver.assert_servable()


@pytest.fixture
def second(attached: Scene) -> Iterator[Receiver]:
    """A receiver of another engine, at home in the thread of the test."""
    params = {name: torch.full_like(p, float("nan")) for name, p in attached.params.items()}
    receiver = Receiver(
        params, run="r", engine="E1", k=0, size=1, layout=declaration(), socket=attached.folder, deadlines=QUICK
    )
    attaching = attached.pool.submit(receiver.attach)
    attached.daemon.hook("E1[0]")
    attached.daemon.say("E1[0]", replaced(attached.rec_goal, {"order": "idle", "key": NO_KEY}))
    attaching.result(10)
    with pytest.raises(ReceiveTimeout):
        receiver.receive(timeout_s=0.01)
    yield receiver
    receiver.close()


def order_both(scene: Scene, version: int, orders: Sequence[tuple[m.Order, str]]) -> None:
    for order, state in orders:
        sources = scene.sources() if order == "write" else ()
        fields = {"order": order, "op": Op(version), "key": key(version), "sources": sources}
        for who in (E, "E1[0]"):
            scene.daemon.say(who, replaced(scene.rec_goal, fields))
        for who in (E, "E1[0]"):
            scene.daemon.wait(partial(scene.is_in, who, state), f"{who} {state}")


def test_one_call_serves_all_receivers_of_its_thread(attached: Scene, second: Receiver) -> None:
    """No engine is resumed before both are decided: two calls one after the other would wait for each other."""
    attached.fill(100)
    attached.publisher.publish()
    orders = attached.pool.submit(
        order_both, attached, 1, [("pause", "paused"), ("write", "applied"), ("resume", "serving")]
    )

    assert attached.receiver.receive(timeout_s=20) == 1
    assert second.receive(timeout_s=0) == 1
    orders.result(10)
    attached.received(100)
    for name, expected in attached.expected(100).items():
        assert torch.equal(dict(second._target)[name], expected)  # type: ignore[arg-type]


def test_receiver_at_home_in_another_thread_is_not_touched(attached: Scene, second: Receiver) -> None:
    attached.publisher.publish()
    call = attached.receive(timeout_s=0.5)
    fields = {"order": "pause", "op": Op(1), "key": key(1)}
    attached.daemon.say("E1[0]", replaced(attached.rec_goal, fields))
    with pytest.raises(ReceiveTimeout):
        call.result(10)

    assert second.state == "unready"


def test_callback_that_raises_in_anothers_call_is_raised_by_its_own(attached: Scene, second: Receiver) -> None:
    def refuse(_: Version) -> None:
        raise ValueError("the cache of E1 is busy")

    assert second._worker is not None
    second._worker.before = refuse
    attached.daemon.say("E1[0]", replaced(attached.rec_goal, {"order": "pause", "op": Op(1), "key": key(1)}))
    with pytest.raises(ReceiveTimeout):
        attached.receiver.receive(timeout_s=0.3)
    assert second.state == "refused"
    with pytest.raises(ValueError, match="the cache of E1 is busy"):
        second.receive()


def test_other_receiver_leaves_its_barrier_before_the_call_ends(attached: Scene, second: Receiver) -> None:
    attached.daemon.say("E1[0]", replaced(attached.rec_goal, {"order": "pause", "op": Op(1), "key": key(1)}))

    def let_go() -> None:
        attached.daemon.wait(lambda: attached.daemon.receiver("E1[0]").leave, "asks to leave")
        attached.daemon.say("E1[0]", replaced(attached.rec_goal, {"order": "left", "op": Op(1), "key": key(1)}))

    letting = attached.pool.submit(let_go)
    with pytest.raises(ReceiveTimeout):
        attached.receiver.receive(timeout_s=0.05)

    assert second.state == "unready"
    letting.result(10)


def test_new_epoch_is_prepared_outside_of_receive(attached: Scene) -> None:
    """An engine that generates is not asked for a safe point because somebody joined."""
    plan = attached.daemon.blobs.popitem()[1]
    attached.daemon.blobs[blob_digest(plan)] = plan
    before = attached.receiver.report.plan_digest
    attached.order("idle", 0, 0, epoch=Epoch(2))
    attached.daemon.wait(lambda: attached.receiver.report.plan_digest == before, "prepared again")


def test_new_epoch_reads_the_memory_that_it_speaks_of(attached: Scene) -> None:
    """A trainer that restarts has the same layout, hence the same plan, and other memory."""
    attached.fill(300)
    attached.publisher.publish()
    assert attached.publisher._attachment is not None
    attached.daemon.wait(lambda: attached.daemon.publisher(T).slots[0].key == key(1), "published")
    old = attached.publisher._attachment.slots.pools[0]
    new = Pool.create("trainer 0 slot 0", old.payload_nbytes)
    new.payload[:] = old.payload
    old.payload[:] = 0
    assert (new.bump(), new.bump()) == (1, old.generation)
    attached.daemon.given = {PoolKey(0, slot, 0): new for slot in (0, 1)}
    attached.order("idle", 0, 0, epoch=Epoch(2))
    attached.deliver(1, 1)

    attached.received(300)


def test_daemon_that_comes_back_finds_both_hooks(attached: Scene, tmp_path: Path) -> None:
    attached.fill(100)
    attached.publisher.publish()
    attached.daemon.wait(lambda: attached.daemon.publisher(T).slots[0].key == key(1), "published")
    old = attached.daemon
    old.stop()
    with SmallDaemon(tmp_path) as new:
        attached.daemon = new
        new.blobs = old.blobs
        new.hook(T)
        new.hook(E)
        new.given = new.hooks[T].pools
        assert new.publisher(T).slots[0].key == key(1)
        attached.order("idle", 0, 0)
        new.wait(lambda: new.receiver(E).plan_digest, "prepared over the new daemon's memory")
        attached.deliver(1, 1)
        attached.received(100)
        attached.close()


def test_daemon_that_stays_away_ends_every_wait_by_name(attached: Scene) -> None:
    attached.publisher.publish()
    calls: list[Callable[[], object]] = [lambda: attached.publisher.wait(1), attached.receiver.receive]
    waiting = [attached.pool.submit(call) for call in calls]
    time.sleep(0.2)
    begun = time.monotonic()
    attached.daemon.stop()
    for call in waiting:
        with pytest.raises(PeerGone, match=r"not heard for 1\.\d s \(restart_s 1\.0\)"):
            call.result(20)

    assert time.monotonic() - begun < 10


def test_absent_daemon_is_named_with_its_path(tmp_path: Path) -> None:
    publisher = Publisher({"w": torch.zeros(2)}, run="r", rank=0, world=1, socket=tmp_path / "none", attach_s=0.3)
    with pytest.raises(DaemonAbsent, match=r"no daemon answers at .*none/control.sock, tried for 0\.[345] s") as caught:
        publisher.attach()

    assert "weightd serve" in str(caught.value)
    with pytest.raises(NotAttached):
        publisher.publish()
    assert not [t for t in threading.enumerate() if t.name.startswith("weightd")]


def test_refusal_is_raised_on_both_sides(scene: Scene) -> None:
    report = Refused("run r", (RunPaused("r", "never began", (), 0),), "nothing was attached")
    scene.daemon.refuse = report.to_wire()
    for call in (scene.publisher.attach, scene.receiver.attach):
        with pytest.raises(Refused) as caught:
            call()
        assert str(caught.value) == str(report)


def test_memory_that_the_daemon_refuses_ends_the_attach(scene: Scene) -> None:
    scene.daemon.deny = RunPaused("r", "denied", (), 0).to_wire()
    scene.publisher._deadlines = QUICK
    with pytest.raises(WeightdError):
        Publisher({"w": torch.zeros(2)}, run="r", rank=0, world=1, socket=scene.folder, attach_s=0.5).attach()


def test_close_says_goodbye_and_may_be_repeated(attached: Scene) -> None:
    attached.publisher.close()
    attached.receiver.close()
    attached.publisher.close()
    attached.daemon.wait(lambda: attached.daemon.hooks[E].bye, "goodbye")

    assert attached.daemon.hooks[T].bye == "closed by the trainer"
    assert attached.daemon.hooks[E].bye == "closed by the engine"
