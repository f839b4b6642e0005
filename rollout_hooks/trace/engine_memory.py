"""The engine's own memory while its loader is traced: whose memory a view is, and what was replaced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils import swap_tensors

from weightd.rollout_hooks.targets import Target, named_tensors
from weightd.rollout_hooks.trace.affine import View, dense_shape
from weightd.rollout_hooks.trace.contents import Contents


@dataclass(eq=False)
class Cell:
    """The memory of one parameter, from its first element to its last.

    Attributes:
        name: Its name; where it is tied, the first of them.
        tensor: It.
        received: Whether a receiver writes it: a parameter or a persistent buffer.
        contents: What the loader wrote.
        refused: Whether something about it was refused.
    """

    name: str
    tensor: Tensor
    received: bool
    contents: Contents
    refused: bool = False

    @property
    def first(self) -> int:
        """Where it begins in its storage."""
        return int(self.tensor.storage_offset())

    def holds(self, tensor: Tensor) -> bool:
        """Say whether a view of the same storage lies inside."""
        begin, end = _range(self.tensor)
        first, last = _range(tensor)
        return begin <= first and last <= end

    def view(self, tensor: Tensor) -> View:
        """Return a view of the storage as one of this memory."""
        return View(int(tensor.storage_offset()) - self.first, tuple(tensor.shape), tensor.stride())


class EngineMemory:
    """All tensors of an engine.

    Attributes:
        cells: One for each memory.
        tied: Further name of a parameter to its first one.
    """

    def __init__(self, target: Target) -> None:
        self.cells: list[Cell] = []
        self.tied: dict[str, str] = {}
        self._by_storage: dict[int, list[Cell]] = {}
        self._modules = list(target.modules()) if isinstance(target, nn.Module) else []
        self._tables = [(m, dict(m._parameters), dict(m._buffers)) for m in self._modules]
        # A tensor object can be given other memory (torch.utils.swap_tensors): each with what it was.
        objects = {id(t): t for _, parameters, _ in self._tables for t in parameters.values() if t is not None}
        self._objects = [(t, t.detach(), type(t), dict(vars(t))) for t in objects.values()]
        received = named_tensors(target)
        for name, tensor in received.items():
            self._add(name, tensor, received=True)
        for name, tensor in _others(target, received):
            self._add(name, tensor, received=False)

    def cell(self, tensor: Tensor) -> Cell | None:
        """Return whose memory a tensor lies in."""
        cells = self._by_storage.get(storage_of(tensor), ())
        return next((cell for cell in cells if cell.holds(tensor)), cells[0] if cells else None)

    def put_back(self) -> list[tuple[Tensor, Tensor | None, str]]:
        """Put back what the loader replaced, and return each as it was and as it became, with its name."""
        replaced: list[tuple[Tensor, Tensor | None, str]] = []
        for module, parameters, buffers in self._tables:
            for table, before in ((module._parameters, parameters), (module._buffers, buffers)):
                for name, was in before.items():
                    now = table.get(name)
                    if was is not None and now is not was:
                        replaced.append((was, now, name))
                table.clear()
                table.update(before)  # type: ignore[arg-type]  # each table gets back what it held
        for tensor, was, kind, attributes in self._objects:
            if storage_of(tensor) != storage_of(was):
                replaced.append((was, tensor.detach(), ""))
                original = nn.Parameter(was, requires_grad=tensor.requires_grad)
                original.__class__ = kind
                vars(original).update(attributes)
                swap_tensors(tensor, original)  # type: ignore[no-untyped-call]
        return replaced

    def _add(self, name: str, tensor: Tensor, received: bool) -> None:
        cells = self._by_storage.setdefault(storage_of(tensor), [])
        same = next((c for c in cells if _same(c.tensor, tensor)), None)
        if same is not None:
            if received:
                self.tied[name] = same.name
            return
        shape = dense_shape(tensor.shape, tensor.stride())
        cell = Cell(name, tensor, received, Contents(name, shape, dtype_of(tensor)))
        cells.append(cell)
        self.cells.append(cell)


def storage_of(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, for as long as the storage lives."""
    return int(tensor.untyped_storage()._cdata)


def dtype_of(tensor: Tensor) -> str:
    """Return the name of a tensor's element type."""
    return str(tensor.dtype).removeprefix("torch.")


def _range(tensor: Tensor) -> tuple[int, int]:
    """Return the bytes of its storage that a tensor spans."""
    size, first = tensor.element_size(), int(tensor.storage_offset())
    span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1 if tensor.numel() else 0
    return first * size, (first + span) * size


def _same(a: Tensor, b: Tensor) -> bool:
    return a.numel() > 0 and (a.storage_offset(), a.shape, a.stride(), a.dtype) == (
        b.storage_offset(),
        b.shape,
        b.stride(),
        b.dtype,
    )


def _others(target: Target, received: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Return tensors of an engine that no receiver writes: buffers that are not saved, and plain attributes."""
    if not isinstance(target, nn.Module):
        return
    for prefix, module in target.named_modules():
        tables = {**module._buffers, **{n: v for n, v in vars(module).items() if isinstance(v, Tensor)}}
        for name, tensor in tables.items():
            full = f"{prefix}.{name}".removeprefix(".").replace("_orig_mod.", "")
            if isinstance(tensor, Tensor) and full not in received:
                yield full, tensor.detach()
