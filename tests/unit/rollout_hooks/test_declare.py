"""Declared layouts of one rank, filled from whole tensors and compared with what plain slicing gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from weightd.core.errors import Refused
from weightd.core.layout import local
from weightd.core.layout.cuts import shared_heads, spans
from weightd.core.layout.faults import BadCut, BadEntry, DuplicateName, UnknownDType
from weightd.rollout_hooks.declare import Declaration, Part
from weightd.rollout_hooks.parameters import Parameter

UNEVEN = (5, 5, 4, 4)
Whole = dict[str, NDArray[Any]]


def _whole(**shapes: tuple[int, ...]) -> Whole:
    """Tensors whose elements all differ, none of them 0."""
    found, at = {}, 1
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        found[name] = np.arange(at, at + count, dtype=np.uint16).reshape(shape)
        at += count
    return found


def _filled(declaration: Declaration, whole: Whole) -> Whole:
    """The parameters as they are after an apply; 0 where nothing is written."""
    layout = declaration.layout()
    buffers = local.empty_buffers(layout)
    local.fill(layout, buffers, whole)
    shapes = declaration.parameters()
    return {b.name: data.reshape(shapes[b.name].shape) for b, data in zip(layout.buffers, buffers, strict=True)}


@pytest.mark.parametrize("k", range(4))
def test_column_and_row_parallel_parameters_are_slices(k: int) -> None:
    whole = _whole(up=(18, 3), down=(3, 18), bias=(18,))
    d = Declaration("bfloat16")
    d.column("up", (18, 3), UNEVEN, k)
    d.row("down", (3, 18), UNEVEN, k)
    d.column("bias", (18,), UNEVEN, k)

    got = _filled(d, whole)

    a, b = [(0, 5), (5, 10), (10, 14), (14, 18)][k]
    assert whole["up"][a:b].tolist() == got["up"].tolist()
    assert whole["down"][:, a:b].tolist() == got["down"].tolist()
    assert whole["bias"][a:b].tolist() == got["bias"].tolist()


def test_a_rank_with_nothing_has_an_empty_parameter_and_knows_the_tensor() -> None:
    d = Declaration("bfloat16")
    d.column("w", (5, 3), (2, 2, 1, 0), 3)

    layout = d.layout()

    assert 0 == layout.pieces
    assert (0, 3) == d.parameters()["w"].shape
    assert "w" == layout.tensors[0].name


def test_replicated_parameters_and_scalars_are_whole() -> None:
    whole = _whole(norm=(7,), scale=())
    d = Declaration("bfloat16")
    d.replicated("norm.weight", (7,), tensor="norm")
    d.replicated("scale", ())

    got = _filled(d, whole)

    assert whole["norm"].tolist() == got["norm.weight"].tolist()
    assert whole["scale"].tolist() == got["scale"].tolist()


def test_of_a_padded_vocabulary_only_real_rows_are_needed() -> None:
    """13 rows padded to 20 over 4: the third rank has 3 real rows, the last none."""
    whole = _whole(embed=(13, 2))
    real = {}
    for k in range(4):
        d = Declaration("bfloat16")
        d.vocabulary("embed", (13, 2), (5, 5, 5, 5), k)
        assert (5, 2) == d.parameters()["embed"].shape
        real[k] = _filled(d, whole)["embed"]

    assert whole["embed"][5:10].tolist() == real[1].tolist()
    assert [*whole["embed"][10:13].tolist(), [0, 0], [0, 0]] == real[2].tolist()
    assert [[0, 0]] * 5 == real[3].tolist()
    with pytest.raises(BadCut, match="with padding they add up to 12"):
        Declaration("bfloat16").vocabulary("embed", (13, 2), (6, 6), 0)


@pytest.mark.parametrize("k", range(4))
def test_fused_gate_up_is_both_parts_of_this_rank(k: int) -> None:
    whole = _whole(gate=(18, 3), up=(18, 3))
    d = Declaration("bfloat16")
    d.gate_up("gate_up", ("gate", "up"), (18, 3), UNEVEN, k)

    a, b = [(0, 5), (5, 10), (10, 14), (14, 18)][k]
    expected = np.concatenate([whole["gate"][a:b], whole["up"][a:b]])
    assert expected.tolist() == _filled(d, whole)["gate_up"].tolist()


@pytest.mark.parametrize("k", range(4))
def test_fused_qkv_shares_kv_heads_among_ranks(k: int) -> None:
    """Element case L08: two kv heads over four ranks, each on two of them; 2,2,1,1 query heads."""
    whole = _whole(q=(12, 3), k=(4, 3), v=(4, 3), qb=(12,), kb=(4,), vb=(4,))
    d = Declaration("bfloat16")
    heads, kv = spans((2, 2, 1, 1)), shared_heads(2, 4)
    d.qkv("qkv.weight", ("q", "k", "v"), 2, heads, kv, k, rest=(3,))
    d.qkv("qkv.bias", ("qb", "kb", "vb"), 2, heads, kv, k)

    got = _filled(d, whole)

    q = [slice(0, 4), slice(4, 8), slice(8, 10), slice(10, 12)][k]
    h = [slice(0, 2), slice(0, 2), slice(2, 4), slice(2, 4)][k]
    assert (12, 3) == d.layout().tensors[0].shape
    assert np.concatenate([whole["q"][q], whole["k"][h], whole["v"][h]]).tolist() == got["qkv.weight"].tolist()
    assert np.concatenate([whole["qb"][q], whole["kb"][h], whole["vb"][h]]).tolist() == got["qkv.bias"].tolist()


def test_stacked_experts_are_boxes_of_one_tensor_each() -> None:
    """Experts 1 and 4 of a rank: [E, gate rows + up rows, width]."""
    whole = _whole(g1=(6, 2), u1=(6, 2), g4=(6, 2), u4=(6, 2))
    d = Declaration("bfloat16")
    d.parameter("w13", (2, 8, 2))
    for e, expert in enumerate((1, 4)):
        d.take("w13", f"g{expert}", (6, 2), (2, 0), (4, 2), at=(e, 0, 0))
        d.take("w13", f"u{expert}", (6, 2), (2, 0), (4, 2), at=(e, 4, 0))

    got = _filled(d, whole)["w13"]

    expected = [[*whole["g1"][2:6], *whole["u1"][2:6]], [*whole["g4"][2:6], *whole["u4"][2:6]]]
    assert np.array(expected).tolist() == got.tolist()


def test_a_tied_head_is_a_second_name_of_one_parameter() -> None:
    """Element case L11."""
    d = Declaration("bfloat16")
    d.vocabulary("embed.weight", (13, 2), (7, 7), 0, tensor="model.embed_tokens.weight")
    d.tied("lm_head.weight", "model.embed_tokens.weight")

    layout = d.layout()

    assert (("lm_head.weight", "model.embed_tokens.weight"),) == layout.aliases
    assert 1 == len(layout.buffers)


def test_a_kept_parameter_needs_no_trainer() -> None:
    d = Declaration("bfloat16")
    d.kept("rotary.inv_freq", (4,), "float32")

    layout = d.layout()

    assert ("rotary.inv_freq",) == layout.kept
    assert 16 == layout.buffers[0].nbytes
    assert 0 == layout.pieces


def test_element_types_may_differ_by_parameter() -> None:
    d = Declaration("bfloat16")
    d.replicated("router", (3, 2), dtype="float32")
    d.replicated("norm", (3,))

    assert [24, 6] == [b.nbytes for b in d.layout().buffers]
    assert ["float32", "bfloat16"] == [t.dtype for t in d.layout().tensors]


def test_what_cannot_stand_is_refused() -> None:
    d = Declaration("bfloat16")
    d.replicated("w", (5, 3))
    with pytest.raises(DuplicateName):
        d.replicated("w", (5, 3))
    with pytest.raises(UnknownDType):
        d.replicated("v", (5, 3), dtype="int4")
    with pytest.raises(BadCut, match="they add up to 20"):
        d.column("v", (18, 3), (5, 5, 5, 5), 0)
    with pytest.raises(BadEntry, match=r"declared as \(5, 3\) bfloat16 and as \(6, 3\) bfloat16"):
        d.replicated("x", (6, 3), tensor="w")
    with pytest.raises(BadEntry, match="2 parts whose rows have 2 different shapes"):
        d.fused("y", [Part("a", (5, 3), (0, 5)), Part("b", (5, 2), (0, 5))])
    with pytest.raises(BadEntry, match="made of 0 parts"):
        d.fused("y", [])
    with pytest.raises(BadCut, match="a has no such rows"):
        d.fused("y", [Part("a", (5, 3), (3, 6))])
    with pytest.raises(BadCut, match="different engines"):
        d.qkv("z", ("q", "k", "v"), 2, spans((1, 1)), spans((1, 1, 1)), 0)
    with pytest.raises(BadCut, match="different engines"):
        d.qkv("z", ("q", "k", "v"), 2, spans((1, 1)), spans((1, 1)), 2)


@pytest.mark.parametrize("extent,at", [((5, 3), (1, 0)), ((5, 4), (0, 0)), ((5, 3), (0, -1)), ((1, 5, 3), (0, 0))])
def test_a_box_that_does_not_fit_its_parameter_is_refused(extent: tuple[int, ...], at: tuple[int, ...]) -> None:
    d = Declaration("bfloat16")
    d.parameter("w", (5, 3))
    with pytest.raises(BadEntry, match=r"shape \(5, 3\) has no room for"):
        d.take("w", "t", (9, 9, 9)[: len(extent)], (0,) * len(extent), extent, at)


def test_a_box_beyond_a_stack_is_refused() -> None:
    d = Declaration("bfloat16")
    d.parameter("w", (2, 5, 3))
    with pytest.raises(BadEntry):
        d.take("w", "t", (5, 3), (0, 0), (5, 3), (2, 0, 0))


def test_declared_and_real_parameters_are_compared_all_at_once() -> None:
    d = Declaration("bfloat16")
    d.column("up", (18, 3), UNEVEN, 2)
    d.replicated("norm", (3,))
    d.replicated("same", (2,))
    real = {
        "up": Parameter((5, 3), "bfloat16"),
        "same": Parameter((2,), "bfloat16"),
        "bias": Parameter((4,), "float32"),
    }
    with pytest.raises(Refused) as report:
        d.check(real, "layout of rollout rank E0[2]")

    assert "layout of rollout rank E0[2]" == report.value.subject
    assert [
        ("up", "(4, 3) bfloat16", "(5, 3) bfloat16"),
        ("norm", "(3,) bfloat16", ""),
        ("bias", "", "(4,) float32"),
    ] == [v.args for v in report.value.violations]
    d.check(d.parameters())
