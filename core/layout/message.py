"""A layout as bytes: what hooks and daemons send each other, and what ``export_layout`` writes.

The bytes come from elsewhere.  Lengths are bounded while they are unpacked,
types are checked strictly, columns must have the length that the counts say,
the digest must be that of the content, and then every rule of a layout is
checked.  Nothing but a ``WeightdError`` leaves this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack
import msgspec
import numpy as np

from weightd.core.layout.checks import MAX_NDIM, validate
from weightd.core.layout.columns import BufferInfo, Layout, RowRange, TensorInfo, Unused
from weightd.core.layout.digest import layout_digest
from weightd.core.layout.faults import MalformedLayout
from weightd.core.layout.packing import packed

if TYPE_CHECKING:
    from weightd.core.layout.columns import Int64

FORMAT = 1
"""Number of this form; another one is refused, not guessed."""

_NARROW = ("tensor", "buffer", "offset")
_WIDE = ("start", "extent", "step", "stride")


@dataclass(frozen=True, slots=True)
class LayoutLimits:
    """What a reader accepts before it allocates anything.

    Attributes:
        message_bytes: Length of the whole message.
        entries: Entries of each table.
        pieces: Pieces.
        text: Bytes of one text.
    """

    message_bytes: int = 1 << 28
    entries: int = 1 << 20
    pieces: int = 1 << 21
    text: int = 4096


DEFAULT_LIMITS = LayoutLimits()
"""Several times what a 1T model needs: 70,000 tensors and 200,000 pieces a rank are 30 MiB."""


class _Tensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A row of the table of tensors; 70,000 of them carry no keys."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class _Buffer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: str
    nbytes: int
    dtype: str
    kind: str
    region: int
    base: int


class _Unused(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: str
    rows: tuple[int, int] | None
    why: str


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The message; columns are little-endian int64, wide ones row by row."""

    format: int
    digest: str
    pieces: int
    ndim: int
    tensors: tuple[_Tensor, ...]
    buffers: tuple[_Buffer, ...]
    aliases: tuple[tuple[str, str], ...]
    unused: tuple[_Unused, ...]
    kept: tuple[str, ...]
    tensor: bytes
    buffer: bytes
    offset: bytes
    start: bytes
    extent: bytes
    step: bytes
    stride: bytes


def encode_layout(layout: Layout) -> bytes:
    """Return a valid layout as bytes; equal content gives equal bytes.

    >>> from weightd.core.layout.build import LayoutBuilder
    >>> empty = LayoutBuilder().build()
    >>> decode_layout(encode_layout(empty)).pieces
    0
    """
    body: dict[str, Any] = {
        "format": FORMAT,
        "digest": layout_digest(layout),
        "pieces": layout.pieces,
        "ndim": layout.ndim,
        "tensors": [[t.name, t.shape, t.dtype] for t in layout.tensors],
        "buffers": [[b.name, b.nbytes, b.dtype, b.kind, b.region, b.base] for b in layout.buffers],
        "aliases": layout.aliases,
        "unused": [[u.name, None if u.rows is None else [u.rows.start, u.rows.end], u.why] for u in layout.unused],
        "kept": layout.kept,
    }
    body |= {name: np.ascontiguousarray(getattr(layout, name), "<i8").tobytes() for name in (*_NARROW, *_WIDE)}
    return packed(body)


def decode_layout(data: bytes, limits: LayoutLimits = DEFAULT_LIMITS, whose: str = "layout") -> Layout:
    """Return the layout that ``data`` holds.

    Args:
        data: Bytes of ``encode_layout``, from anywhere.
        limits: What to accept.
        whose: Subject of a report, for instance ``layout of trainer rank 3``.

    Raises:
        MalformedLayout: The bytes are no layout message of this format, or not what their digest says.
        Refused: They are, but the layout breaks a rule.
    """
    message = _converted(unpacked(data, limits), _Message)
    if message.format != FORMAT:
        raise MalformedLayout(f"format {message.format}, this reads format {FORMAT}")
    if not 0 <= message.pieces <= limits.pieces or not 0 <= message.ndim <= MAX_NDIM:
        raise MalformedLayout(f"{message.pieces} pieces of {message.ndim} dimensions")
    layout = Layout(
        tensors=tuple(TensorInfo(t.name, t.shape, t.dtype) for t in message.tensors),
        buffers=tuple(BufferInfo(b.name, b.nbytes, b.dtype, b.kind, b.region, b.base) for b in message.buffers),
        **{name: _column(name, getattr(message, name), (message.pieces,)) for name in _NARROW},
        **{name: _column(name, getattr(message, name), (message.pieces, message.ndim)) for name in _WIDE},
        aliases=message.aliases,
        unused=tuple(Unused(u.name, None if u.rows is None else RowRange(*u.rows), u.why) for u in message.unused),
        kept=message.kept,
    )
    validate(layout, whose)
    digest = layout_digest(layout)
    if digest != message.digest:
        raise MalformedLayout(f"its content has digest {digest}, it says {message.digest[:64]}")
    return layout


def _column(name: str, data: bytes, shape: tuple[int, ...]) -> Int64:
    """Return a read-only column of int64 over the message's bytes."""
    count = 1
    for n in shape:
        count *= n
    if len(data) != 8 * count:
        raise MalformedLayout(f"column {name} has {len(data)} bytes, {8 * count} were announced")
    return np.frombuffer(data, "<i8").astype(np.int64, copy=False).reshape(shape)


def unpacked(data: bytes, limits: LayoutLimits) -> object:
    """Return the plain values of msgpack bytes within the limits.

    Raises:
        MalformedLayout: Too long, no msgpack, an extension type, a key that is no text, or a key twice.
    """
    if len(data) > limits.message_bytes:
        raise MalformedLayout(f"{len(data)} bytes, more than {limits.message_bytes}")
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            use_list=True,
            object_pairs_hook=_unique_keys,
            ext_hook=_no_extension,
            max_str_len=limits.text,
            max_bin_len=8 * limits.pieces * MAX_NDIM,
            max_array_len=limits.entries,
            max_map_len=64,  # no map here has more keys
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.UnpackException) as e:  # what msgpack raises for bad bytes
        raise MalformedLayout(str(e) or type(e).__name__) from e


def _unique_keys(pairs: list[tuple[object, object]]) -> dict[object, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _no_extension(code: int, _data: bytes) -> object:
    raise ValueError(f"extension type {code}")


_T = TypeVar("_T")


def _converted(value: object, kind: type[_T]) -> _T:
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as e:
        raise MalformedLayout(str(e)) from e
