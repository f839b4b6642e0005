"""How a dimension is cut, as explicit sizes; a rule's name never travels.

Three rules for uneven cuts are in live use, and they differ: 18 rows over 4
ranks are 5,5,5,3 to ``torch.chunk``, 5,5,4,4 to DeepSpeed, and refused by
Megatron and vLLM.  Whoever describes a shard gives its sizes.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from weightd.core.layout.faults import BadCut

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


Span = tuple[int, int]
"""First and one past the last index."""


def chunk_sizes(size: int, parts: int) -> tuple[int, ...]:
    """Return the sizes that ``torch.chunk`` and FSDP2 cut: ``ceil(size / parts)`` until nothing is left.

    Args:
        size: Length of the dimension, in elements.
        parts: Number of ranks; trailing ones may get 0.

    Raises:
        BadCut: A negative length, or no part at all.

    Source: DTensor's ``Shard`` placement, torch 2.13; padded to a common length there, which is no piece.

    >>> chunk_sizes(5, 4), chunk_sizes(18, 4)
    ((2, 2, 1, 0), (5, 5, 5, 3))
    """
    _check(size, parts)
    step = -(-size // parts)
    return tuple(min(step, max(size - i * step, 0)) for i in range(parts))


def balanced_sizes(size: int, parts: int) -> tuple[int, ...]:
    """Return sizes that differ by at most 1, the larger ones first.

    Args:
        size: Length of the dimension, in elements.
        parts: Number of ranks.

    Raises:
        BadCut: A negative length, or no part at all.

    Source: DeepSpeed 0.19.8 ``get_shard_size_list``, without grain size or kv heads: read its frozen widths there.

    >>> balanced_sizes(18, 4), balanced_sizes(3, 4)
    ((5, 5, 4, 4), (1, 1, 1, 0))
    """
    _check(size, parts)
    least, more = divmod(size, parts)
    return tuple(least + (i < more) for i in range(parts))


def even_sizes(size: int, parts: int) -> tuple[int, ...]:
    """Return equal sizes, or refuse the remainder.

    Args:
        size: Length of the dimension, in elements.
        parts: Number of ranks.

    Raises:
        BadCut: ``parts`` does not divide ``size``.

    Source: Megatron-core and vLLM assert divisibility.

    >>> even_sizes(18, 3)
    (6, 6, 6)
    """
    _check(size, parts)
    if size % parts:
        raise BadCut(size, (parts,), f"{size % parts} are left over, and this cut allows no remainder")
    return (size // parts,) * parts


def padded_sizes(size: int, padded: int, parts: int) -> tuple[int, ...]:
    """Return the real part of each rank's share of a padded dimension; padding is never a piece.

    Args:
        size: Real length of the dimension, in elements: the vocabulary.
        padded: Its length with padding, which is cut evenly.
        parts: Number of ranks; the last ones may hold nothing real.

    Raises:
        BadCut: ``parts`` does not divide ``padded``, or ``padded`` is too short.

    >>> padded_sizes(13, 20, 4)
    (5, 5, 3, 0)
    """
    _check(size, parts)
    if padded < size:
        raise BadCut(size, (parts,), f"the padded length {padded} is shorter")
    share = even_sizes(padded, parts)[0]
    return tuple(min(share, max(size - i * share, 0)) for i in range(parts))


def offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return where each part begins.

    >>> offsets((5, 5, 4, 4))
    (0, 5, 10, 14)
    """
    begins, at = [], 0
    for size in sizes:
        begins.append(at)
        at += size
    return tuple(begins)


def span(size: int, sizes: Sequence[int], part: int) -> tuple[int, int]:
    """Return first and one past last index of a part, after checking that the sizes cut the dimension.

    Args:
        size: Length of the dimension, in elements.
        sizes: Length of every part, in order.
        part: Which part.

    Raises:
        BadCut: The sizes are negative or do not add up, or there is no such part.

    >>> span(18, (5, 5, 4, 4), 2)
    (10, 14)
    """
    if any(n < 0 for n in sizes):
        raise BadCut(size, tuple(sizes), "a size is negative")
    if sum(sizes) != size:
        raise BadCut(size, tuple(sizes), f"they add up to {sum(sizes)}")
    if not 0 <= part < len(sizes):
        raise BadCut(size, tuple(sizes), f"there is no part {part}")
    begin = offsets(sizes)[part]
    return begin, begin + sizes[part]


def spans(sizes: Iterable[int]) -> tuple[Span, ...]:
    """Return first and one past last index of every part.

    >>> spans((5, 5, 4, 4))
    ((0, 5), (5, 10), (10, 14), (14, 18))
    """
    listed = list(sizes)
    return tuple(pairwise([*offsets(listed), sum(listed)]))


def shared_heads(heads: int, ranks: int) -> tuple[Span, ...]:
    """Return the key and value heads of every rank, where heads are copied if there are fewer than ranks.

    Args:
        heads: Number of key and value heads.
        ranks: Tensor-parallel size; a divisor or a multiple of ``heads``.

    Raises:
        BadCut: It is neither; give the spans explicitly.

    Source: vLLM ``QKVParallelLinear``: rank k has head ``k // (ranks / heads)``.

    >>> shared_heads(2, 4), shared_heads(4, 2)
    (((0, 1), (0, 1), (1, 2), (1, 2)), ((0, 2), (2, 4)))
    """
    if ranks <= heads:
        return spans(even_sizes(heads, ranks))
    copies = even_sizes(ranks, heads)[0]
    return tuple((k // copies, k // copies + 1) for k in range(ranks))


def _check(size: int, parts: int) -> None:
    if size < 0 or parts < 1:
        raise BadCut(size, (parts,), "a length is at least 0, and there is at least one part")
