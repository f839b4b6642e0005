"""Builds the layout of one rank: tensors, buffers, pieces, and what is said about them.

The builder checks each entry as it is added, so that the fault is raised in the
line that made it, and the pieces together at the end, on columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from weightd.core.layout.boxes import Pieces, join, placed, row_major, tidy
from weightd.core.layout.checks import buffer_faults, tensor_faults, validate
from weightd.core.layout.columns import BufferInfo, Int64, Layout, RowRange, TensorInfo, Unused
from weightd.core.layout.faults import BadColumns, DuplicateName

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from weightd.core.errors import WeightdError


class LayoutBuilder:
    """Collects what one rank holds or needs.

    >>> b = LayoutBuilder()
    >>> w = b.add_tensor("w", (5, 3), "bfloat16")
    >>> buf = b.add_buffer("w", nbytes=12, dtype="bfloat16", kind="param")
    >>> b.add_piece(w, buf, start=(3, 0), extent=(2, 3))
    >>> b.build().stride.tolist()
    [[3, 1]]
    """

    def __init__(self) -> None:
        self._tensors: dict[str, TensorInfo] = {}
        self._tensor_rows: dict[str, int] = {}
        self._buffers: dict[str, BufferInfo] = {}
        self._parts: list[Pieces] = []
        self._single: list[_Row] = []
        self._aliases: list[tuple[str, str]] = []
        self._unused: list[Unused] = []
        self._kept: list[str] = []

    def add_tensor(self, name: str, shape: Sequence[int], dtype: str) -> int:
        """Add a logical tensor and return its row.

        Args:
            name: HF checkpoint name.
            shape: Logical shape in elements, without padding; ``()`` for 0-d.
            dtype: Element type as it lies in the buffers.

        Raises:
            LayoutError: The name is taken, or the entry cannot stand.
        """
        if name in self._tensors:
            raise DuplicateName("tensors", (name,))
        info = TensorInfo(name, tuple(int(n) for n in shape), dtype)
        _raise_first(tensor_faults(info))
        self._tensors[name] = info
        self._tensor_rows[name] = len(self._tensor_rows)
        return self._tensor_rows[name]

    def tensor_row(self, name: str) -> int | None:
        """Return the row of a tensor that was added, or None."""
        return self._tensor_rows.get(name)

    def add_buffer(self, name: str, nbytes: int, dtype: str, kind: str, region: int = 0, base: int = 0) -> int:
        """Add a buffer and return its row; the arguments are those of ``BufferInfo``.

        Raises:
            LayoutError: The name is taken, or the entry cannot stand.
        """
        if name in self._buffers:
            raise DuplicateName("buffers", (name,))
        info = BufferInfo(name, int(nbytes), dtype, kind, region, base)
        _raise_first(buffer_faults(info))
        self._buffers[name] = info
        return len(self._buffers) - 1

    def add_piece(
        self,
        tensor: int,
        buffer: int,
        start: Sequence[int],
        extent: Sequence[int],
        offset: int = 0,
        stride: Sequence[int] | None = None,
        step: Sequence[int] | None = None,
    ) -> None:
        """Add one piece; one with an extent of 0 is an empty shard and adds nothing.

        Args:
            tensor: Row of the tensor.
            buffer: Row of the buffer.
            start: First index per dimension.
            extent: Number of indices per dimension.
            offset: Element of the buffer where the piece begins.
            stride: Buffer elements between neighbouring indices; contiguous row-major by default.
            step: Distance of neighbouring indices; ones by default.

        Raises:
            BadColumns: The arguments differ in length.
        """
        if 0 in extent:
            return
        n = len(extent)
        stride = row_major(extent) if stride is None else stride
        step = (1,) * n if step is None else step
        if not len(start) == len(stride) == len(step) == n:
            raise BadColumns("start", f"start {start}, extent {extent}, stride {stride}, step {step} differ in length")
        self._single.append((tensor, buffer, tuple(start), tuple(extent), tuple(step), offset, tuple(stride)))

    def add_pieces(self, pieces: Pieces, tensor: int | None = None, buffer: int | None = None) -> None:
        """Add many pieces at once.

        Args:
            pieces: Any number of them, as wide as their tensors or wider.
            tensor: Row of the tensor of all of them; their own column by default.
            buffer: Row of the buffer of all of them; their own column by default.
        """
        self._keep_order()
        self._parts.append(placed(pieces, tensor, buffer))

    def add_alias(self, name: str, canonical: str) -> None:
        """Say that ``name`` is another name of the memory of ``canonical``."""
        self._aliases.append((name, canonical))

    def add_unused(self, name: str, rows: tuple[int, int] | None = None, why: str = "") -> None:
        """Say that nobody takes a tensor, or its rows ``[rows[0], rows[1])``."""
        self._unused.append(Unused(name, None if rows is None else RowRange(*rows), why))

    def add_kept(self, name: str) -> None:
        """Say that the engine keeps ``name`` as it is."""
        self._kept.append(name)

    def build(self, whose: str = "layout") -> Layout:
        """Return the checked layout; pieces stay in the order they were added.

        Args:
            whose: Subject of a report, for instance ``layout of trainer rank 3``.

        Raises:
            Refused: All faults of the pieces and of what is said about them.
        """
        self._keep_order()
        width = max((len(t.shape) for t in self._tensors.values()), default=0)
        pieces = tidy(join(self._parts, width))
        surplus = slice(width, None)
        if (pieces.extent[:, surplus] != 1).any() or (pieces.start[:, surplus] != 0).any():
            raise BadColumns("extent", f"a piece has {pieces.ndim} dimensions, the widest tensor {width}")
        layout = Layout(
            tensors=tuple(self._tensors.values()),
            buffers=tuple(self._buffers.values()),
            tensor=_column(pieces.tensor),
            start=_column(pieces.start[:, :width]),
            extent=_column(pieces.extent[:, :width]),
            step=_column(pieces.step[:, :width]),
            buffer=_column(pieces.buffer),
            offset=_column(pieces.offset),
            stride=_column(pieces.stride[:, :width]),
            aliases=tuple(self._aliases),
            unused=tuple(self._unused),
            kept=tuple(self._kept),
        )
        return validate(layout, whose)

    def _keep_order(self) -> None:
        """Turn the single pieces so far into columns, in front of what is added next."""
        if self._single:
            self._parts.append(_columns_of(self._single))
            self._single = []


_Row = tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]


def _columns_of(rows: list[_Row]) -> Pieces:
    """Return single pieces as columns; made at once, because 70,000 small arrays would take seconds."""
    width = max(len(row[2]) for row in rows)

    def wide(values: Iterable[tuple[int, ...]], fill: int) -> Int64:
        filled = [v + (fill,) * (width - len(v)) for v in values]
        return np.array(filled, np.int64).reshape(len(rows), width)

    return Pieces(
        tensor=np.array([row[0] for row in rows], np.int64),
        buffer=np.array([row[1] for row in rows], np.int64),
        start=wide((row[2] for row in rows), 0),
        extent=wide((row[3] for row in rows), 1),
        step=wide((row[4] for row in rows), 1),
        offset=np.array([row[5] for row in rows], np.int64),
        stride=wide((row[6] for row in rows), 0),
    )


def _column(values: Int64) -> Int64:
    """Return a contiguous column that cannot be written: layouts are values."""
    column = np.ascontiguousarray(values)
    column.flags.writeable = False
    return column


def _raise_first(faults: Iterable[WeightdError]) -> None:
    for fault in faults:
        raise fault
