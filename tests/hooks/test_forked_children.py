"""A process that is forked from an attached one: it is no part of the run, and what it writes is its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes.forked import in_child
from tests.fakes.small_daemon import SmallDaemon
from tests.hooks import test_hooks_meet as meet
from tests.hooks.test_live_memory import Scene
from weightd.link.session import HookSession

pytestmark = [pytest.mark.net, pytest.mark.timeout(60)]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SmallDaemon]:
    with SmallDaemon(tmp_path) as started:
        yield started


@pytest.fixture(params=["snapshot", "live"])
def scene(daemon: SmallDaemon, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Scene]:
    made = Scene(daemon, tmp_path, memory=request.param).attach()
    yield made
    made.close()


def published(scene: Scene) -> tuple[list[int], bytes]:
    """Return the generations of both slots, and the bytes of version 1, as the daemon sees them."""
    return [scene.memory(slot).generation for slot in (0, 1)], scene.memory(0).payload.tobytes()


@pytest.mark.parametrize(
    "call",
    [
        lambda p: p.publish(),
        lambda p: p.before_step(),
        lambda p: p.wait(1),
        lambda p: p.next_version,
        lambda p: p.committed,
    ],
)
def test_a_childs_calls_are_refused_and_touch_nothing(scene: Scene, call: Callable[[Any], object]) -> None:
    scene.publisher.publish()
    scene.holds(0, 1)
    before = published(scene)

    assert in_child(lambda: call(scene.publisher)) == "E_NOT_ATTACHED"
    assert published(scene) == before


def test_a_child_steps_in_memory_of_its_own(scene: Scene) -> None:
    scene.publisher.publish()
    scene.holds(0, 1)
    before, weight = published(scene), scene.weight()

    def step() -> float:
        scene.step()
        return scene.weight()

    assert in_child(step) == pytest.approx(weight - 1)
    assert (weight, before) == (scene.weight(), published(scene))


@pytest.mark.parametrize("end", ["close", "__exit__"])
def test_what_a_child_closes_stays_open_in_its_parent(scene: Scene, end: str) -> None:
    def close() -> float:
        scene.publisher.__exit__(None, None, None) if end == "__exit__" else scene.publisher.close()
        scene.step()
        return scene.weight()

    weight = scene.weight()

    assert in_child(close) == pytest.approx(weight - 1)
    assert scene.publisher.publish() == 1
    assert weight == scene.weight()
    scene.holds(0, 1)


def test_a_child_holds_no_lock_that_a_thread_of_its_parent_held(scene: Scene) -> None:
    attachment = scene.publisher._attachment
    assert isinstance(attachment, HookSession)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with attachment.changed:
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    try:
        assert in_child(scene.publisher.close, 10.0) is None
    finally:
        done.set()
        thread.join()


def test_a_child_closes_its_copies_of_the_parents_descriptors(scene: Scene) -> None:
    attachment = scene.publisher._attachment
    assert attachment is not None
    errands = attachment._errands
    assert errands is not None
    channel = errands._channel
    assert channel is not None

    assert in_child(lambda: (channel.alive(), [pool.fd for pool in attachment.slots.pools])) == (False, [-1, -1])
    assert channel.alive()


def test_a_child_attaches_with_the_publisher_that_it_inherited(scene: Scene) -> None:
    def attach() -> str:
        scene.publisher._attach_s = 0.5
        scene.publisher.attach()
        return "attached"

    # By its own greeting, which nobody answers with a goal here: not by what its parent once heard.
    assert in_child(attach) == "E_DEADLINE"


@pytest.mark.parametrize("call", [lambda r: r.receive(1), lambda r: r.version, lambda r: r.assert_servable()])
def test_a_receivers_child_serves_nothing(daemon: SmallDaemon, tmp_path: Path, call: Callable[[Any], object]) -> None:
    scene = meet.Scene(daemon, tmp_path)
    scene.attach()
    scene.fill(1)
    scene.publisher.publish()
    scene.deliver(1, 1)
    before = {name: np.asarray(tensor.float()) for name, tensor in scene.params.items()}

    assert in_child(lambda: call(scene.receiver)) == "E_NOT_RECEIVING"
    assert in_child(scene.receiver.close) is None
    assert scene.receiver.version == 1
    assert all(np.array_equal(before[n], np.asarray(t.float())) for n, t in scene.params.items())
    scene.close()
