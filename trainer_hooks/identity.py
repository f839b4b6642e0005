"""Which trainer rank this is, and what its run is made of."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from weightd.core.errors import ConfigError
from weightd.core.roster.declared import roster_from_mapping
from weightd.core.roster.topology import EngineDecl, Mode, Roster
from weightd.core.units import TrainerRank
from weightd.trainer_hooks.faults import WorldUnknown

Engines = Mapping[str, int] | Sequence[EngineDecl] | str | os.PathLike[str]
"""Sizes by engine, declarations, or the path of a roster file (TOML or JSON)."""


class Identity(NamedTuple):
    """This rank in the trainer's world."""

    rank: TrainerRank
    world: int


def identify(rank: int | None = None, world: int | None = None) -> Identity:
    """Return rank and world size: as given, else of ``torch.distributed``, else of ``RANK`` and ``WORLD_SIZE``.

    Raises:
        WorldUnknown: None of them says, or the numbers make no sense.
    """
    tried = [f"arguments rank={rank} world={world}"]
    found = None if rank is None or world is None else (rank, world)
    if found is None and dist.is_available() and dist.is_initialized():
        found = dist.get_rank(), dist.get_world_size()
        tried.append(f"torch.distributed rank={found[0]} world={found[1]}")
    elif found is None:
        tried.append("torch.distributed is not initialised")
        texts = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
        tried.append(f"environment RANK={texts[0]} WORLD_SIZE={texts[1]}")
        if all(text is not None and text.isdigit() for text in texts):
            found = int(str(texts[0])), int(str(texts[1]))
    if found is None or not 0 <= found[0] < found[1]:
        raise WorldUnknown(tuple(tried))
    if rank not in (None, found[0]) or world not in (None, found[1]):
        raise WorldUnknown(tuple(tried))
    return Identity(TrainerRank(found[0]), found[1])


def declare_roster(
    engines: Engines | None, identity: Identity, reserved: Iterable[int], mode: Mode | None
) -> Roster | None:
    """Return the roster that trainer rank 0 sends, or None on the other ranks and without a declaration.

    Raises:
        ConfigError: The roster file cannot be read, or is of another world than this rank.
        Refused: It can, and does not stand.
    """
    if engines is None or identity.rank != 0:
        return None
    if isinstance(engines, str | os.PathLike):
        return _roster_of_file(Path(engines), identity)
    if isinstance(engines, Mapping):
        declared = tuple(EngineDecl(name, size) for name, size in engines.items())
    else:
        declared = tuple(engines)
    return Roster(identity.world, declared, tuple(reserved), mode or "disaggregated")


def _roster_of_file(path: Path, identity: Identity) -> Roster:
    roster = roster_from_mapping(_table(path), f"roster {path}").roster
    if roster.world != identity.world:
        why = f"it has {roster.world} trainer slots, this trainer has {identity.world} ranks"
        raise ConfigError("engines", str(path), why, "roster file")
    return roster


def _table(path: Path) -> dict[str, Any]:
    """Return the table in a roster file."""
    try:
        data = path.read_bytes()
        table: object = json.loads(data) if path.suffix == ".json" else tomllib.loads(data.decode())
    except (OSError, ValueError) as error:  # both readers' errors are ValueErrors
        raise ConfigError("engines", str(path), str(error), "roster file") from error
    if not isinstance(table, dict):
        raise ConfigError("engines", str(path), "it holds no table", "roster file")
    return table
