"""A rank plan as bytes, and what a hook checks before it carries one out.

The bytes come from another process.  Types are checked strictly, columns must
be as long as the counts say, and ``check_rank_plan`` then holds every row
against the memory that the hook really has: a wrong plan is refused, never run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from weightd.core.layout.digest import layout_digest
from weightd.core.plan.copies import NARROW, WIDE
from weightd.core.plan.holdings import itemsizes, needed_nbytes
from weightd.core.plan.node_plan import COPY_DIMS, Copies, LandingSource, RankPlan, Source, TrainerSource
from weightd.core.plan.plan_faults import CopyOutOfBounds, MalformedPlan, PlanError, PlanMismatch
from weightd.core.units import EngineId, EngineRank, RolloutRank, TrainerRank

if TYPE_CHECKING:
    from weightd.core.layout.boxes import Mask
    from weightd.core.layout.columns import Int64, Layout

FORMAT = 1
"""Number of this form; another one is refused, not guessed."""

MAX_PLAN_BYTES = 1 << 30
"""Longest message: 7 million rows, a hundred times the plan of a 1T model for one rank."""

_MOST = 1 << 52
"""No offset, stride or extent is larger, so that sums of their quotients stay inside int64."""


class _Source(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A trainer's pool, or the landing where ``rank`` is -1."""

    rank: int
    region: int


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The message; columns are little-endian int64, wide ones row by row."""

    format: int
    engine: str
    k: int
    sources: tuple[_Source, ...]
    nbytes: int
    target_digest: str
    memory: str
    rows: int
    source: bytes
    source_offset: bytes
    target: bytes
    target_offset: bytes
    itemsize: bytes
    source_stride: bytes
    target_stride: bytes
    extent: bytes


def encode_rank_plan(plan: RankPlan, memory: str = "") -> bytes:
    """Return a rank plan as bytes; equal plans over equal memory give equal bytes.

    Args:
        plan: The plan.
        memory: Names the incarnations of the pools that it reads.  The same copies from a restarted trainer's
            pools are another blob: a rank that kept its views of the old ones would read old bytes.
    """
    columns = {name: np.ascontiguousarray(getattr(plan.copies, name), "<i8").tobytes() for name in (*NARROW, *WIDE)}
    sources = tuple(_Source(s.rank, s.region) if isinstance(s, TrainerSource) else _Source(-1, 0) for s in plan.sources)
    message = _Message(
        format=FORMAT,
        engine=plan.rank.engine,
        k=plan.rank.k,
        sources=sources,
        nbytes=plan.nbytes,
        target_digest=plan.target_digest,
        memory=memory,
        rows=len(plan.copies),
        **columns,
    )
    return msgspec.msgpack.encode(message)


def decode_rank_plan(data: bytes) -> RankPlan:
    """Return the rank plan that ``data`` holds; ``check_rank_plan`` says whether it may be carried out.

    Raises:
        MalformedPlan: The bytes are no rank plan of this format.
    """
    if len(data) > MAX_PLAN_BYTES:
        raise MalformedPlan(f"{len(data)} bytes, more than {MAX_PLAN_BYTES}")
    try:
        message = msgspec.msgpack.decode(data, type=_Message, strict=True)
    except (msgspec.ValidationError, msgspec.DecodeError) as e:
        raise MalformedPlan(str(e)) from e
    if message.format != FORMAT:
        raise MalformedPlan(f"format {message.format}, this reads format {FORMAT}")
    narrow = {name: _column(name, getattr(message, name), (message.rows,)) for name in NARROW}
    wide = {name: _column(name, getattr(message, name), (message.rows, COPY_DIMS)) for name in WIDE}
    if any(s.rank < -1 or s.region < 0 for s in message.sources) or message.k < 0:
        raise MalformedPlan("a rank or a region is negative")
    return RankPlan(
        rank=RolloutRank(EngineId(message.engine), EngineRank(message.k)),
        sources=tuple(_source(s) for s in message.sources),
        copies=Copies(**narrow, **wide),
        nbytes=message.nbytes,
        target_digest=message.target_digest,
    )


def _source(s: _Source) -> Source:
    return LandingSource() if s.rank < 0 else TrainerSource(TrainerRank(s.rank), s.region)


def _column(name: str, data: bytes, shape: tuple[int, ...]) -> Int64:
    """Return a read-only column of int64 over the message's bytes."""
    count = shape[0] * (shape[1] if len(shape) > 1 else 1)
    if count < 0 or len(data) != 8 * count:
        raise MalformedPlan(f"column {name} has {len(data)} bytes, {8 * count} were announced")
    return np.frombuffer(data, "<i8").astype(np.int64, copy=False).reshape(shape)


def check_rank_plan(plan: RankPlan, target_layout: Layout, pool_nbytes: Mapping[Source, int]) -> None:
    """Return if every row of a plan lies in the memory it is for, and they are as many bytes as the rank needs.

    Nothing is assumed about the plan's numbers.

    Args:
        plan: From anywhere.
        target_layout: The layout of the rank that would carry it out.
        pool_nbytes: Bytes of each pool that the plan may read, without header pages.

    Raises:
        PlanMismatch: It is for another layout, or reads a pool that is not there, or its counts do not add up.
        CopyOutOfBounds: A row leaves its pool or its buffer.
    """
    who, copies = str(plan.rank), plan.copies
    digest = layout_digest(target_layout)
    if plan.target_digest != digest:
        raise PlanMismatch(who, "digest of the layout", plan.target_digest, digest)
    for source in plan.sources:
        if source not in pool_nbytes:
            raise PlanMismatch(who, "a source", _name(source), f"none of {len(pool_nbytes)} pools")
    for name, column, most in (
        ("source", copies.source, len(plan.sources)),
        ("target", copies.target, len(target_layout.buffers)),
    ):
        strange = np.flatnonzero((column < 0) | (column >= most))
        if strange.size:
            raise PlanMismatch(who, f"{name} of row {strange[0]}", str(int(column[strange[0]])), f"one of {most}")
    sizes = itemsizes(target_layout)[copies.target]
    strange = np.flatnonzero(copies.itemsize != sizes)
    if strange.size:
        row = int(strange[0])
        raise PlanMismatch(who, f"itemsize of row {row}", str(int(copies.itemsize[row])), str(int(sizes[row])))
    pools = np.array([pool_nbytes[s] for s in plan.sources], np.int64)
    buffers = np.array([b.nbytes for b in target_layout.buffers], np.int64)
    for side, offset, stride, where, nbytes in (
        ("source", copies.source_offset, copies.source_stride, copies.source, pools),
        ("target", copies.target_offset, copies.target_stride, copies.target, buffers),
    ):
        bad = np.flatnonzero(~_inside(offset, stride, copies, nbytes[where]))
        if bad.size:
            raise _out_of_bounds(plan, target_layout, side, bad, int(nbytes[where[bad[0]]]))
    moved = int(copies.nbytes.sum())
    if moved != plan.nbytes:
        raise PlanMismatch(who, "bytes of all rows", str(plan.nbytes), str(moved))
    # Every row lies in its buffer, but that alone would let a plan leave out what the rank then serves unwritten.
    needed = needed_nbytes(target_layout)
    if moved != needed:
        raise PlanMismatch(who, "bytes of a version", str(moved), str(needed))


def _inside(offset: Int64, stride: Int64, copies: Copies, nbytes: Int64) -> Mask:
    """Say which rows lie in their memory; bounds come before products, so that nothing leaves int64."""
    hops = copies.extent - 1
    sane = (copies.extent >= 1) & (copies.extent <= _MOST) & (stride >= 0) & (stride % copies.itemsize[:, None] == 0)
    room = np.maximum(nbytes, 1)[:, None]
    sane &= (hops <= 0) | ((stride > 0) & (stride <= room // np.maximum(hops, 1)))
    reach = np.where(sane & (hops > 0), hops * np.where(sane, stride, 0), 0).sum(axis=1)
    # No row visits an element twice; in floating point, because a product of hostile extents has no bound.
    visits = np.prod(copies.extent.astype(np.float64), axis=1) * copies.itemsize
    sane &= (visits <= nbytes)[:, None]
    begins = (offset >= 0) & (offset <= nbytes) & (offset % copies.itemsize == 0)
    result: Mask = sane.all(axis=1) & begins & (np.where(begins, offset, 0) + reach + copies.itemsize <= nbytes)
    return result


def _out_of_bounds(plan: RankPlan, layout: Layout, side: str, bad: Int64, nbytes: int) -> PlanError:
    row, copies = int(bad[0]), plan.copies
    source = side == "source"
    where = _name(plan.sources[int(copies.source[row])]) if source else layout.buffers[int(copies.target[row])].name
    offset = copies.source_offset if source else copies.target_offset
    stride = copies.source_stride if source else copies.target_stride
    return CopyOutOfBounds(
        rank=str(plan.rank),
        row=row,
        side=side,
        where=where,
        nbytes=nbytes,
        offset=int(offset[row]),
        extent=tuple(copies.extent[row].tolist()),
        stride=tuple(stride[row].tolist()),
        itemsize=int(copies.itemsize[row]),
        others=int(bad.size) - 1,
    )


def _name(source: Source) -> str:
    return (
        f"region {source.region} of trainer rank {source.rank}" if isinstance(source, TrainerSource) else "the landing"
    )
