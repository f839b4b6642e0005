"""Which ranks the run has taken in, and which it refuses.

A rank is taken in when nothing in its hello is wrong and nobody else is that
rank.  A refused one stays refused until its node shows it no more: the answer
is repeated, never the judgement.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from weightd.core.roster.hello import check_hello
from weightd.core.roster.topology import Registration
from weightd.core.roster.violations import RankDuplicate
from weightd.core.session.view import Who, rank_name, registration_of, role_of
from weightd.core.units import EngineId, EngineRank, RolloutRank, TrainerRank
from weightd.core.wire.messages import RanksRefused, TrainerEntry

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightd.core.errors import WeightdError
    from weightd.core.roster.topology import Roster
    from weightd.core.session.view import View
    from weightd.core.units import Boot, NodeId
    from weightd.core.wire.messages import ReceiverEntry


RANK0 = TrainerRank(0)
"""The rank that brings the roster."""


@dataclass(frozen=True, slots=True)
class Member:
    """A rank that the run has taken in.

    Attributes:
        registration: As its node measured it.
        layout_digest: Of what it holds or needs.
        ready: Its layout and its descriptors are there.
        since: When it was taken in.
    """

    registration: Registration
    layout_digest: str
    ready: bool
    since: float


def expected_ranks(roster: Roster) -> tuple[Who, ...]:
    """Return every declared rank, trainers first."""
    trainers: list[Who] = [TrainerRank(r) for r in range(roster.world)]
    return (*trainers, *(who for e in roster.engines for who in engine_ranks(roster, EngineId(e.id))))


def engine_ranks(roster: Roster, engine: EngineId) -> tuple[RolloutRank, ...]:
    """Return the ranks of one declared engine."""
    return _ranks(engine, next(e.size for e in roster.engines if e.id == engine))


@lru_cache(maxsize=4096)
def _ranks(engine: EngineId, size: int) -> tuple[RolloutRank, ...]:
    return tuple(RolloutRank(engine, EngineRank(k)) for k in range(size))


class Members:
    """The ranks of a run, by role."""

    def __init__(self) -> None:
        self.here: dict[Who, Member] = {}
        self.lost: dict[Who, tuple[Registration, str]] = {}
        self._refused: dict[tuple[Who, Boot], tuple[NodeId, WeightdError]] = {}

    def update(self, roster: Roster, view: View, now: float) -> None:
        """Take in what is new, drop what is gone."""
        view.note_missing([m.registration for m in self.here.values()], now)
        self._forget_answered(view)
        for who, member in list(self.here.items()):
            r = member.registration
            presence = view.rank(who, r.node, r.boot, now)
            if presence.kind == "gone":
                self.lost[who] = (r, presence.why)
                del self.here[who]
        for node, entry in view.entries():
            if view.node(node, now).kind == "here":  # what a silent node said last brings nobody in
                self._look_at(roster, view, node, entry, now)

    def refuse(self, ranks: Iterable[Who], error: WeightdError) -> None:
        """Refuse ranks that were taken in."""
        for who in list(ranks):
            member = self.here.pop(who, None)
            if member is not None:
                self._refused[who, member.registration.boot] = (member.registration.node, error)

    def is_refused(self, who: Who, boot: Boot) -> bool:
        """Return whether an incarnation is refused."""
        return (who, boot) in self._refused

    def refusals(self) -> tuple[RanksRefused, ...]:
        """Return what refused ranks are told, each report once."""
        ranks: dict[int, list[tuple[str, Boot]]] = {}
        reports: dict[int, WeightdError] = {}
        for (who, boot), (_, error) in self._refused.items():
            ranks.setdefault(id(error), []).append((rank_name(who), boot))
            reports[id(error)] = error
        return tuple(RanksRefused(tuple(ranks[i]), reports[i].to_wire()) for i in reports)

    def missing(self, roster: Roster, without: frozenset[EngineId] = frozenset()) -> tuple[Who, ...]:
        """Return the declared ranks that are not here, engines in ``without`` left out."""
        return tuple(who for who in self._needed(roster, without) if who not in self.here)

    def unready(self, roster: Roster, without: frozenset[EngineId] = frozenset()) -> tuple[Who, ...]:
        """Return the ranks that are here and whose layout or descriptors are not."""
        needed = self._needed(roster, without)
        return tuple(who for who in needed if who in self.here and not self.here[who].ready)

    def complete_engines(self, roster: Roster) -> tuple[EngineId, ...]:
        """Return the engines of which every rank is here and ready, in declared order."""
        return tuple(
            EngineId(e.id)
            for e in roster.engines
            if all(who in self.here and self.here[who].ready for who in engine_ranks(roster, EngineId(e.id)))
        )

    def why_absent(self, who: Who) -> str:
        """Return what became of a rank that attached and is not here; empty for one that never did."""
        refused = [(node, error) for (w, _), (node, error) in self._refused.items() if w == who]
        if refused:
            node, error = refused[-1]
            return f"refused on node {node}: {error.code}"
        if who not in self.lost:
            return ""
        registration, why = self.lost[who]
        return f"pid {registration.pid} on node {registration.node}: {why or 'it was not heard any more'}"

    # ------------------------------------------------------------ inside

    @staticmethod
    def _needed(roster: Roster, without: frozenset[EngineId]) -> list[Who]:
        return [w for w in expected_ranks(roster) if not (isinstance(w, RolloutRank) and w.engine in without)]

    def _look_at(
        self, roster: Roster, view: View, node: NodeId, entry: TrainerEntry | ReceiverEntry, now: float
    ) -> None:
        who = role_of(entry)
        if (who, entry.boot) in self._refused:
            return
        registration = registration_of(node, entry)
        known = self.here.get(who)
        if known is not None and (known.registration.node, known.registration.boot) == (node, entry.boot):
            self.here[who] = Member(registration, entry.layout_digest, entry.ready, known.since)
            return
        if known is not None and self._may_return(view, known, now):
            return  # neither taken nor refused while the other may be dead
        brought = entry.roster if isinstance(entry, TrainerEntry) and known is None else None
        fault = check_hello(brought or roster, registration, [m.registration for m in self.here.values()])
        if fault is not None:
            if RANK0 not in self.here and not isinstance(fault, RankDuplicate):
                return  # who waits for a new job's rank 0 is judged by the roster that it brings
            self._refused[who, entry.boot] = (node, fault)
            return
        self.here[who] = Member(registration, entry.layout_digest, entry.ready, now)
        self.lost.pop(who, None)

    @staticmethod
    def _may_return(view: View, known: Member, now: float) -> bool:
        r = known.registration
        return view.rank(r.who, r.node, r.boot, now).kind == "away"

    def _forget_answered(self, view: View) -> None:
        """Drop refusals of ranks that their node shows no more: they were told, or they are gone."""
        shown = {(role_of(e), e.boot) for _, e in view.entries()}
        self._refused = {k: v for k, v in self._refused.items() if k in shown or view.report(v[0]) is None}
