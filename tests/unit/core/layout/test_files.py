from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import pytest

from weightd.core.errors import Refused
from weightd.core.layout.build import LayoutBuilder
from weightd.core.layout.digest import layout_digest
from weightd.core.layout.faults import MalformedLayout
from weightd.core.layout.files import MAGIC, LayoutFile, decode_file, encode_file, layout_file_name
from weightd.core.layout.message import encode_layout
from weightd.core.layout.packing import packed
from weightd.core.units import EngineId, EngineRank, NodeId, RolloutRank, SlotName, TrainerRank

if TYPE_CHECKING:
    from collections.abc import Callable


def _file(who: TrainerRank | RolloutRank) -> LayoutFile:
    b = LayoutBuilder()
    w = b.add_tensor("w", (5, 3), "bfloat16")
    b.add_piece(w, b.add_buffer("w", 12, "bfloat16", "param"), (3, 0), (2, 3))
    return LayoutFile(who, 5, b.build(), NodeId("gpu-c"), SlotName("cpu:2"))


@pytest.mark.parametrize("who", [TrainerRank(3), RolloutRank(EngineId("E0"), EngineRank(3))])
def test_a_file_says_whose_layout_it_holds(who: TrainerRank | RolloutRank) -> None:
    file = decode_file(encode_file(_file(who)))

    assert (who, 5, "gpu-c", "cpu:2") == (file.who, file.size, file.node, file.slot)
    assert isinstance(who, RolloutRank) == isinstance(file.who, RolloutRank)
    assert layout_digest(_file(who).layout) == layout_digest(file.layout)


def test_the_file_holds_exactly_the_wire_s_message() -> None:
    file = _file(TrainerRank(3))

    assert encode_layout(file.layout) in encode_file(file)
    assert encode_file(file).startswith(b"weightd layout 1\n")


def test_names_of_files() -> None:
    assert "trainer-3.layout" == _file(TrainerRank(3)).name
    assert "E0-1.layout" == layout_file_name(RolloutRank(EngineId("E0"), EngineRank(1)))
    assert "%2E%2E" not in layout_file_name(RolloutRank(EngineId("a.b"), EngineRank(1)))
    assert "%2Fetc%2F%C3%A9-1.layout" == layout_file_name(RolloutRank(EngineId("/etc/é"), EngineRank(1)))


def _changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    header = msgpack.unpackb(encode_file(_file(TrainerRank(3)))[len(MAGIC) :])
    change(header)
    return MAGIC + packed(header)


@pytest.mark.parametrize(
    "change,why",
    [
        (lambda h: h.update(rank=5), "rank 5 of 5"),
        (lambda h: h.update(rank=-1), "rank -1 of 5"),
        (lambda h: h.update(role="rollout"), "role rollout with engine ''"),
        (lambda h: h.update(engine="E0"), "role trainer with engine 'E0'"),
        (lambda h: h.update(role="both"), "Invalid enum value 'both'"),
        (lambda h: h.update(more=1), "unknown field `more`"),
        (lambda h: h.pop("slot"), "missing required field `slot`"),
        (lambda h: h.update(layout=b"\x80"), "missing required field"),
    ],
)
def test_a_header_of_another_form_is_refused(change: Callable[[dict[str, Any]], object], why: str) -> None:
    with pytest.raises(MalformedLayout, match=why):
        decode_file(_changed(change))


def test_another_kind_of_file_is_refused() -> None:
    with pytest.raises(MalformedLayout, match="does not begin with 'weightd layout 1'"):
        decode_file(b"weightd layout 2\n\x80")
    with pytest.raises(MalformedLayout):
        decode_file(encode_layout(_file(TrainerRank(3)).layout))


def test_a_refused_layout_is_named_after_its_rank() -> None:
    def outside(header: dict[str, Any]) -> None:
        message = msgpack.unpackb(header["layout"])
        message["start"] = np.array([4, 0], "<i8").tobytes()
        header["layout"] = packed(message)
        header.update(role="rollout", engine="E0")

    with pytest.raises(Refused, match=r"layout of rollout rank E0\[3\] refused"):
        decode_file(_changed(outside))
