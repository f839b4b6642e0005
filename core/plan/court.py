"""Judges every tensor of a proof, a block of them at a time, and says what each violates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from weightd.core.errors import WeightdError
from weightd.core.layout.boxes import Mask, Pieces
from weightd.core.layout.columns import Int64, Layout
from weightd.core.plan.catalog import Catalog
from weightd.core.plan.holdings import Boxes, gather, into_boxes
from weightd.core.plan.verdict import Cuts, Verdict, judge
from weightd.core.plan.violations import Claim, ElementsAmbiguous, ElementsUncovered, Region, SourceUnused
from weightd.core.units import RolloutRank

BLOCK_PIECES = 1 << 19
"""Source pieces that are judged together: about 100 MiB of columns, whatever the size of the model."""


@dataclass(frozen=True, slots=True)
class RankTotals:
    """What one rollout rank needs.

    Attributes:
        pieces: Number of its pieces.
        elements: Elements of all of them.
        nbytes: Bytes of all of them; the plan of the rank copies exactly so many.
    """

    pieces: int
    elements: int
    nbytes: int


class Court:
    """Judges all tensors, a block of them at a time."""

    def __init__(
        self,
        catalog: Catalog,
        trainer_layouts: Sequence[Layout],
        rollout_layouts: Mapping[RolloutRank, Layout],
        whole: bool,
    ) -> None:
        self._catalog = catalog
        self._trainers = trainer_layouts
        self._rollouts = rollout_layouts
        self._whole = whole
        self._verdicts: dict[tuple[object, ...], Verdict] = {}
        self.owned = self.used = self.declared = 0

    def sit(self) -> Iterator[WeightdError]:
        """Return what the elements violate, and count them on the way."""
        for block in self._blocks():
            sources = into_boxes(*gather(self._trainers, self._catalog.source_numbers, block))
            numbers = [self._catalog.target_numbers[r] for r in self._rollouts]
            targets = into_boxes(*gather(list(self._rollouts.values()), numbers, block))
            yield from self._judge_block(np.flatnonzero(block), sources, targets)

    def rank_totals(self) -> dict[RolloutRank, RankTotals]:
        """Return what each rollout rank needs."""
        totals = {}
        for rank, layout in self._rollouts.items():
            number = self._catalog.target_numbers[rank][layout.tensor]
            fed = number >= 0
            numel = np.prod(layout.extent[fed], axis=1, dtype=np.int64)
            nbytes = int((numel * self._catalog.itemsize[number[fed]]).sum())
            totals[rank] = RankTotals(int(fed.sum()), int(numel.sum()), nbytes)
        return totals

    def _to_judge(self) -> Mask:
        """Tensors that both sides know and describe alike, and those that leave a gap in a buffer that is fed."""
        catalog = self._catalog
        chosen = catalog.owned & catalog.known
        if not self._whole:
            needed = np.zeros(len(chosen), np.bool_)
            for column in catalog.target_numbers.values():
                needed[column[column >= 0]] = True
            chosen &= needed
        for rank, layout in self._rollouts.items():
            number = catalog.target_numbers[rank][layout.tensor]
            written = np.flatnonzero(number >= 0)
            number, buffer = number[written], layout.buffer[written]
            owned = catalog.owned[number]
            if not owned.all():
                chosen[number[~owned & np.isin(buffer, buffer[owned])]] = True
        result: Mask = chosen & catalog.sound
        return result

    def _blocks(self) -> Iterator[Mask]:
        """Return the tensors to judge, in blocks of about ``BLOCK_PIECES`` source pieces."""
        chosen = self._to_judge()
        pieces: Int64 = np.zeros(len(chosen), np.int64)
        for layout, numbers in zip(self._trainers, self._catalog.source_numbers, strict=True):
            # A rank lists a tensor once, but aliases of one memory share a number.
            np.add.at(pieces, numbers, np.bincount(layout.tensor, minlength=len(numbers)))
        block = np.cumsum(np.where(chosen, pieces, 0)) // BLOCK_PIECES
        for b in np.unique(block[chosen]).tolist():
            yield chosen & (block == b)

    def _judge_block(self, tensors: Int64, sources: Boxes, targets: Boxes) -> Iterator[WeightdError]:
        has, wants = sources.representatives, targets.representatives
        has_rows = np.searchsorted(has.tensor, [tensors, tensors + 1]).T.tolist()
        wants_rows = np.searchsorted(wants.tensor, [tensors, tensors + 1]).T.tolist()
        width = max(has.ndim, wants.ndim)
        for number, (a, b), (c, d) in zip(tensors.tolist(), has_rows, wants_rows, strict=True):
            owned, needed = _cuts(has, a, b, width), _cuts(wants, c, d, width)
            if not len(owned) and not len(needed):
                continue
            verdict = self._verdict(number, owned, needed)
            self.owned += verdict.owned
            self.used += verdict.used
            self.declared += verdict.declared
            if verdict.missing or verdict.ambiguous or (verdict.unused and self._whole):
                yield from self._charges(number, verdict, (a, sources, owned), (c, targets, needed))

    def _verdict(self, number: int, owned: Cuts, needed: Cuts) -> Verdict:
        shape = self._catalog.tensors[number].shape
        rows, whole = self._catalog.unused_rows.get(number, ()), number in self._catalog.unused_whole
        cut = (*_key(owned), *_key(needed), shape, rows, whole)
        verdict = self._verdicts.get(cut)
        if verdict is None:
            verdict = self._verdicts[cut] = judge(owned, needed, shape, rows, whole)
        return verdict

    def _charges(
        self,
        number: int,
        verdict: Verdict,
        source: tuple[int, Boxes, Cuts],
        target: tuple[int, Boxes, Cuts],
    ) -> Iterator[WeightdError]:
        """Return what a verdict violates; each side comes as (its first box, all boxes, its cuts)."""
        info = self._catalog.tensors[number]
        numel = prod(info.shape)
        begin, sources, owned = source

        def owners(rows: Iterable[int]) -> tuple[int, ...]:
            return tuple(sorted({r for row in rows for r in sources.holders_of(begin + row)}))

        if verdict.missing:
            first, regions, left = _narrowed(verdict.missing_regions(), len(info.shape))
            offset, targets, needed = target
            order = list(self._rollouts)
            needing = {p for row in verdict.touching(needed, "missing") for p in targets.holders_of(offset + row)}
            yield ElementsUncovered(
                info.name,
                info.shape,
                info.dtype,
                numel,
                verdict.needed,
                verdict.used,
                verdict.missing,
                verdict.missing * int(self._catalog.itemsize[number]),
                first,
                regions,
                left,
                owners(range(len(owned))),
                tuple(str(order[p]) for p in sorted(needing)),
            )
        if verdict.ambiguous:
            first, regions, left = _narrowed(verdict.ambiguous_regions(), len(info.shape))
            claims = [row for row in range(len(owned)) if _holds(owned, row, first)]
            yield ElementsAmbiguous(
                info.name,
                info.shape,
                numel,
                verdict.ambiguous,
                first,
                regions,
                left,
                owners(verdict.touching(owned, "ambiguous")),
                tuple(Claim(_region(owned, row, len(info.shape)), owners([row])) for row in claims),
            )
        if verdict.unused and self._whole:
            first, regions, left = _narrowed(verdict.unused_regions(), len(info.shape))
            yield SourceUnused(
                info.name,
                info.shape,
                numel,
                verdict.owned,
                verdict.used,
                verdict.declared,
                verdict.unused,
                first,
                regions,
                left,
                owners(verdict.touching(owned, "unused")),
            )


def _cuts(pieces: Pieces, begin: int, end: int, width: int) -> Cuts:
    """Return some rows of pieces as wide as both sides are."""
    missing = width - pieces.ndim
    rows = slice(begin, end)
    if not missing:
        return Cuts(pieces.start[rows], pieces.extent[rows], pieces.step[rows])

    def wide(column: Int64, fill: int) -> Int64:
        return np.pad(column[rows], ((0, 0), (0, missing)), constant_values=fill)

    return Cuts(wide(pieces.start, 0), wide(pieces.extent, 1), wide(pieces.step, 1))


def _key(cuts: Cuts) -> tuple[int, bytes, bytes, bytes]:
    return len(cuts), cuts.start.tobytes(), cuts.extent.tobytes(), cuts.step.tobytes()


def _region(cuts: Cuts, row: int, n: int) -> Region:
    start, extent, step = (c[row, :n].tolist() for c in (cuts.start, cuts.extent, cuts.step))
    return Region(tuple(start), tuple(extent), tuple(step))


def _narrowed(
    found: tuple[tuple[int, ...], tuple[Region, ...], int], n: int
) -> tuple[tuple[int, ...], tuple[Region, ...], int]:
    """Return index and regions in as many dimensions as the tensor has."""
    first, regions, left = found
    return first[:n], tuple(Region(r.start[:n], r.extent[:n], r.step[:n]) for r in regions), left


def _holds(cuts: Cuts, row: int, index: tuple[int, ...]) -> bool:
    """Say whether a box holds an element."""
    n = len(index)
    apart = np.array(index, np.int64) - cuts.start[row, :n]
    inside = (apart >= 0) & (apart <= (cuts.extent[row, :n] - 1) * cuts.step[row, :n])
    return bool((inside & (apart % cuts.step[row, :n] == 0)).all())
