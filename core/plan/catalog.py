"""One numbering of tensors for all ranks: which names mean the same tensor, and who describes it how.

A tensor's number is that of a *source* tensor wherever the trainer knows one.
Aliases are followed on both sides: an alias of the trainer is another name of
one source, an alias of a rollout rank is another name of one target, and either
satisfies both names.  They are never merged across sides: where the engine ties
what the trainer holds apart, one of the two stays unused, and the proof says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from weightd.core.dtypes import dtype_named
from weightd.core.layout.columns import Int64, Layout, RowRange, TensorInfo
from weightd.core.plan.violations import Description, DescriptionConflict, NamesUnmatched
from weightd.core.units import RolloutRank, TrainerRank

if TYPE_CHECKING:
    from weightd.core.errors import WeightdError

KEPT = -1
"""Number of a tensor that its rank keeps as it is."""

Table = tuple[TensorInfo, ...]
Who = TrainerRank | RolloutRank


@dataclass(frozen=True, slots=True, eq=False)
class Catalog:
    """The tensors of a run, by number.

    Attributes:
        tensors: What is said of each tensor; the trainer's description where it has one.
        itemsize: Bytes of one element, shape (T,).
        sound: Whether all ranks describe the tensor alike; others are not looked at, shape (T,).
        owned: Whether the trainer knows the tensor, shape (T,).
        known: Whether the trainer and a rollout rank know it, be it to keep it or under an alias, shape (T,).
        source_numbers: Per trainer rank, the number of each row of its table of tensors.
        target_numbers: Per rollout rank, likewise; ``KEPT`` for kept ones.
        unused_whole: Numbers that the trainer declares unused as a whole.
        unused_rows: Rows that the trainer declares unused, by number.
    """

    tensors: tuple[TensorInfo, ...]
    itemsize: Int64
    sound: np.ndarray[tuple[int], np.dtype[np.bool_]]
    owned: np.ndarray[tuple[int], np.dtype[np.bool_]]
    known: np.ndarray[tuple[int], np.dtype[np.bool_]]
    source_numbers: tuple[Int64, ...]
    target_numbers: Mapping[RolloutRank, Int64]
    unused_whole: frozenset[int]
    unused_rows: Mapping[int, tuple[RowRange, ...]]


class _Aliases:
    """Names that stand for one memory; the canonical name is the one that stands for itself."""

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._canonical = dict(sorted(set(pairs)))

    def resolve(self, name: str) -> str:
        seen = {name}
        while (following := self._canonical.get(name)) is not None and following not in seen:
            seen.add(following)
            name = following
        return name

    def group(self, name: str) -> tuple[str, ...]:
        """Return the canonical name of ``name``, then every other name of the same memory, sorted."""
        if not self._canonical:
            return (name,)
        top = self.resolve(name)
        names = {n for n in self._canonical if self.resolve(n) == top}
        return (top, *sorted((names | {name}) - {top}))


def distinct_tables(layouts: Sequence[Layout]) -> list[tuple[Table, list[int]]]:
    """Return each different table of tensors with the positions of the layouts that have it.

    Ranks of one stage list the same tensors, so 512 layouts have a handful of tables.
    """
    by_edge: dict[tuple[int, str, str], list[tuple[Table, list[int]]]] = {}
    for place, layout in enumerate(layouts):
        table = layout.tensors
        edge = (len(table), table[0].name, table[-1].name) if table else (0, "", "")
        known = by_edge.setdefault(edge, [])
        for other, places in known:
            if other is table or other == table:
                places.append(place)
                break
        else:
            known.append((table, [place]))
    return [entry for entries in by_edge.values() for entry in entries]


def build_catalog(
    trainer_layouts: Sequence[Layout], rollout_layouts: Mapping[RolloutRank, Layout], whole: bool
) -> tuple[Catalog, tuple[WeightdError, ...]]:
    """Return the numbering of all tensors, and what names and descriptions violate.

    Args:
        trainer_layouts: Layout of trainer rank r at position r.
        rollout_layouts: Layouts of the rollout ranks that are looked at.
        whole: Whether these are all rollout ranks, so that a name only the trainer knows is a fault.
    """
    book = _Book(trainer_layouts, rollout_layouts)
    catalog = book.catalog()
    return catalog, (*book.names_unmatched(whole), *book.conflicts(catalog))


class _Book:
    """The names of both sides while the catalog is made."""

    def __init__(self, trainer_layouts: Sequence[Layout], rollout_layouts: Mapping[RolloutRank, Layout]) -> None:
        self._trainers = trainer_layouts
        self._rollouts = rollout_layouts
        self._aliases = _Aliases(pair for layout in trainer_layouts for pair in layout.aliases)
        self._source_tables = distinct_tables(trainer_layouts)
        self._number: dict[str, int] = {}  # by canonical name
        self._info: list[TensorInfo] = []
        self._suspect: set[int] = set()
        self._said: dict[int, dict[tuple[tuple[int, ...], str], tuple[TensorInfo, list[Who]]]] = {}
        self._source_numbers = self._number_sources()
        self._sources = len(self._info)
        self._known_to_engines: set[int] = set()  # by any name, kept or not
        self._kept: set[str] = set()
        self._targets: set[int] = set()
        self._target_numbers = self._number_targets()
        self._unused_whole, self._unused_rows = self._declared_unused()

    def _enter(self, name: str, info: TensorInfo) -> int:
        number = self._number.setdefault(name, len(self._info))
        if number == len(self._info):
            self._info.append(info)
        elif (first := self._info[number]) is not info and (first.shape != info.shape or first.dtype != info.dtype):
            self._suspect.add(number)
        return number

    def _number_sources(self) -> tuple[Int64, ...]:
        numbers: list[Int64] = [np.zeros(0, np.int64)] * len(self._trainers)
        for table, places in self._source_tables:
            column = np.array([self._enter(self._aliases.resolve(t.name), t) for t in table], np.int64)
            for place in places:
                numbers[place] = column
        return tuple(numbers)

    def _number_targets(self) -> dict[RolloutRank, Int64]:
        """Number the tensors of each rollout rank; ranks that say the same are numbered once."""
        ranks, layouts = list(self._rollouts), list(self._rollouts.values())
        numbers = {}
        for _, places in distinct_tables(layouts):
            alike: dict[tuple[object, object], Int64] = {}
            for place in places:
                layout = layouts[place]
                said = (layout.aliases, layout.kept)
                if said not in alike:
                    alike[said] = self._number_target(layout)
                numbers[ranks[place]] = alike[said]
        return {rank: numbers[rank] for rank in ranks}

    def _number_target(self, layout: Layout) -> Int64:
        aliases = _Aliases(layout.aliases)
        kept = {aliases.resolve(name) for name in layout.kept}
        column: Int64 = np.full(len(layout.tensors), KEPT, np.int64)
        for row, info in enumerate(layout.tensors):
            group = aliases.group(info.name)
            sources = [n for name in group if (n := self._source_number(name)) is not None]
            self._known_to_engines.update(sources)
            if group[0] in kept:
                self._kept.add(group[0])
                continue
            column[row] = self._enter(self._info_name(sources[0]) if sources else group[0], info)
            self._targets.add(int(column[row]))
        self._known_to_engines.update(n for k in layout.kept if (n := self._source_number(k)) is not None)
        self._kept.update(kept)
        return column

    def _source_number(self, name: str) -> int | None:
        number = self._number.get(self._aliases.resolve(name))
        return number if number is not None and number < self._sources else None

    def _info_name(self, number: int) -> str:
        return self._aliases.resolve(self._info[number].name)

    def _declared_unused(self) -> tuple[frozenset[int], dict[int, tuple[RowRange, ...]]]:
        whole: set[int] = set()
        rows: dict[int, set[RowRange]] = {}
        for layout in self._trainers:
            for unused in layout.unused:
                number = self._source_number(unused.name)
                if number is None:
                    continue
                if unused.rows is None:
                    whole.add(number)
                else:
                    rows.setdefault(number, set()).add(unused.rows)
        ordered = {n: tuple(sorted(r, key=lambda x: (x.start, x.end))) for n, r in rows.items()}
        return frozenset(whole), ordered

    def catalog(self) -> Catalog:
        numbers = range(len(self._info))
        known = np.array([n in self._known_to_engines for n in numbers], np.bool_)
        sound = np.array([n not in self._suspect or self._only_trimmed(n) for n in numbers], np.bool_)
        return Catalog(
            tensors=tuple(self._info),
            itemsize=np.array([dtype_named(t.dtype).nbytes for t in self._info], np.int64),
            sound=sound,
            owned=np.arange(len(self._info)) < self._sources,
            known=known,
            source_numbers=self._source_numbers,
            target_numbers=self._target_numbers,
            unused_whole=self._unused_whole,
            unused_rows=self._unused_rows,
        )

    def _described(self, number: int) -> list[tuple[TensorInfo, list[Who]]]:
        """Return each different description of a suspect tensor with those who make it."""
        if not self._said:
            for table, places in self._source_tables:
                self._note(table, self._source_numbers[places[0]], [TrainerRank(r) for r in places])
            for rank, layout in self._rollouts.items():
                self._note(layout.tensors, self._target_numbers[rank], [rank])
        return list(self._said[number].values())

    def _note(self, table: Table, numbers: Int64, who: Sequence[Who]) -> None:
        for info, number in zip(table, numbers.tolist(), strict=True):
            if number in self._suspect:
                ways = self._said.setdefault(number, {})
                ways.setdefault((info.shape, info.dtype), (info, []))[1].extend(who)

    def _only_trimmed(self, number: int) -> bool:
        """Say whether ranks differ in nothing but trailing rows that the trainer declares unused."""
        if number >= self._sources:
            return False
        source = self._info[number]
        for info, who in self._described(number):
            if info.shape == source.shape and info.dtype == source.dtype:
                continue
            trainers = any(not isinstance(w, RolloutRank) for w in who)
            if trainers or not self._trims(number, source, info):
                return False
        return True

    def _trims(self, number: int, source: TensorInfo, target: TensorInfo) -> bool:
        if not source.shape or len(source.shape) != len(target.shape) or source.dtype != target.dtype:
            return False
        if source.shape[1:] != target.shape[1:] or target.shape[0] > source.shape[0]:
            return False
        end = target.shape[0]
        for rows in self._unused_rows.get(number, ()):
            if rows.start <= end < rows.end:
                end = rows.end
        return end >= source.shape[0] or number in self._unused_whole

    def conflicts(self, catalog: Catalog) -> Iterator[DescriptionConflict]:
        """Return the tensors on whose description ranks disagree, those of one way as one.

        A wrong element type is wrong for every tensor of a model.
        """
        ways: dict[tuple[object, ...], list[DescriptionConflict]] = {}
        for conflict in self._each_conflict(catalog):
            ways.setdefault(conflict.way, []).append(conflict)
        for first, *more in ways.values():
            yield first.together_with(tuple(conflict.parameter for conflict in more))

    def _each_conflict(self, catalog: Catalog) -> Iterator[DescriptionConflict]:
        for number in sorted(self._suspect):
            if catalog.sound[number]:
                continue
            said = sorted(self._described(number), key=lambda d: -len(d[1]))
            yield DescriptionConflict(
                self._info[number].name,
                tuple(
                    Description(
                        info.shape,
                        info.dtype,
                        tuple(int(w) for w in who if not isinstance(w, RolloutRank)),
                        tuple(str(w) for w in who if isinstance(w, RolloutRank)),
                    )
                    for info, who in said
                ),
                self._unused_rows.get(number, ()),
            )

    def names_unmatched(self, whole: bool) -> Iterator[NamesUnmatched]:
        """Return the names that only one side knows, if there are any."""
        free = [n for n in range(self._sources) if n not in self._known_to_engines] if whole else []
        unused = [n for n in free if n in self._unused_whole or self._all_rows_unused(n)]
        lonely = sorted(self._info[n].name for n in set(free) - set(unused))
        known = len(self._known_to_engines)
        missing = sorted(self._info[n].name for n in self._targets if n >= self._sources)
        if lonely or missing:
            fed = len([n for n in self._targets if n < self._sources])
            yield NamesUnmatched(
                unmatched_source=tuple(lonely),
                unmatched_target=tuple(missing),
                source_total=known + len(unused) + len(lonely),
                source_matched=known,
                source_unused=len(unused),
                target_total=fed + len(missing) + len(self._kept),
                target_matched=fed,
                target_kept=len(self._kept),
            )

    def _all_rows_unused(self, number: int) -> bool:
        shape, end = self._info[number].shape, 0
        for rows in self._unused_rows.get(number, ()):
            if rows.start <= end < rows.end:
                end = rows.end
        return bool(shape) and end >= shape[0]
