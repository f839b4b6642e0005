"""Bytes to messages and back: the one door to MessagePack.

Bytes are read by ``msgpack`` under the limits of ``core.wire.limits``, types are
checked by ``msgspec.convert`` in strict mode.  A frame is a message as a whole or
it is refused as a whole: an unknown field, a doubled key, a number that is not
finite, an extension type or a byte too many are all errors.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

import msgpack
import msgspec

from weightd.core.wire import limits
from weightd.core.wire.faults import LocalProtocolError, PeerProtocolError, ProtocolMismatch
from weightd.core.wire.messages import MAX_FRAME_BYTES, PROTOCOL, Envelope

if TYPE_CHECKING:
    from types import UnionType

    from weightd.core.errors import Plain

T = TypeVar("T")

_MAX_CHARACTERS = limits.MAX_TEXT_BYTES // 4
"""Texts are measured in characters before they are encoded, and one takes up to four bytes."""

UNKNOWN_PEER = "an unnamed peer"
"""Who sent a frame, where the caller cannot say."""


def encode(envelope: Envelope) -> bytes:
    """Return the frame of a message.

    Raises:
        LocalProtocolError: A field is not of its declared type, a number is not finite, or the frame
            would be larger than ``MAX_FRAME_BYTES``.
    """
    return pack(envelope, MAX_FRAME_BYTES, type(envelope.body).__name__)


def decode(frame: bytes, who: str = UNKNOWN_PEER) -> Envelope:
    """Return the message of a frame.

    Args:
        frame: One whole frame as it came from the socket.
        who: Its sender as well as it is known, for the error.

    Raises:
        PeerProtocolError: The frame is not a message.
        ProtocolMismatch: It is one of another protocol number.
    """
    plain = _read(frame, MAX_FRAME_BYTES, who)
    theirs = plain.get("protocol") if isinstance(plain, dict) else None
    # Looked at first: a message of another protocol would otherwise fail on whichever field is new.
    if type(theirs) is int and theirs != PROTOCOL:
        raise ProtocolMismatch(who, theirs, PROTOCOL)
    return _typed(plain, Envelope, who, len(frame))


def pack(value: object, limit_bytes: int, message: str = "") -> bytes:
    """Return any of our structs as bytes, checked as its receiver will check it.

    Args:
        value: A msgspec struct.
        limit_bytes: Largest result.
        message: Name for the error; the value's type if empty.

    Raises:
        LocalProtocolError: As for ``encode``.
    """
    name = message or type(value).__name__
    try:
        plain = msgspec.to_builtins(value, builtin_types=(bytes,))
        _check_plain(plain)
        msgspec.convert(plain, type(value), strict=True, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        what, path = _split(error)
        raise LocalProtocolError(name, what, path) from error
    except (_Illegal, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise LocalProtocolError(name, _named(error)) from error
    frame = _packb(plain)
    if len(frame) > limit_bytes:
        raise LocalProtocolError(name, f"{len(frame):,} bytes, the limit is {limit_bytes:,}")
    return frame


def unpack(frame: bytes, type_: type[T] | UnionType, limit_bytes: int, who: str = UNKNOWN_PEER) -> T:
    """Return the value of ``type_`` that ``pack`` made the bytes of.

    Args:
        frame: The bytes, whole.
        type_: A msgspec struct or a tagged union of structs.
        limit_bytes: Largest frame that is looked at.
        who: Its sender, for the error.

    Raises:
        PeerProtocolError: The bytes are not such a value.
    """
    return _typed(_read(frame, limit_bytes, who), type_, who, len(frame))


class _Illegal(Exception):
    """A value that no message may hold."""


class _Reader:
    """Counts the containers of one frame and refuses what msgpack would let pass."""

    def __init__(self) -> None:
        self._containers = 0

    def _count(self) -> None:
        self._containers += 1
        if self._containers > limits.MAX_CONTAINERS:
            raise _Illegal(f"more than {limits.MAX_CONTAINERS:,} lists and maps")

    def read_list(self, items: list[Plain]) -> list[Plain]:
        self._count()
        return items

    def read_map(self, pairs: list[tuple[str, Plain]]) -> dict[str, Plain]:
        self._count()
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            raise _Illegal(f"key {next(k for k in keys if keys.count(k) > 1)!r} comes twice in one map")
        return found

    def read_extension(self, code: int, _data: bytes) -> Plain:
        raise _Illegal(f"extension type {code}")


def _read(frame: bytes, limit_bytes: int, who: str) -> Plain:
    """Return the plain values of a frame, or refuse it."""
    if len(frame) > limit_bytes:
        raise PeerProtocolError(who, f"larger than {limit_bytes:,} bytes", "", len(frame))
    reader = _Reader()
    try:
        plain = msgpack.unpackb(
            frame,
            raw=False,
            strict_map_key=True,
            unicode_errors="strict",
            object_pairs_hook=reader.read_map,
            list_hook=reader.read_list,
            ext_hook=reader.read_extension,
            max_str_len=limits.MAX_TEXT_BYTES,
            max_bin_len=limits.MAX_BINARY_BYTES,
            max_array_len=limits.MAX_LIST_ITEMS,
            max_map_len=limits.MAX_MAP_ITEMS,
            max_ext_len=0,
        )
        _check_plain(plain)
    except _Illegal as error:
        raise PeerProtocolError(who, str(error), "", len(frame)) from error
    # msgpack's own errors are ValueErrors (and one plain UnpackException); a key that is no text is one, too.
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise PeerProtocolError(who, _named(error), "", len(frame)) from error
    return plain


def _typed(plain: Plain, type_: type[T] | UnionType, who: str, nbytes: int) -> T:
    """Return plain values as ``type_``, or name the field that does not fit."""
    try:
        # bytes are bytes: without builtin_types a text would be taken for base64, strict or not.
        typed: T = msgspec.convert(plain, type_, strict=True, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        what, path = _split(error)
        raise PeerProtocolError(who, what, path, nbytes) from error
    return typed


def _check_plain(plain: Plain) -> None:
    """Refuse what msgpack and msgspec let pass on either side: numbers that are not finite, deep nesting."""
    level: list[Plain] = [plain]
    for _ in range(limits.MAX_DEPTH + 1):
        deeper: list[Plain] = []
        for value in level:
            if type(value) is float and not math.isfinite(value):
                raise _Illegal(f"{value} is not a finite number")
            if isinstance(value, dict):
                deeper.extend(value.values())
            elif isinstance(value, (list, tuple)):
                deeper.extend(value)
            elif isinstance(value, str) and len(value) > _MAX_CHARACTERS:
                raise _Illegal(f"a text of {len(value):,} characters, the limit is {_MAX_CHARACTERS:,}")
            elif isinstance(value, bytes) and len(value) > limits.MAX_BINARY_BYTES:
                raise _Illegal(f"a run of {len(value):,} bytes, the limit is {limits.MAX_BINARY_BYTES:,}")
        if not deeper:
            return
        level = deeper
    raise _Illegal(f"nested deeper than {limits.MAX_DEPTH} levels")


def _split(error: msgspec.ValidationError) -> tuple[str, str]:
    """Return what msgspec objects to, and the path of the field."""
    what, _, path = str(error).partition(" - at `")
    return what, path.rstrip("`")


def _named(error: Exception) -> str:
    """Return an error's class and text; some of msgpack's have no text."""
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _packb(plain: Plain) -> bytes:
    """Return plain values as MessagePack."""
    packed = msgpack.packb(plain, use_bin_type=True)
    assert isinstance(packed, bytes)
    return packed
