"""Cases of the field in which trainer and engine do not mean the same tensors, seen from the trainer.

With the two modules beside this one every row of the case log's sections 2 to 12 is met that a trainer has a part in.
Left to the engine, which alone decides them: O-45 (buffers that deep sleep throws away), O-46 (an engine's
parameters on ``meta``) and O-47 (an engine that never attaches).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.cases.test_field_reports_trainer import counting, needs, refusal
from tests.hooks.delivery import delivered, differing
from tests.hooks.published import Rank
from weightd.core.dtypes import DTYPES
from weightd.core.layout.faults import UnknownDType
from weightd.core.layout.message import decode_layout, encode_layout
from weightd.trainer_hooks.faults import NamesCollide
from weightd.trainer_hooks.shards import dtype_name

IDS = {f"o{n:02d}" for n in range(9, 67)}
"""Sections 2 to 12."""

OF_ENGINES = {"o45", "o46", "o47"}


def test_every_row_is_met_or_left_to_the_engine_by_name() -> None:
    # O-38 to O-39 and O-49 to O-52 are below; a row may have several tests.
    here = Path(__file__).parent
    found = set().union(*(re.findall(r"^def test_(o\d\d)_", p.read_text(), re.M) for p in here.glob("test_field_*.py")))

    assert sorted(IDS - found) == sorted(OF_ENGINES)


def test_o38_a_name_that_no_engine_knows_is_refused() -> None:
    held = Rank({"a": counting(2, 2), "b": counting(3), "c": counting(4)}).fill()
    text = refusal(lambda: delivered([held], 1, needs(a=(2, 2), b=(3,))))

    assert "c" in re.findall(r"\bc\b", text)
    assert "E_REFUSED" in text


def test_o39_layers_that_nobody_publishes_are_listed() -> None:
    held = Rank({f"layers.{i}.{m}.w": counting(2, 2) for i in (0, 1) for m in "qk"}).fill()
    wanted = {f"layers__{i}__{m}__w": (2, 2) for i in (0, 1, 2) for m in "qk"}
    text = refusal(lambda: delivered([held], 1, needs(**wanted)))

    assert "layers.2.q.w" in text
    assert "layers.2.k.w" in text
    assert "layers.1" not in text


@pytest.mark.parametrize("order", ["abc", "acb", "cab", "bca"])
def test_o49_order_of_names_means_nothing(order: str) -> None:
    """Sizes of 4, 8 and 4 bytes: read in the other side's order, two of three would be wrong."""
    source = {"a": counting(1) + 1, "b": counting(2) + 10, "c": counting(1) + 100}
    held = Rank({name: source[name] for name in order}).fill()
    params = delivered([held], 1, needs(a=(1,), b=(2,), c=(1,)))[0]

    assert differing(params, source) == []


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_o50_element_types_travel_as_text(name: str) -> None:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"NOT RUN: this torch has no {name}")
    rank = Rank({"w": torch.zeros(3, 2).to(dtype)})

    assert decode_layout(encode_layout(rank.layout)).tensors[0].dtype == name


def test_o50_unknown_element_type_is_refused() -> None:
    with pytest.raises(UnknownDType, match="complex128"):
        dtype_name("w", torch.complex128)


def test_o51_scale_of_another_shape_is_refused() -> None:
    """A weight of (256, 384) in blocks of 128 has scales of (2, 3); packed for another kernel they are (2, 4)."""
    held = Rank({"w": counting(256, 384), "w_scale": counting(2, 4)}).fill()
    text = refusal(lambda: delivered([held], 1, needs(w=(256, 384), w_scale=(2, 3))))

    assert "E_DESCRIPTION" in text
    assert "w_scale" in text
    assert "(2, 4)" in text
    assert "(2, 3)" in text


def test_o52_scale_that_is_there_twice_is_refused() -> None:
    stream = [("w_scale", counting(2, 3)), ("w", counting(256, 384)), ("w_scale", counting(2, 3) + 1)]
    with pytest.raises(NamesCollide, match=r"2 tensors are called w_scale"):
        Rank(iter(stream))
