"""The hooks that are attached to this daemon, and the memory they offered.

A hook is found by what its messages say (run, who, boot) and answered on the
routing id of its last message.  The pools of a trainer rank outlive its process here:
a version that it published can still be read.  Pools are asked for by incarnation: the
next one of a rank, or a second one that is about to be refused, has other bytes at equal generations.
"""

from __future__ import annotations

import secrets
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field

from weightd.core.errors import WeightdError
from weightd.core.layout.columns import Layout
from weightd.core.session.events import SessionId
from weightd.core.units import Boot, EngineId, RolloutRank, RunName, TrainerRank
from weightd.core.wire.messages import EngineHello, TrainerHello
from weightd.link.faults import MemoryRefused
from weightd.link.fd_messages import PoolKey
from weightd.link.header import HEADER_BYTES
from weightd.link.memory import Pool

Who = TrainerRank | RolloutRank


@dataclass(slots=True)
class Hook:
    """One attached hook.

    Attributes:
        session: Its number here.
        run: Its run.
        boot: Its incarnation.
        hello: What it greeted with.
        pid: Its process by the kernel's word.
        routing_id: Where its last message came from.
        bound: Its descriptor socket is connected; its end is the hook's.
        closed: That socket has closed again: nothing but its goodbye can follow.
        layout: Whether its layout is here and fits its memory.
        ready: Told to the run's machine as ready.
        pools: Memory it offered.
    """

    session: SessionId
    run: RunName
    boot: Boot
    hello: TrainerHello | EngineHello
    pid: int
    routing_id: bytes
    bound: bool = False
    closed: bool = False
    layout: bool = False
    ready: bool = False
    pools: dict[PoolKey, Pool] = field(default_factory=dict)

    @property
    def who(self) -> Who:
        """The rank it stands for."""
        return who_of(self.hello)

    @property
    def name(self) -> str:
        """Its rank for texts: ``trainer 3`` or ``E0[1]``."""
        return name_of(self.hello)

    @property
    def due(self) -> dict[PoolKey, int]:
        """Every pool it announced, with its size in bytes."""
        if isinstance(self.hello, EngineHello):
            return {}
        return {PoolKey(self.hello.rank, r.slot, r.region): r.nbytes for r in self.hello.regions}

    @property
    def complete(self) -> bool:
        """Whether nothing is lacking: descriptor socket, layout and every announced pool."""
        return self.bound and self.layout and self.pools.keys() == self.due.keys()


def who_of(hello: TrainerHello | EngineHello) -> Who:
    """Return the rank that a hello stands for."""
    if isinstance(hello, TrainerHello):
        return hello.rank
    return RolloutRank(EngineId(hello.engine), hello.k)


def name_of(hello: TrainerHello | EngineHello) -> str:
    """Return a rank as texts and ``sender`` fields have it."""
    who = who_of(hello)
    return str(who) if isinstance(who, RolloutRank) else f"trainer {who}"


def check_layout(hello: TrainerHello | EngineHello, layout: Layout) -> WeightdError | None:
    """Return why a layout does not fit the memory that its hook announced, or None.

    Every buffer of a trainer rank must lie in its region, in each of its slots alike.
    """
    if isinstance(hello, EngineHello):
        return None
    payload: dict[int, int] = {}
    for r in hello.regions:
        payload[r.region] = min(payload.get(r.region, r.nbytes), r.nbytes)
    for buffer in layout.buffers:
        room = payload.get(buffer.region, HEADER_BYTES) - HEADER_BYTES
        if buffer.base + buffer.nbytes > room:
            why = f"buffer {buffer.name} ends at byte {buffer.base + buffer.nbytes:,}, the region carries {room:,}"
            name = f"trainer {hello.rank} region {buffer.region}"
            return MemoryRefused(name, buffer.base + buffer.nbytes, room, why)
    return None


@dataclass
class AttachedHooks:
    """Every attached hook of this daemon, and pools of trainer ranks that have ended."""

    limit: int
    _by_session: dict[SessionId, Hook] = field(default_factory=dict)
    _by_identity: dict[tuple[RunName, str, Boot], SessionId] = field(default_factory=dict)
    _orphans: dict[tuple[RunName, TrainerRank, Boot], dict[PoolKey, Pool]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._by_session)

    def __iter__(self) -> Iterator[Hook]:
        return iter(tuple(self._by_session.values()))

    def find(self, run: RunName, name: str, boot: Boot) -> Hook | None:
        """Return the hook that a message is from."""
        session = self._by_identity.get((run, name, boot))
        return None if session is None else self._by_session[session]

    def get(self, session: SessionId) -> Hook | None:
        """Return the hook of a session, unless it has ended."""
        return self._by_session.get(session)

    def add(self, run: RunName, boot: Boot, hello: TrainerHello | EngineHello, pid: int, routing_id: bytes) -> Hook:
        """Take a hook on, under a new session number."""
        hook = Hook(secrets.randbits(62), run, boot, hello, pid, routing_id)
        self._by_session[hook.session] = hook
        self._by_identity[run, hook.name, boot] = hook.session
        return hook

    def remove(self, hook: Hook, *, keep: bool = False) -> None:
        """Forget a hook.

        Args:
            hook: The hook.
            keep: Whether the pools of a trainer rank stay, until ``keep_only`` names others.
        """
        self._by_session.pop(hook.session, None)
        self._by_identity.pop((hook.run, hook.name, hook.boot), None)
        who = hook.who
        if keep and hook.ready and not isinstance(who, RolloutRank):
            self._orphans[hook.run, who, hook.boot] = hook.pools
        else:
            for pool in hook.pools.values():
                pool.close()

    def offered(self, run: RunName, boots: Mapping[TrainerRank, Boot]) -> Mapping[PoolKey, Pool]:
        """Return all pools of these incarnations of trainer ranks, of ready hooks and of ended ones."""
        pools: dict[PoolKey, Pool] = {}
        for (of, rank, boot), kept in self._orphans.items():
            if of == run and boots.get(rank) == boot:
                pools.update(kept)
        for hook in self._by_session.values():
            named = isinstance(hook.hello, TrainerHello) and boots.get(hook.hello.rank) == hook.boot
            if hook.run == run and hook.ready and named:
                pools.update(hook.pools)
        return pools

    def keep_only(self, run: RunName, named: Container[tuple[TrainerRank, Boot]]) -> None:
        """Drop the pools that ended ranks of a run left, but those of the incarnations that are named."""
        for of, rank, boot in tuple(self._orphans):
            if of == run and (rank, boot) not in named:
                for pool in self._orphans.pop((of, rank, boot)).values():
                    pool.close()

    def close(self) -> None:
        """Close every pool."""
        for hook in self:
            self.remove(hook)
        for run in {of for of, _, _ in self._orphans}:
            self.keep_only(run, ())
