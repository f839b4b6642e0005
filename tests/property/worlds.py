"""Small worlds for the element proof: layouts that are cut at random, a brute-force oracle, and a carrier of bytes.

The oracle counts single elements in Python dictionaries and shares no code with the layouts' algebra.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from weightd.core.dtypes import dtype_named
from weightd.core.layout.build import LayoutBuilder
from weightd.core.layout.columns import Layout
from weightd.core.plan.node_plan import Copies, LandingSource, NodePlan, TrainerSource
from weightd.core.roster.topology import Place, Topology
from weightd.core.units import EngineId, EngineRank, NodeId, RolloutRank, SlotName, TrainerRank

Index = tuple[int, ...]
Box = tuple[tuple[int, int, int], ...]
"""Start, extent and step per dimension."""

POISON = 0xFF
"""Of such bytes every floating-point element is a NaN."""


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: Index
    dtype: str

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass
class World:
    """Who holds which box of which tensor, and who needs which."""

    tensors: list[Tensor]
    topology: Topology
    held: list[list[tuple[int, Box]]]  # per trainer rank: (tensor, box)
    needed: dict[RolloutRank, list[tuple[int, Box]]]
    unused: list[tuple[int, tuple[int, int] | None]] = field(default_factory=list)
    transposed: bool = False
    sparse: int = 1  # strides of the engines are so many times wider than the pieces

    def fulls(self) -> dict[str, NDArray[Any]]:
        """The tensors' true bytes by name."""
        return {t.name: numbered(t.shape, t.dtype, 1 + 37 * n) for n, t in enumerate(self.tensors)}

    def layouts(self) -> tuple[list[Layout], dict[RolloutRank, Layout]]:
        trainers = [self._layout(pieces, "slot") for pieces in self.held]
        return trainers, {r: self._layout(pieces, "param") for r, pieces in self.needed.items()}

    def _layout(self, pieces: list[tuple[int, Box]], kind: str) -> Layout:
        """One buffer per tensor with a gap between its pieces; on trainers all in one region."""
        b = LayoutBuilder()
        base = 0
        for number, t in enumerate(self.tensors):
            row = b.add_tensor(t.name, t.shape, t.dtype)
            mine = [box for n, box in pieces if n == number]
            size = dtype_named(t.dtype).nbytes
            if kind == "slot" and any(n == number and rows is None for n, rows in self.unused):
                b.add_unused(t.name)
            wide = self.sparse if kind == "param" else 1
            elements = sum(wide * int(np.prod([e for _, e, _ in box], dtype=np.int64)) + 3 for box in mine) + 2
            buffer = b.add_buffer(t.name, elements * size, t.dtype, kind, base=base if kind == "slot" else 0)
            base += -(-elements * size // 64) * 64
            offset = 2
            for box in mine:
                extent = [e for _, e, _ in box]
                b.add_piece(
                    row,
                    buffer,
                    [s for s, _, _ in box],
                    extent,
                    offset,
                    [wide * n for n in self._strides(extent, kind)],
                    [k for _, _, k in box],
                )
                offset += wide * int(np.prod(extent, dtype=np.int64)) + 3
            if kind == "slot":
                for n, rows in self.unused:
                    if n == number and rows is not None:
                        b.add_unused(t.name, rows)
        return b.build()

    def _strides(self, extent: list[int], kind: str) -> list[int]:
        order = range(len(extent)) if self.transposed and kind == "slot" else reversed(range(len(extent)))
        strides, n = [0] * len(extent), 1
        for d in order:
            strides[d], n = n, n * extent[d]
        return strides


def numbered(shape: Index, dtype: str, first: int = 1) -> NDArray[Any]:
    """A tensor of counted elements as their bytes: every one different as far as the type allows."""
    count = np.arange(first, first + int(np.prod(shape, dtype=np.int64)))
    if dtype == "bfloat16":
        halves = count.astype(np.float32).view(np.uint16)
        return halves[1::2].reshape(shape).copy()
    real = count.astype(np.dtype(dtype))
    return real.view(dtype_named(dtype).carrier).reshape(shape)


def elements(box: Box) -> Iterator[Index]:
    """Every index of a box, one by one."""
    return itertools.product(*(range(s, s + (e - 1) * k + 1, k) for s, e, k in box))


# --- the oracle -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """What is so of one tensor, counted."""

    needed: int
    missing: frozenset[Index]
    ambiguous: frozenset[Index]
    owned: int
    unused: frozenset[Index]


def truth(world: World, tensor: int) -> Truth:
    """Count the elements of a tensor one by one."""
    boxes_of: dict[Index, set[Box]] = {}
    for pieces in world.held:
        for n, box in pieces:
            if n == tensor:
                for i in elements(box):
                    boxes_of.setdefault(i, set()).add(box)
    needed = {i for pieces in world.needed.values() for n, box in pieces if n == tensor for i in elements(box)}

    def excused(i: Index) -> bool:
        return any(
            n == tensor and (rows is None or (bool(i) and rows[0] <= i[0] < rows[1])) for n, rows in world.unused
        )

    return Truth(
        needed=len(needed),
        missing=frozenset(needed - boxes_of.keys()),
        ambiguous=frozenset(i for i, b in boxes_of.items() if len(b) > 1 and (i in needed or not excused(i))),
        owned=len(boxes_of),
        unused=frozenset(i for i in boxes_of if i not in needed and not excused(i)),
    )


def remote_nbytes(world: World, node: NodeId) -> int:
    """Bytes that a node must fetch: what its ranks need and none of its trainers hold, each element once."""
    here = set(world.topology.trainer_ranks(node))
    total = 0
    for tensor, t in enumerate(world.tensors):
        local = {i for r in here for n, box in world.held[r] if n == tensor for i in elements(box)}
        wanted = {
            i
            for rank in world.topology.rollout_ranks(node)
            for n, box in world.needed[rank]
            if n == tensor
            for i in elements(box)
        }
        total += len(wanted - local) * dtype_named(t.dtype).nbytes
    return total


# --- the carrier ----------------------------------------------------------------------------------------------------


def pools(layouts: Sequence[Layout], fulls: Mapping[str, NDArray[Any]]) -> dict[TrainerSource, bytearray]:
    """The trainers' shared memory: pieces hold the true bytes, everything else is poisoned."""
    found = {}
    for r, layout in enumerate(layouts):
        regions: dict[int, int] = {}
        for b in layout.buffers:
            regions[b.region] = max(regions.get(b.region, 0), b.base + b.nbytes)
        memory = {region: bytearray([POISON]) * n for region, n in regions.items()}
        for p in range(layout.pieces):
            b = layout.buffers[int(layout.buffer[p])]
            full = fulls[layout.tensors[int(layout.tensor[p])].name]
            place_piece(layout, p, memory[b.region], b.base)[...] = logical(full, layout, p)
        for region, held in memory.items():
            found[TrainerSource(TrainerRank(r), region)] = held
    return found


def place_piece(layout: Layout, p: int, memory: bytearray, base: int) -> NDArray[Any]:
    """A view of where one piece lies."""
    info = layout.tensors[int(layout.tensor[p])]
    n, carrier = len(info.shape), dtype_named(info.dtype).carrier
    return np.ndarray(
        tuple(layout.extent[p, :n].tolist()),
        carrier,
        buffer=memory,
        offset=base + int(layout.offset[p]) * carrier.itemsize,
        strides=tuple((layout.stride[p, :n] * carrier.itemsize).tolist()),
    )


def logical(full: NDArray[Any], layout: Layout, p: int) -> NDArray[Any]:
    """The elements of the full tensor that a piece stands for."""
    n = full.ndim
    start, extent, step = (c[p, :n].tolist() for c in (layout.start, layout.extent, layout.step))
    cut: NDArray[Any] = full[
        tuple(slice(s, s + (e - 1) * k + 1, k) for s, e, k in zip(start, extent, step, strict=True))
    ]
    return cut


def carry(copies: Copies, rows: range, sources: Sequence[bytearray], targets: Sequence[bytearray]) -> None:
    """Carry out copies; numpy refuses a row that leaves its memory."""
    for i in rows:
        shape = tuple(copies.extent[i].tolist())
        carrier = np.dtype(f"V{int(copies.itemsize[i])}")
        source: NDArray[Any] = np.ndarray(
            shape,
            carrier,
            buffer=sources[int(copies.source[i])],
            offset=int(copies.source_offset[i]),
            strides=tuple(copies.source_stride[i].tolist()),
        )
        target: NDArray[Any] = np.ndarray(
            shape,
            carrier,
            buffer=targets[int(copies.target[i])],
            offset=int(copies.target_offset[i]),
            strides=tuple(copies.target_stride[i].tolist()),
        )
        target[...] = source


def deliver(
    plan: NodePlan, memory: Mapping[TrainerSource, bytearray], layouts: Mapping[RolloutRank, Layout]
) -> dict[RolloutRank, list[bytearray]]:
    """Fetch and apply one node's plan; return the buffers of its ranks, poisoned where nothing was written."""
    landing = bytearray([POISON]) * plan.fetch.landing_nbytes
    sources = [memory[s] for s in plan.fetch.sources]
    for bucket in plan.fetch.buckets:
        only = bytearray(len(landing))  # a bucket fills its own stretch and nothing else
        carry(plan.fetch.gather, range(bucket.first_row, bucket.last_row), sources, [only])
        end = bucket.landing_offset + bucket.nbytes
        assert not any(only[: bucket.landing_offset])
        assert not any(only[end:])
        landing[bucket.landing_offset : end] = only[bucket.landing_offset : end]
    written = {}
    for rank, ranked in plan.ranks.items():
        buffers = [bytearray([POISON]) * b.nbytes for b in layouts[rank].buffers]
        mine = [landing if isinstance(s, LandingSource) else memory[s] for s in ranked.sources]
        carry(ranked.copies, range(len(ranked.copies)), mine, buffers)
        written[rank] = buffers
    return written


def expected(layout: Layout, fulls: Mapping[str, NDArray[Any]]) -> list[bytearray]:
    """The buffers of a rank by plain slices of the full tensors."""
    buffers = [bytearray([POISON]) * b.nbytes for b in layout.buffers]
    for p in range(layout.pieces):
        full = fulls[layout.tensors[int(layout.tensor[p])].name]
        place_piece(layout, p, buffers[int(layout.buffer[p])], 0)[...] = logical(full, layout, p)
    return buffers


# --- strategies -----------------------------------------------------------------------------------------------------


def topology_of(
    trainers: Sequence[str], engines: Mapping[str, Sequence[str]], reserved: Sequence[int] = ()
) -> Topology:
    """A topology from places written ``node/slot``."""

    def place(text: str) -> Place:
        node, slot = text.split("/")
        return Place(NodeId(node), SlotName(slot))

    return Topology(
        tuple(map(place, trainers)),
        {EngineId(e): tuple(map(place, places)) for e, places in engines.items()},
        frozenset(TrainerRank(r) for r in reserved),
        "mixed",
    )


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    nodes = [f"n{i}" for i in range(draw(st.integers(1, 3)))]
    place = st.builds("{}/s{}".format, st.sampled_from(nodes), st.integers(0, 2))
    trainers = draw(st.lists(place, min_size=1, max_size=4))
    engines = {f"E{i}": draw(st.lists(place, min_size=1, max_size=3)) for i in range(draw(st.integers(1, 2)))}
    return topology_of(trainers, engines)


@st.composite
def cuttings(draw: st.DrawFn, shape: Index, ranks: int) -> list[list[Box]]:
    """The boxes of each of some ranks, which together hold every element; several ranks may hold the same."""
    whole: Box = tuple((0, n, 1) for n in shape)
    parts = draw(st.integers(1, ranks))
    kind = draw(st.sampled_from(["whole", "cut", "flat", "stepped"])) if shape and 0 not in shape else "whole"
    boxes: list[list[Box]]
    if kind == "whole":
        boxes = [[whole] if 0 not in shape else []]
    elif kind == "cut":
        dim = draw(st.integers(0, len(shape) - 1))
        ends = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=parts - 1, max_size=parts - 1)))
        bounds = [0, *ends, shape[dim]]
        boxes = [
            [tuple((a, b - a, 1) if d == dim else w for d, w in enumerate(whole))] if b > a else []
            for a, b in itertools.pairwise(bounds)
        ]
    elif kind == "stepped":
        dim = draw(st.integers(0, len(shape) - 1))
        boxes = []
        for p in range(parts):
            n = len(range(p, shape[dim], parts))
            step = parts if n > 1 else 1
            boxes.append([tuple((p, n, step) if d == dim else w for d, w in enumerate(whole))] if n else [])
    else:
        numel = int(np.prod(shape))
        per = -(-numel // parts)
        boxes = [flat_boxes(shape, min(p * per, numel), min((p + 1) * per, numel)) for p in range(parts)]
    return [boxes[r % len(boxes)] for r in range(ranks)]


def flat_boxes(shape: Index, low: int, high: int) -> list[Box]:
    """The boxes of flat elements [low, high): found by looking at every element."""
    if low >= high:
        return []
    if len(shape) == 1:
        return [((low, high - low, 1),)]
    inner = int(np.prod(shape[1:]))
    boxes: list[Box] = []
    first, last = -(-low // inner), high // inner
    if low // inner == (high - 1) // inner and not (low % inner == 0 and high % inner == 0):
        row = low // inner
        return [((row, 1, 1), *b) for b in flat_boxes(shape[1:], low - row * inner, high - row * inner)]
    if low % inner:
        boxes += [((first - 1, 1, 1), *b) for b in flat_boxes(shape[1:], low % inner, inner)]
    if last > first:
        boxes.append(((first, last - first, 1), *((0, n, 1) for n in shape[1:])))
    if high % inner:
        boxes += [((last, 1, 1), *b) for b in flat_boxes(shape[1:], 0, high % inner)]
    return boxes


@st.composite
def worlds(draw: st.DrawFn, damaged: bool = False) -> World:
    """A world that is covered, or one with some boxes lost, grown or moved."""
    topology = draw(topologies())
    tensors: list[Tensor] = []
    held: list[list[tuple[int, Box]]] = [[] for _ in topology.trainers]
    needed: dict[RolloutRank, list[tuple[int, Box]]] = {r: [] for r in topology.rollout_ranks()}
    unused: list[tuple[int, tuple[int, int] | None]] = []
    for n in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
        if draw(st.integers(0, 15)) == 0:
            shape = (0, *shape)
        tensors.append(Tensor(f"t{n}", shape, draw(st.sampled_from(["uint8", "int16", "float32", "int64"]))))
        for pieces, boxes in zip(held, draw(cuttings(shape, len(held))), strict=True):
            pieces.extend((n, b) for b in boxes)
        for engine, places in topology.engines.items():
            for k, boxes in enumerate(draw(cuttings(shape, len(places)))):
                needed[RolloutRank(engine, EngineRank(k))].extend((n, b) for b in boxes)
    if damaged:
        ranks = [*held, *needed.values()]
        for hurt in draw(st.lists(st.integers(0, len(ranks) - 1), min_size=1, max_size=3)):
            draw(damages(ranks[hurt], tensors))
        for n, t in enumerate(tensors):
            if t.shape and t.shape[0] > 1 and draw(st.booleans()):
                end = draw(st.integers(1, t.shape[0]))
                unused.append((n, (draw(st.integers(0, end - 1)), end)))
            elif draw(st.integers(0, 9)) == 0:
                unused.append((n, None))
    transposed: bool = draw(st.booleans())
    return World(tensors, topology, held, needed, unused, transposed, draw(st.integers(1, 2)))


@st.composite
def damages(draw: st.DrawFn, pieces: list[tuple[int, Box]], tensors: list[Tensor]) -> None:
    """Lose, cut or move one piece of a rank, or give it another one."""
    lose: bool = draw(st.booleans())
    if pieces and lose:
        pieces.pop(draw(st.integers(0, len(pieces) - 1)))
    if draw(st.booleans()):
        n = draw(st.integers(0, len(tensors) - 1))
        if 0 in tensors[n].shape:
            return
        box = []
        for size in tensors[n].shape:
            start = draw(st.integers(0, size - 1))
            step = draw(st.integers(1, 3))
            extent = draw(st.integers(1, (size - 1 - start) // step + 1))
            box.append((start, extent, step if extent > 1 else 1))
        pieces.append((n, tuple(box)))
