"""What a rollout rank needs, said by hand: which slices of which checkpoint tensors make its parameters.

For an engine whose cut is known.  Sizes are explicit everywhere, one for each
rank of the engine: engines and trainers round differently, and 5,5,4,4 is not
5,5,5,3.  Fused parameters (qkv, gate_up, stacked experts) are taken apart here,
because trainers only ever speak of the tensors of the checkpoint.

Nothing here looks at a module; ``Declaration.check`` compares with the real
parameters that whoever has them describes.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

from weightd.core.dtypes import DTYPES
from weightd.core.errors import Refused
from weightd.core.layout.boxes import row_major
from weightd.core.layout.build import LayoutBuilder
from weightd.core.layout.cuts import Span, offsets, span
from weightd.core.layout.faults import BadCut, BadEntry, DuplicateName, UnknownDType
from weightd.rollout_hooks.parameters import DeclarationMismatch, Parameter, described

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightd.core.layout.columns import Layout


class Part(NamedTuple):
    """Rows of one checkpoint tensor inside a fused parameter.

    Attributes:
        tensor: Checkpoint name.
        shape: Its whole shape.
        rows: Which rows of it, in elements of dimension 0.
    """

    tensor: str
    shape: tuple[int, ...]
    rows: Span


class Declaration:
    """Collects the parameters of one rollout rank.

    >>> d = Declaration("bfloat16")
    >>> d.column("mlp.up_proj.weight", (18, 3), sizes=(5, 5, 4, 4), k=2)
    >>> d.parameters()["mlp.up_proj.weight"].shape
    (4, 3)
    >>> d.layout().start.tolist(), d.layout().extent.tolist()
    ([[10, 0]], [[4, 3]])
    """

    def __init__(self, dtype: str) -> None:
        """Begin a declaration.

        Args:
            dtype: Element type of parameters for which none is given.
        """
        self._dtype = dtype
        self._builder = LayoutBuilder()
        self._parameters: dict[str, Parameter] = {}
        self._rows: dict[str, int] = {}
        self._tensors: dict[str, Parameter] = {}

    def parameter(self, name: str, shape: Sequence[int], dtype: str | None = None) -> None:
        """Declare a parameter, to be filled by ``take``; the methods below do both.

        Args:
            name: The engine's name of it, unique.
            shape: Its shape on this rank.
            dtype: Element type, if another than the declaration's.

        Raises:
            LayoutError: The name is taken, or the entry cannot stand.
        """
        found = Parameter(tuple(shape), dtype or self._dtype)
        if name in self._parameters:
            raise DuplicateName("buffers", (name,))
        if found.dtype not in DTYPES:
            raise UnknownDType("buffers", name, found.dtype, tuple(DTYPES))
        nbytes = prod(found.shape) * DTYPES[found.dtype].nbytes
        self._rows[name] = self._builder.add_buffer(name, nbytes, found.dtype, "param")
        self._parameters[name] = found

    def take(
        self,
        parameter: str,
        tensor: str,
        full_shape: Sequence[int],
        start: Sequence[int],
        extent: Sequence[int],
        at: Sequence[int] | None = None,
    ) -> None:
        """Say that a box of a checkpoint tensor lies in a parameter.

        Args:
            parameter: A parameter that was declared.
            tensor: Checkpoint name.
            full_shape: The tensor's whole shape.
            start: First index of the box, per dimension of the tensor.
            extent: Number of indices; an empty box only makes the tensor known.
            at: Index of the parameter where the box begins; its dimensions are the parameter's
                last ones, so that ``at=(e, 0, 0)`` is expert e of a stack.  Zeros by default.

        Raises:
            LayoutError: The box does not fit the parameter, or the tensor was declared otherwise.
        """
        found = self._parameters[parameter]
        at = (0,) * len(found.shape) if at is None else at
        lead = len(found.shape) - len(extent)
        room = [n - a for n, a in zip(found.shape, at, strict=True)]
        if (
            lead < 0
            or any(a < 0 for a in at)
            or any(r < 1 for r in room[:lead])
            or any(e > r for e, r in zip(extent, room[lead:], strict=True))
        ):
            raise BadEntry("buffers", parameter, f"shape {found.shape} has no room for {tuple(extent)} at {tuple(at)}")
        strides = row_major(found.shape)
        offset = sum(a * s for a, s in zip(at, strides, strict=True))
        row = self._tensor(tensor, tuple(full_shape), found.dtype)
        self._builder.add_piece(row, self._rows[parameter], start, extent, offset, strides[lead:])

    def replicated(self, name: str, shape: Sequence[int], tensor: str = "", dtype: str | None = None) -> None:
        """Declare a parameter that every rank has whole; ``()`` is a 0-d one.

        Args:
            name: The engine's name.
            shape: Its shape.
            tensor: Checkpoint name, if another.
            dtype: Element type, if another than the declaration's.
        """
        self.parameter(name, shape, dtype)
        self.take(name, tensor or name, shape, (0,) * len(shape), shape)

    def cut(
        self,
        name: str,
        full_shape: Sequence[int],
        dim: int,
        sizes: Sequence[int],
        k: int,
        tensor: str = "",
        dtype: str | None = None,
    ) -> None:
        """Declare this rank's part of a tensor that is cut along one dimension.

        Args:
            name: The engine's name.
            full_shape: Shape of the whole tensor.
            dim: The dimension that is cut.
            sizes: Length of every rank's part, in elements.
            k: This rank.
            tensor: Checkpoint name, if another.
            dtype: Element type, if another than the declaration's.

        Raises:
            BadCut: The sizes do not cut the dimension.
        """
        first, end = span(full_shape[dim], sizes, k)
        shape, start = list(full_shape), [0] * len(full_shape)
        shape[dim], start[dim] = end - first, first
        self.parameter(name, shape, dtype)
        self.take(name, tensor or name, full_shape, start, shape)

    def column(
        self,
        name: str,
        full_shape: Sequence[int],
        sizes: Sequence[int],
        k: int,
        tensor: str = "",
        dtype: str | None = None,
    ) -> None:
        """Declare a column-parallel parameter: the tensor is cut along dimension 0 (see ``cut``)."""
        self.cut(name, full_shape, 0, sizes, k, tensor, dtype)

    def row(
        self,
        name: str,
        full_shape: Sequence[int],
        sizes: Sequence[int],
        k: int,
        tensor: str = "",
        dtype: str | None = None,
    ) -> None:
        """Declare a row-parallel parameter: the tensor is cut along dimension 1 (see ``cut``)."""
        self.cut(name, full_shape, 1, sizes, k, tensor, dtype)

    def vocabulary(
        self,
        name: str,
        full_shape: Sequence[int],
        sizes: Sequence[int],
        k: int,
        tensor: str = "",
        dtype: str | None = None,
    ) -> None:
        """Declare an embedding whose rows are padded before they are cut; only real rows are needed.

        The padding is the engine's own, and stays as it is.  The last rank may hold no real row.

        Args:
            name: The engine's name.
            full_shape: Shape of the whole tensor without padding.
            sizes: Rows of every rank's parameter, with padding.
            k: This rank.
            tensor: Checkpoint name, if another.
            dtype: Element type, if another than the declaration's.

        Raises:
            BadCut: The sizes hold fewer rows than the tensor, or there is no such rank.
        """
        rows, padded = full_shape[0], sum(sizes)
        if padded < rows:
            raise BadCut(rows, tuple(sizes), f"with padding they add up to {padded}")
        first, end = span(padded, sizes, k)
        real = max(min(end, rows) - first, 0)
        rest = tuple(full_shape[1:])
        self.parameter(name, (end - first, *rest), dtype)
        self.take(name, tensor or name, full_shape, (first, *(0 for _ in rest)), (real, *rest))

    def fused(self, name: str, parts: Sequence[Part], dtype: str | None = None) -> None:
        """Declare a parameter that is rows of several tensors, one after another.

        Args:
            name: The engine's name.
            parts: The rows, in the parameter's order; tensors agree in all dimensions but the first.
            dtype: Element type, if another than the declaration's.

        Raises:
            LayoutError: No part, or parts that do not fit on top of each other.

        >>> d = Declaration("bfloat16")
        >>> d.fused("gate_up.weight", [Part("gate.weight", (9, 3), (5, 9)), Part("up.weight", (9, 3), (5, 9))])
        >>> d.layout().offset.tolist()
        [0, 12]
        """
        rests = {part.shape[1:] for part in parts}
        if len(rests) != 1:
            raise BadEntry("buffers", name, f"made of {len(parts)} parts whose rows have {len(rests)} different shapes")
        for part in parts:
            if not 0 <= part.rows[0] <= part.rows[1] <= part.shape[0]:
                raise BadCut(part.shape[0], part.rows, f"{part.tensor} has no such rows")
        rest = rests.pop()
        begins = offsets([end - first for first, end in (part.rows for part in parts)])
        last = parts[-1].rows
        self.parameter(name, (begins[-1] + last[1] - last[0], *rest), dtype)
        for part, begin in zip(parts, begins, strict=True):
            first, end = part.rows
            zeros = (0,) * len(rest)
            self.take(name, part.tensor, part.shape, (first, *zeros), (end - first, *rest), (begin, *zeros))

    def gate_up(
        self,
        name: str,
        tensors: tuple[str, str],
        full_shape: Sequence[int],
        sizes: Sequence[int],
        k: int,
        dtype: str | None = None,
    ) -> None:
        """Declare a fused ``[gate; up]``, both cut alike along dimension 0.

        Args:
            name: The engine's name.
            tensors: Checkpoint names of gate and up.
            full_shape: Whole shape of either.
            sizes: Rows of every rank's part of either, in elements.
            k: This rank.
            dtype: Element type, if another than the declaration's.

        Raises:
            BadCut: The sizes do not cut the dimension.
        """
        rows = span(full_shape[0], sizes, k)
        self.fused(name, [Part(tensor, tuple(full_shape), rows) for tensor in tensors], dtype)

    def qkv(
        self,
        name: str,
        tensors: tuple[str, str, str],
        head_dim: int,
        q_heads: Sequence[Span],
        kv_heads: Sequence[Span],
        k: int,
        rest: Sequence[int] = (),
        dtype: str | None = None,
    ) -> None:
        """Declare a fused ``[q; k; v]`` of this rank's heads.

        Args:
            name: The engine's name.
            tensors: Checkpoint names of q, k and v.
            head_dim: Rows of one head.
            q_heads: Query heads of every rank (see ``cuts.spans``).
            kv_heads: Key and value heads of every rank (see ``cuts.shared_heads`` where ranks share them).
            k: This rank.
            rest: Further dimensions: ``(hidden,)`` for a weight, none for a bias.
            dtype: Element type, if another than the declaration's.

        Raises:
            BadCut: There is no such rank, or one of the two lists speaks of more ranks.

        >>> from weightd.core.layout.cuts import shared_heads, spans
        >>> d = Declaration("bfloat16")
        >>> d.qkv("qkv.bias", ("q", "k", "v"), 2, spans((2, 2, 1, 1)), shared_heads(2, 4), k=3)
        >>> d.layout().start.tolist()  # query head 5; head 1 of k and v, which rank 2 has as well
        [[10], [2], [2]]
        """
        if len(q_heads) != len(kv_heads) or not 0 <= k < len(q_heads):
            raise BadCut(len(q_heads), (len(kv_heads), k), "q heads, kv heads and rank speak of different engines")
        parts = []
        for tensor, heads in zip(tensors, (q_heads, kv_heads, kv_heads), strict=True):
            whole = max(end for _, end in heads) * head_dim
            first, end = heads[k]
            parts.append(Part(tensor, (whole, *rest), (first * head_dim, end * head_dim)))
        self.fused(name, parts, dtype)

    def tied(self, name: str, canonical: str) -> None:
        """Say that ``name`` is one more checkpoint name of the declared tensor ``canonical``: one write, two names."""
        self._builder.add_alias(name, canonical)

    def kept(self, name: str, shape: Sequence[int], dtype: str | None = None) -> None:
        """Declare a parameter that the engine keeps as it is; no trainer has to feed it."""
        self.parameter(name, shape, dtype)
        self._builder.add_kept(name)

    def parameters(self) -> dict[str, Parameter]:
        """Return every declared parameter by the engine's name."""
        return dict(self._parameters)

    def layout(self, whose: str = "declared layout") -> Layout:
        """Return the layout; its buffers are the parameters, in the order they were declared.

        Raises:
            Refused: All faults of the pieces.
        """
        return self._builder.build(whose)

    def check(self, actual: Mapping[str, Parameter], whose: str = "declared layout") -> None:
        """Compare with the real parameters of this rank, all of them before anything is refused.

        Args:
            actual: Shape and element type by the engine's name.
            whose: Subject of the report.

        Raises:
            Refused: One ``DeclarationMismatch`` per parameter.
        """
        names = [*self._parameters, *(name for name in actual if name not in self._parameters)]
        wrong = tuple(
            DeclarationMismatch(name, described(self._parameters.get(name)), described(actual.get(name)))
            for name in names
            if self._parameters.get(name) != actual.get(name)
        )
        if wrong:
            raise Refused(whose, wrong, "the rank did not attach; its parameters are untouched")

    def _tensor(self, name: str, shape: tuple[int, ...], dtype: str) -> int:
        """Return the row of a checkpoint tensor; several parameters may take from one."""
        known = self._tensors.setdefault(name, Parameter(shape, dtype))
        if known != (shape, dtype):
            raise BadEntry(
                "tensors", name, f"declared as {described(known)} and as {described(Parameter(shape, dtype))}"
            )
        row = self._builder.tensor_row(name)
        return self._builder.add_tensor(name, shape, dtype) if row is None else row
