"""What all roster errors share: how they name ranks and slots, and how they cross a wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from weightd.core.errors import SHOWN, Plain, WeightdError, WireError, ranges
from weightd.core.units import EngineId, EngineRank, RolloutRank, TrainerRank

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from weightd.core.roster.topology import SlotLabel


@dataclass(eq=False)
class RosterError(WeightdError):
    """A roster, or what attached to it, is not what it has to be."""


@dataclass(eq=False)
class RankError(RosterError):
    """Something about one rank, of the trainer or of an engine.

    As data it is role ``rollout`` with ``engine`` and ``k``, or role ``trainer``
    with ``trainer_rank``: the two rank spaces never share a field name.

    Attributes:
        engine: Engine of a rollout rank, None for a trainer rank.
        number: k of a rollout rank, r of a trainer rank.
    """

    engine: str | None
    number: int

    @property
    def who(self) -> TrainerRank | RolloutRank:
        """The rank it is about."""
        if self.engine is None:
            return TrainerRank(self.number)
        return RolloutRank(EngineId(self.engine), EngineRank(self.number))

    def fields(self) -> dict[str, Plain]:
        """Return the facts, the rank under the names of its own space."""
        own = super().fields()
        del own["engine"], own["number"]
        named: dict[str, Plain] = {"role": "trainer", "trainer_rank": self.number}
        if self.engine is not None:
            named = {"role": "rollout", "engine": self.engine, "k": self.number}
        return named | own

    @classmethod
    def _from_fields(cls, fields: Mapping[str, Plain], wire: WireError) -> Self:
        number = fields["k"] if fields["role"] == "rollout" else fields["trainer_rank"]
        return super()._from_fields({**fields, "engine": fields.get("engine"), "number": number}, wire)


def split_rank(who: TrainerRank | RolloutRank) -> tuple[str | None, int]:
    """Return the engine (None for the trainer) and the number in its rank space."""
    return (str(who.engine), int(who.k)) if isinstance(who, RolloutRank) else (None, int(who))


def rank_text(who: TrainerRank | RolloutRank) -> str:
    """Return a rank as texts name it.

    >>> rank_text(TrainerRank(3)), rank_text(RolloutRank(EngineId("E0"), EngineRank(3)))
    ('trainer rank 3', 'rollout rank E0[3]')
    """
    return f"rollout rank {who}" if isinstance(who, RolloutRank) else f"trainer rank {who}"


def slots_text(labels: Iterable[SlotLabel]) -> str:
    """Return slots for a text: numbers as ranges, names one by one and cut after ``SHOWN``.

    >>> slots_text([2, 3, 7]), slots_text(["n0/a", "n0/b"]), slots_text([])
    ('2-3, 7', 'n0/a, n0/b', 'none')
    """
    listed = list(dict.fromkeys(labels))
    numbers = [label for label in listed if isinstance(label, int)]
    names = [label for label in listed if isinstance(label, str)]
    shown = ([ranges(numbers)] if numbers else []) + names[:SHOWN]
    if len(names) > SHOWN:
        shown.append(f"{len(names) - SHOWN} more")
    return ", ".join(shown) or "none"


def nodes_text(ranks_by_node: Mapping[str, tuple[int, ...]]) -> str:
    """Return ranks by node for a text, cut after ``SHOWN`` nodes.

    >>> nodes_text({"n0": (6, 7), "n1": (14, 15)})
    'n0: 6-7; n1: 14-15'
    """
    parts = [f"{node}: {ranges(ranks)}" for node, ranks in ranks_by_node.items()]
    rest = len(parts) - SHOWN
    return "; ".join(parts[:SHOWN] + ([plural(rest, "more node")] if rest > 0 else []))


def plural(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> plural(1, "slot"), plural(2, "slot")
    ('1 slot', '2 slots')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
