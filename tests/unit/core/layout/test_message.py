from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import pytest

from weightd.core.errors import Refused
from weightd.core.layout.build import LayoutBuilder
from weightd.core.layout.faults import MalformedLayout
from weightd.core.layout.message import LayoutLimits, decode_layout, encode_layout
from weightd.core.layout.packing import packed

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightd.core.layout.columns import Layout


def _layout() -> Layout:
    b = LayoutBuilder()
    w = b.add_tensor("w", (5, 3), "bfloat16")
    b.add_piece(w, b.add_buffer("w", 12, "bfloat16", "slot"), (3, 0), (2, 3))
    b.add_alias("v", "w")
    b.add_unused("w", (3, 5), "trimmed")
    b.add_kept("inv_freq")
    return b.build()


def test_a_layout_comes_back_whole() -> None:
    layout = decode_layout(encode_layout(_layout()))

    assert _layout().tensors == layout.tensors
    assert _layout().buffers == layout.buffers
    assert [[3, 0]] == layout.start.tolist()
    assert (("v", "w"),) == layout.aliases
    assert _layout().unused == layout.unused
    assert ("inv_freq",) == layout.kept


def test_columns_are_little_endian_words_on_every_machine() -> None:
    message = msgpack.unpackb(encode_layout(_layout()))

    assert bytes([3, 0, 0, 0, 0, 0, 0, 0] + [0] * 8) == message["start"]


def _changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    message = msgpack.unpackb(encode_layout(_layout()))
    change(message)
    return packed(message)


@pytest.mark.parametrize(
    "change,why",
    [
        (lambda m: m.update(format=2), "format 2, this reads format 1"),
        (lambda m: m.update(extra=1), "unknown field `extra`"),
        (lambda m: m.pop("stride"), "missing required field `stride`"),
        (lambda m: m["tensors"][0].append(1), "at most length 3"),
        (lambda m: m["tensors"][0].pop(), "at least length 3"),
        (lambda m: m.update(pieces=2), "column tensor has 8 bytes, 16 were announced"),
        (lambda m: m.update(ndim=1), "column start has 16 bytes, 8 were announced"),
        (lambda m: m.update(pieces=-1), "-1 pieces of 2 dimensions"),
        (lambda m: m.update(ndim=17), "1 pieces of 17 dimensions"),
        (lambda m: m.update(pieces="1"), "Expected `int`, got `str`"),
        (lambda m: m.update(pieces=True), "Expected `int`, got `bool`"),
        (lambda m: m.update(start=[0] * 16), "Expected `bytes`, got `array`"),
        (lambda m: m.update(kept=["other"]), "its content has digest"),
        (lambda m: m.update(digest="0" * 32), f"it says {'0' * 32}"),
    ],
)
def test_a_message_of_another_form_is_refused(change: Callable[[dict[str, Any]], object], why: str) -> None:
    with pytest.raises(MalformedLayout, match=why):
        decode_layout(_changed(change))


def test_a_layout_that_breaks_a_rule_is_refused_with_the_name_of_its_rank() -> None:
    outside = np.array([4, 0], "<i8").tobytes()

    with pytest.raises(Refused, match="layout of trainer rank 3 refused: 1 violation"):
        decode_layout(_changed(lambda m: m.update(start=outside)), whose="layout of trainer rank 3")


@pytest.mark.parametrize(
    "data,why",
    [
        (b"", "incomplete"),
        (b"\xc1", "MalformedLayout|FormatError|no layout message"),
        (encode_layout(LayoutBuilder().build()) + b"\x00", "extra data"),
        (msgpack.packb([1]), "Expected `object`, got `array`"),
        (msgpack.packb({1: 2}), "int is not allowed for map key"),
        (b"\x82\xa1a\x01\xa1a\x01", "a key occurs twice"),
        (msgpack.packb({"a": msgpack.ExtType(5, b"")}), "extension type 5"),
        (msgpack.packb({"a": msgpack.Timestamp(1)}), "exceeds max_ext_len"),
        (b"\x81\xa1a\xa1\xff", "utf-8"),
        (b"\x91" * 5000, "no layout message"),
    ],
)
def test_bytes_that_are_no_message_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(MalformedLayout, match=why):
        decode_layout(data)


@pytest.mark.parametrize(
    "limits,why",
    [
        (LayoutLimits(message_bytes=100), "bytes, more than 100"),
        (LayoutLimits(text=5), "exceeds max_str_len"),
        (LayoutLimits(entries=2), "exceeds max_array_len"),
        (LayoutLimits(pieces=0), "exceeds max_bin_len"),
    ],
)
def test_what_exceeds_a_limit_is_refused_while_it_is_read(limits: LayoutLimits, why: str) -> None:
    with pytest.raises(MalformedLayout, match=why):
        decode_layout(encode_layout(_layout()), limits)


def test_a_layout_without_pieces_passes_a_limit_of_no_pieces() -> None:
    empty = encode_layout(LayoutBuilder().build())

    assert 0 == decode_layout(empty, LayoutLimits(pieces=0)).pieces
