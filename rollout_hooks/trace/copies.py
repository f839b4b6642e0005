"""Operations that make a new tensor out of copies of others: which part of the result is which of the arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

Parts = Iterator[tuple[Tensor, Tensor]]
"""A view of the result, and what it is a copy of."""


def _whole(out: Tensor, source: Tensor, *_args: Any, **_kwargs: Any) -> Parts:
    yield out, source


def _cat(out: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> Parts:
    at = 0
    for tensor in tensors:
        if tensor.dim() == out.dim():  # torch skips an empty tensor of shape (0,), whatever the others are
            yield out.narrow(dim, at, tensor.shape[dim]), tensor
            at += tensor.shape[dim]


def _stack(out: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> Parts:
    for at, tensor in enumerate(tensors):
        yield out.select(dim, at), tensor


def _pad(out: Tensor, source: Tensor, pad: Sequence[int], _value: float = 0.0) -> Parts:
    for i in range(len(pad) // 2):
        dim = source.dim() - 1 - i
        before, after = pad[2 * i], pad[2 * i + 1]
        source = source.narrow(dim, max(-before, 0), source.shape[dim] + min(before, 0) + min(after, 0))
        out = out.narrow(dim, max(before, 0), source.shape[dim])
    yield out, source


def _repeat(out: Tensor, source: Tensor, repeats: Sequence[int]) -> Parts:
    shape = (*(1 for _ in range(len(repeats) - source.dim())), *source.shape)
    pairs = [n for pair in zip(repeats, shape, strict=True) for n in pair]
    singles = [n for size in shape for n in (1, size)]
    yield out.view(pairs), source.reshape(singles).expand(pairs)


COPIES: dict[str, Callable[..., Parts]] = {
    "clone": _whole,
    "_to_copy": _whole,
    "cat": _cat,
    "stack": _stack,
    "constant_pad_nd": _pad,
    "repeat": _repeat,
}
"""By the name of the operation that torch dispatches, called with the result and the operation's arguments."""

FACTORIES = frozenset(
    [
        *("empty", "empty_strided", "zeros", "ones", "full", "scalar_tensor"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
        *("empty_like", "zeros_like", "ones_like", "full_like"),
    ]
)
"""What makes memory that a loader then writes pieces of the checkpoint into."""

VIEWS = frozenset(("_unsafe_view", "lift_fresh"))
"""Views that torch's schema does not call so."""

LOOKS = frozenset(
    [
        *("item", "tolist", "numpy", "__array__", "__dlpack__", "data_ptr"),
        *("__bool__", "__int__", "__float__", "__index__", "__complex__", "is_nonzero", "equal", "allclose"),
    ]
)
"""Calls that hand elements, or their address, to Python."""
