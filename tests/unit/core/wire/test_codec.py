"""What the codec refuses, by which rule, and that both sides have the same rules."""

import dataclasses
from typing import Any

import msgpack
import msgspec
import pytest

from tests.wire_samples import BODIES, ERROR, envelope
from weightd.core.errors import WireError
from weightd.core.wire import limits
from weightd.core.wire import messages as m
from weightd.core.wire.codec import decode, encode, pack, unpack
from weightd.core.wire.faults import LocalProtocolError, PeerProtocolError, ProtocolMismatch

WELCOME = next(body for body in BODIES if isinstance(body, m.Welcome))

OVERLONG = (limits.MAX_TEXT_BYTES + 1).to_bytes(4, "big")
"""The longest text and the longest run of bytes have the same limit."""


def plain(body: m.Body = WELCOME) -> dict[str, Any]:
    """The values of a valid message, to be broken."""
    values: dict[str, Any] = msgspec.to_builtins(envelope(body), builtin_types=(bytes,))
    return values


def packed(values: dict[str, Any]) -> bytes:
    """Plain values as bytes, unchecked."""
    frame: bytes = msgpack.packb(values)  # pyright: ignore[reportAssignmentType]
    return frame


def refusal(frame: bytes) -> PeerProtocolError:
    with pytest.raises(PeerProtocolError) as refused:
        decode(frame, "node-b")
    assert "node-b" == refused.value.who
    assert len(frame) == refused.value.nbytes
    return refused.value


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_every_message_survives_the_trip(body: m.Body) -> None:
    assert envelope(body) == decode(encode(envelope(body)))


@pytest.mark.parametrize(
    "frame, what",
    [
        (b"", "incomplete"),
        (b"\xc1", "FormatError"),
        (b"\x91" * 3000, "StackError"),
        (b"\x91" * 100 + b"\xc0", "nested deeper than 32"),
        (b"\xdd\xff\xff\xff\xff", "max_array_len"),
        (b"\xdf\xff\xff\xff\xff", "max_map_len"),
        (b"\xdb\xff\xff\xff\xff", "incomplete"),
        (b"\xdb" + OVERLONG + bytes(limits.MAX_TEXT_BYTES + 1), "max_str_len"),
        (b"\xc6" + OVERLONG + bytes(limits.MAX_TEXT_BYTES + 1), "max_bin_len"),
        (b"\xdd" + (limits.MAX_LIST_ITEMS + 1).to_bytes(4, "big") + b"\xc0" * limits.MAX_LIST_ITEMS, "max_array_len"),
        (b"\xdf" + (limits.MAX_MAP_ITEMS + 1).to_bytes(4, "big") + b"\xa1a\xc0" * limits.MAX_MAP_ITEMS, "max_map_len"),
        (b"\x82\xa1a\x01\xa1a\x02", "'a' comes twice"),
        (b"\x81\x01\x01", "not allowed for map key"),
        (b"\x81\xa1a\xcb\x7f\xf8\0\0\0\0\0\0", "nan is not a finite number"),
        (b"\x91\xcb\x7f\xf0\0\0\0\0\0\0", "inf is not a finite number"),
        (b"\x91\xcb\xff\xf0\0\0\0\0\0\0", "-inf is not a finite number"),
        (b"\xa2\xff\xfe", "UnicodeDecodeError"),
        (b"\xd6\xff\0\0\0\0", "max_ext_len"),  # a timestamp
        (b"\xc7\0\x05", "extension type 5"),  # an extension without a byte
        (b"\xc0\xc0", "ExtraData"),
    ],
    ids=lambda value: value[:12].hex() if isinstance(value, bytes) else None,
)
def test_hostile_bytes_are_refused_by_the_rule_they_break(frame: bytes, what: str) -> None:
    assert what in refusal(frame).what


def test_a_frame_of_many_empty_lists_does_not_fill_the_memory() -> None:
    chunk = b"\xdc\xff\xff" + b"\x90" * 0xFFFF
    frame = b"\xdc\x00\x10" + chunk * 16

    assert f"more than {limits.MAX_CONTAINERS:,} lists and maps" in refusal(frame).what


def test_a_frame_above_the_limit_is_not_looked_at() -> None:
    assert f"larger than {m.MAX_FRAME_BYTES:,} bytes" == refusal(bytes(m.MAX_FRAME_BYTES + 1)).what


def test_trailing_bytes_are_refused() -> None:
    assert "ExtraData" in refusal(encode(envelope(WELCOME)) + b"\0").what


@pytest.mark.parametrize(
    "path, value, shown",
    [
        (("seq",), -1, "$.seq"),
        (("seq",), True, "$.seq"),
        (("seq",), 1.0, "$.seq"),
        (("seq",), "4", "$.seq"),
        (("seq",), 2**63, "$.seq"),
        (("trace",), "text", "$.trace"),
        (("body", "node"), 5, "$.body.node"),
        (("body", "heartbeat_s"), None, "$.body.heartbeat_s"),
        (("body", "type"), "Farewell", "$.body.type"),
        (("body",), [], "$.body"),
        (("surprise",), 1, ""),
        (("body", "surprise"), 1, "$.body"),
    ],
)
def test_a_field_that_does_not_fit_is_named(path: tuple[str, ...], value: object, shown: str) -> None:
    values = plain()
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value

    assert shown == refusal(packed(values)).path


@pytest.mark.parametrize("field", ["seq", "body", "run"])
def test_a_missing_field_is_named(field: str) -> None:
    values = plain()
    del values[field]

    assert f"`{field}`" in refusal(packed(values)).what


def test_another_protocol_is_told_with_both_numbers_before_any_field_is_looked_at() -> None:
    with pytest.raises(ProtocolMismatch) as refused:
        decode(packed({"protocol": 9, "new": "field"}), "node-b")

    assert (9, m.PROTOCOL, "node-b") == (refused.value.theirs, refused.value.ours, refused.value.who)


def test_deep_reports_are_refused_before_they_can_exhaust_the_stack() -> None:
    error = ERROR
    for _ in range(40):
        error = WireError("E_PART", {}, "part", (error,))

    with pytest.raises(LocalProtocolError, match="nested deeper"):
        encode(envelope(m.Refusal(error)))


@pytest.mark.parametrize(
    "body, what, path",
    [
        (m.Bye(5), "Expected `str`, got `int`", "$.body.why"),  # type: ignore[arg-type]
        (m.BlobWanted("d", -1), "Expected `int` >= 0", "$.body.first"),
        (dataclasses, "module", ""),
        (m.BlobWanted("x" * 65), "length <= 64", "$.body.digest"),
        (m.Refusal(WireError("E", {"waited_s": float("inf")}, "")), "inf is not a finite number", ""),
        (m.Bye("x" * (limits.MAX_TEXT_BYTES // 4 + 1)), "characters", ""),
        (m.Status(bytes(limits.MAX_BINARY_BYTES + 1)), "run of", ""),
        (m.NodeReport(*[()] * 5), "", "$.body.node"),  # type: ignore[arg-type]
    ],
)
def test_what_a_peer_would_refuse_is_not_sent(body: Any, what: str, path: str) -> None:
    with pytest.raises(LocalProtocolError) as refused:
        encode(envelope(body))

    assert what in refused.value.what
    assert path == refused.value.path


def test_a_message_larger_than_a_frame_is_not_sent() -> None:
    parts = {f"part {n}": "x" * 900_000 for n in range(10)}

    with pytest.raises(LocalProtocolError, match=f"the limit is {m.MAX_FRAME_BYTES:,}"):
        encode(envelope(m.Refusal(WireError("E", parts, ""))))


def test_the_largest_chunk_fits_a_frame() -> None:
    chunk = m.BlobChunk("d" * 64, 1, 2, m.CHUNK_BYTES, bytes(m.CHUNK_BYTES))

    assert len(encode(envelope(chunk))) <= m.CHUNK_BYTES + limits.ENVELOPE_BYTES


def test_small_datagrams_have_the_same_rules() -> None:
    frame = pack(ERROR, 1000)

    assert ERROR == unpack(frame, WireError, 1000)
    with pytest.raises(LocalProtocolError):
        pack(ERROR, 10)
    with pytest.raises(PeerProtocolError, match="larger than 10 bytes"):
        unpack(frame, WireError, 10)
