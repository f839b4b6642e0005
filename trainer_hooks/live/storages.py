"""The storages of a rank's parameters, moved into its live memory and kept there until the publisher closes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, UntypedStorage

from weightd.link.copies import Bytes
from weightd.trainer_hooks.faults import HoldingsChanged, LiveMemoryRefused
from weightd.trainer_hooks.live.aliases import storage_id, storage_of, tensors_in
from weightd.trainer_hooks.live.homes import Home, Stand
from weightd.trainer_hooks.live.moving import Life, move, private_memory

log = logging.getLogger("weightd.live")

_Watched = tuple[Callable[[], Tensor], int, tuple[int, ...], tuple[int, ...], torch.dtype, int]
"""How a shard is read; its address, shape, strides and element type while it is in its place; and its home's number."""


class LiveStorages:
    """All storages of one rank in one payload."""

    def __init__(self, payload: Bytes, homes: Sequence[Home]) -> None:
        """Move them.

        Args:
            payload: Live memory, shape (nbytes,).
            homes: The storages and their places.

        Raises:
            LiveMemoryRefused: One cannot be moved; all of them are where they were, or in memory like it.
        """
        self._payload = payload
        self._homes = tuple(homes)
        self._addresses = [int(payload.ctypes.data) + home.first_byte for home in homes]
        self._watched = [
            _watched(stand, address, at)
            for at, (home, address) in enumerate(zip(homes, self._addresses, strict=True))
            for stand in home.stands
        ]
        self._inside: list[Life] = []
        for home in homes:
            _refuse_foreign(home, _storage(home))
        found = tensors_in([storage_id(_storage(home)) for home in homes], _known(homes))
        for home in homes:
            tensors = found.pop(storage_id(_storage(home)))
            why, there = self._enter(home, home.nbytes, tensors)
            if why:
                tensors.clear()
                found.clear()
                self.leave()
                raise LiveMemoryRefused(home.name, why)
            self._inside.append(there)

    @property
    def nbytes(self) -> int:
        """Bytes of all storages."""
        return sum(home.nbytes for home in self._homes)

    def settle(self) -> int:
        """Move what a framework has put elsewhere since into its old place, and return the number of storages.

        Runs at every publish over every shard, so it makes no object where nothing has moved.

        Raises:
            HoldingsChanged: It is not of the size or the strides that were attached, or its old memory is in use.
            LiveMemoryRefused: It cannot be moved.
        """
        astray: dict[int, None] = {}
        for read, address, shape, strides, dtype, at in self._watched:
            tensor = read()
            same = tensor.data_ptr() == address and tensor.stride() == strides and tensor.shape == shape
            if not same or tensor.dtype is not dtype:
                astray[at] = None
        for at in astray:
            self._return(at)
        return len(astray)

    def leave(self) -> None:
        """Move everything into memory of torch's own; what somebody holds stays, and a warning says so."""
        inside, self._inside = self._inside, []
        places = zip(self._homes, self._addresses, inside, strict=False)
        homes = [home for home, address, there in places if _is_at(home, address) and not there.ended]
        found = tensors_in([storage_id(_storage(home)) for home in homes], _known(homes))
        for home in homes:
            nbytes = _storage(home).nbytes()
            why = move(found.pop(storage_id(_storage(home))), private_memory(nbytes))
            if why:
                log.warning("%s stays in the shared memory of a publisher that is closed: %s", home.name, why)

    # ------------------------------------------------------------ inside

    def _enter(self, home: Home, nbytes: int, tensors: Sequence[Tensor]) -> tuple[str, Life]:
        """Move a storage to its place; return why not, or an empty text, and what tells whether anybody lives there."""
        view = self._payload[home.first_byte : home.first_byte + nbytes]
        place = torch.frombuffer(view.data, dtype=torch.uint8).untyped_storage()
        return move(tensors, place), Life(place)

    def _return(self, at: int) -> None:
        """Move a storage that was replaced to the place of the one that it replaces."""
        home = self._homes[at]
        storage = _storage(home)
        for stand in home.stands:
            tensor = stand.shard.read()
            if not _lies_in(tensor, storage) or not stand.is_at(tensor, storage.data_ptr()):
                raise HoldingsChanged(stand.shard.name, *_difference(stand, tensor))
        nbytes = storage.nbytes()
        if nbytes > home.nbytes:  # less is padding that is gone
            raise HoldingsChanged(home.name, f"in {home.nbytes} bytes of memory", f"in {nbytes}")
        _refuse_foreign(home, storage)
        if not self._inside[at].ended:
            attached = "a tensor in live memory"
            raise HoldingsChanged(
                home.name, attached, "another one, while something still holds the memory of the first"
            )
        number = storage_id(storage)
        del storage
        why, self._inside[at] = self._enter(home, nbytes, tensors_in([number], _known([home]))[number])
        if why:
            raise LiveMemoryRefused(home.name, why)


def _watched(stand: Stand, address: int, at: int) -> _Watched:
    shard = stand.shard
    first = address + stand.start * shard.dtype.itemsize
    return shard.read, first, shard.local_shape, stand.strides, shard.dtype, at


def _storage(home: Home) -> UntypedStorage:
    storage = storage_of(home.stands[0].shard.read())
    if storage is None:
        raise HoldingsChanged(home.name, "a tensor in live memory", "without memory of its own")
    return storage


def _lies_in(tensor: Tensor, storage: UntypedStorage) -> bool:
    mine = storage_of(tensor)
    return mine is not None and storage_id(mine) == storage_id(storage)


def _known(homes: Sequence[Home]) -> list[Tensor]:
    return [stand.shard.read() for home in homes for stand in home.stands]


def _is_at(home: Home, address: int) -> bool:
    return all(stand.is_at(stand.shard.read(), address) for stand in home.stands)


def _difference(stand: Stand, tensor: Tensor) -> tuple[str, str]:
    """Return what a shard was and what it is now, where they differ in more than their memory."""
    shard = stand.shard
    was = f"{shard.local_shape} {shard.dtype} with strides {stand.strides} from element {stand.start} of its memory"
    shape, at = tuple(tensor.shape), tensor.storage_offset()
    return was, f"{shape} {tensor.dtype} with strides {tensor.stride()} from element {at} of its memory"


def _refuse_foreign(home: Home, storage: UntypedStorage) -> None:
    """Refuse memory that others look at without being tensors of this process.

    Raises:
        LiveMemoryRefused: Other processes share it, or it is not torch's own, or numpy looks at it.
    """
    if storage.is_shared():
        raise LiveMemoryRefused(home.name, "other processes share its memory")
    if not storage.resizable():
        raise LiveMemoryRefused(
            home.name, "its memory is not torch's own, or a numpy array was made of it and may still look at it"
        )
    if storage.is_pinned():
        raise LiveMemoryRefused(home.name, "its memory is pinned for a GPU")
