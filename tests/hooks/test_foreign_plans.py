"""A daemon that gives a rank another plan than its own: the hook refuses it before a byte is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.fakes.small_daemon import SmallDaemon
from tests.hooks.test_hooks_meet import Scene
from weightd.core.errors import WeightdError
from weightd.core.plan.copies import take
from weightd.core.plan.message import decode_rank_plan, encode_rank_plan
from weightd.core.plan.node_plan import RankPlan
from weightd.core.plan.plan_faults import CopyOutOfBounds, MalformedPlan, PlanMismatch

pytestmark = [pytest.mark.net, pytest.mark.timeout(60)]

Change = Callable[[bytes], bytes]


class Spoiled(Scene):
    """A scene in which the rank's plan is changed on its way."""

    def __init__(self, daemon: SmallDaemon, folder: Path, change: Change) -> None:
        super().__init__(daemon, folder)
        self._change = change

    def plan(self) -> bytes:
        return self._change(super().plan())


@contextmanager
def spoiled(folder: Path, change: Change) -> Iterator[Spoiled]:
    with SmallDaemon(folder) as daemon:
        scene = Spoiled(daemon, folder, change)
        yield scene
        scene.close()


def rows(change: Callable[[RankPlan], RankPlan]) -> Change:
    return lambda blob: encode_rank_plan(change(decode_rank_plan(blob)))


def refused(folder: Path, change: Change) -> WeightdError:
    """Return what ``attach()`` of the engine's rank raises; its parameters are untouched."""
    with spoiled(folder, change) as scene:
        with pytest.raises(WeightdError) as raised:
            scene.attach()
        assert all(bool(torch.isnan(p).all()) for p in scene.params.values())
        return raised.value


def test_bytes_that_are_no_plan(tmp_path: Path) -> None:
    error = refused(tmp_path, lambda blob: blob[: len(blob) // 2])

    assert isinstance(error, MalformedPlan)
    assert error.code == "E_PLAN_MESSAGE"


def test_a_row_that_leaves_its_memory(tmp_path: Path) -> None:
    def far(plan: RankPlan) -> RankPlan:
        offset = plan.copies.target_offset.copy()
        offset[0] = 1 << 20
        return replace(plan, copies=replace(plan.copies, target_offset=offset))

    error = refused(tmp_path, rows(far))

    assert isinstance(error, CopyOutOfBounds)
    assert (error.code, error.side, error.offset) == ("E_PLAN_BOUNDS", "target", 1 << 20)


def test_a_plan_of_another_layout(tmp_path: Path) -> None:
    error = refused(tmp_path, rows(lambda plan: replace(plan, target_digest="0" * 32)))

    assert isinstance(error, PlanMismatch)
    assert (error.code, error.fact) == ("E_PLAN_MISMATCH", "digest of the layout")


def test_a_plan_that_leaves_out_parameters(tmp_path: Path) -> None:
    """Each of its rows is right: only their sum tells that the engine would serve what nobody wrote."""

    def short(plan: RankPlan) -> RankPlan:
        kept = take(plan.copies, slice(0, 1))
        return replace(plan, copies=kept, nbytes=int(kept.nbytes.sum()))

    error = refused(tmp_path, rows(short))

    assert isinstance(error, PlanMismatch)
    assert (error.code, error.fact) == ("E_PLAN_MISMATCH", "bytes of a version")
    assert int(error.planned) < int(error.found) == 3 * 3 * 2 + 3 * 2 * 4 + 4
