"""Ranks, versions and identities as types of their own.

Mixing a trainer's rank with an engine's is the commonest bug of weight
synchronisation, so no two rank spaces share a type here, and a bare ``int``
never stands for either in a signature above this module.
"""

from __future__ import annotations

from typing import NamedTuple, NewType

RunName = NewType("RunName", str)
"""Name of one training job; everything below belongs to one run."""

NodeId = NewType("NodeId", str)
"""Configured identity of one daemon and thereby of its host."""

SlotName = NewType("SlotName", str)
"""One device of a node: a GPU's UUID, or the declared name of a CPU rank's place."""

EngineId = NewType("EngineId", str)
"""Name of one rollout engine of a run."""

TrainerRank = NewType("TrainerRank", int)
"""Rank in the trainer's world, ``0 .. W-1``."""

EngineRank = NewType("EngineRank", int)
"""Rank inside one engine, ``0 .. size-1``; written k in the texts."""

Version = NewType("Version", int)
"""Number of a published set of weights; starts at 1, committed ones only grow. 0: none yet."""

Epoch = NewType("Epoch", int)
"""One roster with one set of layouts, counted by the leader from 1. 0: none yet."""

Term = NewType("Term", int)
"""Number of a leadership, journaled, one leader per term, from 1. 0: none yet."""

Op = NewType("Op", int)
"""Counter within a term, taken at every start, refill and PREPARED. 0: none yet."""

Boot = NewType("Boot", int)
"""Random number of one process start, 63 bits."""

NO_VERSION = Version(0)
NO_EPOCH = Epoch(0)
NO_TERM = Term(0)
NO_OP = Op(0)


class RolloutRank(NamedTuple):
    """One rank of one engine."""

    engine: EngineId
    k: EngineRank

    def __str__(self) -> str:
        return f"{self.engine}[{self.k}]"


class Attempt(NamedTuple):
    """Names the bytes of a version together with it; equal on all trainer ranks.

    ``boot`` is that of trainer rank 0, as every rank is told when it joins;
    ``number`` is one more than the failures of this version that the hook was told.
    Counted rather than drawn, so that all ranks name the same bytes alike.
    """

    boot: Boot
    number: int

    def __str__(self) -> str:
        return f"{self.boot % 0x10000:04x}.{self.number}"


class VersionKey(NamedTuple):
    """The name of bytes everywhere: a version and the attempt that carries it."""

    version: Version
    attempt: Attempt

    def __str__(self) -> str:
        return f"v{self.version}/{self.attempt}"


NO_KEY = VersionKey(NO_VERSION, Attempt(Boot(0), 0))
