"""Exact texts of every fault of a layout, reached through the public face."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.golden_text import check_error_is_whole, check_golden
from weightd.core.errors import Refused, WeightdError
from weightd.core.layout.algebra import transpose
from weightd.core.layout.boxes import box
from weightd.core.layout.build import LayoutBuilder
from weightd.core.layout.cuts import span
from weightd.core.layout.message import decode_layout
from weightd.core.layout.reshape import merge_dims

if TYPE_CHECKING:
    from collections.abc import Callable


def _builder() -> LayoutBuilder:
    b = LayoutBuilder()
    b.add_tensor("model.embed_tokens.weight", (11, 7), "bfloat16")
    b.add_buffer("model.embed_tokens.weight", 98, "bfloat16", "slot")
    return b


def _outside() -> None:
    b = _builder()
    for first in (8, 9, 10):
        b.add_piece(0, 0, (first, 2), (3, 5))
    b.build("layout of trainer rank 3")


def _overrun() -> None:
    b = _builder()
    for offset in (20, 21, 22):
        b.add_piece(0, 0, (4, 0), (6, 5), offset=offset)
    b.build()


def _conflict() -> None:
    b = _builder()
    b.add_tensor("model.norm.weight", (7,), "float32")
    for offset in (0, 7, 14):
        b.add_piece(1, 0, (0,), (7,), offset=offset)
    b.build()


FAULTS: dict[str, Callable[[], object]] = {
    "E_LAYOUT_BOX": _outside,
    "E_LAYOUT_BUFFER": _overrun,
    "E_LAYOUT_NAME": lambda: _builder().add_tensor("model.embed_tokens.weight", (11, 7), "bfloat16"),
    "E_LAYOUT_DTYPE": lambda: _builder().add_tensor("model.norm.weight", (7,), "torch.bfloat16"),
    "E_LAYOUT_CONFLICT": _conflict,
    "E_LAYOUT_ENTRY": lambda: _builder().add_buffer("model.norm.weight", 14, "bfloat16", "slot", base=98),
    "E_LAYOUT_COLUMNS": lambda: transpose(box((11, 7)), (1, 1)),
    "E_LAYOUT_CUT": lambda: span(18, (5, 5, 4, 3), 2),
    "E_LAYOUT_OPERATION": lambda: merge_dims(box((2**30, 2**30), stride=(2**31, 1)), 0, 2**31),
    "E_LAYOUT_MESSAGE": lambda: decode_layout(b"\x81\xa1a\x01"),
}


@pytest.mark.parametrize("code", FAULTS)
def test_the_text_of_each_fault(code: str) -> None:
    with pytest.raises(WeightdError) as raised:
        FAULTS[code]()
    error = raised.value.violations[0] if isinstance(raised.value, Refused) else raised.value

    assert code == error.code
    check_golden(f"errors/{code}", str(error))
    check_error_is_whole(error)


def test_the_text_of_a_report() -> None:
    with pytest.raises(Refused) as raised:
        _outside()

    check_golden("errors/layout_refused", str(raised.value))
