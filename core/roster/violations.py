"""What can be wrong with a roster: one error class for each code of the topology specification.

Codes that speak of ranks that attached, or did not, live in
``rank_violations``, those of how a roster is written in ``declaration_violations``;
all are exported here, the one door.
Every list of slots or ranks is complete in the fields; only texts shorten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weightd.core.errors import Story, ranges, some
from weightd.core.roster.counts import placement_class
from weightd.core.roster.declaration_violations import (
    Remainder,
    RosterFileUnreadable,
    RosterShape,
    RosterValue,
    UnknownKeys,
    roster_value,
)
from weightd.core.roster.rank_violations import (
    GpuMismatch,
    NodeMismatch,
    RankDuplicate,
    RanksMissing,
    RankUnknown,
    StaleRegistration,
)
from weightd.core.roster.roster_error import RankError, RosterError, nodes_text, plural, slots_text
from weightd.core.roster.topology import Mode, SlotLabel

__all__ = [
    "EngineOutOfWorld",
    "EnginePlacement",
    "GpuMismatch",
    "NodeMismatch",
    "NodeTiling",
    "RankDuplicate",
    "RankError",
    "RankUnknown",
    "RanksMissing",
    "Remainder",
    "RosterError",
    "RosterFileUnreadable",
    "RosterShape",
    "RosterValue",
    "SlotsOverlap",
    "StaleRegistration",
    "TrainerRanksUncovered",
    "UnknownKeys",
    "roster_value",
]


@dataclass(eq=False)
class TrainerRanksUncovered(RosterError):
    """Trainer ranks that are in no engine and not reserved, where the mode wants one of both.

    Attributes:
        world: Trainer ranks W.
        memberships: Sum of the engine sizes.
        covered: Distinct trainer ranks in at least one engine.
        reserved: Trainer ranks in no engine by intent.
        uncovered: The rest; ``covered + reserved + uncovered == world``.
        ranks: The uncovered ranks; empty while only sizes are known.
        by_node: The same by node.
        engines: The engines counted by size, for instance ``1 engine x 12 = 12``.
        excess: Memberships of a slot beyond its first;
            ``covered + excess + without_trainer + on_no_node == memberships``.
        without_trainer: Slots of engines that are on a node and host no trainer rank.
        on_no_node: Slots of engines that are on no node.
    """

    code: ClassVar[str] = "E_UNCOVERED"
    world: int
    memberships: int
    covered: int
    reserved: int
    uncovered: int
    ranks: tuple[int, ...]
    by_node: dict[str, tuple[int, ...]]
    engines: str
    excess: int = 0
    without_trainer: int = 0
    on_no_node: int = 0

    def story(self) -> Story:
        """Return the text; its first and third line are conservation identity I1."""
        which = "which ranks is known once they attach: only sizes are declared"
        if self.ranks:
            which = f"ranks {ranges(self.ranks)} ({nodes_text(self.by_node)})"
        return Story(
            what=f"{self.uncovered} of {plural(self.world, 'trainer rank')} uncovered, in no engine and not reserved: "
            f"{self.covered} covered + {self.reserved} reserved + {self.uncovered} uncovered = {self.world}",
            which=which,
            who=f"{self.engines} engine slots: {self.covered} covered + {self.excess} claimed again + "
            f"{self.without_trainer} without a trainer rank + {self.on_no_node} on no node = {self.memberships}",
            effect="nothing would be received through these ranks; what they own is needed all the same",
            next="give these ranks an engine, or list them in reserved_trainer_ranks",
        )


@dataclass(eq=False)
class SlotsOverlap(RosterError):
    """Slots that are claimed more than once, all by the same engines.

    Attributes:
        slots: The slots.
        engines: The engines that claim each of them; the same one twice if it lists a slot twice.
    """

    code: ClassVar[str] = "E_OVERLAP"
    slots: tuple[SlotLabel, ...]
    engines: tuple[str, ...]

    def story(self) -> Story:
        """Return the text: what is claimed, and by how much too often."""
        claims = len(self.engines)
        by = f"engines {' and '.join(self.engines)}"
        if len(set(self.engines)) == 1:
            by = f"engine {self.engines[0]} {claims} times"
        return Story(
            what=f"{plural(len(self.slots), 'slot')} claimed by {by}: {slots_text(self.slots)}",
            which=f"{plural(len(self.slots), 'slot')} x {claims} claims = {len(self.slots) * claims}, "
            f"{len(self.slots) * (claims - 1)} too many",
            effect="a slot hosts one rollout rank",
            next="leave each slot to one engine",
        )


@dataclass(eq=False)
class EngineOutOfWorld(RosterError):
    """An engine with slots that are on no node.

    Attributes:
        engine: Engine name.
        start: Its smallest slot, as a number of the global order of slots.
        end: One past its largest slot.
        world: Number of slots of all nodes.
        excess: How many of its slots are on no node.
        count: How many different slots it has.
        outside: The slots on no node.
    """

    code: ClassVar[str] = "E_OUT_OF_WORLD"
    engine: str
    start: int
    end: int
    world: int
    excess: int
    count: int
    outside: tuple[SlotLabel, ...]

    def story(self) -> Story:
        """Return the text; the slots inside and outside add up to the engine's."""
        return Story(
            what=f"engine {self.engine} at [{self.start}, {self.end}) leaves the {plural(self.world, 'slot')} "
            f"of all nodes: {self.count - self.excess} inside + {self.excess} outside = {plural(self.count, 'slot')}",
            which=f"on no node: {slots_text(self.outside)}",
            effect="these ranks would have no daemon to attach to",
            next="correct the engine's slots, or add the slots to a node",
        )


@dataclass(eq=False)
class EnginePlacement(RosterError):
    """An engine whose slots host trainer ranks in a way that the mode does not allow.

    Attributes:
        engine: Engine name.
        with_trainer: Its slots that host a trainer rank.
        without_trainer: Its slots that host none.
        mode: Mode of the roster.
    """

    code: ClassVar[str] = "E_MIXED"
    engine: str
    with_trainer: tuple[SlotLabel, ...]
    without_trainer: tuple[SlotLabel, ...]
    mode: Mode

    def story(self) -> Story:
        """Return the text; slots with and without a trainer rank add up to the engine's."""
        hosts, bare = len(self.with_trainer), len(self.without_trainer)
        rule, advice = _MODE_RULES[self.mode]
        return Story(
            what=f"engine {self.engine} is {placement_class(hosts, hosts + bare)}, which mode {self.mode} refuses: "
            f"{hosts} with a trainer rank + {bare} without = {plural(hosts + bare, 'slot')}",
            which=f"with: {slots_text(self.with_trainer)}; without: {slots_text(self.without_trainer)}",
            effect=f"in mode {self.mode} {rule}",
            next=advice,
        )


_MODE_RULES = {
    "colocated": (
        "every slot of an engine hosts a trainer rank",
        "place the engine on trainer slots, or say mode mixed (and allow_mixed_engine, if it is on both)",
    ),
    "disaggregated": (
        "no slot of an engine hosts a trainer rank",
        "place the engine off trainer slots, or change the mode",
    ),
    "mixed": (
        "an engine lies wholly on trainer slots or wholly off them",
        "move the engine to one side, or set allow_mixed_engine = true",
    ),
}
"""What each mode wants of an engine, and what to do about one that is otherwise."""


@dataclass(eq=False)
class NodeTiling(RosterError):
    """Under ``strict_tiling``: an engine that is in several nodes and does not fill them.

    Attributes:
        engine: Engine name.
        count: Number of its ranks.
        slots_per_node: Slots of each node it touches: one number where they are equal.
        shard_sizes: Sizes of its node shards.
    """

    code: ClassVar[str] = "E_NODE_TILING"
    engine: str
    count: int
    slots_per_node: int | tuple[int, ...]
    shard_sizes: tuple[int, ...]

    def story(self) -> Story:
        """Return the text; the node shards add up to the engine's size."""
        nodes = self.slots_per_node
        sizes = str(nodes) if isinstance(nodes, int) else some(nodes)
        return Story(
            what=f"engine {self.engine} of {self.count} does not tile nodes of {sizes} slots: "
            f"node shards {' + '.join(map(str, self.shard_sizes))} = {self.count}",
            effect="strict_tiling: an engine lies in one node or fills whole nodes",
            next="choose slots that fill nodes, or drop strict_tiling: uneven node shards work",
        )
