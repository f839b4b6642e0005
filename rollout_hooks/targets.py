"""The memory that a receiver writes into: an engine's own parameters as flat numpy views.

The views share the parameters' memory; torch is not asked again after they are made.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from weightd.core.dtypes import DTYPES
from weightd.core.errors import Refused
from weightd.core.layout.build import LayoutBuilder
from weightd.core.layout.columns import Layout
from weightd.core.units import Version
from weightd.link.copies import Bytes
from weightd.rollout_hooks.declare import Declaration
from weightd.rollout_hooks.faults import BuffersOverlap, TargetMoved, UnsupportedTarget
from weightd.rollout_hooks.parameters import DeclarationMismatch, Parameter

Target = nn.Module | Mapping[str, Tensor]
"""A module, or tensors by name."""

Layouts = Declaration | Layout | None
"""What the parameters are made of; None: the module's own, each whole."""

_SUPPORTED = ("initialised, strided CPU tensors of a type of core.dtypes", "no element at two indices")

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers that carry an element's bytes to numpy, which knows no bfloat16."""


_Where = tuple[int, int, torch.dtype]
"""Address of a parameter's first element, number of elements, element type."""


@dataclass(frozen=True, slots=True)
class Targets:
    """A rank's target.

    Attributes:
        layout: What it needs.
        buffers: Memory of each of the layout's buffers, in its order.
        names: Parameter of each buffer.
        target: The parameters themselves, to look at again.
        memory: Where each name of a buffer's memory was when the views were made, tied names included.
    """

    layout: Layout
    buffers: tuple[Bytes, ...]
    names: tuple[str, ...]
    target: Target
    memory: Mapping[str, _Where]

    def check_in_place(self, who: str, version: Version) -> None:
        """Return if the views still are the parameters: a copy into memory that was left behind changes no engine.

        Raises:
            TargetMoved: A parameter lies elsewhere by now.
        """
        tensors = _all_tensors(self.target)
        moved = [n for n, was in self.memory.items() if n not in tensors or _where(tensors[n]) != was]
        if moved:
            raise TargetMoved(who, version, tuple(moved))


def targets_of(target: Target, layouts: Layouts, who: str) -> Targets:
    """Return layout and memory of a rank.

    Args:
        target: The parameters.
        layouts: What they are made of.
        who: The rank, for texts.

    Raises:
        UnsupportedTarget: A parameter cannot be written into.
        Refused: Parameters and layout differ; all of them are named.
    """
    tensors = named_tensors(target)
    for name, tensor in tensors.items():
        _refuse_unwritable(who, name, tensor)
    whose = f"layout of rollout rank {who}"
    if layouts is None:
        layout = own_layout(tensors, whose)
    elif isinstance(layouts, Declaration):
        layouts.check(_declared_ones(layouts, tensors), whose)
        layout = layouts.layout(whose)
        for buffer in layout.buffers:
            _refuse_strided(who, buffer.name, tensors[buffer.name])
    else:
        layout = layouts
        _check_buffers(layout, tensors, whose)
    buffers = tuple(flat_bytes(tensors[b.name])[: b.nbytes] for b in layout.buffers)
    names = tuple(b.name for b in layout.buffers)
    _refuse_overlap(who, "", spans_of(names, buffers))
    written = {_memory(name, tensors[name]) for name in names}
    memory = {name: _where(tensor) for name, tensor in tensors.items() if _memory(name, tensor) in written}
    return Targets(layout, buffers, names, target, memory)


def named_tensors(target: Target) -> dict[str, Tensor]:
    """Return every parameter and persistent buffer by name, tied ones under each of their names."""
    if not isinstance(target, nn.Module):
        return dict(target)
    return {name: tensor.detach() for name, tensor in _all_tensors(target).items()}


def _all_tensors(target: Target) -> Mapping[str, Tensor]:
    """Return the tensors themselves, by name."""
    if not isinstance(target, nn.Module):
        return target
    state = target.state_dict(keep_vars=True)
    return {name.replace("_orig_mod.", ""): t for name, t in state.items() if isinstance(t, Tensor)}


def own_layout(tensors: Mapping[str, Tensor], whose: str) -> Layout:
    """Return the layout of tensors that are whole under their own names; tied ones are aliases."""
    builder = LayoutBuilder()
    first: dict[object, str] = {}
    for name, tensor in tensors.items():
        canonical = first.setdefault(_memory(name, tensor), name)
        if canonical != name:
            builder.add_alias(name, canonical)
            continue
        dtype = _dtype(tensor)
        row = builder.add_tensor(name, tuple(tensor.shape), dtype)
        buffer = builder.add_buffer(name, flat_bytes(tensor).nbytes, dtype, "param")
        builder.add_piece(row, buffer, (0,) * tensor.ndim, tuple(tensor.shape), 0, tensor.stride())
    return builder.build(whose)


def flat_bytes(tensor: Tensor) -> Bytes:
    """Return the memory from a tensor's first element to its last, gaps of its strides included, shape (nbytes,)."""
    if tensor.numel() == 0:
        return np.empty(0, np.uint8)
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    # One-dimensional and dense, whatever the tensor's own strides are; same storage, same first element.
    flat = tensor.detach().view(_BITS[tensor.element_size()]).as_strided((span,), (1,))
    memory: Bytes = flat.numpy().view(np.uint8)
    return memory


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _memory(name: str, tensor: Tensor) -> object:
    """Return what is equal for two names of one memory, and for nothing else."""
    if tensor.numel() == 0:
        return name
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _where(tensor: Tensor) -> _Where:
    """Return where a tensor's memory is; looked at for every parameter of every version, hence no more than this."""
    return tensor.data_ptr(), tensor.numel(), tensor.dtype


def _refuse_unwritable(who: str, name: str, tensor: Tensor) -> None:
    found = ""
    if tensor.is_meta:
        found = "a meta tensor has no memory"
    elif tensor.device.type != "cpu":
        found = f"it is on {tensor.device}"
    elif tensor.layout is not torch.strided:
        found = f"its layout is {tensor.layout}"
    elif _dtype(tensor) not in DTYPES:
        found = f"its element type is {tensor.dtype}"
    elif tensor.numel() and any(n > 1 and s <= 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
        found = f"shape {tuple(tensor.shape)} with strides {tensor.stride()}: expanded, one memory for many indices"
    if found:
        raise UnsupportedTarget(who, name, found, _SUPPORTED)


def _refuse_strided(who: str, name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        found = f"shape {tuple(tensor.shape)} with strides {tensor.stride()}: a declared parameter is row-major"
        raise UnsupportedTarget(who, name, found, ("contiguous tensors", "a Layout with the strides as they are"))


def _declared_ones(declaration: Declaration, tensors: Mapping[str, Tensor]) -> dict[str, Parameter]:
    """Return the real parameters for the comparison; further names of a declared memory need no declaration."""
    declared = declaration.parameters()
    known = {_memory(n, tensors[n]) for n in declared if n in tensors}
    return {
        name: Parameter(tuple(t.shape), _dtype(t))
        for name, t in tensors.items()
        if name in declared or _memory(name, t) not in known
    }


def _check_buffers(layout: Layout, tensors: Mapping[str, Tensor], whose: str) -> None:
    """Compare a layout's buffers with the tensors that they name."""
    wrong: list[DeclarationMismatch] = []
    for buffer in layout.buffers:
        tensor = tensors.get(buffer.name)
        found = "" if tensor is None else f"{flat_bytes(tensor).nbytes} bytes of {_dtype(tensor)}"
        declared = f"{buffer.nbytes} bytes of {buffer.dtype}"
        if found != declared:
            wrong.append(DeclarationMismatch(buffer.name, declared, found))
    if wrong:
        raise Refused(whose, tuple(wrong), "the rank did not attach; its parameters are untouched")


# ------------------------------------------------------------ who writes where in this process


@dataclass(frozen=True, slots=True)
class _Span:
    first: int
    end: int
    name: str


_claims: dict[object, tuple[str, str, list[_Span]]] = {}
_claims_lock = threading.Lock()
os.register_at_fork(after_in_child=_claims.clear)


def spans_of(names: Iterable[str], buffers: Iterable[Bytes]) -> list[_Span]:
    """Return the addresses of buffers."""
    pairs = [(name, b.ctypes.data, b.nbytes) for name, b in zip(names, buffers, strict=True) if b.nbytes]
    return sorted((_Span(a, a + n, name) for name, a, n in pairs), key=lambda s: s.first)


def claim(owner: object, who: str, run: str, targets: Targets) -> None:
    """Note that ``owner`` writes into its targets, until ``unclaim``.

    Raises:
        BuffersOverlap: Another receiver of this process writes there.
    """
    mine = spans_of(targets.names, targets.buffers)
    with _claims_lock:
        for other, other_run, spans in _claims.values():
            _refuse_overlap(who, run, mine, other, other_run, spans)
        _claims[owner] = who, run, mine


def unclaim(owner: object) -> None:
    """Take the note back."""
    with _claims_lock:
        _claims.pop(owner, None)


def _refuse_overlap(
    who: str, run: str, mine: list[_Span], other: str = "", other_run: str = "", theirs: list[_Span] | None = None
) -> None:
    """Refuse memory that is in both lists, or twice in one."""
    marked = [(s, True) for s in mine] + [(s, theirs is None) for s in theirs or ()]
    last: tuple[_Span, bool] | None = None
    for span, ours in sorted(marked, key=lambda m: m[0].first):
        if last is not None and span.first < last[0].end and (theirs is None or ours != last[1]):
            shared = min(span.end, last[0].end) - span.first
            names = (span.name, last[0].name) if ours else (last[0].name, span.name)
            if theirs is None:
                found = f"it shares {shared:,} bytes with {names[1]}"
                raise UnsupportedTarget(who, names[0], found, _SUPPORTED)
            raise BuffersOverlap(who, run, other, other_run, *names, shared)
        if last is None or span.end > last[0].end:
            last = span, ours
