"""The element proof: every element that a rollout rank needs has exactly one owner, and nothing is left over.

``prove_coverage`` looks at all parameters of all ranks before it raises, so
that one refusal names everything.  It is the only maker of ``CoverageProof``,
and the planner accepts nothing less.

What is shown, in whole numbers:

- target pieces lie in their buffers and share no memory;
- every needed element is owned; equal boxes on several ranks are replicas, of
  which the planner picks one; different boxes that share an element are refused;
- every owned element is needed, or declared unused; every name is known to both
  sides, or declared unused or kept.

A reserved trainer rank owns its shards like any other.  A rank without a piece
is legal and counted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weightd.core.errors import InternalInvariantBroken, Refused, WeightdError
from weightd.core.layout.boxes import Mask, Pieces, pieces_of
from weightd.core.layout.columns import Int64, Layout
from weightd.core.layout.digest import layout_digest
from weightd.core.plan.catalog import Catalog, build_catalog
from weightd.core.plan.court import Court, RankTotals
from weightd.core.plan.holdings import Boxes, gather, into_boxes
from weightd.core.plan.storage import outside_faults, overlap_faults
from weightd.core.roster.topology import Topology
from weightd.core.units import RolloutRank

EFFECT = "nothing was planned or sent; engines keep what they serve"


@dataclass(frozen=True, slots=True)
class SourceTotals:
    """Different elements of the trainer; ``owned = used + declared`` where all ranks were looked at."""

    owned: int
    used: int
    declared: int


_WITNESS = object()


@dataclass(frozen=True, slots=True, eq=False)
class CoverageProof:
    """That every element needed has its owners.  Only ``prove_coverage`` makes one.

    Attributes:
        topology: The ranks and where they are.
        trainer_layouts: Layout of trainer rank r at position r.
        rollout_layouts: Layouts of the rollout ranks that were proved.
        catalog: The numbering of tensors.
        totals: Per rollout rank, what it needs.
        source: What the trainer owns.
        whole: Whether all rollout ranks were looked at, so that unused elements are ruled out, too.
        rollout_digests: Digests of the rollout ranks' layouts.
    """

    topology: Topology
    trainer_layouts: tuple[Layout, ...]
    rollout_layouts: Mapping[RolloutRank, Layout]
    catalog: Catalog
    totals: Mapping[RolloutRank, RankTotals]
    source: SourceTotals
    whole: bool
    rollout_digests: Mapping[RolloutRank, str]
    _witness: object

    def __post_init__(self) -> None:
        if self._witness is not _WITNESS:
            raise InternalInvariantBroken("proof", "a CoverageProof was made without prove_coverage")

    @property
    def ranks(self) -> tuple[RolloutRank, ...]:
        """The rollout ranks that were proved, in the topology's order."""
        return tuple(self.rollout_layouts)

    def needs(self, ranks: Iterable[RolloutRank]) -> tuple[Pieces, Int64]:
        """Return what some ranks need and do not keep, and each piece's position in ``ranks``."""
        order = list(ranks)
        layouts = [self.rollout_layouts[r] for r in order]
        return gather(layouts, [self.catalog.target_numbers[r] for r in order], self._all())

    def sources(self, wanted: Mask) -> Boxes:
        """Return the source's boxes of wanted tensors, shape (T,), with their holders."""
        return into_boxes(*gather(self.trainer_layouts, self.catalog.source_numbers, wanted))

    def _all(self) -> Mask:
        return np.ones(len(self.catalog.tensors), np.bool_)


def prove_coverage(
    topology: Topology,
    trainer_layouts: Sequence[Layout],
    rollout_layouts: Mapping[RolloutRank, Layout],
    *,
    only: Collection[RolloutRank] | None = None,
) -> CoverageProof:
    """Show that every element every rollout rank needs has exactly one owner, replicas counted as one.

    Args:
        topology: The ranks and where they are.
        trainer_layouts: Layout of trainer rank r at position r; reserved ranks included.
        rollout_layouts: Layout of every rollout rank of the topology.
        only: Prove these ranks alone, for a node that plans for itself: what is unused, and names that only the
            trainer knows, are then not judged.

    Returns:
        The proof.  The only constructor of ``CoverageProof``.

    Raises:
        Refused: Holds all violations of all ranks: E_NAME, E_DESCRIPTION, E_OUTSIDE_BUFFER, E_TARGET_OVERLAP,
            E_ELEM_UNCOVERED, E_ELEM_AMBIGUOUS, E_SRC_UNUSED.
        InternalInvariantBroken: Layouts and topology do not list the same ranks.
    """
    ranks = [r for r in topology.rollout_ranks() if only is None or r in only]
    if len(trainer_layouts) != len(topology.trainers) or any(r not in rollout_layouts for r in ranks):
        facts = f"{len(trainer_layouts)} layouts for {len(topology.trainers)} trainer ranks, "
        facts += f"{sum(r in rollout_layouts for r in ranks)} for {len(ranks)} rollout ranks"
        raise InternalInvariantBroken("one layout per rank", facts)
    layouts = {r: rollout_layouts[r] for r in ranks}
    catalog, violations = build_catalog(trainer_layouts, layouts, whole=only is None)
    court = Court(catalog, trainer_layouts, layouts, whole=only is None)
    faults = [*violations, *_storage_faults(trainer_layouts, layouts, catalog), *court.sit()]
    if faults:
        subject = f"coverage of {len(ranks)} rollout ranks by {len(trainer_layouts)} trainer ranks"
        raise Refused(subject, tuple(faults), EFFECT)
    return CoverageProof(
        topology=topology,
        trainer_layouts=tuple(trainer_layouts),
        rollout_layouts=layouts,
        catalog=catalog,
        totals=court.rank_totals(),
        source=SourceTotals(court.owned, court.used, court.declared),
        whole=only is None,
        rollout_digests={r: layout_digest(layout) for r, layout in layouts.items()},
        _witness=_WITNESS,
    )


def _storage_faults(
    trainer_layouts: Sequence[Layout], layouts: Mapping[RolloutRank, Layout], catalog: Catalog
) -> Iterator[WeightdError]:
    """Pieces outside their buffers on either side, and target pieces that share memory."""
    for r, layout in enumerate(trainer_layouts):
        yield from outside_faults(layout, pieces_of(layout), f"trainer rank {r}")
    for rank, layout in layouts.items():
        written = pieces_of(layout)
        written = written.take(catalog.target_numbers[rank][written.tensor] >= 0)
        outside = list(outside_faults(layout, written, str(rank)))
        yield from outside
        if not outside:  # places beyond a buffer say nothing about what is shared inside
            yield from overlap_faults(layout, written, str(rank))
