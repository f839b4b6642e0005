"""Runs an engine's own loader once without a byte, and returns the layout that it says.

::

    traced = trace(model, {"model.norm.weight": ((4096,), "bfloat16"), ...})
    traced.probe(model, weights_it_was_loaded_from)
    Receiver(model, ..., layout=traced.layout())
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weightd.core.dtypes import DTYPES
from weightd.core.errors import Refused, WeightdError
from weightd.core.layout.boxes import row_major
from weightd.core.layout.build import LayoutBuilder
from weightd.core.layout.columns import Layout
from weightd.core.layout.faults import UnknownDType
from weightd.rollout_hooks.parameters import Parameter
from weightd.rollout_hooks.targets import Target, flat_bytes
from weightd.rollout_hooks.trace.affine import Row, View, boxes
from weightd.rollout_hooks.trace.engine_memory import Cell, EngineMemory, dtype_of
from weightd.rollout_hooks.trace.faults import UNTOUCHED, NotTraced, NotWritten, WrittenTwice
from weightd.rollout_hooks.trace.lines import loader_line
from weightd.rollout_hooks.trace.probe import probe
from weightd.rollout_hooks.trace.recorder import Calls, Dispatch, Recorder

Checkpoint = Mapping[str, Tensor | tuple[Sequence[int], str]]
"""Shape and element type by checkpoint name, or tensors, of which nothing else is read."""

Load = Callable[[Iterable[tuple[str, Tensor]]], object]
"""A loader: vLLM's and SGLang's ``model.load_weights``."""

_FLOATS = {"float16": (5, 10), "bfloat16": (8, 7), "float32": (8, 23), "float64": (11, 52)}
"""Bits of exponent and fraction: a type holds all values of another if it has no fewer of both."""


class Cast(NamedTuple):
    """A tensor that the loader casts.

    Attributes:
        tensor: Checkpoint name.
        stored: Element type in the checkpoint.
        needed: Element type of the parameter: what the trainer has to publish.
    """

    tensor: str
    stored: str
    needed: str


class Piece(NamedTuple):
    """A box of a checkpoint tensor inside a parameter."""

    tensor: str
    parameter: str
    row: Row


@dataclass(frozen=True)
class Traced:
    """What a loader makes of a checkpoint.

    Attributes:
        parameters: Bytes of memory and element type of each parameter, without further names of tied ones.
        pieces: Which box of which tensor lies where.
        tensors: Shape and element type of the tensors that are used, as the trainer has to publish them.
        unused: Checkpoint tensors of which nothing came into a parameter.
        uncovered: Parameters that the loader never wrote.
        filled: Parameters that it filled with constants only, such as a shard of vocabulary padding; they stay.
        unfed: Elements of the other parameters that no checkpoint element reaches (padding), where there are any.
        tied: Further name of a parameter to the name in ``parameters``.
        casts: Tensors that the loader casts.
    """

    parameters: Mapping[str, tuple[int, str]]
    pieces: tuple[Piece, ...]
    tensors: Mapping[str, Parameter]
    unused: tuple[str, ...]
    uncovered: tuple[str, ...]
    filled: tuple[str, ...]
    unfed: Mapping[str, int]
    tied: Mapping[str, str]
    casts: tuple[Cast, ...]

    def layout(self, kept: Iterable[str] = (), whose: str = "traced layout") -> Layout:
        """Return the layout for ``Receiver(layout=...)``.

        Args:
            kept: Parameters that the engine keeps as they are: buffers that no checkpoint has.
            whose: Subject of a report.

        Raises:
            Refused: A parameter was never written and is not kept.
        """
        keeps = set(kept)
        missing = tuple(name for name in self.uncovered if name not in keeps)
        if missing:
            raise Refused(whose, (NotWritten(missing),), UNTOUCHED)
        builder = LayoutBuilder()
        rows = {name: builder.add_tensor(name, *described) for name, described in self.tensors.items()}
        buffers = {
            name: builder.add_buffer(name, nbytes, dtype, "param") for name, (nbytes, dtype) in self.parameters.items()
        }
        for tensor, parameter, row in self.pieces:
            builder.add_piece(rows[tensor], buffers[parameter], row.start, row.extent, row.offset, row.stride, row.step)
        for name in self.uncovered:
            builder.add_kept(name)
        return builder.build(whose)

    def probe(self, model: Target, loaded_from: Mapping[str, Tensor]) -> None:
        """Refuse the parameters that do not hold what they were loaded from (see ``probe``).

        Raises:
            Refused: One ``ReLaid`` for each.
        """
        probe(model, self.layout(self.uncovered), loaded_from)


def trace(model: Target, checkpoint: Checkpoint, load: Load | None = None, whose: str = "traced layout") -> Traced:
    """Run a loader once over tensors that have no memory, and return what it would have written.

    Nothing is written into the engine.

    Args:
        model: The engine's module on this rank, or its tensors by name.
        checkpoint: Every tensor of the checkpoint, as the loader is given them.
        load: The loader; by default ``model.load_weights``.
        whose: Subject of a report.

    Raises:
        Refused: The loader does what no copy can do; each is named with its line.
    """
    described = {name: _described(name, entry) for name, entry in checkpoint.items()}
    engine = EngineMemory(model)
    recorder = Recorder(engine, described, whose)
    loader: Any = load if load is not None else model.load_weights  # type: ignore[union-attr]
    try:
        with torch.no_grad(), Calls(recorder), Dispatch(recorder):
            loader(iter(recorder.sources.items()))
    finally:
        replaced = engine.put_back()
    where = _first_line(loader)
    for was, now, _ in replaced:
        recorder.rebind(was, now, where)
    return _Result(engine, recorder, described).traced()


def _described(name: str, entry: Tensor | tuple[Sequence[int], str]) -> Parameter:
    shape, dtype = (entry.shape, dtype_of(entry)) if isinstance(entry, Tensor) else entry
    if dtype not in DTYPES:
        raise UnknownDType("tensors", name, dtype, tuple(DTYPES))
    return Parameter(tuple(int(n) for n in shape), dtype)


def _first_line(loader: Any) -> str:
    """Return where a loader is defined: an assignment to a module's attribute leaves no other trace."""
    code = getattr(getattr(loader, "__func__", loader), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else loader_line()


class _Result:
    """What the recorder noted, as pieces of checkpoint tensors."""

    def __init__(self, engine: EngineMemory, recorder: Recorder, checkpoint: Mapping[str, Parameter]) -> None:
        self._engine = engine
        self._recorder = recorder
        self._checkpoint = checkpoint
        self._needed: dict[str, tuple[str, str]] = {}  # tensor to element type and the parameter that has it
        self._pieces: list[Piece] = []
        self._unfed: dict[str, int] = {}

    def traced(self) -> Traced:
        received = [cell for cell in self._engine.cells if cell.received]
        for cell in received:
            self._add(cell)
        if self._recorder.violations:
            raise self._recorder.report()
        fed = {piece.parameter for piece in self._pieces}
        idle = [cell for cell in received if cell.name not in fed]
        tensors = {n: Parameter(self._checkpoint[n].shape, dtype) for n, (dtype, _) in self._needed.items()}
        return Traced(
            parameters={c.name: (flat_bytes(c.tensor).nbytes, c.contents.dtype) for c in received},
            pieces=tuple(self._pieces),
            tensors=tensors,
            unused=tuple(n for n in self._checkpoint if n not in tensors),
            uncovered=tuple(cell.name for cell in idle if not cell.contents.writes),
            filled=tuple(cell.name for cell in idle if cell.contents.writes),
            unfed=self._unfed,
            tied={n: first for n, first in self._engine.tied.items() if first in {c.name for c in received}},
            casts=tuple(
                Cast(n, self._checkpoint[n].dtype, p.dtype)
                for n, p in tensors.items()
                if p.dtype != self._checkpoint[n].dtype
            ),
        )

    def _add(self, cell: Cell) -> None:
        contents = cell.contents
        clash = contents.clash()
        if clash is not None:
            self._refuse(WrittenTwice(cell.name, *clash))
            return
        pieces, base = contents.pieces(), row_major(contents.shape)
        for number in sorted(set(pieces.buffer.tolist())):
            self._check_type(cell, *self._recorder.origins[number])
        for at in range(len(pieces)):
            extent = tuple(pieces.extent[at].tolist())
            tensor = self._recorder.origins[int(pieces.buffer[at])].tensor
            first = sum(i * s for i, s in zip(pieces.start[at].tolist(), base, strict=True))
            stride = tuple(k * s for k, s in zip(pieces.step[at].tolist(), base, strict=True))
            here = View(int(pieces.offset[at]), extent, tuple(pieces.stride[at].tolist()))
            rows = boxes(self._checkpoint[tensor].shape, here, View(first, extent, stride))
            self._pieces.extend(Piece(tensor, cell.name, row) for row in rows)
        missing = cell.tensor.numel() - int(pieces.numel.sum())
        if missing and len(pieces):
            self._unfed[cell.name] = missing

    def _check_type(self, cell: Cell, tensor: str, via: frozenset[str]) -> None:
        """Note the type that a tensor has to be published in, and refuse casts that a copy does not undo."""
        stored, needed = self._checkpoint[tensor].dtype, cell.contents.dtype
        line = next((w.where for w in cell.contents.writes if w.moves), "")
        lossy = sorted(dtype for dtype in {stored, *via} - {needed} if not _castable(dtype, needed, dtype in via))
        if lossy:
            why = f"it is {stored} in the checkpoint and {needed} in the engine, and becomes {lossy[0]} on its way"
            why = why if lossy[0] in via else f"no trainer casts {stored} to {needed} as the loader does"
            self._refuse(NotTraced(f"cast to {needed}", cell.name, tensor, line, why))
        dtype, other = self._needed.setdefault(tensor, (needed, cell.name))
        if dtype != needed:
            why = f"{other} holds it as {dtype}, this one as {needed}, and a tensor is published in one type"
            self._refuse(NotTraced("a second element type", cell.name, tensor, line, why))

    def _refuse(self, error: WeightdError) -> None:
        self._recorder.violations.append(error)


def _castable(dtype: str, needed: str, on_the_way: bool) -> bool:
    """Say whether a value that passes through ``dtype`` is the same as if it was published as ``needed``."""
    if dtype not in _FLOATS or needed not in _FLOATS:
        return False
    return not on_the_way or all(a >= b for a, b in zip(_FLOATS[dtype], _FLOATS[needed], strict=True))
