"""A whole Megatron model, cut by Megatron's rules, into vLLM-like engines: every element against the checkpoint."""

from __future__ import annotations

import os
from functools import cache
from itertools import product
from random import Random

import pytest

from tests.hooks.delivery import Held, Params, delivered, differing
from tests.hooks.megatron_model import Engine, World, checkpoint, without_padding

SIZES = (1, 2, 3, 8)
"""Ranks of the engine: whole, even, uneven, and with key and value heads repeated."""

EVERY = [
    World(tp, pp, ep, kept)
    for tp, pp, ep, kept in product((1, 2, 4, 8), (1, 2, 3), (1, 2, 3), ("te", "sequential", "legacy"))
]
CHOSEN = [
    World(),
    World(tp=2, pp=2, ep=3),
    World(tp=4, pp=3, ep=1, experts="legacy"),
    World(tp=8, pp=1, ep=1, experts="sequential"),  # fewer groups than ranks
    World(tp=2, pp=1, ep=2, experts="legacy"),
]
WORLDS = EVERY if os.environ.get("WEIGHTD_FULL") == "1" else [*CHOSEN, *Random(7).sample(EVERY, 2)]


@cache
def tensors() -> Params:
    return checkpoint()


@cache
def slots(world: World) -> list[Held]:
    return world.held(tensors())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("world", WORLDS, ids=lambda w: f"tp{w.tp}-pp{w.pp}-ep{w.ep}-{w.experts}")
def test_every_element_arrives_where_the_engine_has_it(world: World, size: int) -> None:
    engine = Engine(size)
    node = "a" if size % 2 else "b"  # the same node, and another one
    params = delivered(slots(world), size, engine.declaration, node)

    for k in range(size):
        expected = engine.expected(tensors(), k)
        assert [] == differing(without_padding(params[k], expected), expected)
