"""Who takes part, and where: the declared roster, registrations, and the topology they add up to.

``Roster`` is what is declared.  ``Registration`` is what attached, on the node
that *measured* it.  ``Topology`` is the judged sum of both, the only thing that
proof and plan look at; ``core.roster.judge`` makes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from weightd.core.units import Boot, EngineId, EngineRank, NodeId, RolloutRank, SlotName, TrainerRank

Mode = Literal["colocated", "disaggregated", "mixed"]
Placement = Literal["colocated", "remote", "mixed"]
SlotLabel = int | str
"""A slot in a declaration.  A number is only a label; two declarations of one slot use the same label."""


class EngineDecl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine as declared.

    Attributes:
        id: Engine name.
        size: Number of its ranks.
        slots: Slot of rank k at position k, or None where only the size is declared.
        required: Whether the run pauses when this engine is lost.
    """

    id: str
    size: int
    slots: tuple[SlotLabel, ...] | None = None
    required: bool = False


class Roster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which ranks a run expects.

    Attributes:
        world: Number of trainer ranks W.
        engines: Every engine.
        reserved: Trainer ranks with no engine by intent; still sources of their shards.
        mode: Placement of engines against trainer ranks.
        strict_tiling: Refuse an engine that neither lies in one node nor fills whole nodes.
        allow_mixed_engine: Accept an engine that is partly on trainer slots.
        nodes: Node to its slots, where declared; None where nodes are only measured.
        trainer_slots: Slot of trainer rank r at position r, where declared.
    """

    world: int
    engines: tuple[EngineDecl, ...]
    reserved: tuple[int, ...] = ()
    mode: Mode = "disaggregated"
    strict_tiling: bool = False
    allow_mixed_engine: bool = False
    nodes: dict[str, tuple[SlotLabel, ...]] | None = None
    trainer_slots: tuple[SlotLabel, ...] | None = None


@dataclass(frozen=True, slots=True)
class Registration:
    """One attached rank, as its node's daemon measured it.

    Attributes:
        who: A trainer rank, or a rollout rank.
        size: The world, or the size of the engine, that the rank was started with.
        node: The node whose daemon it attached to.
        slot: The device or declared place it said it is on.
        pid: Its process id on that node.
        boot: Its incarnation.
    """

    who: TrainerRank | RolloutRank
    size: int
    node: NodeId
    slot: SlotName
    pid: int
    boot: Boot


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is.  Two ranks share a slot exactly when their places are equal."""

    node: NodeId
    slot: SlotName

    def __str__(self) -> str:
        return f"{self.node}/{self.slot}"


@dataclass(frozen=True, slots=True)
class NodeShard:
    """The ranks of one engine on one node, ordered by k.  Its head is the smallest k."""

    engine: EngineId
    node: NodeId
    ranks: tuple[EngineRank, ...]
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Topology:
    """A judged roster: every rank of it with the place it is on.

    Attributes:
        trainers: Place of trainer rank r at position r.
        engines: Engine to the place of its rank k at position k; in the declared order.
        reserved: Trainer ranks with no engine by intent.
        mode: As declared.
    """

    trainers: tuple[Place, ...]
    engines: dict[EngineId, tuple[Place, ...]]
    reserved: frozenset[TrainerRank]
    mode: Mode

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """Every node that holds a rank, sorted."""
        places = [*self.trainers, *(p for ps in self.engines.values() for p in ps)]
        return tuple(sorted({p.node for p in places}))

    def rollout_ranks(self, node: NodeId | None = None) -> tuple[RolloutRank, ...]:
        """Every rollout rank, or those on ``node``, in engine order, then by k."""
        return tuple(
            RolloutRank(engine, EngineRank(k))
            for engine, places in self.engines.items()
            for k, place in enumerate(places)
            if node is None or place.node == node
        )

    def trainer_ranks(self, node: NodeId) -> tuple[TrainerRank, ...]:
        """The trainer ranks on ``node``, ascending."""
        return tuple(TrainerRank(r) for r, place in enumerate(self.trainers) if place.node == node)

    def place(self, who: TrainerRank | RolloutRank) -> Place:
        """Where ``who`` is."""
        return self.engines[who.engine][who.k] if isinstance(who, RolloutRank) else self.trainers[who]

    def group(self, engine: EngineId) -> tuple[NodeShard, ...]:
        """The non-empty node shards of an engine, ordered by their smallest k."""
        by_node: dict[NodeId, list[int]] = {}
        for k, place in enumerate(self.engines[engine]):
            by_node.setdefault(place.node, []).append(k)
        return tuple(
            NodeShard(
                engine,
                node,
                tuple(EngineRank(k) for k in ks),
                tuple(self.engines[engine][k] for k in ks),
            )
            for node, ks in by_node.items()
        )
