"""Every rule of a layout, checked on columns, for layouts of ours and for those that came from elsewhere.

A layout from the wire may hold any numbers, so no check computes anything that
could leave int64: products are bounded by division first, and the sizes below
are refused before anything is multiplied by them.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from weightd.core.dtypes import DTYPES
from weightd.core.errors import Refused, WeightdError
from weightd.core.layout.faults import (
    BadColumns,
    BadEntry,
    BoxOutOfBounds,
    BufferOverrun,
    DTypeConflict,
    DuplicateName,
    UnknownDType,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from weightd.core.layout.boxes import Mask
    from weightd.core.layout.columns import BufferInfo, Int64, Layout, TensorInfo

MAX_NDIM = 16
"""Dimensions of a tensor; checkpoints have at most 5, a few more arise by splitting."""

MAX_DIM = 1 << 40
"""Length of one dimension; all parameters of a large model together are 2**40 elements."""

MAX_NUMEL = 1 << 52
"""Elements of one tensor or buffer: with a sum over 16 dimensions it stays far inside int64."""

MAX_STEP = (1 << 31) - 1
"""Step of a piece: the product of two of them stays inside int64 (``progressions``)."""

MAX_NAME = 1024
"""Characters of a name; the longest names of checkpoints have about 100."""

BASE_ALIGN = 64
"""Bytes that buffers are aligned to in their region: a cache line."""

KINDS = ("slot", "live", "param")
"""Kinds of buffers."""


def validate(layout: Layout, whose: str = "layout") -> Layout:
    """Return ``layout``, or refuse it with every fault at once.

    Args:
        layout: Any layout; its columns may hold any numbers.
        whose: Subject of the report, for instance ``layout of trainer rank 3``.

    Raises:
        Refused: Holds one ``LayoutError`` per kind of fault and table.
    """
    faults = find_faults(layout)
    if faults:
        raise Refused(whose, faults, "the layout is not used; no byte was read or written")
    return layout


def find_faults(layout: Layout) -> tuple[WeightdError, ...]:
    """Return all faults of a layout; pieces are only looked at where the tables and columns stand."""
    faults: list[WeightdError] = []
    for tensor in layout.tensors:
        faults.extend(tensor_faults(tensor))
    for buffer in layout.buffers:
        faults.extend(buffer_faults(buffer))
    faults.extend(_name_faults(layout))
    faults.extend(_column_faults(layout))
    return tuple(faults) if faults else tuple(_piece_faults(layout))


def tensor_faults(tensor: TensorInfo) -> Iterable[WeightdError]:
    """Return what is wrong with an entry of the table of tensors."""
    yield from _text_faults("tensors", tensor.name)
    if tensor.dtype not in DTYPES:
        yield UnknownDType("tensors", tensor.name, tensor.dtype, tuple(DTYPES))
    if len(tensor.shape) > MAX_NDIM:
        yield BadEntry("tensors", tensor.name, f"{len(tensor.shape)} dimensions, more than {MAX_NDIM}")
    elif not all(0 <= n <= MAX_DIM for n in tensor.shape):
        yield BadEntry("tensors", tensor.name, f"shape {tensor.shape} is not within 0 to {MAX_DIM}")
    elif prod(tensor.shape) > MAX_NUMEL:
        yield BadEntry("tensors", tensor.name, f"shape {tensor.shape} has more than {MAX_NUMEL} elements")


def buffer_faults(buffer: BufferInfo) -> Iterable[WeightdError]:
    """Return what is wrong with an entry of the table of buffers."""
    yield from _text_faults("buffers", buffer.name)
    dtype = DTYPES.get(buffer.dtype)
    if dtype is None:
        yield UnknownDType("buffers", buffer.name, buffer.dtype, tuple(DTYPES))
    elif not 0 <= buffer.nbytes <= MAX_NUMEL:
        yield BadEntry("buffers", buffer.name, f"{buffer.nbytes} bytes is not within 0 to {MAX_NUMEL}")
    elif buffer.nbytes % dtype.nbytes:
        yield BadEntry("buffers", buffer.name, f"{buffer.nbytes} bytes are no whole number of {dtype.name}")
    if buffer.kind not in KINDS:
        yield BadEntry("buffers", buffer.name, f"kind {buffer.kind!r} is none of {', '.join(KINDS)}")
    if not 0 <= buffer.region < 1 << 31:
        yield BadEntry("buffers", buffer.name, f"region {buffer.region} is not within 0 to {(1 << 31) - 1}")
    if not 0 <= buffer.base <= MAX_NUMEL or buffer.base % BASE_ALIGN:
        yield BadEntry("buffers", buffer.name, f"base {buffer.base} is no multiple of {BASE_ALIGN} up to {MAX_NUMEL}")


def _text_faults(table: str, name: str) -> Iterable[WeightdError]:
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        shown = name[:40]
        yield BadEntry(table, shown, f"a name has 1 to {MAX_NAME} printable characters, this one has {len(name)}")


def _doubles(table: str, names: Sequence[str]) -> Iterable[WeightdError]:
    twice = tuple(name for name, times in Counter(names).items() if times > 1)
    if twice:
        yield DuplicateName(table, twice)


def _name_faults(layout: Layout) -> Iterable[WeightdError]:
    shapes = {t.name: t.shape for t in layout.tensors}
    yield from _doubles("tensors", [t.name for t in layout.tensors])
    yield from _doubles("buffers", [b.name for b in layout.buffers])
    yield from _doubles("aliases", [alias for alias, _ in layout.aliases])
    yield from _doubles("kept", layout.kept)
    for alias, canonical in layout.aliases:
        yield from _text_faults("aliases", alias)
        if alias in shapes:
            yield BadEntry("aliases", alias, "is a tensor of its own in the same layout")
        if canonical not in shapes:
            yield BadEntry("aliases", alias, f"stands for {canonical!r}, which the layout does not list")
    for name in layout.kept:
        yield from _text_faults("kept", name)
    for unused in layout.unused:
        yield from _text_faults("unused", unused.name)
        if unused.rows is not None:
            rows = shapes.get(unused.name, (MAX_DIM,))[:1]
            if not rows or not 0 <= unused.rows.start < unused.rows.end <= rows[0]:
                span = f"[{unused.rows.start}, {unused.rows.end})"
                yield BadEntry("unused", unused.name, f"rows {span} are none of {rows[0] if rows else 'a 0-d tensor'}")


def _column_faults(layout: Layout) -> Iterable[WeightdError]:
    """Shapes, element types, and rows that point into the tables."""
    pieces = layout.tensor.shape[0] if layout.tensor.ndim == 1 else -1
    width = max((len(t.shape) for t in layout.tensors), default=0)
    wide = {name: getattr(layout, name) for name in ("start", "extent", "step", "stride")}
    narrow = {name: getattr(layout, name) for name in ("tensor", "buffer", "offset")}
    for name, column in {**narrow, **wide}.items():
        want = (pieces, width) if name in wide else (pieces,)
        if column.dtype != np.int64:
            yield BadColumns(name, f"holds {column.dtype}, not int64")
        if column.shape != want:
            yield BadColumns(name, f"has shape {column.shape}, not {want}")
    for name, table in (("tensor", layout.tensors), ("buffer", layout.buffers)):
        column = narrow[name]
        strange = (column < 0) | (column >= len(table))
        if strange.any():
            count, first = int(strange.sum()), int(column[strange][0])
            yield BadColumns(name, f"{count} pieces point to none of {len(table)} rows, the first to {first}")


def _piece_faults(layout: Layout) -> Iterable[WeightdError]:
    if not layout.pieces:
        return
    ranks, shapes = padded_shapes([t.shape for t in layout.tensors], layout.ndim)
    boxes = ~_inside(layout, ranks[layout.tensor], shapes[layout.tensor])
    if boxes.any():
        yield _box_fault(layout, boxes)
    elements: Int64 = np.array([b.nbytes // DTYPES[b.dtype].nbytes for b in layout.buffers], np.int64)
    overrun = ~boxes & ~_lies_in(layout, elements[layout.buffer])
    if overrun.any():
        yield _overrun_fault(layout, overrun, elements)
    yield from _dtype_faults(layout)


def padded_shapes(shapes: Sequence[tuple[int, ...]], width: int) -> tuple[Int64, Int64]:
    """Return the number of dimensions of each shape, and the shapes padded at the right with 1.

    >>> [x.tolist() for x in padded_shapes([(), (5, 3)], 2)]
    [[0, 2], [[1, 1], [5, 3]]]
    """
    padded: Int64 = np.ones((len(shapes), width), np.int64)
    for row, shape in enumerate(shapes):
        padded[row, : len(shape)] = shape
    return np.array([len(s) for s in shapes], np.int64), padded


def _inside(layout: Layout, ranks: Int64, shapes: Int64) -> Mask:
    """Say which pieces are boxes inside their tensors, shape (P,)."""
    start, extent, step = layout.start, layout.extent, layout.step
    sane = (start >= 0) & (start < shapes) & (extent >= 1) & (extent <= shapes) & (step >= 1) & (step <= MAX_STEP)
    hops = np.where(sane, extent - 1, 0)
    room = np.where(sane, shapes - 1 - start, 0)
    fits = (hops == 0) | (step <= room // np.maximum(hops, 1))
    beyond = np.arange(layout.ndim) >= ranks[:, None]  # columns that the tensor does not have
    unit = (step == 1) & (layout.stride == 0)
    result: Mask = (sane & fits & (~beyond | unit)).all(axis=1)
    return result


def _lies_in(layout: Layout, elements: Int64) -> Mask:
    """Say which pieces lie inside their buffers, shape (P,); extents of the others may be anything."""
    offset, stride = layout.offset, layout.stride
    hops = np.clip(layout.extent - 1, 0, MAX_DIM)
    bound = np.maximum(elements, 1)[:, None]
    sane = (stride >= 0) & ((stride >= 1) | (hops == 0)) & ((hops == 0) | (stride <= bound // np.maximum(hops, 1)))
    reach = np.where(sane, hops * np.where(sane & (hops > 0), stride, 0), 0).sum(axis=1)
    within = (offset >= 0) & (offset < elements)
    result: Mask = sane.all(axis=1) & within & (np.where(within, offset + reach, 0) < elements)
    return result


def _numbers(column: Int64, row: int) -> tuple[int, ...]:
    return tuple(int(v) for v in column[row])


def _box_fault(layout: Layout, bad: Mask) -> BoxOutOfBounds:
    row = int(np.flatnonzero(bad)[0])
    tensor = layout.tensors[int(layout.tensor[row])]
    return BoxOutOfBounds(
        tensor.name,
        tensor.shape,
        row,
        _numbers(layout.start, row),
        _numbers(layout.extent, row),
        _numbers(layout.step, row),
        int(bad.sum()) - 1,
    )


def _overrun_fault(layout: Layout, bad: Mask, elements: Int64) -> BufferOverrun:
    row = int(np.flatnonzero(bad)[0])
    buffer = int(layout.buffer[row])
    return BufferOverrun(
        layout.buffers[buffer].name,
        int(elements[buffer]),
        layout.tensors[int(layout.tensor[row])].name,
        row,
        int(layout.offset[row]),
        _numbers(layout.extent, row),
        _numbers(layout.stride, row),
        int(bad.sum()) - 1,
    )


def _dtype_faults(layout: Layout) -> Iterable[WeightdError]:
    number = {name: n for n, name in enumerate(DTYPES)}
    of_tensor = np.array([number[t.dtype] for t in layout.tensors], np.int64)[layout.tensor]
    of_buffer = np.array([number[b.dtype] for b in layout.buffers], np.int64)[layout.buffer]
    bad = np.flatnonzero(of_tensor != of_buffer)
    if bad.size:
        row = int(bad[0])
        tensor, buffer = layout.tensors[int(layout.tensor[row])], layout.buffers[int(layout.buffer[row])]
        yield DTypeConflict(row, tensor.name, tensor.dtype, buffer.name, buffer.dtype, bad.size - 1)
