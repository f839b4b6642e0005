"""Moves a storage to other memory under the tensors that lie in it: the objects stay what they are, their bytes move.

A parameter keeps its identity, its attributes, its gradient and its place in an optimizer.  That nobody was
overlooked is proved by the old storage itself: it is given back, and if it then still lives, somebody holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from weightd.trainer_hooks.live.aliases import storage_of

_Weak: Any = StorageWeakRef
_Storages: Any = torch.UntypedStorage
"""Untyped, and private to torch: what torch shares storages with between processes."""


class Life:
    """Tells whether anybody still holds a storage: a tensor, a storage object, a graph of autograd."""

    def __init__(self, storage: UntypedStorage) -> None:
        self._weak = _Weak(storage)

    @property
    def ended(self) -> bool:
        """Whether nobody does."""
        return bool(self._weak.expired())

    def holder(self) -> UntypedStorage | None:
        """Return the storage, unless nobody holds it."""
        found: UntypedStorage | None = None if self.ended else _Storages._new_with_weak_ptr(self._weak.cdata)
        return found


def move(tensors: Sequence[Tensor], target: UntypedStorage) -> str:
    """Copy the storage of some tensors to ``target`` and let them lie there; return why not, or an empty text.

    Args:
        tensors: Every tensor that is known to lie in one storage; at least one.
        target: Memory of the same size.
    """
    old = storage_of(tensors[0])
    assert old is not None, "only tensors with a storage are moved"
    target.copy_(old, non_blocking=False)
    refused = _point(tensors, target)
    if refused:
        _point(tensors, old)
        return refused
    life = Life(old)
    del old
    holder = life.holder()
    if holder is None:
        return ""
    _point(tensors, holder)
    return "something that Python does not show as a tensor still holds its memory"


def private_memory(nbytes: int) -> UntypedStorage:
    """Return new memory of torch's own."""
    return torch.empty(nbytes, dtype=torch.uint8).untyped_storage()


def _point(tensors: Sequence[Tensor], storage: UntypedStorage) -> str:
    """Let tensors lie in a storage, each where it lay in its own; return why one cannot."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        for tensor in tensors:
            there = torch.empty(0, dtype=tensor.dtype)
            there.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
            try:
                tensor.data = there
            except (RuntimeError, TypeError) as error:
                return f"a tensor of type {type(tensor).__name__} in it cannot be re-pointed: {error}"
    return ""
