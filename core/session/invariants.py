"""What must hold after every step, whatever was lost, doubled, late or dead.

I1-I5 are those of the coverage specification, J1-J9 those of the session's.
``leader_faults`` looks at one machine and is cheap enough for debug builds;
``world_faults`` looks at everything at once, which only a simulation can.
I4 is proved before an epoch exists; here its sums are compared with what was
applied (I5).  J4 is about bytes that change: whoever changes them asks
``lease_fault`` first.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightd.core.errors import InternalInvariantBroken
from weightd.core.session.epochs import spec_engines
from weightd.core.session.members import engine_ranks
from weightd.core.session.turns import Phase
from weightd.core.units import NO_KEY, EngineId, RolloutRank, Version, VersionKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from weightd.core.session.leader import LeaderMachine
    from weightd.core.wire.messages import CommitNote, EpochSpec, ReceiverReport


@dataclass(frozen=True, slots=True)
class RankFacts:
    """A rollout rank as it really is.

    Attributes:
        who: The rank.
        report: What it says of itself.
        content: The version whose bytes its parameters hold, None if they hold no whole version.
        servable: Whether its engine may serve with it, as far as it knows.
    """

    who: RolloutRank
    report: ReceiverReport
    content: VersionKey | None
    servable: bool


@dataclass(frozen=True, slots=True)
class WorldFacts:
    """Everything at one moment.

    Attributes:
        leader: The machine that leads, if one does.
        ranks: Every rollout rank whose process lives.
        commits: Every commit that was ever journaled, oldest first.
    """

    leader: LeaderMachine | None
    ranks: Sequence[RankFacts]
    commits: Sequence[CommitNote]


# ------------------------------------------------------------ one machine


def leader_faults(leader: LeaderMachine) -> list[str]:
    """Return the rules that a leader's machine breaks by itself."""
    s = leader.state
    faults: list[str] = []
    if leader.term and s.stage not in ("idle", "paused") and _unbounded(leader):
        faults.append(f"J6: stage {s.stage} of {s.key} has no deadline")
    applying = {t.key for t in s.turns.values() if t.phase in (Phase.WRITING, Phase.DONE)}
    if len(applying) > 1:
        faults.append(f"J1: {len(applying)} versions are being applied: {sorted(applying)}")
    spec = s.epoch
    return [*faults, *_count_faults(leader), *(_epoch_faults(spec) if spec else ()), *_byte_faults(leader)]


def _count_faults(leader: LeaderMachine) -> Iterable[str]:
    """J9: acknowledgements are counted against the ranks of the epoch."""
    s = leader.state
    for turn in s.turns.values():
        if turn.engine in s.part and (s.epoch is None or turn.seats != s.seats(turn.engine)):
            yield f"J9: acknowledgements of {turn.engine} are counted against another set than the epoch's"


def _unbounded(leader: LeaderMachine) -> bool:
    waits_for_ranks = leader.state.stage == "attaching" and not leader.state.members.here
    return leader.stage_deadline() is None and leader.state.journal.oldest_at() is None and not waits_for_ranks


def _epoch_faults(spec: EpochSpec) -> tuple[str, ...]:
    """I1-I3: every declared rank is in the epoch, or its engine is down, once and on one node."""
    found: list[str] = []
    if [p.rank for p in spec.trainers] != list(range(spec.roster.world)):
        found.append(f"I1: epoch {spec.epoch} has trainer ranks {[p.rank for p in spec.trainers]}")
    places = Counter(RolloutRank(p.engine, p.k) for p in spec.receivers)
    for engine in spec_engines(spec):
        expected = engine_ranks(spec.roster, engine)
        if any(places[who] != 1 for who in expected):
            found.append(f"I2: engine {engine} of epoch {spec.epoch} has {[places[w] for w in expected]} of each rank")
    up = sum(e.size for e in spec.roster.engines if EngineId(e.id) in spec_engines(spec))
    if up != len(spec.receivers):
        found.append(f"I3: epoch {spec.epoch} has {len(spec.receivers)} rollout ranks, its engines have {up}")
    return tuple(found)


def _byte_faults(leader: LeaderMachine) -> Iterable[str]:
    """I5: an engine that is done has applied the planned bytes on every rank."""
    s = leader.state
    for turn in s.turns.values():
        if turn.phase is not Phase.DONE:
            continue
        for who, seat in turn.seats.items():
            entry = s.view.receiver(who, seat.node, seat.boot)
            if entry is None or entry.report.op != turn.op:
                continue  # gone since; the next look excludes it
            if entry.report.state == "applied" and entry.report.applied_nbytes != turn.planned[who]:
                yield f"I5: {who} applied {entry.report.applied_nbytes} of {turn.planned[who]} bytes and counts as done"


# ------------------------------------------------------------ everything


def world_faults(facts: WorldFacts) -> list[str]:
    """Return the rules that do not hold."""
    return [*(leader_faults(facts.leader) if facts.leader is not None else ()), *rank_faults(facts)]


def rank_faults(facts: WorldFacts) -> list[str]:
    """Return the rules that do not hold between ranks, engines and commits; the leader's own are left out."""
    return [*_commit_faults(facts.commits), *_rank_faults(facts), *_engine_faults(facts)]


def check_world(facts: WorldFacts) -> None:
    """Do nothing if every rule holds.

    Raises:
        InternalInvariantBroken: One does not.
    """
    faults = world_faults(facts)
    if faults:
        raise InternalInvariantBroken(faults[0].split(":")[0], "; ".join(faults))


def lease_fault(key: VersionKey, committed: VersionKey, in_hand: VersionKey, previous: VersionKey) -> str | None:
    """Return why bytes named ``key`` may not change now (J4).

    Args:
        key: What the memory holds.
        committed: Last commit that is journaled.
        in_hand: The undecided version in hand.
        previous: The commit before, while not every live engine has acknowledged the last one.
    """
    names = {committed: "the last committed version", in_hand: "in hand", previous: "not yet replaced everywhere"}
    return None if key == NO_KEY or key not in names else f"J4: {key} is {names[key]}, and its bytes change"


def _commit_faults(commits: Sequence[CommitNote]) -> Iterable[str]:
    """J3: numbers grow; one commit for one version."""
    for before, after in itertools.pairwise(commits):
        if after.key.version < before.key.version:
            yield f"J3: {after.key} was committed after {before.key}"
        if after.key.version == before.key.version and after.key != before.key:
            yield f"J3: version {after.key.version} was committed twice: {before.key} and {after.key}"


def _rank_faults(facts: WorldFacts) -> Iterable[str]:
    """J2, and nobody says of itself what it has not applied."""
    named = {(c.key, e) for c in facts.commits for e in c.engines}
    for rank in facts.ranks:
        r = rank.report
        if r.base != NO_KEY and rank.content != r.base:
            yield f"a rank reports what it has not: {rank.who} says base {r.base} and holds {rank.content}"
        if r.state == "applied" and rank.content != r.key:
            yield f"a rank reports what it has not: {rank.who} says applied {r.key} and holds {rank.content}"
        if r.state == "serving" and (r.base, rank.who.engine) not in named:
            yield f"J2: {rank.who} serves {r.base}, and no journaled commit of it names {rank.who.engine}"


def _engine_faults(facts: WorldFacts) -> Iterable[str]:
    """J5 and J7: ranks of an engine serve one version, and so do the engines that are up."""
    leader = facts.leader
    if leader is None or leader.state.epoch is None:
        return
    serving: dict[EngineId, Version] = {}
    for engine in {EngineId(e.id) for e in leader.state.roster.engines}:
        ranks = [r for r in facts.ranks if r.who.engine == engine]
        running = [r for r in ranks if r.servable]
        yield from _mixed(running, ranks)
        if len(running) == len(engine_ranks(leader.state.roster, engine)):
            versions = {r.report.base.version for r in running}
            if len(versions) == 1:
                serving[engine] = versions.pop()
    up = {e: v for e, v in serving.items() if (t := leader.state.turns.get(e)) is not None and t.up}
    if len(set(up.values())) > 1:
        yield f"J7: engines that are up serve different versions: {up}"


def _mixed(running: Sequence[RankFacts], ranks: Sequence[RankFacts]) -> Iterable[str]:
    """Ranks of one engine never run with different bytes: not even while some of them wait to resume."""
    bases = {r.report.base for r in running}
    for r in ranks:
        if running and r.report.state in ("applying", "applied") and bases != {r.report.key}:
            yield f"J5: {r.who} is {r.report.state} {r.report.key} while {[str(x.who) for x in running]} run"
