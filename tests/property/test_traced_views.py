"""Any chain of views and copies of any tensors: what is traced is what happens to the elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from weightd.core.layout.local import empty_buffers, fill
from weightd.rollout_hooks.trace import trace

Step = Callable[[Sequence[Tensor]], Tensor]
"""Makes one tensor of those there are; says the same for real tensors and for those without memory."""

LARGEST = 400


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[Step]]:
    """Return shapes of checkpoint tensors, and steps that each make one more tensor."""
    shapes = draw(st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=2))
    made = [torch.empty(shape, device="meta") for shape in shapes]
    steps: list[Step] = []
    for _ in range(draw(st.integers(1, 7))):
        step = draw(steps_on(made))
        out = step(made)
        if out.numel() > LARGEST:
            continue
        steps.append(step)
        made.append(out)
    return shapes, steps


@st.composite
def steps_on(draw: st.DrawFn, made: Sequence[Tensor]) -> Step:
    which = draw(st.integers(max(len(made) - 2, 0), len(made) - 1))
    tensor = made[which]
    kind = draw(
        st.sampled_from(
            [
                "reshape",
                "clone",
                "unsqueeze",
                "stack",
                "permute",
                "slice",
                "narrow",
                "cat",
                "expand",
                "repeat",
                "chunk",
                "build",
            ]
        )
    )
    n = tensor.dim()
    dim = draw(st.integers(0, n - 1)) if n else 0
    if kind == "reshape":
        shape = draw(factors(tensor.numel()))
        return lambda ts: ts[which].reshape(shape)
    if kind == "clone":
        return lambda ts: ts[which].contiguous()
    if kind == "unsqueeze" or not n:
        return lambda ts: ts[which].unsqueeze(0)
    if kind == "stack":
        return lambda ts: torch.stack([ts[which], ts[which]], dim)
    if kind == "permute":
        order = draw(st.permutations(range(n)))
        return lambda ts: ts[which].permute(order)
    if kind == "slice":
        first, hop = draw(st.integers(0, tensor.shape[dim] - 1)), draw(st.integers(1, 3))
        index = (*(slice(None) for _ in range(dim)), slice(first, None, hop))
        return lambda ts: ts[which][index]
    if kind == "narrow":
        first = draw(st.integers(0, tensor.shape[dim] - 1))
        size = draw(st.integers(1, tensor.shape[dim] - first))
        return lambda ts: ts[which].narrow(dim, first, size)
    if kind == "cat":
        return lambda ts: torch.cat([ts[which], ts[which].narrow(dim, 0, 1)], dim)
    if kind == "expand":
        return lambda ts: ts[which].unsqueeze(dim).expand(*tensor.shape[:dim], 2, *tensor.shape[dim:])
    if kind == "repeat":
        times = [2 if d == dim else 1 for d in range(n)]
        return lambda ts: ts[which].repeat(times)
    if kind == "chunk":
        return lambda ts: ts[which].chunk(2, dim)[-1]
    return lambda ts: built(ts[which], dim)


def built(tensor: Tensor, dim: int) -> Tensor:
    """Return a tensor that is filled in two writes, with zeros between them."""
    shape = list(tensor.shape)
    shape[dim] = 2 * shape[dim] + 1
    made = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    made.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    made.narrow(dim, tensor.shape[dim] + 1, tensor.shape[dim]).copy_(tensor)
    return made


@st.composite
def factors(draw: st.DrawFn, number: int) -> tuple[int, ...]:
    """Return a shape of ``number`` elements."""
    shape = []
    for _ in range(draw(st.integers(0, 3))):
        divisors = [d for d in range(1, number + 1) if number % d == 0]
        shape.append(draw(st.sampled_from(divisors)))
        number //= shape[-1]
    return (*shape, number)


class Loads(nn.Module):
    """Copies what a chain makes into its one parameter."""

    def __init__(self, shape: Sequence[int], order: Sequence[int], steps: Sequence[Step]) -> None:
        super().__init__()
        memory = torch.zeros([shape[d] for d in order])
        self.w = nn.Parameter(memory.permute([order.index(d) for d in range(len(shape))]), requires_grad=False)
        self._steps = steps

    def load_weights(self, weights: Any) -> None:
        tensors = [tensor for _, tensor in weights]
        for step in self._steps:
            tensors.append(step(tensors))
        self.w.data.copy_(tensors[-1])


@given(chains(), st.data())
@settings(max_examples=100, deadline=None)
def test_traced_copy_is_the_real_copy(chain: tuple[list[tuple[int, ...]], list[Step]], data: st.DataObject) -> None:
    shapes, steps = chain
    tensors, first = {}, 1
    for number, shape in enumerate(shapes):
        size = prod(shape)
        tensors[f"t{number}"] = torch.arange(first, first + size, dtype=torch.float32).reshape(shape)
        first += size
    made = [torch.empty(shape, device="meta") for shape in shapes]
    for step in steps:
        made.append(step(made))
    order = data.draw(st.permutations(range(made[-1].dim())))
    model = Loads(made[-1].shape, order, steps)
    model.load_weights(tensors.items())
    expected = model.w.clone()
    model.w.zero_()
    traced = trace(model, {n: (tuple(t.shape), "float32") for n, t in tensors.items()})

    assert not model.w.any()
    layout = traced.layout(kept=traced.uncovered)  # a chain may leave nothing but the zeros that it made
    (buffer,) = empty_buffers(layout)
    fill(layout, [buffer], {n: t.numpy().view(np.uint32) for n, t in tensors.items()})
    memory = torch.from_numpy(buffer.view(np.float32))
    assert torch.equal(torch.as_strided(memory, model.w.shape, model.w.stride()), expected)
