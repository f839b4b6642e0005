from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from weightd.core.layout import intersect as module
from weightd.core.layout.algebra import embed
from weightd.core.layout.boxes import Pieces, box, join, no_pieces, placed
from weightd.core.layout.cuts import balanced_sizes, offsets
from weightd.core.layout.faults import NotDescribable
from weightd.core.layout.intersect import Overlaps, intersect

if TYPE_CHECKING:
    from weightd.core.layout.columns import Int64


def _rows(sizes: tuple[int, ...], width: int) -> Pieces:
    """One piece per rank, ranks as buffers."""
    cuts = zip(offsets(sizes), sizes, strict=True)
    return join([placed(embed(box((n, width)), 0, a), buffer=r) for r, (a, n) in enumerate(cuts)])


def test_balanced_halves_feed_balanced_quarters() -> None:
    """Element case L01: [9, 9] to [5, 5, 4, 4]."""
    common = intersect(_rows((9, 9), 3), _rows(balanced_sizes(18, 4), 3))

    assert [(0, 0), (0, 1), (1, 1), (1, 2), (1, 3)] == list(
        zip(common.source.tolist(), common.target.tolist(), strict=True)
    )
    assert [0, 5, 9, 10, 14] == common.start[:, 0].tolist()
    assert [5, 4, 1, 4, 4] == common.extent[:, 0].tolist()
    assert [0, 15, 0, 3, 15] == common.source_offset.tolist()
    assert [0, 0, 12, 0, 0] == common.target_offset.tolist()
    assert [15, 12, 3, 12, 12] == common.numel.tolist()


def test_the_strides_of_common_stepped_indices_are_per_common_index() -> None:
    source = box((9,), step=(2,), stride=(5,))  # 0, 2, ..., 16
    target = box((6,), start=(0,), step=(3,), stride=(7,))  # 0, 3, ..., 15

    common = intersect(source, target)  # 0, 6, 12

    assert [[3]] == common.extent.tolist()
    assert [[6]] == common.step.tolist()
    assert [[15]] == common.source_stride.tolist()
    assert [[14]] == common.target_stride.tolist()


def test_tensors_of_other_or_negative_number_do_not_meet() -> None:
    source = join([placed(box((4,)), 3), placed(box((4,)), -1), placed(box((4,)), 9)])
    target = join([placed(box((4,)), -1), placed(box((4,)), 9), placed(box((4,)), 4)])

    common = intersect(source, target)

    assert [2] == common.source.tolist()
    assert [1] == common.target.tolist()


def test_replicas_and_overlapping_pieces_all_meet() -> None:
    """A long piece that begins early must not be lost behind short ones that end early."""
    source = join([box((20,)), *(box((1,), start=(i,)) for i in range(5)), box((20,))])

    common = intersect(source, box((2,), start=(17,)))

    assert [0, 6] == common.source.tolist()


def test_nothing_meets_nothing() -> None:
    assert 0 == len(intersect(no_pieces(2), box((2, 3))))
    assert 0 == len(intersect(box((2, 3)), no_pieces(2)))
    assert (0, 2) == intersect(no_pieces(2), no_pieces(2)).start.shape


def test_0d_tensors_meet_in_their_one_element() -> None:
    common = intersect(placed(box(()), 1), join([placed(box(()), 0), placed(box(()), 1)]))

    assert [1] == common.target.tolist()
    assert [1] == common.numel.tolist()


def test_a_tensor_cut_on_dimension_1_looks_at_few_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 source columns, 40 target columns: one pair each, where all pairs would be 1600."""
    columns = join([embed(box((7, 3)), 1, 3 * i) for i in range(40)])
    seen: list[int] = []
    real = module._common

    def counted(source: Pieces, target: Pieces, s: Int64, t: Int64) -> Overlaps:
        seen.append(len(s))
        return real(source, target, s, t)

    monkeypatch.setattr(module, "_common", counted)

    assert 40 == len(intersect(columns, columns))
    assert [40] == seen


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = _rows((1,) * 11, 3), _rows((4, 0, 7), 3)
    whole = intersect(source, target)
    monkeypatch.setattr(module, "BLOCK_PAIRS", 3)

    blocks = intersect(source, target)

    assert whole.source.tolist() == blocks.source.tolist()
    assert 11 == len(blocks)


def test_more_pairs_than_can_be_listed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PAIRS", 11)
    same = join([box((5,))] * 3)

    assert 9 == len(intersect(same, same))
    with pytest.raises(NotDescribable, match="4 and 3 pieces meet in up to 12 pairs"):
        intersect(join([same, box((5,))]), same)


def test_indices_too_large_for_a_key_are_ranked_first() -> None:
    """Tensors of the largest admitted length; 2**22 of them would leave int64 with plain keys."""
    far = 2**40 - 5
    ids = np.arange(0, 2**23, 2**20)
    source = join([placed(box((5,), start=(far,)), int(i)) for i in ids])
    target = join([placed(box((3,), start=(far + 1,)), int(i)) for i in ids])

    plain = intersect(source, target)
    limit, module._KEY_LIMIT = module._KEY_LIMIT, 0
    try:
        ranked = intersect(source, target)
    finally:
        module._KEY_LIMIT = limit

    assert list(range(8)) == plain.source.tolist() == ranked.source.tolist()
    assert [1] * 8 == plain.source_offset.tolist() == ranked.source_offset.tolist()
