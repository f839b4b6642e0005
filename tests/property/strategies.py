"""Random shapes, cuts, worlds, replicas and layouts; everything shrinks to tiny and uneven."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from weightd.core.dtypes import DTYPES
from weightd.core.layout.algebra import compose, embed, transpose
from weightd.core.layout.boxes import Pieces, box, join, moved, no_pieces, placed
from weightd.core.layout.build import LayoutBuilder
from weightd.core.layout.columns import Layout
from weightd.core.layout.cuts import balanced_sizes, chunk_sizes, offsets
from weightd.core.layout.flat import flat_range

if TYPE_CHECKING:
    from collections.abc import Sequence


def shapes(min_ndim: int = 0, max_ndim: int = 3, max_dim: int = 6) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes without a zero; 0-d, 1-row and 1-element tensors included."""
    return st.lists(st.integers(1, max_dim), min_size=min_ndim, max_size=max_ndim).map(tuple)


@st.composite
def sizes(draw: st.DrawFn, size: int, parts: int) -> tuple[int, ...]:
    """Explicit sizes of ``parts`` parts that add up to ``size``; some of them 0."""
    marks = sorted(draw(st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1)))
    return tuple(b - a for a, b in zip([0, *marks], [*marks, size], strict=True))


@st.composite
def pieces_in(draw: st.DrawFn, shape: tuple[int, ...], max_pieces: int = 4, tensors: int = 1) -> Pieces:
    """Any boxes inside a shape, with steps and odd strides; they may overlap in tensor and memory."""
    found = [no_pieces(len(shape))]
    for _ in range(draw(st.integers(0, max_pieces))):
        start, extent, step, stride = [], [], [], []
        for n in shape:
            start.append(draw(st.integers(0, n - 1)))
            step.append(draw(st.integers(1, 4)))
            extent.append(draw(st.integers(1, 1 + (n - 1 - start[-1]) // step[-1])))
            stride.append(draw(st.integers(1, 9)))
        made = box(extent, start, step, draw(st.integers(0, 9)), stride)
        found.append(placed(made, draw(st.integers(0, tensors - 1)), draw(st.integers(0, 1))))
    return join(found)


@dataclass(frozen=True, slots=True)
class Shards:
    """One tensor over the ranks of a world: the pieces of each rank, from offset 0, and the elements they span."""

    pieces: tuple[Pieces, ...]
    elements: tuple[int, ...]


def _boxes(shape: tuple[int, ...], dim: int, cut: Sequence[int]) -> Shards:
    """Contiguous shards along one dimension."""
    pieces, spans = [], []
    for begin, size in zip(offsets(cut), cut, strict=True):
        extent = (*shape[:dim], size, *shape[dim + 1 :])
        pieces.append(embed(box(extent), dim, begin))
        spans.append(prod(extent))
    return Shards(tuple(pieces), tuple(spans))


def _flat(shape: tuple[int, ...], cut: Sequence[int]) -> Shards:
    """Flat shards, as ZeRO-3 cuts."""
    return Shards(tuple(flat_range(shape, a, a + n) for a, n in zip(offsets(cut), cut, strict=True)), tuple(cut))


def _tp_then_flat(shape: tuple[int, ...], dim: int, tp: Sequence[int], dp: int) -> Shards:
    """A box per TP rank, cut flat over ``dp`` ranks; rank = tp * dp + its place, as ZeRO-3 under AutoTP."""
    pieces, spans = [], []
    for begin, size in zip(offsets(tp), tp, strict=True):
        local = (*shape[:dim], size, *shape[dim + 1 :])
        numel = prod(local)
        for a, n in zip(offsets(chunk_sizes(numel, dp)), chunk_sizes(numel, dp), strict=True):
            inner = flat_range(local, a, a + n) if numel else no_pieces(len(shape))
            pieces.append(compose(embed(box(local), dim, begin), inner, local))
            spans.append(n)
    return Shards(tuple(pieces), tuple(spans))


def _interleaved(shape: tuple[int, ...], dim: int, ranks: int) -> Shards:
    """Rank r has indices r, r + ranks, ... along a dimension: pieces with a step."""
    pieces, spans = [], []
    for r in range(ranks):
        count = len(range(r, shape[dim], ranks))
        extent = (*shape[:dim], count, *shape[dim + 1 :])
        step = tuple(ranks if d == dim else 1 for d in range(len(shape)))
        start = tuple(r if d == dim else 0 for d in range(len(shape)))
        pieces.append(box(extent, start, step))
        spans.append(prod(extent))
    return Shards(tuple(pieces), tuple(spans))


def _stored_transposed(shards: Shards, shape: tuple[int, ...]) -> Shards:
    """The same boxes, each stored with its dimensions in reverse order."""
    order = tuple(range(len(shape)))[::-1]
    pieces = []
    for part in shards.pieces:
        kept = [box(e[::-1], s[::-1]) for s, e in zip(part.start.tolist(), part.extent.tolist(), strict=True)]
        pieces.append(transpose(kept[0], order) if kept else part)
    return Shards(tuple(pieces), shards.elements)


@st.composite
def shards(draw: st.DrawFn, shape: tuple[int, ...], ranks: int) -> Shards:
    """One tensor cut over ``ranks`` ranks in one of the ways people cut; each element on at least one rank."""
    whole = Shards((box(shape),) * ranks, (prod(shape),) * ranks)
    kind = draw(
        st.sampled_from(["whole", "boxes", "chunk", "flat", "interleaved", "tp_flat", "transposed", "replicas"])
    )
    if kind == "flat" or (not shape and kind != "whole"):
        return _flat(shape, draw(sizes(prod(shape), ranks)))
    if kind == "whole":
        return whole
    dim = draw(st.integers(0, len(shape) - 1))
    if kind == "chunk":
        return _boxes(shape, dim, chunk_sizes(shape[dim], ranks))
    if kind == "interleaved":
        return _interleaved(shape, dim, ranks)
    if kind == "transposed":
        return _stored_transposed(_boxes(shape, dim, draw(sizes(shape[dim], ranks))), shape)
    if kind == "tp_flat" and ranks % 2 == 0:
        return _tp_then_flat(shape, dim, draw(sizes(shape[dim], ranks // 2)), 2)
    if kind == "replicas" and ranks % 2 == 0:
        half = _boxes(shape, dim, balanced_sizes(shape[dim], ranks // 2))
        return Shards(half.pieces * 2, half.elements * 2)
    return _boxes(shape, dim, draw(sizes(shape[dim], ranks)))


@dataclass(frozen=True, slots=True)
class Tensor:
    """A logical tensor of a world."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@st.composite
def models(draw: st.DrawFn, max_tensors: int = 3) -> tuple[Tensor, ...]:
    """A few tensors of mixed shape and element type."""
    found = draw(
        st.lists(st.tuples(shapes(), st.sampled_from(["bfloat16", "float32"])), min_size=1, max_size=max_tensors)
    )
    return tuple(Tensor(f"layers.{i}.weight", shape, dtype) for i, (shape, dtype) in enumerate(found))


@st.composite
def sides(draw: st.DrawFn, model: tuple[Tensor, ...], ranks: int, kind: str) -> tuple[Layout, ...]:
    """The layouts of a world of ``ranks`` ranks that together hold all of a model.

    A ``slot`` side keeps every tensor in a buffer of its own at the next multiple of 64 bytes;
    a ``param`` side puts all tensors of an element type into one fused buffer.
    """
    cuts = [draw(shards(tensor.shape, ranks)) for tensor in model]
    return tuple(_layout(model, [(c.pieces[r], c.elements[r]) for c in cuts], kind) for r in range(ranks))


def _layout(model: tuple[Tensor, ...], parts: list[tuple[Pieces, int]], kind: str) -> Layout:
    builder = LayoutBuilder()
    rows = [builder.add_tensor(t.name, t.shape, t.dtype) for t in model]
    if kind == "slot":
        base = 0
        for tensor, row, (part, count) in zip(model, rows, parts, strict=True):
            nbytes = count * DTYPES[tensor.dtype].nbytes
            builder.add_pieces(part, row, builder.add_buffer(tensor.name, nbytes, tensor.dtype, kind, base=base))
            base += -(-nbytes // 64) * 64
        return builder.build()
    for dtype in sorted({t.dtype for t in model}):
        mine = [i for i, t in enumerate(model) if t.dtype == dtype]
        buffer = builder.add_buffer(dtype, sum(parts[i][1] for i in mine) * DTYPES[dtype].nbytes, dtype, kind)
        for i, at in zip(mine, offsets([parts[i][1] for i in mine]), strict=True):
            builder.add_pieces(moved(parts[i][0], at), rows[i], buffer)
    return builder.build()


@dataclass(frozen=True, slots=True)
class World:
    """What trainers hold and what one engine needs of a model."""

    model: tuple[Tensor, ...]
    sources: tuple[Layout, ...]
    targets: tuple[Layout, ...]


@st.composite
def worlds(draw: st.DrawFn, max_ranks: int = 4) -> World:
    """A trainer world and an engine, each cutting each tensor in its own way."""
    model = draw(models())
    sources = draw(sides(model, draw(st.integers(1, max_ranks)), "slot"))
    return World(model, sources, draw(sides(model, draw(st.integers(1, max_ranks)), "param")))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """The layout of any one rank, with aliases, unused rows and kept names."""
    model = draw(models())
    side = draw(sides(model, draw(st.integers(1, 3)), draw(st.sampled_from(["slot", "param"]))))
    builder = LayoutBuilder()
    chosen = draw(st.sampled_from(side))
    for t in chosen.tensors:
        builder.add_tensor(t.name, t.shape, t.dtype)
    for b in chosen.buffers:
        builder.add_buffer(b.name, b.nbytes, b.dtype, b.kind, draw(st.integers(0, 3)), b.base)
    builder.add_pieces(Pieces(*(getattr(chosen, name) for name in Pieces.__slots__)))
    if draw(st.booleans()):
        builder.add_alias("lm_head.weight", model[0].name)
    trimmed = draw(st.booleans())
    if model[0].shape and trimmed:
        builder.add_unused(model[0].name, (0, draw(st.integers(1, model[0].shape[0]))), "trimmed")
    if draw(st.booleans()):
        builder.add_kept("rotary.inv_freq")
    return builder.build()
