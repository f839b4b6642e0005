"""Experts that lie in one parameter, one after another, and where an expert's tensors are in the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from weightd.core.layout.algebra import compose, embed, transpose
from weightd.core.layout.boxes import Pieces, box, join, moved, no_pieces
from weightd.core.layout.reshape import split_dim
from weightd.trainer_hooks.adapters.megatron.place import DoesNotFit, Expertise, Held, Partition, Ring
from weightd.trainer_hooks.adapters.megatron.splits import Shape, Split
from weightd.trainer_hooks.shards import Part

EXPERT = "{expert}"
"""Stands for an expert's global number in a name."""


@dataclass(frozen=True, slots=True)
class Experts:
    """All local experts in one parameter, stacked: [local experts, …], or with a dimension that counts all of them.

    Attributes:
        split: How one expert is cut; its names contain ``{expert}``, or name tensors that the checkpoint stacks, too.
        transposed: Each expert is stored transposed: [hidden, 2 f / size] where the checkpoint has [2 f, hidden].
        flat: None for a parameter whose dimension 0 is the expert; otherwise the dimension that is as long as those of
            all local experts together, although they lie one after another in memory: 1 for ``weight1`` and 0 for
            ``weight2`` of Megatron's ``GroupedMLP``.

    Source: megatron-core 0.16 ``transformer/moe/experts.py``, which views ``weight1`` as (local experts, hidden, -1).
    """

    split: Split
    transposed: bool = False
    flat: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Those of one expert."""
        return self.split.names

    def held(self, shape: Shape, ring: Ring, experts: Expertise) -> Held:
        """Return what the local experts hold, each of its own tensors or all of stacked ones."""
        stored = self._stored(shape, experts.local)
        one = stored[::-1] if self.transposed else stored
        inner = self.split.held(one, ring, experts)
        found: dict[str, tuple[Shape, list[Pieces]]] = {}
        for part in inner.parts:
            pieces = compose(part.pieces, transpose(box(stored), (1, 0)), one) if self.transposed else part.pieces
            for e in range(experts.local):
                placed = Part(part.name, part.shape, moved(pieces, e * prod(stored)))
                named = of_expert(placed, experts.first + e, experts.total)
                found.setdefault(named.name, (named.shape, []))[1].append(named.pieces)
        parts = tuple(Part(name, full, join(some, len(full))) for name, (full, some) in found.items())
        return Held(parts, inner.padding * experts.local)

    def partition(self, shape: Shape) -> Partition | None:
        """Return that of one expert, for the dimensions of the stack."""
        one = self.split.partition(shape if self.flat is not None else shape[1:])
        if one is None:
            return None
        dim = 1 - one.dim if self.transposed else one.dim
        return Partition(dim if self.flat is not None else dim + 1, tuple(dict.fromkeys((1, *one.strides))))

    def _stored(self, shape: Shape, local: int) -> Shape:
        """Return the shape in which one expert is stored."""
        if self.flat is None:
            if len(shape) < 2 or shape[0] != local:
                raise DoesNotFit(f"dimension 0 of {shape} is not this rank's {local} experts")
            stored = shape[1:]
        else:
            if not 0 <= self.flat < len(shape) or shape[self.flat] % local:
                raise DoesNotFit(f"dimension {self.flat} of {shape} is not {local} experts of equal length")
            stored = tuple(n // local if d == self.flat else n for d, n in enumerate(shape))
        if self.transposed and len(stored) != 2:
            raise DoesNotFit(f"an expert of shape {stored} cannot be stored transposed")
        return stored


def of_expert(part: Part, number: int, count: int) -> Part:
    """Return the part of one expert's tensor under the expert's name, or inside of the checkpoint's stack.

    Args:
        part: What is held of the expert; its name is a template.
        number: The expert's global number.
        count: Experts of the whole model.
    """
    if EXPERT in part.name:
        return Part(part.name.replace(EXPERT, str(number)), part.shape, part.pieces)
    shape = (count, *part.shape)
    if not len(part.pieces):
        return Part(part.name, shape, no_pieces(len(shape)))
    if not part.shape:
        raise DoesNotFit("a 0-d tensor of an expert cannot be part of a stack")
    rows = part.shape[0]
    return Part(part.name, shape, split_dim(embed(part.pieces, 0, number * rows), 0, rows))
