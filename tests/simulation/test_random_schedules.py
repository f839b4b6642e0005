"""Random schedules on the real machines: no rule is ever broken, and every run goes on once faults stop."""

import os
from dataclasses import replace

import pytest

from tests.simulation.scene import BAD_DAY, QUIET_DAY, Chaos, Scene
from tests.simulation.world import World

FULL = os.environ.get("WEIGHTD_FULL") == "1"
SCHEDULES = 5_000 if FULL else 120
CHUNK = 20
"""Schedules of one test: a red one prints its seed, and `World(seed, …)` is that schedule again."""

FAULTS_S, CALM_S = 28.0, 90.0

SCENES = (
    Scene(),
    Scene(("a", "b"), ("a", "b"), {"E0": ("a", "b"), "E1": ("b",)}),
    Scene(("a", "b"), ("a", "a", "b", "b"), {"E0": ("a", "a", "b", "b")}),
    Scene(required=frozenset({"E1"})),
    Scene(("a",), ("a",), {"E0": ("a",)}),
    Scene(("a", "b", "c"), ("b", "a", "c"), {"E0": ("a", "b", "c"), "E1": ("c", "a")}),
)
"""Worlds of different shapes; in one the leader's node has no engine, in one everything is on one node."""

LIVE_SCENES = tuple(
    replace(scene, live=frozenset(range(len(scene.trainers)) if at % 2 else [len(scene.trainers) - 1]))
    for at, scene in enumerate(SCENES)
)
"""The same with live trainer ranks: only the last one, or all of them."""

DAYS = (
    BAD_DAY,
    Chaos(loss=0.15, double=0.1, slow=0.1, refuse=0.03, linger=0.05, skip_receive=0.03, fault_every_s=5.0),
    Chaos(loss=0.05, double=0.05, slow=0.05, refuse=0.05, linger=0.1, skip_receive=0.05, fault_every_s=8.0),
    Chaos(loss=0.3, double=0.3, slow=0.3),
    Chaos(refuse=0.02, linger=0.05, skip_receive=0.02, fault_every_s=3.0),
)
"""What can go wrong: a bit of all, much of all, slow engines, only the network, only the processes."""


def world_of(seed: int, scenes: tuple[Scene, ...] = SCENES) -> World:
    """Return the schedule of a seed."""
    return World(seed, scenes[seed % len(scenes)], DAYS[seed % len(DAYS)])


def goes_on(world: World) -> bool:
    """Let faults stop; return whether three more versions commit and every rank serves them."""
    world.calm()
    last = world.last_version()
    return world.run_until(
        world.clock.now + CALM_S, lambda: world.last_version() >= last + 3 and world.all_serve(last + 2)
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, SCHEDULES, CHUNK))
def test_no_rule_is_broken_and_every_run_goes_on(first: int) -> None:
    for seed in range(first, first + CHUNK):
        world = world_of(seed)
        world.start()
        world.run_until(FAULTS_S)
        assert goes_on(world), f"seed {seed} is stuck: {world.standing()}"
        assert world.unanswered() == [], f"seed {seed}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, SCHEDULES, CHUNK))
def test_with_live_trainers_no_rule_is_broken_and_every_run_goes_on(first: int) -> None:
    moves = 0
    for seed in range(first, first + CHUNK):
        world = world_of(seed, LIVE_SCENES)
        world.start()
        world.run_until(FAULTS_S)
        assert goes_on(world), f"seed {seed} is stuck: {world.standing()}"
        assert world.unanswered() == [], f"seed {seed}"
        assert world.stale_copies == 0, f"seed {seed}: a step began under a reader"
        moves += world.moves

    assert moves > 0


def test_on_a_quiet_day_live_trainers_copy_nothing() -> None:
    world = World(1, LIVE_SCENES[1], QUIET_DAY)
    world.start()
    world.run_until(40.0)

    assert len(world.commits) >= 8
    assert (world.moves, world.stale_copies) == (0, 0)


@pytest.mark.parametrize("seed", [2245])
def test_schedules_that_were_red_once(seed: int) -> None:
    """2245: a limit that was held for absent ranks had the leader look again at once, for ever."""
    world = world_of(seed)
    world.start()
    world.run_until(FAULTS_S)
    assert goes_on(world), f"seed {seed} is stuck: {world.standing()}"


def test_a_quiet_day_commits_every_version_for_every_engine() -> None:
    world = World(1, Scene(), QUIET_DAY)
    world.start()
    world.run_until(40.0)

    assert len(world.commits) >= 8
    assert all(("E0", "E1", "E2") == c.engines for c in world.commits)
    assert [c.key.version for c in world.commits] == list(range(1, len(world.commits) + 1))
    assert world.refusals == []
    assert world.stale_copies == 0


def test_the_same_seed_is_the_same_schedule() -> None:
    def commits(seed: int) -> list[tuple[int, tuple[str, ...]]]:
        world = World(seed, Scene(), BAD_DAY)
        world.start()
        world.run_until(25.0)
        return [(c.key.version, c.engines) for c in world.commits]

    assert commits(3) == commits(3)
