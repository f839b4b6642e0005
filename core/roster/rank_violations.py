"""What can be wrong with the ranks that attached, or did not, to a roster."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from weightd.core.errors import Plain, Story, WireError, ranges, some
from weightd.core.roster.roster_error import RankError, RosterError, nodes_text, plural, rank_text, slots_text
from weightd.core.roster.topology import SlotLabel

if TYPE_CHECKING:
    from collections.abc import Mapping

NEVER_ATTACHED = "never attached"
"""Stands for the node of a missing rank whose node nobody declared."""


@dataclass(eq=False)
class NodeMismatch(RankError):
    """A rank attached to the daemon of another node than the one it is declared on.

    Attributes:
        declared_node: Node of its declared slot.
        measured_node: Node whose daemon it attached to.
        pid: Its process id there.
    """

    code: ClassVar[str] = "E_NODE_MISMATCH"
    declared_node: str
    measured_node: str
    pid: int = 0

    def story(self) -> Story:
        """Return the text: both nodes."""
        return Story(
            what=f"{rank_text(self.who)} is declared on node {self.declared_node} and attached on {self.measured_node}",
            who=_process(self.pid, self.measured_node) if self.pid else "",
            effect="the rank was not registered",
            next="start it on the declared node, or correct the roster",
        )


@dataclass(eq=False)
class GpuMismatch(RankError):
    """A rank sits on another device than the one it is declared on.

    Attributes:
        node: Node that measured it.
        expected_slot: Declared slot.
        got_slot: Slot that it attached with.
        pid: Its process id on that node.
    """

    code: ClassVar[str] = "E_GPU_MISMATCH"
    node: str
    expected_slot: str
    got_slot: str
    pid: int = 0

    def story(self) -> Story:
        """Return the text: both devices."""
        return Story(
            what=f"{rank_text(self.who)} is declared on slot {self.expected_slot} and attached on slot {self.got_slot}",
            who=_process(self.pid, self.node),
            effect="the rank was not registered: its neighbour's bytes would land on this device",
            next="correct the rank's device (its visible devices) or the roster",
        )


@dataclass(eq=False)
class RanksMissing(RosterError):
    """Declared ranks of one engine, or of the trainer, that did not register.

    As data the ranks are ``missing_k`` for an engine, ``missing_ranks`` for the trainer.

    Attributes:
        engine: Engine name, None for the trainer.
        expected: Declared ranks n.
        missing: The ranks that are not there; ``registered + len(missing) == expected``.
        by_node: The missing ranks by declared node; empty where no node is declared.
        waited_s: Seconds waited, None where a file was judged.
        lost: Missing ranks that did attach, by number, with what became of them.
    """

    code: ClassVar[str] = "E_RANK_MISSING"
    engine: str | None
    expected: int
    missing: tuple[int, ...]
    by_node: dict[str, tuple[int, ...]]
    waited_s: float | None = None
    lost: dict[str, str] = field(default_factory=dict)

    @property
    def registered(self) -> int:
        """Ranks that are there."""
        return self.expected - len(self.missing)

    @property
    def node(self) -> str:
        """The declared nodes of the missing ranks, or that they never attached; empty where some did."""
        return ", ".join(self.by_node) or ("" if self.lost else NEVER_ATTACHED)

    def fields(self) -> dict[str, Plain]:
        """Return the facts, the ranks under the name of their own space."""
        named: dict[str, Plain] = {"role": "trainer"}
        if self.engine is not None:
            named = {"role": "rollout", "engine": self.engine}
        return {
            **named,
            "expected": self.expected,
            "registered": self.registered,
            "missing_ranks" if self.engine is None else "missing_k": list(self.missing),
            "node": self.node,
            "by_node": {node: list(ranks) for node, ranks in self.by_node.items()},
            **({} if self.waited_s is None else {"waited_s": self.waited_s}),
            **({"lost": self.lost} if self.lost else {}),
        }

    @classmethod
    def _from_fields(cls, fields: Mapping[str, Plain], wire: WireError) -> Self:
        missing = fields["missing_k"] if fields["role"] == "rollout" else fields["missing_ranks"]
        return super()._from_fields({**fields, "engine": fields.get("engine"), "missing": missing}, wire)

    def story(self) -> Story:
        """Return the text; registered and missing add up to expected."""
        whose, rank, role = ("trainer", "rank", "trainer")
        if self.engine is not None:
            whose, rank, role = (f"engine {self.engine}", "k", "rollout")
        listed = "ranks" if self.engine is None and len(self.missing) > 1 else rank
        within = "" if self.waited_s is None else f" within {self.waited_s} s"
        return Story(
            what=f"{whose}: {self.registered} registered + {len(self.missing)} missing = "
            f"{plural(self.expected, f'{role} rank')}{within}",
            which=", ".join(filter(None, (f"missing: {listed} {ranges(self.missing)}", self._where()))),
            who="; ".join(f"{rank} {number} attached and is gone: {why}" for number, why in self.lost.items()),
            effect="no version starts before every rank is registered",
            next=f"look at the log of {whose} {rank} {min(self.missing)}{self._nearby()}",
        )

    def _where(self) -> str:
        """Return where the missing ranks are declared, or which of them no daemon has seen."""
        if self.by_node:
            listed = f" ({nodes_text(self.by_node)})" if len(self.by_node) > 1 else ""
            return f"declared on {self.node}{listed}"
        never = [n for n in self.missing if str(n) not in self.lost]
        return f"{ranges(never)} {NEVER_ATTACHED}" if self.lost and never else "" if self.lost else NEVER_ATTACHED

    def _nearby(self) -> str:
        """Return where to look for the first missing rank."""
        if self.by_node:
            return f" on {next(iter(self.by_node))}"
        return "" if str(min(self.missing)) in self.lost else ", which reached no daemon"


@dataclass(eq=False)
class RankDuplicate(RankError):
    """Several live processes claim to be the same rank.

    Attributes:
        expected: Ranks of the engine, or the world.
        registered: Live registrations for them, the surplus included.
        nodes: Node of each claimant.
        pids: Process id of each claimant; empty where a file was judged.
        runs: The runs, where the claims come from different runs.
    """

    code: ClassVar[str] = "E_RANK_DUP"
    expected: int
    registered: int
    nodes: tuple[str, ...]
    pids: tuple[int, ...]
    runs: tuple[str, ...] = field(default=())

    def story(self) -> Story:
        """Return the text: every claimant."""
        whose = "world" if self.engine is None else f"engine {self.engine}"
        who = f"on {' and on '.join(self.nodes)}; process ids are known once they attach"
        if self.pids:
            who = " and ".join(f"pid {pid} on {node}" for pid, node in zip(self.pids, self.nodes, strict=True))
        if self.runs:
            who += f"; runs {' and '.join(self.runs)}"
        return Story(
            what=f"{rank_text(self.who)} is claimed by {len(self.nodes)} live processes",
            which=f"{whose}: {plural(self.registered, 'registration')} for {plural(self.expected, 'rank')}",
            who=who,
            effect="only one of them would get the weights",
            next="stop the process that is left over",
        )


@dataclass(eq=False)
class RankUnknown(RankError):
    """A rank that the roster does not have.

    Attributes:
        reason: ``engine``: no such engine; ``number``: outside the engine or the world;
            ``size``: it was started with another size than the declared one.
        expected: Declared size of the engine, or the world; 0 for an unknown engine.
        size: Size that the rank was started with.
        node: Node whose daemon it attached to.
        pid: Its process id there.
        engines: The declared engines.
    """

    code: ClassVar[str] = "E_RANK_UNKNOWN"
    reason: Literal["engine", "number", "size"]
    expected: int
    size: int
    node: str
    pid: int
    engines: tuple[str, ...]

    def story(self) -> Story:
        """Return the text: what it says of itself, and what the roster says."""
        whose = "a world" if self.engine is None else f"engine {self.engine}"
        has = {
            "engine": f"the roster has {self.expected} ranks of engine {self.engine}, "
            f"its engines are {some(self.engines)}",
            "number": f"{whose} has {plural(self.expected, 'rank')}, numbered from 0",
            "size": f"the roster declares {whose} of {plural(self.expected, 'rank')}",
        }
        return Story(
            what=f"{rank_text(self.who)} is not of this roster, by its {self.reason}: {has[self.reason]}",
            which=f"it was started as number {self.number} of {self.size}",
            who=_process(self.pid, self.node),
            effect="the rank was not registered",
            next="start it as the roster declares it, or correct the roster",
        )


@dataclass(frozen=True, slots=True)
class StaleRegistration:
    """A notice, no error: registrations of an earlier epoch that this roster does not have.

    Attributes:
        engine: Engine name.
        k: Its stale ranks.
        slots: The slot of each.
    """

    engine: str
    k: tuple[int, ...]
    slots: tuple[SlotLabel, ...]

    def fields(self) -> dict[str, Plain]:
        """Return the facts as plain values."""
        return {"notice": "stale", "engine": self.engine, "k": list(self.k), "slots": list(self.slots)}

    def __str__(self) -> str:
        return (
            f"notice: {plural(len(self.k), 'registration')} of engine {self.engine} from an earlier epoch stale: "
            f"k {ranges(self.k)} on slots {slots_text(self.slots)}; their messages are refused"
        )


def _process(pid: int, node: str) -> str:
    """Return where a process is; a file names no process."""
    return f"pid {pid} on {node}" if pid else f"on {node}"
