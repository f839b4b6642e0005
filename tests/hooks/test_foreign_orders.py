"""What a daemon should never say, and what a trainer should never give: the hooks answer by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.fakes.small_daemon import SmallDaemon
from tests.hooks.test_hooks_meet import Scene
from weightd.core.errors import UnknownRemoteError, WireError
from weightd.core.wire.faults import LocalProtocolError
from weightd.core.wire.messages import MAX_FRAME_BYTES
from weightd.rollout_hooks.faults import ApplyEnded, NotAttached, PlanUnusable
from weightd.trainer_hooks.faults import HoldingsChanged

pytestmark = [pytest.mark.net, pytest.mark.timeout(60)]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with SmallDaemon(tmp_path) as daemon:
        scene = Scene(daemon, tmp_path)
        yield scene
        scene.close()


@pytest.fixture
def attached(scene: Scene) -> Scene:
    scene.attach()
    return scene


def test_an_order_to_write_that_names_no_source(attached: Scene) -> None:
    attached.publisher.publish()
    call = attached.receive()
    attached.order("pause", 1, 1)
    attached.state("paused")
    attached.order("write", 1, 1, sources=())

    with pytest.raises(PlanUnusable) as raised:
        call.result(10)
    assert raised.value.code == "E_RANK_PLAN"
    assert all(bool(torch.isnan(p).all()) for p in attached.params.values())


def test_a_version_that_is_taken_back_without_a_reason(attached: Scene) -> None:
    attached.publisher.publish()
    call = attached.receive()
    attached.order("pause", 1, 1)
    attached.state("paused")
    attached.write(1, 1)
    attached.state("applied")
    attached.order("abort", 1, 2)

    with pytest.raises(ApplyEnded) as raised:
        call.result(10)
    assert raised.value.code == "E_APPLY_ENDED"


def test_an_error_of_a_later_release_keeps_its_text(scene: Scene) -> None:
    text = "E_OF_TOMORROW: the moon is not where it was planned"
    scene.daemon.refuse = WireError("E_OF_TOMORROW", {"moon": 1}, text)

    with pytest.raises(UnknownRemoteError) as raised:
        scene.publisher.attach()
    assert UnknownRemoteError.code == "E_REMOTE"
    assert (raised.value.remote_code, str(raised.value)) == ("E_OF_TOMORROW", text)


def test_a_label_that_no_message_carries(attached: Scene) -> None:
    """It is the trainer's own, so the trainer is told, and its daemon is not sent half of it."""
    attached.publisher.publish(label="x" * MAX_FRAME_BYTES)

    with pytest.raises(LocalProtocolError) as raised:
        attached.publisher.wait(1, timeout_s=10)
    assert raised.value.code == "E_PROTOCOL_LOCAL"


def test_a_parameter_that_grew_since_it_was_attached(attached: Scene) -> None:
    attached.q.data = torch.zeros(5, 3, dtype=torch.bfloat16)

    with pytest.raises(HoldingsChanged) as raised:
        attached.publisher.publish()
    assert (raised.value.code, raised.value.name) == ("E_HOLDINGS", "q")


def test_nothing_is_received_before_attaching(scene: Scene) -> None:
    with pytest.raises(NotAttached) as raised:
        scene.receiver.receive(timeout_s=1.0)
    assert raised.value.code == "E_NOT_RECEIVING"
