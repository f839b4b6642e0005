"""Every tensor of this process that lies in given storages, found by asking the garbage collector.

Whatever a framework keeps beside its parameters (FSDP2's padded shard, DeepSpeed's flat groups, views of either) is
a tensor object that Python can see.  What it cannot see is found by counting afterwards (``moving``).
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage

StorageId = int
"""Address of a storage's implementation: equal for all tensors that share it."""


def storage_of(tensor: Tensor) -> UntypedStorage | None:
    """Return a tensor's own storage; None for one that only wraps others, as a DTensor, or has none."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor.untyped_storage(tensor)
    except (RuntimeError, NotImplementedError):
        return None


def storage_id(storage: UntypedStorage) -> StorageId:
    """Return what tells a storage from every other that lives now."""
    return int(storage._cdata)


def tensors_in(wanted: Iterable[StorageId], known: Iterable[Tensor] = ()) -> dict[StorageId, list[Tensor]]:
    """Return all tensors that lie in some storages, by storage.

    Args:
        wanted: The storages.
        known: Tensors that are looked at in any case: the collector does not list what was frozen (``gc.freeze``).
    """
    found: dict[StorageId, dict[int, Tensor]] = {storage: {} for storage in wanted}
    todo = [*known, *_all_tensors()]
    while todo:
        tensor = todo.pop()
        storage = storage_of(tensor)
        mine = None if storage is None else found.get(storage_id(storage))
        if mine is None or id(tensor) in mine:
            continue
        mine[id(tensor)] = tensor
        base = tensor._base  # may be held by its views alone
        if base is not None:
            todo.append(base)
    return {storage: list(tensors.values()) for storage, tensors in found.items()}


def _all_tensors() -> list[Tensor]:
    """Return every tensor that the collector tracks, by what an instance refers to: its class.

    Not out of ``gc.get_objects()``: that list holds what other threads are in the middle of, too, and a tuple that
    somebody else holds cannot be finished: ``tuple(x for ...)`` raises SystemError there.
    """
    # type() instead of isinstance(), which a proxy answers as it likes.
    return [obj for obj in gc.get_referrers(*_kinds(Tensor)) if issubclass(type(obj), Tensor)]


def _kinds(kind: type[Tensor]) -> Iterator[type[Tensor]]:
    yield kind
    for narrower in type.__subclasses__(kind):
        yield from _kinds(narrower)
