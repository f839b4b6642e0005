"""Hooks are found by what their messages say; a trainer's memory outlives its process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from weightd.core.layout.build import LayoutBuilder
from weightd.core.layout.columns import Layout
from weightd.core.units import Boot, EngineRank, RunName, SlotName, TrainerRank
from weightd.core.wire.messages import EngineHello, Region, TrainerHello
from weightd.daemon.attached import AttachedHooks, Hook, check_layout
from weightd.link.faults import MemoryRefused
from weightd.link.fd_messages import PoolKey
from weightd.link.memory import Pool

RUN = RunName("r")


def trainer(rank: int = 0, nbytes: int = 8192) -> TrainerHello:
    regions = tuple(Region(slot, 0, nbytes) for slot in range(2))
    return TrainerHello(TrainerRank(rank), 2, 1, 1, SlotName("s"), "d", 1, regions)


def engine() -> EngineHello:
    return EngineHello("E0", EngineRank(1), 2, 1, 1, "s", "d", 1)


@pytest.fixture
def hooks() -> Iterator[AttachedHooks]:
    found = AttachedHooks(10)
    yield found
    found.close()


def offered(hooks: AttachedHooks, boot: int, rank: int = 0) -> Hook:
    hook = hooks.add(RUN, Boot(boot), trainer(rank), 1, b"id")
    hook.pools = {key: Pool.create(str(key), 4096) for key in hook.due}
    hook.ready = True
    return hook


def test_a_hook_is_found_by_run_name_and_boot(hooks: AttachedHooks) -> None:
    hook = hooks.add(RUN, Boot(5), engine(), 1, b"id")

    assert hooks.find(RUN, "E0[1]", Boot(5)) is hook
    assert hooks.find(RUN, "E0[1]", Boot(6)) is None
    assert hooks.find(RunName("other"), "E0[1]", Boot(5)) is None


def test_it_is_complete_with_socket_layout_and_every_pool(hooks: AttachedHooks) -> None:
    hook = hooks.add(RUN, Boot(5), trainer(), 1, b"id")
    seen = [hook.complete]
    hook.bound = True
    seen.append(hook.complete)
    hook.layout = True
    seen.append(hook.complete)
    hook.pools = {key: Pool.create(str(key), 4096) for key in hook.due}
    seen.append(hook.complete)

    assert seen == [False, False, False, True]


def pools_of(hooks: AttachedHooks, boot: int, rank: int = 0) -> dict[PoolKey, Pool]:
    return dict(hooks.offered(RUN, {TrainerRank(rank): Boot(boot)}))


def test_pools_of_an_ended_trainer_stay_while_they_are_named(hooks: AttachedHooks) -> None:
    first = offered(hooks, 1)
    kept = dict(first.pools)
    hooks.remove(first, keep=True)

    assert pools_of(hooks, 1) == kept
    assert pools_of(hooks, 1, rank=1) == {}
    hooks.keep_only(RUN, {(TrainerRank(0), Boot(1))})
    assert pools_of(hooks, 1) == kept
    hooks.keep_only(RunName("other"), ())
    assert pools_of(hooks, 1) == kept
    hooks.keep_only(RUN, {(TrainerRank(0), Boot(2))})
    assert pools_of(hooks, 1) == {}
    assert all(pool.closed for pool in kept.values())


def test_pools_of_another_incarnation_are_never_taken_for_those_of_a_rank(hooks: AttachedHooks) -> None:
    """Its slots have the same names, the same sizes and, after as many versions, the same generations."""
    ended, live = offered(hooks, 1), offered(hooks, 2)
    kept = dict(ended.pools)
    hooks.remove(ended, keep=True)
    duplicate = offered(hooks, 3)

    assert (pools_of(hooks, 1), pools_of(hooks, 2)) == (kept, live.pools)
    hooks.remove(duplicate)
    assert (pools_of(hooks, 1), pools_of(hooks, 2)) == (kept, live.pools)


def test_pools_that_no_plan_reads_end_with_their_process(hooks: AttachedHooks) -> None:
    hook = offered(hooks, 1)
    pools = list(hook.pools.values())
    hooks.remove(hook, keep=False)

    assert all(pool.closed for pool in pools)


def test_pools_of_a_hook_that_was_never_ready_are_closed(hooks: AttachedHooks) -> None:
    hook = offered(hooks, 1)
    hook.ready = False
    pools = list(hook.pools.values())
    hooks.remove(hook, keep=True)

    assert all(pool.closed for pool in pools)


def layout(nbytes: int, base: int = 0, region: int = 0) -> Layout:
    builder = LayoutBuilder()
    builder.add_buffer("b", nbytes, "float32", kind="slot", region=region, base=base)
    return builder.build()


@pytest.mark.parametrize("size, base, region, fits", [(4096, 0, 0, True), (4096, 64, 0, False), (64, 0, 1, False)])
def test_every_buffer_must_lie_in_its_region(size: int, base: int, region: int, fits: bool) -> None:
    error = check_layout(trainer(), layout(size, base, region))

    assert (error is None) == fits
    assert fits or isinstance(error, MemoryRefused)
