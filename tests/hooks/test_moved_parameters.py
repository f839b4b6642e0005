"""An engine that re-binds a parameter is told so: the version would land in memory that nothing serves from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.fakes.small_daemon import SmallDaemon
from tests.hooks.test_hooks_meet import Scene
from weightd.rollout_hooks.faults import TargetMoved

pytestmark = [pytest.mark.net, pytest.mark.timeout(60)]


@pytest.fixture
def moved(tmp_path: Path) -> Iterator[Scene]:
    with SmallDaemon(tmp_path) as daemon:
        scene = Scene(daemon, tmp_path)
        scene.attach()
        yield scene
        scene.close()


def test_re_bound_parameter_refuses_the_pause(moved: Scene) -> None:
    moved.fill(100)
    moved.publisher.publish()
    moved.params["down"] = torch.zeros(3, 2)
    call = moved.receive()
    moved.order("pause", 1, 1)
    with pytest.raises(TargetMoved) as caught:
        call.result(10)

    assert (caught.value.names, caught.value.version) == (("down",), 1)
    moved.state("refused")


def test_parameter_that_is_re_bound_in_the_barrier_is_never_called_applied(moved: Scene) -> None:
    moved.fill(100)
    moved.publisher.publish()
    call = moved.receive()
    moved.order("pause", 1, 1)
    moved.state("paused")
    moved.params["down"] = torch.zeros(3, 2)
    moved.write(1, 1)
    with pytest.raises(TargetMoved):
        call.result(10)

    moved.state("torn")
