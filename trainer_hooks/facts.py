"""What a trainer knows about its tensors and no adapter can see: ties, padding, what is frozen, what is not published.

Names are those that are published, after ``renamed=``.  A pattern is one of ``fnmatch``: ``visual.*``, or a whole
name.  What is said of a name that a rank does not hold is an error on that rank: it would silently mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from weightd.core.errors import ConfigError
from weightd.core.layout.algebra import narrow
from weightd.trainer_hooks.faults import NothingToPublish
from weightd.trainer_hooks.shards import Holdings, Part, Shard

Aliases = Sequence[tuple[str, str]]
"""Pairs (name, canonical name)."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is declared about the tensors of one rank.

    Attributes:
        ties: Further name to name of one weight.  Where the rank holds both as tensors of their own, both are
            published, and every publish compares the elements that this rank holds of both.
        true_shapes: Shape without padding by name, of tensors whose shape here is a padded one.
        frozen: Patterns of tensors that never change: each is copied into each slot once.
        not_synced: Patterns of tensors that are not published.
    """

    ties: Mapping[str, str] = field(default_factory=dict)
    true_shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    frozen: Iterable[str] = ()
    not_synced: Iterable[str] = ()


def with_facts(holdings: Holdings, facts: Facts | None) -> Holdings:
    """Return holdings as they are with what was declared about them.

    Raises:
        ConfigError: A name or pattern matches nothing on this rank, or cannot hold of what it matches.
        NothingToPublish: Everything is declared not to be published.
    """
    if facts is None:
        return holdings
    holdings = _without(holdings, _patterns("not_synced", facts.not_synced))
    holdings = _trimmed(holdings, facts.true_shapes)
    holdings = _frozen(holdings, _patterns("frozen", facts.frozen))
    return _tied(holdings, facts.ties)


def names_of(holdings: Holdings) -> list[str]:
    """Return every published name of the holdings, aliases last."""
    parts = (part.name for shard in holdings.shards for part in shard.parts)
    return list(dict.fromkeys([*parts, *(name for name, _ in holdings.aliases)]))


# ------------------------------------------------------------ patterns


def _patterns(setting: str, given: Iterable[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise ConfigError(setting, given, "it is one text, a list of patterns is needed")
    return tuple(given)


def _matching(setting: str, patterns: Sequence[str], names: Sequence[str]) -> set[str]:
    """Return the names that match a pattern; a pattern without one is refused."""
    found: set[str] = set()
    for pattern in patterns:
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits:
            why = f"it matches none of the {len(names)} names on this rank, for instance {list(names[:2])}"
            raise ConfigError(setting, pattern, why)
        found.update(hits)
    return found


# ------------------------------------------------------------ not synced


def _without(holdings: Holdings, patterns: Sequence[str]) -> Holdings:
    if not patterns:
        return holdings
    names = names_of(holdings)
    gone = _matching("not_synced", patterns, names)
    if len(gone) == len(names):
        raise NothingToPublish(f"not_synced matches all {len(names)} names on this rank", tuple(names))
    heirs = _heirs(holdings.aliases, gone)
    shards = (_without_parts(shard, gone, heirs) for shard in holdings.shards)
    aliases = (
        (name, heirs.get(canonical, canonical))
        for name, canonical in holdings.aliases
        if name not in gone and heirs.get(canonical) != name
    )
    return replace(holdings, shards=tuple(s for s in shards if s is not None), aliases=tuple(aliases))


def _heirs(aliases: Aliases, gone: set[str]) -> dict[str, str]:
    """Return, for each tensor that is not published under its own name, a tied name under which it is."""
    found: dict[str, str] = {}
    for name, canonical in aliases:
        if canonical in gone and name not in gone:
            found.setdefault(canonical, name)
    return found


def _without_parts(shard: Shard, gone: set[str], heirs: Mapping[str, str]) -> Shard | None:
    parts = [
        Part(heirs.get(part.name, part.name), part.shape, part.pieces)
        for part in shard.parts
        if part.name not in gone or part.name in heirs
    ]
    return replace(shard, parts=tuple(parts)) if parts else None


# ------------------------------------------------------------ padding


def _trimmed(holdings: Holdings, shapes: Mapping[str, Sequence[int]]) -> Holdings:
    wanted: dict[str, tuple[int, ...]] = {}
    held, tied = names_of(holdings), dict(holdings.aliases)
    for name, shape in shapes.items():  # whole names: a shape that several tensors have is said of each
        if name not in held:
            why = f"it is none of the {len(held)} names on this rank, for instance {held[:2]}"
            raise ConfigError("true_shapes", name, why)
        if wanted.setdefault(tied.get(name, name), tuple(shape)) != tuple(shape):
            why = f"{tied.get(name, name)} is the same memory, and {wanted[tied.get(name, name)]} is said of it"
            raise ConfigError("true_shapes", f"{name}: {tuple(shape)}", why)
    return replace(holdings, shards=tuple(_trimmed_shard(shard, wanted) for shard in holdings.shards))


def _trimmed_shard(shard: Shard, shapes: Mapping[str, tuple[int, ...]]) -> Shard:
    parts = tuple(_trimmed_part(part, shapes[part.name]) if part.name in shapes else part for part in shard.parts)
    cut = sum(part.numel for part in shard.parts) - sum(part.numel for part in parts)
    return replace(shard, parts=parts, padding=shard.padding + cut)


def _trimmed_part(part: Part, shape: tuple[int, ...]) -> Part:
    fits = len(shape) == len(part.shape) and all(0 <= n <= m for n, m in zip(shape, part.shape, strict=True))
    if not fits:
        why = f"{part.name} has shape {part.shape} here, and no padding makes that of {shape}"
        raise ConfigError("true_shapes", str(shape), why)
    pieces = part.pieces
    for dim, size in enumerate(shape):
        pieces = narrow(pieces, dim, 0, size)
    return Part(part.name, shape, pieces)


# ------------------------------------------------------------ frozen


def _frozen(holdings: Holdings, patterns: Sequence[str]) -> Holdings:
    if not patterns:
        return holdings
    still = _matching("frozen", patterns, names_of(holdings))
    still |= {canonical for name, canonical in holdings.aliases if name in still}
    return replace(holdings, shards=tuple(_frozen_shard(shard, still) for shard in holdings.shards))


def _frozen_shard(shard: Shard, still: set[str]) -> Shard:
    held = [part.name for part in shard.parts]
    said = [name for name in held if name in still]
    if not said:
        return shard
    if shard.render is not None:
        raise ConfigError("frozen", said[0], "what is published of it is computed at each publish, from its adapters")
    if len(said) < len(held):
        why = f"it lies in one tensor, {shard.name}, with parts that are not frozen: {sorted(set(held) - set(said))}"
        raise ConfigError("frozen", said[0], why)
    return replace(shard, frozen=True)


# ------------------------------------------------------------ ties


def _tied(holdings: Holdings, ties: Mapping[str, str]) -> Holdings:
    """Add the ties that are declared; what identity says already, or denies, is left to it and to the comparison."""
    held = names_of(holdings)
    aliases, distinct = list(holdings.aliases), []
    one = dict(holdings.aliases)
    for name, canonical in ties.items():
        known = [n for n in (name, canonical) if n in held]
        if not known:
            raise ConfigError("ties", f"{name} = {canonical}", "this rank holds neither")
        if len(known) == 1:
            other = canonical if known[0] == name else name
            one[other] = one.get(known[0], known[0])
            held.append(other)  # a further tie may be to this name
            aliases.append((other, one[other]))
        elif one.get(name, name) != one.get(canonical, canonical):
            distinct.append((one.get(name, name), one.get(canonical, canonical)))
    return replace(holdings, aliases=tuple(aliases), ties=(*holdings.ties, *distinct))
