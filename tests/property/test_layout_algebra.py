"""Every operation on pieces against elements listed one by one; every message against its mutations."""

from __future__ import annotations

from math import prod

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.property import strategies as some
from tests.property.elements import elements, listed, numbered, renumbered
from weightd.core.dtypes import DTYPES
from weightd.core.errors import WeightdError
from weightd.core.layout import local
from weightd.core.layout.algebra import compose, concatenate, embed, narrow, transpose
from weightd.core.layout.boxes import Pieces, box, join, pieces_of, placed
from weightd.core.layout.build import LayoutBuilder
from weightd.core.layout.checks import find_faults
from weightd.core.layout.columns import Int64, Layout
from weightd.core.layout.digest import layout_digest
from weightd.core.layout.files import LayoutFile, decode_file, encode_file
from weightd.core.layout.flat import expand_flat, flat_range
from weightd.core.layout.intersect import Overlaps, intersect
from weightd.core.layout.message import decode_layout, encode_layout
from weightd.core.layout.moves import Moves, coalesce, to_copy_dims
from weightd.core.layout.packing import packed
from weightd.core.layout.reshape import merge_dims, split_dim
from weightd.core.units import TrainerRank

Data = st.DataObject


def _check_sane(pieces: Pieces, shape: tuple[int, ...]) -> None:
    """Columns of one shape, boxes inside the tensor, nothing left over from before."""
    assert pieces.start.shape == pieces.extent.shape == pieces.step.shape == pieces.stride.shape
    assert pieces.start.shape == (len(pieces), len(shape))
    assert (pieces.extent >= 1).all()
    assert (pieces.start >= 0).all()
    assert (pieces.start + (pieces.extent - 1) * pieces.step < np.array(shape, np.int64)).all()
    assert (pieces.step[pieces.extent == 1] == 1).all()


@given(st.data())
def test_narrow_keeps_the_elements_between_two_indices(data: Data) -> None:
    shape = data.draw(some.shapes(min_ndim=1))
    pieces = data.draw(some.pieces_in(shape))
    dim = data.draw(st.integers(0, len(shape) - 1))
    low, high = data.draw(st.integers(-1, shape[dim])), data.draw(st.integers(0, shape[dim] + 1))

    narrowed = narrow(pieces, dim, low, high)

    every = numbered(shape)
    kept = np.compress([low <= i < high for i in range(shape[dim])], every, axis=dim)
    before = elements(pieces, shape)
    assert listed(before[np.isin(before[:, 1], kept)]) == listed(elements(narrowed, shape))
    _check_sane(narrowed, shape)
    if 0 <= low < min(high, shape[dim]):
        new_shape = kept.shape
        assert listed(renumbered(before, kept)) == listed(elements(embed(narrowed, dim, -low), new_shape))


@given(st.data())
def test_concatenate_puts_tensors_one_after_another(data: Data) -> None:
    rest = data.draw(some.shapes(max_ndim=2))
    dim = data.draw(st.integers(0, len(rest)))
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    each = [(*rest[:dim], n, *rest[dim:]) for n in lengths]
    parts = [data.draw(some.pieces_in(shape)) for shape in each]

    joined = concatenate(parts, lengths, dim)

    begins = np.cumsum([0, *(prod(shape) for shape in each)])
    whole = np.concatenate([numbered(shape) + begin for shape, begin in zip(each, begins[:-1], strict=True)], axis=dim)
    expected = []
    for part, shape, begin in zip(parts, each, begins[:-1], strict=True):
        rows = elements(part, shape)
        rows[:, 1] += begin
        expected.extend(renumbered(rows, whole).tolist())
    assert sorted(expected) == listed(elements(joined, whole.shape))


@given(st.data())
def test_transpose_reorders_dimensions(data: Data) -> None:
    shape = data.draw(some.shapes())
    pieces = data.draw(some.pieces_in(shape))
    order = data.draw(st.permutations(range(len(shape))))

    turned = transpose(pieces, order)

    whole = numbered(shape).transpose(order)
    assert listed(renumbered(elements(pieces, shape), whole)) == listed(elements(turned, whole.shape))


@given(st.data())
def test_split_dim_is_a_reshape(data: Data) -> None:
    outer, inner = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    left, right = data.draw(some.shapes(max_ndim=1)), data.draw(some.shapes(max_ndim=1))
    before, after = (*left, outer * inner, *right), (*left, outer, inner, *right)
    pieces = data.draw(some.pieces_in(before))

    split = split_dim(pieces, len(left), inner)

    assert listed(elements(pieces, before)) == listed(elements(split, after))
    _check_sane(split, after)
    simple = (pieces.step[:, len(left)] == 1).all()
    assert len(split) <= len(pieces) * (3 if simple else 3 * inner)


@given(st.data())
def test_merge_dims_is_a_reshape(data: Data) -> None:
    left, right = data.draw(some.shapes(max_ndim=1)), data.draw(some.shapes(max_ndim=1))
    outer, inner = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    before, after = (*left, outer, inner, *right), (*left, outer * inner, *right)
    whole = data.draw(st.booleans())
    pieces = box(before) if whole else data.draw(some.pieces_in(before))

    merged = merge_dims(pieces, len(left), inner)

    assert listed(elements(pieces, before)) == listed(elements(merged, after))
    _check_sane(merged, after)
    assert not (whole and not right) or len(merged) == 1


@given(st.data())
def test_compose_is_a_cut_of_what_a_cut_left(data: Data) -> None:
    shape = data.draw(some.shapes(max_ndim=3, max_dim=5))
    local, outer = _outer_cut(data, shape)
    inner = data.draw(some.pieces_in(local)) if 0 not in local else join([], len(shape))

    composed = compose(outer, inner, local)

    of_shard = elements(outer, shape)  # whole element, shard element
    memory = elements(inner, local) if 0 not in local else np.zeros((0, 4), np.int64)
    whole_of = {int(place): int(number) for _, number, _, place in of_shard}
    expected = [[0, whole_of[e], b, s] for _, e, b, s in memory.tolist() if e in whole_of]
    assert sorted(expected) == listed(elements(composed, shape))
    _check_sane(composed, shape)


def _outer_cut(data: Data, shape: tuple[int, ...]) -> tuple[tuple[int, ...], Pieces]:
    """A shard made of blocks of rows (as fused qkv is), some padding; every k-th row; or every second of the shard."""
    if not shape:
        return (), box(())
    kind = data.draw(st.sampled_from(["blocks", "every k-th row", "alternating"]))
    if kind == "alternating":  # two tensors of a GLU, row by row; this one is the first or the second of each pair
        rest = prod(shape[1:])
        stride = (2 * rest, *box(shape[1:]).stride[0].tolist()) if rest > 1 else (2, *(1 for _ in shape[1:]))
        second = data.draw(st.integers(0, 1))
        return (2 * shape[0], *shape[1:]), box(shape, offset=second * rest, stride=stride)
    if kind == "every k-th row":
        step = data.draw(st.integers(1, 3))
        count = len(range(0, shape[0], step))
        return (count, *shape[1:]), box((count, *shape[1:]), step=(step, *(1 for _ in shape[1:])))
    cut = data.draw(some.sizes(shape[0], 4))
    begins = np.cumsum([0, *cut])
    chosen = data.draw(st.lists(st.integers(0, 3), unique=True, max_size=3))
    padding = data.draw(st.integers(0, 2))
    local = (sum(cut[c] for c in chosen) + padding, *shape[1:])
    blocks, at = [], 0
    for c in chosen:
        block = box((cut[c], *shape[1:]), offset=at * prod(shape[1:]))
        blocks.append(embed(block, 0, int(begins[c])))
        at += cut[c]
    return local, join(blocks, len(shape))


@given(st.data())
def test_flat_range_is_a_slice_of_the_flattened_tensor(data: Data) -> None:
    shape = data.draw(some.shapes(max_ndim=4, max_dim=5))
    low = data.draw(st.integers(0, prod(shape)))
    high = data.draw(st.integers(low, prod(shape)))

    pieces = flat_range(shape, low, high, offset=7)

    assert [[0, e, 0, 7 + e - low] for e in range(low, high)] == listed(elements(pieces, shape))
    assert len(pieces) <= max(2 * len(shape) - 1, 1)
    assert pieces.offset.tolist() == sorted(pieces.offset.tolist())
    _check_sane(pieces, shape)


@given(st.data())
def test_many_flat_ranges_at_once_equal_one_by_one(data: Data) -> None:
    ranges, singles = [], []
    for t in range(data.draw(st.integers(0, 5))):
        shape = data.draw(some.shapes(max_ndim=3))
        low = data.draw(st.integers(0, prod(shape)))
        high = data.draw(st.integers(low, prod(shape)))
        ranges.append(([*shape, 1, 1, 1][:3], low, high, 10 * t))
        singles.append(placed(flat_range(shape, low, high, 10 * t), tensor=t))
    shapes = np.array([r[0] for r in ranges], np.int64).reshape(-1, 3)
    lows, highs, places = (np.array([r[i] for r in ranges], np.int64) for i in (1, 2, 3))

    together = expand_flat(shapes, lows, highs, places)

    apart = join(singles, 3)
    for name in Pieces.__slots__:
        assert getattr(apart, name).tolist() == getattr(together, name).tolist()


@given(st.data())
def test_intersection_is_the_common_elements_of_each_pair(data: Data) -> None:
    shape = data.draw(some.shapes())
    source = data.draw(some.pieces_in(shape, max_pieces=6, tensors=3))
    target = data.draw(some.pieces_in(shape, max_pieces=6, tensors=3))

    common = intersect(source, target)

    assert _all_pairs(source, target, shape) == _unrolled(common, shape)
    assert sorted(_unrolled(common, shape), key=lambda pair: pair[::-1]) == list(_unrolled(common, shape))


@given(st.data())
def test_intersection_of_sides_of_different_width(data: Data) -> None:
    length = data.draw(st.integers(1, 6))
    source = data.draw(some.pieces_in((length,), max_pieces=5))
    target = data.draw(some.pieces_in((length, 1, 1), max_pieces=5))

    assert _all_pairs(source, target, (length,)) == _unrolled(intersect(source, target), (length,))


Pair = tuple[int, int]
Common = dict[int, tuple[int, int]]


def _all_pairs(source: Pieces, target: Pieces, shape: tuple[int, ...]) -> dict[Pair, Common]:
    """Common elements of every pair, as tensor element to its places on both sides."""
    found: dict[Pair, Common] = {}
    for t in range(len(target)):
        for s in range(len(source)):
            ours = elements(source.take(np.array([s])), shape).tolist()
            theirs = {(who, e): place for who, e, _, place in elements(target.take(np.array([t])), shape).tolist()}
            both = {e: (place, theirs[who, e]) for who, e, _, place in ours if (who, e) in theirs}
            if both:
                found[s, t] = both
    return found


def _unrolled(common: Overlaps, shape: tuple[int, ...]) -> dict[Pair, Common]:
    found: dict[Pair, Common] = {}
    for row in range(len(common)):
        one = common.take(np.array([row]))
        boxes = {"tensor": one.source, "buffer": one.target, "start": one.start, "extent": one.extent, "step": one.step}
        ours = Pieces(**boxes, offset=one.source_offset, stride=one.source_stride)
        theirs = Pieces(**boxes, offset=one.target_offset, stride=one.target_stride)
        rows = zip(elements(ours, shape).tolist(), elements(theirs, shape).tolist(), strict=True)
        pair = int(one.source[0]), int(one.target[0])
        assert pair not in found
        found[pair] = {a[1]: (a[3], b[3]) for a, b in rows}
    return found


@given(st.data())
def test_moves_copy_exactly_what_the_overlaps_share(data: Data) -> None:
    shape = data.draw(some.shapes(max_ndim=5, max_dim=3))
    source = data.draw(some.pieces_in(shape, max_pieces=3))
    target = data.draw(some.pieces_in(shape, max_pieces=3))
    common = intersect(source, target)
    dims = data.draw(st.integers(1, 3))

    folded = coalesce(common)
    lowered = to_copy_dims(folded, dims)

    expected = [sorted(places.values()) for places in _unrolled(common, shape).values()]
    assert expected == _places(folded, len(common))
    assert expected == _places(lowered, len(common))
    assert lowered.extent.shape == (len(lowered), dims)
    for moves in (folded, lowered):
        unused = moves.extent == 1
        assert (np.diff(unused.astype(np.int64), axis=1) <= 0).all()  # unused dimensions come first
        assert not moves.source_stride[unused].any()
        assert not moves.target_stride[unused].any()


def _places(moves: Moves, overlaps: int) -> list[list[tuple[int, int]]]:
    """Places on both sides of each element that is moved, by overlap."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(overlaps)]
    for row in range(len(moves)):
        source, target = np.array(moves.source_offset[row]), np.array(moves.target_offset[row])
        for d in range(moves.extent.shape[1]):
            source = np.add.outer(source, moves.source_stride[row, d] * np.arange(moves.extent[row, d]))
            target = np.add.outer(target, moves.target_stride[row, d] * np.arange(moves.extent[row, d]))
        pairs = zip(source.ravel().tolist(), target.ravel().tolist(), strict=True)
        found[int(moves.overlap[row])].extend(pairs)
    return [sorted(places) for places in found]


@given(some.worlds())
def test_any_trainer_feeds_any_engine(world: some.World) -> None:
    """Every element that a rank needs arrives, whatever the two cuts; what is no piece stays untouched."""
    values = {}
    for number, tensor in enumerate(world.model):
        carrier = DTYPES[tensor.dtype].carrier
        values[tensor.name] = (numbered(tensor.shape) + 100 * number + 1).astype(carrier)
    sources = []
    for layout in world.sources:
        held = local.empty_buffers(layout)
        local.fill(layout, held, values)
        sources.append(held)
    for layout in world.targets:
        expected, got = local.empty_buffers(layout), local.empty_buffers(layout)
        needed = local.fill(layout, expected, values)

        fed = [_deliver(source, held, layout, got) for source, held in zip(world.sources, sources, strict=True)]

        assert [e.tolist() for e in expected] == [g.tolist() for g in got]
        assert needed <= sum(fed)


def _deliver(source: Layout, held: list[local.Elements], target: Layout, got: list[local.Elements]) -> int:
    names = {t.name: row for row, t in enumerate(target.tensors)}
    common_ids = np.array([names[t.name] for t in source.tensors], np.int64)
    ours = placed(pieces_of(source), tensor=common_ids[source.tensor])
    common = intersect(ours, pieces_of(target))
    moves = to_copy_dims(coalesce(common))
    moved = 0
    for row, overlap in enumerate(moves.overlap.tolist()):
        read = held[int(source.buffer[common.source[overlap]])]
        write = got[int(target.buffer[common.target[overlap]])]
        moved += local.move(moves, row, read, write)
    return moved


@given(some.layouts())
def test_a_layout_survives_its_message_and_its_file(layout: Layout) -> None:
    decoded = decode_layout(encode_layout(layout))

    assert _content(layout) == _content(decoded)
    assert layout_digest(layout) == layout_digest(decoded)
    assert encode_layout(layout) == encode_layout(decoded)
    file = decode_file(encode_file(LayoutFile(TrainerRank(2), 5, layout)))
    assert _content(layout) == _content(file.layout)
    assert (2, 5, "", "") == (file.who, file.size, file.node, file.slot)


def _content(layout: Layout) -> list[object]:
    tables = [layout.tensors, layout.buffers, layout.aliases, layout.unused, layout.kept]
    return [*tables, *(getattr(layout, name).tolist() for name in Pieces.__slots__)]


@given(some.layouts(), some.layouts())
def test_digests_are_equal_exactly_where_contents_are(one: Layout, other: Layout) -> None:
    assert (_content(one) == _content(other)) == (layout_digest(one) == layout_digest(other))


@given(st.data())
def test_bytes_that_were_changed_are_refused_or_still_a_layout(data: Data) -> None:
    good = bytearray(encode_layout(data.draw(some.layouts())))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(len(good) - 1, 0)))
        match data.draw(st.sampled_from(["set", "cut", "drop", "insert"])):
            case "set" if good:
                good[at] = data.draw(st.integers(0, 255))
            case "cut":
                del good[at:]
            case "drop":
                del good[at : at + 1]
            case _:
                good[at:at] = data.draw(st.binary(max_size=9))

    _decodes_or_refuses(bytes(good))


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(WeightdError):
        decode_layout(noise)
    with pytest.raises(WeightdError):
        decode_file(noise)


HOSTILE: list[object] = [
    *(-(2**63), -1, 0, 1, 2**31, 2**40, 2**52, 2**62, 2**63 - 1),
    *(2**64 - 1, None, True, 1.5, "", "x\x00", b"", [], [[]], {}),
]


@given(st.data())
def test_values_that_were_changed_are_refused_or_still_a_layout(data: Data) -> None:
    """Fields of any type and size, and numbers that overflow where they are multiplied."""
    message = msgpack.unpackb(encode_layout(data.draw(some.layouts())))
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(sorted(message)))
        value = message[key]
        if isinstance(value, bytes) and value:
            column = np.frombuffer(value, "<i8").copy()
            chosen = [v for v in HOSTILE if type(v) is int and abs(v) < 2**63]
            column[data.draw(st.integers(0, len(column) - 1))] = data.draw(st.sampled_from(chosen))
            message[key] = column.tobytes()
        elif isinstance(value, list) and value and all(isinstance(entry, list) and entry for entry in value):
            entry = data.draw(st.sampled_from(value))
            entry[data.draw(st.integers(0, len(entry) - 1))] = data.draw(st.sampled_from(HOSTILE))
        else:
            message[key] = data.draw(st.sampled_from(HOSTILE))

    _decodes_or_refuses(packed(message))


def _decodes_or_refuses(data: bytes) -> None:
    refusal = ""
    try:
        faults = find_faults(decode_layout(data))
    except WeightdError as error:
        refusal, faults = str(error), ()
    assert refusal or faults == ()


@given(st.data())
def test_hostile_columns_never_pass_the_checks(data: Data) -> None:
    """What passes is compared with whole numbers of any size, which cannot overflow."""
    shape = data.draw(some.shapes(max_ndim=2))
    extremes = st.sampled_from([v for v in HOSTILE if type(v) is int and v.bit_length() < 64]) | st.integers(-2, 6)
    names = ["start", "extent", "step", "stride"]
    wide = {name: [data.draw(extremes) for _ in shape] for name in names}
    offset, elements_held = data.draw(extremes), data.draw(st.integers(0, 40))
    start, extent, step, stride = (wide[name] for name in names)
    builder = LayoutBuilder()
    builder.add_tensor("w", shape, "uint8")
    builder.add_buffer("w", elements_held, "uint8", "slot")
    base = builder.build()
    first, count, hop, apart = (np.array(wide[name], np.int64).reshape(1, len(shape)) for name in names)
    zero: Int64 = np.zeros(1, np.int64)
    layout = Layout(base.tensors, base.buffers, zero, first, count, hop, zero, np.array([offset], np.int64), apart)

    box_is_inside = all(
        s >= 0 and e >= 1 and 1 <= k < 2**31 and s + (e - 1) * k < n
        for s, e, k, n in zip(start, extent, step, shape, strict=True)
    )
    last = offset + sum((e - 1) * b for e, b in zip(extent, stride, strict=True))
    memory_is_inside = all(b >= 0 and (b >= 1 or e == 1) for e, b in zip(extent, stride, strict=True))
    assert (box_is_inside and memory_is_inside and 0 <= offset <= last < elements_held) == (find_faults(layout) == ())
