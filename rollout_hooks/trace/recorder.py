"""Runs beneath a loader: writes down every copy, and carries out none that would reach the engine.

Checkpoint tensors are *meta* tensors: views of them are ordinary views without memory, whose storage says which
tensor it is and whose offset and strides say which elements.  So nothing has to be known about slices, transposes and
reshapes; only what copies is taken apart here.  What computes is remembered as unknown and refused when it reaches a
parameter; what looks at an element is refused at once, because there is nothing to go on with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from weightd.core.errors import Refused, WeightdError
from weightd.rollout_hooks.parameters import Parameter
from weightd.rollout_hooks.trace.affine import View, dense_shape
from weightd.rollout_hooks.trace.contents import Contents, Move, Trouble, Write
from weightd.rollout_hooks.trace.copies import COPIES, FACTORIES, LOOKS, VIEWS
from weightd.rollout_hooks.trace.engine_memory import Cell, EngineMemory, dtype_of, storage_of
from weightd.rollout_hooks.trace.faults import UNTOUCHED, NotTraced
from weightd.rollout_hooks.trace.lines import loader_line

_COMPUTES = "the result is computed, not copied"
_LOOKS = "what the loader does next depends on the elements, and a trace has none"
_FOREIGN = "the elements are not of the checkpoint"
_OPENS = "what is written through it is seen by nobody"
_ELSEWHERE = "it would lie in other memory than the engine's own"
_BITS = "the bytes are read as another element type"


class Origin(NamedTuple):
    """A checkpoint tensor, and the element types it was cast to on its way."""

    tensor: str
    via: frozenset[str]


class Recorder:
    """Everything that is known about memory while a loader runs.

    Attributes:
        sources: The meta tensors, by checkpoint name.
        origins: What the numbers in contents mean.
        violations: What was refused so far.
    """

    def __init__(self, engine: EngineMemory, checkpoint: Mapping[str, Parameter], whose: str) -> None:
        self.sources: dict[str, Tensor] = {}
        self.origins: list[Origin] = []
        self.violations: list[WeightdError] = []
        self._engine = engine
        self._whose = whose
        self._numbers: dict[Origin, int] = {}
        self._known: dict[int, tuple[Tensor, Contents]] = {}  # tensors are kept: identities of storages are used again
        for name, (shape, dtype) in checkpoint.items():
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            self._known[storage_of(tensor)] = (tensor, Contents(name, shape, dtype, self._origin(name, frozenset())))
            self.sources[name] = tensor

    # ------------------------------------------------------------ what memory is

    def _origin(self, tensor: str, via: frozenset[str]) -> int:
        number = self._numbers.setdefault(Origin(tensor, via), len(self.origins))
        if number == len(self.origins):
            self.origins.append(Origin(tensor, via))
        return number

    def _place(self, tensor: Tensor) -> tuple[Contents, View] | None:
        """Return the contents that a tensor is a view of, or None for memory that is nobody's."""
        known = self._known.get(storage_of(tensor))
        if known is not None:
            return known[1], View(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
        cell = self._engine.cell(tensor)
        return None if cell is None else (cell.contents, cell.view(tensor))

    def traced(self, tensor: Tensor) -> bool:
        """Say whether a tensor is of the checkpoint, made of it, or a parameter that the loader wrote."""
        if storage_of(tensor) in self._known:
            return True
        cell = self._engine.cell(tensor)
        return cell is not None and bool(cell.contents.writes or cell.refused)

    def _new(self, tensor: Tensor, name: str, trouble: Trouble | None = None) -> Contents:
        contents = Contents(name, dense_shape(tensor.shape, tensor.stride()), dtype_of(tensor), trouble=trouble)
        self._known[storage_of(tensor)] = (tensor, contents)
        return contents

    def _tensor_in(self, *tensors: Tensor) -> str:
        """Return a checkpoint tensor that some of these are made of."""
        for place in (self._place(t) for t in tensors):
            if place is not None and place[0].trouble is not None:
                if place[0].trouble.tensor:
                    return place[0].trouble.tensor
            elif place is not None:
                contents = place[0]
                numbers = [contents.origin] if contents.origin is not None else contents.pieces().buffer.tolist()
                if numbers:
                    return self.origins[numbers[0]].tensor
        return ""

    # ------------------------------------------------------------ what is refused

    def refuse(self, trouble: Trouble, cell: Cell | None, tensor: str = "") -> None:
        """Note a refusal; the loader goes on, so that the next one is found, too."""
        if cell is not None:
            if cell.refused:
                return
            cell.refused = True
        name = cell.name if cell is not None else ""
        self.violations.append(NotTraced(trouble.operation, name, trouble.tensor or tensor, trouble.where, trouble.why))

    def stop(self, operation: str, why: str, *tensors: Tensor) -> Refused:
        """Return the report that ends the trace, because the loader cannot go on without elements."""
        cell = next((c for c in (self._engine.cell(t) for t in tensors) if c is not None), None)
        trouble = Trouble(operation, loader_line(), why)
        name = cell.name if cell is not None else ""
        self.violations.append(NotTraced(operation, name, self._tensor_in(*tensors), trouble.where, why))
        return self.report()

    def report(self) -> Refused:
        """Return everything that was refused."""
        return Refused(self._whose, tuple(self.violations), UNTOUCHED)

    # ------------------------------------------------------------ writes

    def copy(self, target: Tensor, source: Tensor, where: str = "") -> None:
        """Note a copy of ``source`` into ``target``."""
        where = where or loader_line()
        place, cell = self._place(target), None if storage_of(target) in self._known else self._engine.cell(target)
        if place is None:
            if self.traced(source):
                self.refuse(
                    Trouble("copy_", where, "it goes into a tensor that is no parameter and that nobody follows"), None
                )
            return
        contents, region = place
        trouble = self._why_not(cell, contents, target, source, where)
        if trouble is not None:
            self._spoil(target, trouble, self._tensor_in(source))
        elif cell is None or cell.received:
            moves = self._moves(source.detach().expand(target.shape), region)
            contents.writes.append(Write(region, moves, where))

    def _why_not(
        self, cell: Cell | None, contents: Contents, target: Tensor, source: Tensor, where: str
    ) -> Trouble | None:
        """Return why a copy cannot be written down."""
        place = self._place(source) if self.traced(source) else None
        if cell is not None and not cell.received:
            # What the engine computes for itself (rotary tables) concerns no receiver.
            why = "it is no parameter and no persistent buffer: a receiver cannot write it"
            return Trouble("copy_", where, why) if place is not None and self._tensor_in(source) else None
        if place is None:
            return Trouble("copy_", where, _FOREIGN)
        if cell is not None and not cell.holds(target):
            return Trouble("copy_", where, "the write reaches beyond the parameter")
        if dtype_of(target) != contents.dtype:
            return Trouble("view(dtype)", where, _BITS)
        if place[0].trouble is not None:
            return place[0].trouble
        clash = place[0].clash() if self._engine.cell(source) is None else None
        if clash is not None:
            why = f"{clash.elements} elements of a tensor that the loader made are written twice, also at {clash.first}"
            return Trouble("copy_", clash.second, why)
        return None

    def _moves(self, source: Tensor, region: View) -> tuple[Move, ...]:
        place = self._place(source)
        assert place is not None
        contents, view = place
        moves = contents.read(view, region)
        if contents.origin is not None:
            return moves
        cast = [Origin(o.tensor, o.via | {contents.dtype}) for o in (self.origins[m.origin] for m in moves)]
        return tuple(m._replace(origin=self._origin(*origin)) for m, origin in zip(moves, cast, strict=True))

    def constant(self, target: Tensor) -> bool:
        """Note that ``target`` is filled with a constant, and return whether that is known memory."""
        place = self._place(target)
        if place is not None:
            place[0].writes.append(Write(place[1], (), loader_line()))
        return place is not None

    def _spoil(self, target: Tensor, trouble: Trouble, tensor: str) -> None:
        """Note that nobody can say what ``target`` holds."""
        known = self._known.get(storage_of(target))
        if known is None:
            self.refuse(trouble, self._engine.cell(target), tensor)
        elif known[1].trouble is None:
            known[1].trouble = trouble if trouble.tensor else trouble._replace(tensor=tensor)

    # ------------------------------------------------------------ operations

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out one operation of the loader, as far as there is anything to carry out."""
        name = func._schema.name.removeprefix("aten::")
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if func._schema.is_mutable:
            return self._mutate(func, name, args, kwargs, tensors)
        if name in FACTORIES:
            return self._make(func, name, args, kwargs)
        if _is_view(func, name, args, kwargs) or not any(self.traced(t) for t in tensors):
            return func(*args, **kwargs)
        if name in ("_local_scalar_dense", "equal"):
            raise self.stop(name.strip("_"), _LOOKS, *tensors)
        return self._compute(func, name, args, kwargs, tensors)

    def _make(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make new memory: without any, where it may come to hold parts of the checkpoint."""
        dtype = kwargs.get("dtype") or next((t.dtype for t in args if isinstance(t, Tensor)), torch.get_default_dtype())
        like = any(isinstance(t, Tensor) and self.traced(t) for t in args)
        if not (like or dtype.is_floating_point):
            return func(*args, **kwargs)
        made = func(*tree_map(_without_memory, args), **{**kwargs, "device": torch.device("meta"), "pin_memory": False})
        self._new(made, name)
        return made

    def _mutate(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        written = list(_written(func, args, kwargs))
        if not any(self._place(t) for t in written) and not any(self.traced(t) for t in tensors):
            return func(*args, **kwargs)
        if name == "_foreach_copy_":
            for target, source in zip(args[0], args[1], strict=True):
                self.copy(target, source)
        elif name == "copy_" or (name == "fill_" and isinstance(args[1], Tensor) and self.traced(args[1])):
            self.copy(args[0], args[1])
        elif name not in ("fill_", "zero_") or not self.constant(args[0]):
            operation = f"{name}.{func._overloadname}" if name == "set_" else name
            trouble = Trouble(operation, loader_line(), _ELSEWHERE if name == "set_" else _COMPUTES)
            for target in written:
                self._spoil(target, trouble, self._tensor_in(*tensors))
        return None if name.startswith("_foreach") else written[0]

    def _compute(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        """Carry out an operation on tensors without memory, and note what its results are made of."""
        bare = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory", "non_blocking")}
        try:
            made = func(*tree_map(_without_memory, args), **tree_map(_without_memory, bare))
        except NotImplementedError as error:  # torch cannot say a result's shape without its elements
            raise self.stop(name, _LOOKS, *tensors) from error
        if name in COPIES:
            self._new(made, name)
            where = loader_line()
            for part, source in COPIES[name](made, *args, **(bare if name not in ("clone", "_to_copy") else {})):
                self.copy(part, source, where)
            return made
        trouble = Trouble(name, loader_line(), _BITS if name == "view" else _COMPUTES, self._tensor_in(*tensors))
        for out in tree_leaves(made):
            if not isinstance(out, Tensor):
                raise self.stop(name, _LOOKS, *tensors)
        return tree_map(lambda out: self._unknown(out, trouble), made)

    def _unknown(self, out: Tensor, trouble: Trouble) -> Tensor:
        fresh = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="meta")
        self._new(fresh, trouble.operation, trouble)
        return fresh

    # ------------------------------------------------------------ calls that torch does not dispatch

    def look(self, call: str, tensors: list[Tensor]) -> None:
        """Refuse a call that hands elements to Python.

        Raises:
            Refused: The tensor has none, or is a parameter that a loader could then write unseen.
        """
        opens = call in ("numpy", "__array__", "__dlpack__")
        for tensor in tensors:
            if self.traced(tensor) and not (call == "data_ptr" and storage_of(tensor) not in self._known):
                raise self.stop(call, _LOOKS, tensor)
            cell = self._engine.cell(tensor)
            if opens and cell is not None and cell.received:
                raise self.stop(call, _OPENS, tensor)

    def rebind(self, parameter: Tensor, value: Tensor | None, where: str = "") -> bool:
        """Note that a parameter is to be another tensor, and return whether it is one of the engine's."""
        cell = self._engine.cell(parameter)
        if cell is None or storage_of(parameter) in self._known:
            return False
        if value is None or (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
            now = "gone" if value is None else f"{tuple(value.shape)} {dtype_of(value)}"
            was = f"{tuple(parameter.shape)} {dtype_of(parameter)}"
            self.refuse(Trouble("re-binding", where or loader_line(), f"it was {was} and would be {now}"), cell)
        elif storage_of(value) != storage_of(parameter) or cell.view(value) != cell.view(parameter):
            self.copy(parameter, value, where)
        return True


class Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ has no types
    """Hands every operation to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Carry out one operation."""
        return self._recorder.dispatch(func, args, kwargs or {})


class Calls(TorchFunctionMode):
    """Watches the calls that never become an operation: ``item()``, ``numpy()``, ``parameter.data = ...``."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Carry out one call."""
        name = getattr(func, "__name__", "")
        if name in LOOKS:
            self._recorder.look(name, [t for t in args if isinstance(t, Tensor)])
        # Reached through the type, so that the property itself is met and not a tensor's data.
        if name == "__set__" and func.__self__ is vars(torch._C.TensorBase)["data"] and self._recorder.rebind(*args):
            return None
        return func(*args, **(kwargs or {}))


def _is_view(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    first = func._schema.arguments[0] if func._schema.arguments else None
    aliases = first is not None and first.alias_info is not None and not first.alias_info.is_write
    if name == "view" and func._overloadname == "dtype":
        return bool(args[0].dtype == args[1])
    return name in VIEWS or (aliases and name not in ("view_as_real", "view_as_complex", "_conj", "_neg_view"))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Return the tensors that an operation writes."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (t for t in tree_leaves(value) if isinstance(t, Tensor))


def _without_memory(value: Any) -> Any:
    """Return a tensor of the same shape and strides that has no memory; anything else as it is."""
    if not isinstance(value, Tensor) or value.is_meta:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
