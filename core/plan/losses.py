"""What is lost when a trainer rank dies after the plan: the numbers of the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from weightd.core.errors import Refused
from weightd.core.layout.columns import Layout
from weightd.core.plan.proof import prove_coverage
from weightd.core.plan.violations import ElementsUncovered

if TYPE_CHECKING:
    from weightd.core.layout.boxes import Mask
    from weightd.core.plan.proof import CoverageProof
    from weightd.core.units import TrainerRank


@dataclass(frozen=True, slots=True)
class ElementsLost:
    """What nobody owns any more once a trainer rank is gone.

    Attributes:
        rank: The trainer rank.
        held: Elements of all its pieces.
        lost: Different elements that a rollout rank needs and no other trainer rank owns; 0 where all that it held
            has replicas or is needed by nobody.
        nbytes: Bytes of ``lost`` elements.
        violations: The same by parameter; their counts add up to ``lost``.
    """

    rank: TrainerRank
    held: int
    lost: int
    nbytes: int
    violations: tuple[ElementsUncovered, ...]


def elements_lost(proof: CoverageProof, rank: TrainerRank) -> ElementsLost:
    """Return what a proof loses with one trainer rank.

    Args:
        proof: A proof that held while the rank lived.
        rank: The rank that died.
    """
    layouts = list(proof.trainer_layouts)
    dead = layouts[rank]
    held = int(np.prod(dead.extent, axis=1, dtype=np.int64).sum())
    layouts[rank] = _without_pieces(dead)
    violations: tuple[ElementsUncovered, ...] = ()
    try:
        prove_coverage(proof.topology, layouts, proof.rollout_layouts, only=proof.ranks)
    except Refused as refused:
        violations = tuple(v for v in refused.violations if isinstance(v, ElementsUncovered))
    return ElementsLost(rank, held, sum(v.count for v in violations), sum(v.nbytes for v in violations), violations)


def _without_pieces(layout: Layout) -> Layout:
    """Return the layout of a rank that knows the same tensors and holds none of them."""
    none: Mask = np.zeros(layout.pieces, np.bool_)
    return Layout(
        layout.tensors,
        layout.buffers,
        layout.tensor[none],
        layout.start[none],
        layout.extent[none],
        layout.step[none],
        layout.buffer[none],
        layout.offset[none],
        layout.stride[none],
        layout.aliases,
        layout.unused,
        layout.kept,
    )
