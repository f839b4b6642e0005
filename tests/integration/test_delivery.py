"""Three versions through real daemons into engines of every shape, each byte compared with an independent oracle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.integration.cluster import Cluster, Rank, all_do, attached
from weightd.core.roster.topology import EngineDecl

pytestmark = pytest.mark.processes

VERSIONS = (1, 2, 3)


class Seat(NamedTuple):
    """Where a rank is: its node and its slot there."""

    node: str
    slot: str


SEATS = (Seat("a", "gpu-0"), Seat("a", "gpu-1"), Seat("b", "gpu-0"), Seat("b", "gpu-1"))
"""Of the four trainer ranks."""

APART = (Seat("a", "gpu-2"), Seat("a", "gpu-3"), Seat("b", "gpu-2"), Seat("b", "gpu-3"))
"""Slots without a trainer rank."""


class Shape(NamedTuple):
    """One arrangement of engines.

    Attributes:
        engines: Engine to the seats of its ranks.
        reserved: Trainer ranks without an engine.
        mode: Of the roster.
    """

    engines: dict[str, tuple[Seat, ...]]
    reserved: tuple[int, ...] = ()
    mode: str = "disaggregated"


SHAPES = {
    "one engine of four on two nodes": Shape({"E0": APART}),
    "one engine of four, colocated": Shape({"E0": SEATS}, mode="colocated"),
    "two engines of two, one a node": Shape({"E0": APART[:2], "E1": APART[2:]}),
    "two engines of two, both on two nodes": Shape({"E0": APART[::2], "E1": APART[1::2]}),
    "engines of one and two, one trainer rank reserved": Shape({"E0": SEATS[:1], "E1": SEATS[1:3]}, (3,), "colocated"),
    "an engine of three, 2 + 1": Shape({"E0": APART[:3]}),
    "an engine of three, colocated": Shape({"E0": (SEATS[3], SEATS[0], SEATS[1])}, (2,), "colocated"),
    "an engine on the other node alone": Shape({"E0": APART[2:]}),
}


@pytest.fixture(scope="module")
def cluster(module_folder: Path) -> Iterator[Cluster]:
    with Cluster(module_folder) as started:
        yield started


def start(cluster: Cluster, run: str, shape: Shape) -> tuple[list[Rank], list[Rank]]:
    """Start four trainer ranks and the shape's engine ranks, attached."""
    declared = tuple(EngineDecl(engine, len(seats)) for engine, seats in shape.engines.items())
    trainers = [
        cluster.trainer(
            r, 4, seat.node, run=run, slot=seat.slot, engines=declared, reserved=shape.reserved, mode=shape.mode
        )
        for r, seat in enumerate(SEATS)
    ]
    engines = [
        cluster.engine(engine, k, len(seats), seat.node, run=run, slot=seat.slot)
        for engine, seats in shape.engines.items()
        for k, seat in enumerate(seats)
    ]
    attached(trainers, engines)
    return trainers, engines


def deliver(trainers: Sequence[Rank], engines: Sequence[Rank], version: int) -> None:
    """Move one version and compare every byte of every engine rank."""
    assert all_do(trainers, "publish", version=version) == [version] * len(trainers)
    all_do(trainers, "scribble")  # the trainer goes on at once: what was published must not change
    assert all_do(engines, "receive", version=version) == [version] * len(engines)
    assert all_do(engines, "differing", contents=version) == [[]] * len(engines)
    all_do(engines, "assert_servable")
    assert all_do(trainers, "wait", version=version) == [version] * len(trainers)


@pytest.mark.parametrize("name", SHAPES)
def test_three_versions(cluster: Cluster, name: str) -> None:
    run = name.replace(" ", "-")
    trainers, engines = start(cluster, run, SHAPES[name])

    assert all_do(engines, "differing", contents=0) == [[]] * len(engines)
    for version in VERSIONS:
        deliver(trainers, engines, version)

    callbacks = [f"{when} {v}" for v in VERSIONS for when in ("before", "after")]
    assert all_do(engines, "called_back") == [callbacks] * len(engines)
    records = cluster.status(run=run)["versions"]
    assert [(r["version"], r["stage"]) for r in records] == [(v, "committed") for v in VERSIONS]
    all_do([*engines, *trainers], "close")


def test_each_remote_byte_crosses_once(cluster: Cluster) -> None:
    """Both ranks of node b need the whole norm; it is fetched once, and what the wire carried says so."""
    trainers, engines = start(cluster, "once", SHAPES["an engine on the other node alone"])
    deliver(trainers, engines, 1)

    record = cluster.status(run="once")["versions"][-1]
    assert record["wire_nbytes"] == record["minimum_wire_nbytes"] > 0
    assert record["alpha"] == 1.0
    assert record["applied_nbytes"] == record["needed_nbytes"]
    all_do([*engines, *trainers], "close")


def test_a_published_version_is_not_what_the_trainer_does_next(cluster: Cluster) -> None:
    """Publishing twice before anybody receives: the second waits for its slot, the first stays whole."""
    trainers, engines = start(cluster, "twice", SHAPES["two engines of two, one a node"])
    for version in (1, 2):
        all_do(trainers, "publish", version=version)
        all_do(trainers, "scribble")
    for version in (1, 2):
        assert all_do(engines, "receive", version=version) == [version] * len(engines)
        assert all_do(engines, "differing", contents=version) == [[]] * len(engines)
    all_do([*engines, *trainers], "close")
