"""What the element proof and the planner refuse, each with numbers that add up.

Every class is one line of a report: ``prove_coverage`` collects all of them, of
all parameters and ranks, into one ``Refused``.  Regions count logical elements
of the named tensor; ranks of engines are written ``E0[3]``, ranks of the
trainer are numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import msgspec

from weightd.core.errors import SHOWN, Story, WeightdError, binary_size, ranges, some
from weightd.core.layout.columns import RowRange


class Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A box of a tensor, as a report names it.

    Attributes:
        start: First index per dimension.
        extent: Number of indices per dimension.
        step: Distance of neighbouring indices.
    """

    start: tuple[int, ...]
    extent: tuple[int, ...]
    step: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the region."""
        n = 1
        for e in self.extent:
            n *= e
        return n

    def text(self, shape: tuple[int, ...]) -> str:
        """Return the region for a text; whole trailing dimensions are left out.

        >>> Region((4, 0), (2, 3), (1, 1)).text((18, 3)), Region((4, 1), (2, 2), (3, 1)).text((18, 3))
        ('rows [4, 6)', '[4:8:3, 1:3]')
        >>> Region((), (), ()).text(()), Region((0, 0), (18, 3), (1, 1)).text((18, 3))
        ('its one element', 'all of it')
        """
        if not shape:
            return "its one element"
        whole = [
            s == 0 and e == n and k == 1 for s, e, k, n in zip(self.start, self.extent, self.step, shape, strict=True)
        ]
        if all(whole):
            return "all of it"
        if all(whole[1:]) and self.step[0] == 1:
            return f"rows [{self.start[0]}, {self.start[0] + self.extent[0]})"
        parts = []
        for s, e, k in zip(self.start, self.extent, self.step, strict=True):
            end = s + (e - 1) * k + 1
            parts.append(f"{s}:{end}:{k}" if k > 1 else f"{s}:{end}")
        return f"[{', '.join(parts)}]"


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A box and the trainer ranks that hold exactly it."""

    region: Region
    owners: tuple[int, ...]


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One shape and dtype of a name, and who states it."""

    shape: tuple[int, ...]
    dtype: str
    trainer_ranks: tuple[int, ...]
    rollout_ranks: tuple[str, ...]


def _where(regions: tuple[Region, ...], left_out: int, shape: tuple[int, ...], first: tuple[int, ...]) -> str:
    """Return regions for a text, with the number of cells that are not listed, and the first index."""
    listed = some([r.text(shape) for r in regions])
    more = f" and {left_out} more cells" if left_out else ""
    return f"{listed}{more}; first index {_numbers(first)}"


def _trainers(ranks_: tuple[int, ...]) -> str:
    """Return trainer ranks for a text."""
    return f"trainer rank{'' if len(ranks_) == 1 else 's'} {ranges(ranks_)}"


def _numbers(indices: tuple[int, ...]) -> str:
    """Return a tuple of numbers as Python writes it."""
    return f"({', '.join(map(str, indices))}{',' if len(indices) == 1 else ''})"


@dataclass(eq=False)
class ElementError(WeightdError):
    """Base of what the element proof refuses."""

    code: ClassVar[str] = "E_ELEMENT"


@dataclass(eq=False)
class ElementsUncovered(ElementError):
    """Elements that rollout ranks need and no trainer rank owns.

    Attributes:
        parameter: Name of the tensor.
        shape: Its logical shape.
        dtype: Its element type.
        numel: Elements of the shape.
        needed: Different elements that any rollout rank needs.
        covered: Those of them that have an owner; ``covered + count = needed``.
        count: Those that have none.
        nbytes: Bytes of ``count`` elements.
        first_index: The first of them, in row-major order.
        ranges: Boxes that hold exactly them, as far as listed.
        ranges_left_out: Further boxes.
        owners: Trainer ranks that own other elements of the tensor.
        needed_by: Rollout ranks that need at least one of the missing elements.
    """

    code: ClassVar[str] = "E_ELEM_UNCOVERED"
    parameter: str
    shape: tuple[int, ...]
    dtype: str
    numel: int
    needed: int
    covered: int
    count: int
    nbytes: int
    first_index: tuple[int, ...]
    ranges: tuple[Region, ...]
    ranges_left_out: int
    owners: tuple[int, ...]
    needed_by: tuple[str, ...]

    def story(self) -> Story:
        """Return the text; covered and missing add up to what is needed (identity I4)."""
        of = f"{self.needed}" if self.needed == self.numel else f"{self.needed} needed (of {self.numel})"
        owned = f"the other {self.covered} on {_trainers(self.owners)}" if self.owners else "no rank owns any"
        return Story(
            what=f"{self.parameter} {_numbers(self.shape)} {self.dtype}: {self.count} of {of} elements "
            f"({self.nbytes} bytes) have no owner: {self.covered} covered + {self.count} missing = {self.needed}",
            which=_where(self.ranges, self.ranges_left_out, self.shape, self.first_index),
            who=f"needed by {some(self.needed_by)}; {owned}",
            next="publish these elements, or declare the parameter kept on the engine",
        )


@dataclass(eq=False)
class ElementsAmbiguous(ElementError):
    """Elements that lie in different boxes of the source, so that their owner is not clear.

    Attributes:
        parameter: Name of the tensor.
        shape: Its logical shape.
        numel: Elements of the shape.
        count: Elements with more than one owner.
        first_index: The first of them, in row-major order.
        ranges: Boxes that hold exactly them, as far as listed.
        ranges_left_out: Further boxes.
        owners: Trainer ranks that own any of them.
        claims: The boxes that hold the first of them, with their owners.
    """

    code: ClassVar[str] = "E_ELEM_AMBIGUOUS"
    parameter: str
    shape: tuple[int, ...]
    numel: int
    count: int
    first_index: tuple[int, ...]
    ranges: tuple[Region, ...]
    ranges_left_out: int
    owners: tuple[int, ...]
    claims: tuple[Claim, ...]

    def story(self) -> Story:
        """Return the text; it names the boxes that hold the first such element."""
        claims = [f"{c.region.text(self.shape)} on {_trainers(c.owners)}" for c in self.claims]
        return Story(
            what=f"{self.parameter} {_numbers(self.shape)}: {self.count} of {self.numel} elements have several owners "
            "that are no replicas of each other",
            which=_where(self.ranges, self.ranges_left_out, self.shape, self.first_index),
            who=f"first index: {'; '.join(claims)}",
            next="replicas are equal boxes: describe the same box on each rank that holds it, or cut the boxes apart",
        )


@dataclass(eq=False)
class SourceUnused(ElementError):
    """Elements that a trainer rank owns, nobody takes and nobody declared unused.

    Attributes:
        parameter: Name of the tensor.
        shape: Its shape on the trainer's side.
        numel: Elements of the shape.
        owned: Different elements that any trainer rank owns.
        used: Those of them that a rollout rank takes.
        declared: Those that nobody takes and that are declared unused.
        count: The rest; ``used + declared + count = owned``.
        first_index: The first of them, in row-major order.
        ranges: Boxes that hold exactly them, as far as listed.
        ranges_left_out: Further boxes.
        owners: Trainer ranks that own any of them.
    """

    code: ClassVar[str] = "E_SRC_UNUSED"
    parameter: str
    shape: tuple[int, ...]
    numel: int
    owned: int
    used: int
    declared: int
    count: int
    first_index: tuple[int, ...]
    ranges: tuple[Region, ...]
    ranges_left_out: int
    owners: tuple[int, ...]

    def story(self) -> Story:
        """Return the text; used, declared and left over add up to what is owned."""
        return Story(
            what=f"{self.parameter} {_numbers(self.shape)}: {self.count} of {self.numel} elements are owned "
            f"and taken by nobody: {self.used} used + {self.declared} declared unused "
            f"+ {self.count} unused = {self.owned}",
            which=_where(self.ranges, self.ranges_left_out, self.shape, self.first_index),
            who=f"owned by {_trainers(self.owners)}",
            next="declare the rows or the name unused on the trainer (frozen, tied alias, trimmed vocabulary, MTP)",
        )


@dataclass(eq=False)
class NamesUnmatched(ElementError):
    """Names that only one side knows.

    Attributes:
        unmatched_source: Names of the trainer that no rollout rank knows and that are not declared unused.
        unmatched_target: Names of rollout ranks that no trainer rank knows and that are not declared kept.
        source_total: Different tensors of the trainer.
        source_matched: Those known to a rollout rank.
        source_unused: Those declared unused as a whole; matched + unused + unmatched = total.
        target_total: Different tensors of the rollout ranks.
        target_matched: Those known to the trainer.
        target_kept: Those that their engines keep; matched + kept + unmatched = total.
    """

    code: ClassVar[str] = "E_NAME"
    unmatched_source: tuple[str, ...]
    unmatched_target: tuple[str, ...]
    source_total: int
    source_matched: int
    source_unused: int
    target_total: int
    target_matched: int
    target_kept: int

    def story(self) -> Story:
        """Return the text; on each side the three kinds of names add up."""
        s, t = len(self.unmatched_source), len(self.unmatched_target)
        return Story(
            what=f"{s} name{'' if s == 1 else 's'} only on the trainer, {t} only on the engines",
            which=f"trainer: {self.source_total} = {self.source_matched} matched "
            f"+ {self.source_unused} declared unused + {s} unmatched {some(self.unmatched_source)}",
            who=f"engines: {self.target_total} = {self.target_matched} matched + {self.target_kept} kept "
            f"+ {t} unmatched {some(self.unmatched_target)}",
            next="both sides use checkpoint names: map the names, or declare them unused (trainer) or kept (engine)",
        )


@dataclass(eq=False)
class DescriptionConflict(ElementError):
    """Two ranks disagree on the shape or the dtype of one name, and maybe in the same way on others.

    Attributes:
        parameter: Name of the tensor.
        descriptions: Every different statement with those who make it, the commonest first.
        unused_rows: Rows that the trainer declares unused; they may exceed the engine's shape.
        others: Further tensors on which the same ranks differ in the same way.
        also: The first of them, by name.
    """

    code: ClassVar[str] = "E_DESCRIPTION"
    parameter: str
    descriptions: tuple[Description, ...]
    unused_rows: tuple[RowRange, ...] = ()
    others: int = 0
    also: tuple[str, ...] = ()

    @property
    def way(self) -> tuple[object, ...]:
        """What conflicts of one cause have in common: who differs from whom, and in what."""
        one, other = self.descriptions[0], self.descriptions[1]
        dtypes = (one.dtype, other.dtype) if one.dtype != other.dtype else ()
        shapes = one.shape != other.shape
        return (*((d.trainer_ranks, d.rollout_ranks) for d in self.descriptions), dtypes, shapes, self.unused_rows)

    def together_with(self, others: tuple[str, ...]) -> DescriptionConflict:
        """Return the conflict as the first of several of one way."""
        return replace(self, others=len(others), also=others[:SHOWN])

    def story(self) -> Story:
        """Return the text; it says what differs and the usual cause."""
        said = []
        for d in self.descriptions:
            who = [_trainers(d.trainer_ranks)] if d.trainer_ranks else []
            who += [some(d.rollout_ranks)] if d.rollout_ranks else []
            said.append(f"{_numbers(d.shape)} {d.dtype} on {' and '.join(who)}")
        return Story(
            what=f"{self.parameter} is described in {len(self.descriptions)} ways{self._and_others()}",
            which="; ".join(said),
            who=self._difference(),
            next=self._next(),
        )

    def _and_others(self) -> str:
        """Return which other tensors are, by the same ranks."""
        if not self.others:
            return ""
        rest = self.others - len(self.also)
        names = ", ".join(self.also) + (f" and {rest} more" if rest else "")
        return f"; {self.others} more alike: {names}"

    def _next(self) -> str:
        """Return what to do about what differs."""
        if self.descriptions[0].shape == self.descriptions[1].shape:
            return (
                "cast on publish (dtype= of the Publisher), or give the engine's parameter the trainer's element type"
            )
        return "describe the logical tensor alike on all ranks; declare padding rows unused on the trainer"

    def _difference(self) -> str:
        """Return what differs, and the usual cause where only dimension 0 does."""
        one, other = self.descriptions[0], self.descriptions[1]
        if one.shape == other.shape:
            return f"difference: dtype {one.dtype} against {other.dtype}; nothing converts while copying"
        if len(one.shape) != len(other.shape):
            return f"difference: {len(one.shape)} against {len(other.shape)} dimensions"
        if one.shape[1:] != other.shape[1:] or one.dtype != other.dtype:
            dims = [d for d, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if a != b]
            return f"difference: dimensions {some(dims)}"
        declared = some([f"[{r.start}, {r.end})" for r in self.unused_rows]) if self.unused_rows else "none"
        return (
            f"difference: {abs(one.shape[0] - other.shape[0])} rows; a padded vocabulary on one side is the usual "
            f"cause; rows declared unused: {declared}"
        )


@dataclass(eq=False)
class TargetOverlap(ElementError):
    """Two pieces of a rollout rank would be written to the same memory.

    Attributes:
        rank: The rollout rank.
        buffer: Name of the buffer.
        first: Name of the tensor of the first piece.
        first_region: Its box.
        second: Name of the tensor of the second piece; the same piece where it overlaps itself.
        second_region: Its box.
        others: Further overlapping pairs of the same rank.
    """

    code: ClassVar[str] = "E_TARGET_OVERLAP"
    rank: str
    buffer: str
    first: str
    first_region: Region
    second: str
    second_region: Region
    others: int = 0

    def story(self) -> Story:
        """Return the text; it names both boxes."""
        more = f" (and {self.others} more pairs)" if self.others else ""
        return Story(
            what=f"two pieces share memory in buffer {self.buffer} of {self.rank}{more}",
            which=f"{self.first} {_slices(self.first_region)} and {self.second} {_slices(self.second_region)}",
            next="one memory with two names is declared as an alias; everything else has its own place",
        )


@dataclass(eq=False)
class OutsideBuffer(ElementError):
    """A piece that reaches beyond the memory it is said to lie in.

    Attributes:
        rank: The rollout rank, or ``trainer rank r``.
        buffer: Name of the buffer.
        nbytes: Length of the buffer.
        parameter: Name of the tensor.
        region: Its box.
        first_byte: First byte of the piece in the buffer.
        end_byte: One past its last byte.
        others: Further such pieces of the same rank.
    """

    code: ClassVar[str] = "E_OUTSIDE_BUFFER"
    rank: str
    buffer: str
    nbytes: int
    parameter: str
    region: Region
    first_byte: int
    end_byte: int
    others: int = 0

    def story(self) -> Story:
        """Return the text; it compares the piece's bytes with the buffer's."""
        more = f" (and {self.others} more pieces)" if self.others else ""
        return Story(
            what=f"a piece of {self.parameter} spans bytes [{self.first_byte}, {self.end_byte}) "
            f"of buffer {self.buffer}, which has {self.nbytes}{more}",
            which=_slices(self.region),
            who=self.rank,
            next="compare offset and strides with the storage they were read from",
        )


@dataclass(eq=False)
class BudgetError(ElementError):
    """A limit too small for anything to move.

    Attributes:
        bucket_limit_bytes: The limit.
        parameter: A tensor that does not fit.
        element_nbytes: Bytes of one of its elements.
    """

    code: ClassVar[str] = "E_BUDGET"
    bucket_limit_bytes: int
    parameter: str
    element_nbytes: int

    def story(self) -> Story:
        """Return the text."""
        return Story(
            what=f"one element of {self.parameter} is {binary_size(self.element_nbytes)}, bucket_limit_bytes is "
            f"{self.bucket_limit_bytes}: no bucket can hold it",
            effect="nothing was planned",
            next="raise bucket_limit_bytes; 64 MiB is a good size",
        )


@dataclass(eq=False)
class BlockCut(ElementError):
    """A cut of a quantised tensor that falls inside a block with one scale.

    Attributes:
        parameter: Name of the quantised tensor.
        dim: Dimension of the cut.
        block: Length of a block in that dimension, in elements.
        cut: Index at which the tensor is cut.
    """

    code: ClassVar[str] = "E_SHAPE"
    parameter: str
    dim: int
    block: int
    cut: int

    def story(self) -> Story:
        """Return the text; it names the block and the cuts beside it."""
        low = self.cut // self.block * self.block
        return Story(
            what=f"{self.parameter} is cut at {self.cut} in dimension {self.dim}, "
            f"inside the block [{low}, {low + self.block})",
            which=f"blocks of {self.block} have one scale each; {self.cut} = {low} + {self.cut - low}",
            effect="scales shared by two ranks are not supported; nothing was planned",
            next=f"cut at a multiple of {self.block}, for instance {low} or {low + self.block}",
        )


def _slices(region: Region) -> str:
    """Return a box for a text where the tensor's shape is not at hand."""
    parts = []
    for s, e, k in zip(region.start, region.extent, region.step, strict=True):
        end = s + (e - 1) * k + 1
        parts.append(f"{s}:{end}:{k}" if k > 1 else f"{s}:{end}")
    return f"[{', '.join(parts)}]"
