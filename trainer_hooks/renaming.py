"""Names that the trainer's model has and the engine's checkpoint has not: a user's map from one to the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from weightd.core.errors import ConfigError
from weightd.trainer_hooks.names import refuse_collisions
from weightd.trainer_hooks.shards import Holdings, Part, Shard

Renaming = Mapping[str, str] | Callable[[str], str]
"""Prefixes by the prefixes that they stand for, whole components each, or what returns a name's new name."""


def renamed_holdings(holdings: Holdings, renamed: Renaming | None) -> Holdings:
    """Return holdings under the names of the checkpoint; errors go on to use the model's names for shards.

    Args:
        holdings: What the adapter found.
        renamed: The map; the longest prefix that a name has counts, and ``""`` is one of every name.

    Raises:
        ConfigError: A prefix is one of no name that this rank holds.
        NamesCollide: Two tensors would have one name.
    """
    if renamed is None:
        return holdings
    held = [*(part.name for shard in holdings.shards for part in shard.parts), *(name for name, _ in holdings.aliases)]
    held = list(dict.fromkeys(held))
    names = {name: renamed(name) for name in held} if callable(renamed) else _by_prefix(held, renamed)
    refuse_collisions(names.items())
    return replace(
        holdings,
        shards=tuple(_renamed(shard, names) for shard in holdings.shards),
        aliases=tuple((names[name], names.get(canonical, canonical)) for name, canonical in holdings.aliases),
    )


def _renamed(shard: Shard, names: Mapping[str, str]) -> Shard:
    return replace(shard, parts=tuple(Part(names[part.name], part.shape, part.pieces) for part in shard.parts))


def _by_prefix(held: list[str], renamed: Mapping[str, str]) -> dict[str, str]:
    prefixes = {old.strip("."): new.strip(".") for old, new in renamed.items()}
    used: set[str] = set()
    names: dict[str, str] = {}
    for name in held:
        found = _longest(name, prefixes)
        names[name] = name if found is None else _joined(prefixes[found], _rest(name, found))
        used.update(() if found is None else (found,))
    idle = sorted(set(prefixes) - used)
    if idle:
        why = f"it is the longest prefix of none of the {len(held)} names on this rank, for instance {held[:2]}"
        raise ConfigError("renamed", idle[0], why)
    return names


def _longest(name: str, prefixes: Mapping[str, str]) -> str | None:
    parts = name.split(".")
    tries = (".".join(parts[:n]) for n in range(len(parts), -1, -1))
    return next((prefix for prefix in tries if prefix in prefixes), None)


def _rest(name: str, prefix: str) -> str:
    return name[len(prefix) :].lstrip(".")


def _joined(prefix: str, rest: str) -> str:
    return ".".join(part for part in (prefix, rest) if part)
