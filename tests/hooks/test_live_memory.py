"""A live publisher and a daemon that says what a test wants: when steps wait, when they copy, what is refused."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from tests.fakes.small_daemon import SmallDaemon
from tests.hooks.test_hooks_meet import BOOT, QUICK, T, key
from weightd.core.errors import ConfigError
from weightd.core.units import NO_KEY, Epoch, Term
from weightd.core.wire import messages as m
from weightd.link.fd_messages import PoolKey
from weightd.link.memory import Pool
from weightd.trainer_hooks.faults import LiveMemoryRead, LiveMemoryRefused, LiveMemoryWritten, SlotNotFree
from weightd.trainer_hooks.publisher import Publisher

pytestmark = [pytest.mark.net, pytest.mark.timeout(60)]

WAIT = msgspec.structs.replace(QUICK, step_wait_s=20.0, release_s=20.0)
COPY = msgspec.structs.replace(QUICK, step_wait_s=0.05, release_s=0.3)


class Wrapper:
    """An optimizer that wraps another, as DeepSpeed's do."""

    def __init__(self, optimizer: object) -> None:
        self.optimizer = optimizer


class Scene:
    """One live trainer rank, and whoever gives orders."""

    def __init__(self, daemon: SmallDaemon, folder: Path, **options: Any) -> None:
        self.daemon = daemon
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.threads = ThreadPoolExecutor(2)
        self.goal = m.PublisherGoal(Term(1), Epoch(1), BOOT, stage="idle")
        told: dict[str, Any] = {"memory": "live", "engines": {"E0": 1}, "attach_s": 10.0, "deadlines": WAIT}
        self.publisher = Publisher(self.model, run="r", rank=0, world=1, socket=folder, **(told | options))

    def attach(self) -> Scene:
        """Attach."""
        call = self.threads.submit(self.publisher.attach)
        self.daemon.hook(T)
        self.tell()
        call.result(10)
        return self

    def tell(self, **fields: Any) -> None:
        """Say a goal."""
        self.goal = msgspec.structs.replace(self.goal, **fields)
        self.daemon.say(T, self.goal)

    def release(self, slot: int, version: int) -> None:
        """Give a slot free."""
        self.tell(release=(m.SlotRelease(slot, key(version)),))

    def step(self) -> None:
        """Take one from every parameter."""
        for p in self.model.parameters():
            p.grad = torch.full_like(p, 2.0)
        self.optimizer.step()

    def stepping(self) -> Future[None]:
        """Step in another thread."""
        return self.threads.submit(self.step)

    def memory(self, slot: int) -> Pool:
        """Return a slot as the daemon has mapped it."""
        return self.daemon.hooks[T].pools[PoolKey(0, slot, 0)]

    def holds(self, slot: int, version: int) -> m.SlotState:
        """Wait until the rank reports a version in a slot."""

        def look() -> m.SlotState | None:
            shown = self.daemon.publisher(T).slots[slot]
            return shown if shown.key == (key(version) if version else NO_KEY) else None

        return self.daemon.wait(look, f"v{version} in slot {slot}")

    def weight(self) -> float:
        """Return an element of the model."""
        return float(self.model[0].weight[0, 0].detach())  # type: ignore[index]

    def close(self) -> None:
        """End."""
        self.publisher.close()
        self.threads.shutdown()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SmallDaemon]:
    with SmallDaemon(tmp_path) as started:
        yield started


@pytest.fixture
def scene(daemon: SmallDaemon, tmp_path: Path) -> Iterator[Scene]:
    made = Scene(daemon, tmp_path).attach()
    yield made
    made.close()


@pytest.fixture
def hurried(daemon: SmallDaemon, tmp_path: Path) -> Iterator[Scene]:
    made = Scene(daemon, tmp_path, deadlines=COPY).attach()
    yield made
    made.close()


# ------------------------------------------------------------ steps wait


def test_a_step_waits_for_the_release_and_what_it_writes_is_not_taken_for_a_version(scene: Scene) -> None:
    scene.step()
    scene.publisher.publish()
    shown = scene.holds(0, 1)
    before = scene.weight()
    call = scene.stepping()
    scene.tell(waiting_for="E0[0] to apply")

    assert shown.generation == scene.memory(0).generation
    assert shown.generation % 2 == 0
    assert not call.done()
    assert before == scene.weight()

    scene.release(0, 1)
    call.result(10)

    assert scene.weight() == pytest.approx(before - 1)
    assert scene.memory(0).generation == shown.generation + 1
    scene.publisher.publish()
    assert scene.holds(0, 2).generation == shown.generation + 2


def test_the_memory_that_the_daemon_maps_is_that_of_the_parameters(scene: Scene) -> None:
    layout = scene.publisher.describe()
    buffer = layout.buffers[[b.dtype for b in layout.buffers].index("float32")]
    row = [t.name for t in layout.tensors].index("0.weight")
    at = int(layout.offset[int(np.flatnonzero(layout.tensor == row)[0])])
    scene.step()
    found = scene.memory(0).payload[buffer.base : buffer.base + buffer.nbytes].view(np.float32)[at]

    assert scene.weight() == found


def test_a_forward_writes_buffers_while_a_version_is_published(scene: Scene) -> None:
    scene.publisher.publish()
    scene.holds(0, 1)
    before = scene.memory(0).payload.copy()
    scene.model(torch.randn(5, 4))

    assert np.array_equal(before, scene.memory(0).payload)
    assert float(scene.model[1].num_batches_tracked) == 1.0  # type: ignore[arg-type]
    scene.release(0, 1)
    scene.step()
    scene.publisher.publish()
    scene.holds(0, 2)


def test_every_torch_optimizer_waits_unless_some_are_named(daemon: SmallDaemon, tmp_path: Path) -> None:
    scene = Scene(daemon, tmp_path, deadlines=COPY).attach()
    scene.publisher.publish()
    with pytest.raises(LiveMemoryRead):
        scene.other.step()
    scene.close()


def test_only_the_named_optimizer_waits_even_if_it_is_wrapped(daemon: SmallDaemon, tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scene = Scene(daemon, tmp_path, deadlines=COPY, optimizer=Wrapper(optimizer)).attach()
    scene.publisher.publish()
    scene.other.step()
    with pytest.raises(LiveMemoryRead):
        optimizer.step()
    scene.close()
    optimizer.step()


# ------------------------------------------------------------ steps that cannot wait


def test_past_its_limit_a_step_copies_says_so_and_goes_on(hurried: Scene, caplog: pytest.LogCaptureFixture) -> None:
    hurried.publisher.publish(label="step 7")
    hurried.holds(0, 1)
    before, copy = hurried.weight(), hurried.memory(1)
    unused = os.fstat(copy.fd).st_blocks
    hurried.tell(waiting_for="E0[0] to pause, 41 of 600 s")
    with caplog.at_level(logging.WARNING, "weightd.live"):
        call = hurried.stepping()
        moved = hurried.holds(1, 1)
        hurried.release(0, 1)
        call.result(10)

    assert unused * 512 == 4096
    assert moved.label == "step 7"
    assert moved.generation == copy.generation == 2
    assert hurried.weight() == pytest.approx(before - 1)
    (said,) = caplog.messages
    assert "version 1 was not released after 0." in said
    assert "(step_wait_s 0.1): the run waits for E0[0] to pause, 41 of 600 s" in said
    assert "448 B copied, the step goes on" in said
    changed = hurried.memory(0).payload != copy.payload
    assert changed.any()

    hurried.publisher.publish()
    assert hurried.holds(0, 2).key == key(2)
    assert hurried.holds(1, 1).key == key(1)


def test_a_second_copy_waits_for_the_first_one_to_be_released(hurried: Scene) -> None:
    for version in (1, 2):
        hurried.publisher.publish()
        if version == 1:
            call = hurried.stepping()
            hurried.holds(1, 1)
            hurried.release(0, 1)
            call.result(10)
    before = hurried.weight()
    with pytest.raises(SlotNotFree, match=r"slot 0 holds v2/.* slot 1 holds v1/"):
        hurried.step()

    assert before == hurried.weight()


def test_a_step_under_a_reader_is_refused_and_may_be_tried_again(hurried: Scene) -> None:
    hurried.publisher.publish()
    before = hurried.weight()
    with pytest.raises(LiveMemoryRead) as caught:
        hurried.step()

    assert (caught.value.version, caught.value.limit_s, before) == (1, 1.0, hurried.weight())
    call = hurried.stepping()
    hurried.release(0, 1)
    call.result(10)
    assert hurried.weight() == pytest.approx(before - 1)
    assert hurried.memory(1).generation == 2


def test_a_decision_while_the_copy_is_made_is_enough(hurried: Scene) -> None:
    hurried.publisher.publish()
    hurried.holds(0, 1)
    hurried.release(0, 1)
    hurried.holds(0, 0)
    hurried.step()

    assert hurried.daemon.publisher(T).slots[1].key == NO_KEY


# ------------------------------------------------------------ what is noticed


def test_what_is_written_while_it_is_published_is_named_at_the_next_call(scene: Scene) -> None:
    scene.publisher.publish()
    scene.holds(0, 1)
    with torch.no_grad():
        scene.model[0].weight.data.add_(1.0)  # type: ignore[operator]
    scene.release(0, 1)
    scene.holds(0, 0)
    with pytest.raises(LiveMemoryWritten) as caught:
        scene.publisher.publish()

    assert (caught.value.name, caught.value.version) == ("0.weight", 1)
    assert scene.publisher.publish() == 3


def test_what_is_written_after_the_release_is_in_order(scene: Scene) -> None:
    scene.publisher.publish()
    scene.holds(0, 1)
    scene.release(0, 1)
    scene.holds(0, 0)
    with torch.no_grad():
        scene.model[0].weight.data.add_(1.0)  # type: ignore[operator]

    assert scene.publisher.publish() == 2


def test_after_close_the_parameters_have_memory_of_their_own_and_what_was_published_stays(scene: Scene) -> None:
    scene.publisher.publish()
    scene.holds(0, 1)
    before, memory = scene.weight(), Pool.adopt(os.dup(scene.memory(0).fd), scene.memory(0).nbytes)
    published = memory.payload.copy()
    scene.publisher.close()
    scene.step()

    assert scene.weight() == pytest.approx(before - 1)
    assert np.array_equal(published, memory.payload)
    memory.close()


# ------------------------------------------------------------ what is refused


def publisher(source: Any, **options: Any) -> Publisher:
    told: dict[str, Any] = {"memory": "live"}
    return Publisher(source, run="r", rank=0, world=1, **(told | options))


def test_a_parameter_that_cannot_move_refuses_before_any_daemon_is_asked() -> None:
    held = {"w": torch.randn(3)}
    storage = held["w"].untyped_storage()
    with pytest.raises(LiveMemoryRefused) as caught:
        publisher(held).attach()

    assert caught.value.code == "E_LIVE"
    assert storage.data_ptr() == held["w"].data_ptr()


def test_another_kind_of_memory_is_refused_with_the_two_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"shared.* is none of snapshot, live"):
        publisher({}, memory="shared")


def test_a_cast_is_a_copy_and_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match='leave dtype= out, or use memory="snapshot"'):
        publisher({}, dtype=torch.bfloat16)


def test_an_optimizer_that_is_none_is_refused(daemon: SmallDaemon, tmp_path: Path) -> None:
    scene = Scene(daemon, tmp_path, optimizer=object())
    with pytest.raises(ConfigError, match="no optimizer of torch"):
        scene.attach()

    scene.step()
    assert scene.model[0].weight.untyped_storage().resizable()  # type: ignore[operator]
