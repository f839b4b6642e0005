"""Whole LoRA factors on every rank: read where they are whole, gathered where a framework cuts them.

Factors are small, about a hundredth of the model, and the product of any box of the base needs rows of B and
columns of A that other ranks hold.  All of them cross in one flat exchange per publish; who holds what of it is
shown once, as the layout that weightd has for everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weightd.core.dtypes import dtype_named
from weightd.core.layout.boxes import pieces_of
from weightd.core.layout.columns import Layout
from weightd.core.layout.local import Elements, collect, piece_index
from weightd.core.layout.message import decode_layout, encode_layout
from weightd.core.wire.blobs import blob_digest
from weightd.trainer_hooks.describe import Described, describe_holdings
from weightd.trainer_hooks.exchange import Exchange, gather_numbers
from weightd.trainer_hooks.faults import LoraUnsupported
from weightd.trainer_hooks.payload import buffer_elements
from weightd.trainer_hooks.shards import Holdings, Shard

Factors = Mapping[str, Tensor]
"""Whole factors by name."""

_WHOLE = ("factors of which all ranks together hold every element",)


def whole_factors(shards: Sequence[Shard]) -> Factors:
    """Return factors that are whole on this rank, without a copy.

    Raises:
        LoraUnsupported: One is only a part.
    """
    found: dict[str, Tensor] = {}
    for shard in shards:
        tensor = shard.read().detach()
        if tuple(tensor.shape) != shard.parts[0].shape:
            why = (
                f"this rank holds {tuple(tensor.shape)} of {shard.parts[0].shape}, and no framework is known to cut it"
            )
            raise LoraUnsupported(shard.name, why, _WHOLE)
        found[shard.name] = tensor
    return found


class FactorExchange:
    """Gathers factors that are cut over the trainer's ranks."""

    def __init__(self, connect: Callable[[], Exchange]) -> None:
        """Note how to reach the others; nothing is sent before the first gathering."""
        self._connect = connect
        self._exchange: Exchange | None = None
        self._names: tuple[str, ...] = ()
        self._described: Described | None = None
        self._numbers: list[int] = []
        self._known: list[list[int]] = []
        self._layouts: list[Layout] = []

    def gather(self, shards: Sequence[Shard]) -> Factors:
        """Return whole factors; a collective, which all ranks call with the shards of the same factors.

        Raises:
            ExchangeFailed: Not within ``collect_s``.
            LoraUnsupported: All ranks together do not hold every element.
        """
        described = self._describe(shards)
        exchange = self._exchange = self._exchange or self._connect()
        numbers = gather_numbers(exchange, self._numbers)
        if numbers != self._known:  # the same on all ranks: so is what follows
            self._learn(exchange, described.layout, numbers)
        most = max(nbytes for _, nbytes in numbers)
        payloads = exchange.gather(_packed(described, most)) if most else []
        return _assembled(self._layouts, payloads)

    def _describe(self, shards: Sequence[Shard]) -> Described:
        names = tuple(shard.name for shard in shards)
        if self._described is None or names != self._names:
            described = describe_holdings(Holdings(tuple(shards)), None, (), "LoRA factors of this rank")
            digest = int.from_bytes(
                bytes.fromhex(blob_digest(encode_layout(described.layout))[:16]), "big", signed=True
            )
            self._numbers = [digest, described.payload_nbytes]
            self._names, self._described = names, described
        return self._described

    def _learn(self, exchange: Exchange, layout: Layout, numbers: list[list[int]]) -> None:
        layouts = [decode_layout(data) for data in exchange.gather_bytes(encode_layout(layout))]
        _refuse_gaps(layouts)
        self._known, self._layouts = numbers, layouts


def _packed(described: Described, nbytes: int) -> Tensor:
    """Return this rank's factors as its layout says, and zeros up to ``nbytes``; shape (nbytes,), uint8."""
    payload = torch.zeros(nbytes, dtype=torch.uint8)
    for place in described.places:
        count = prod(place.shard.local_shape) * place.dtype.itemsize
        section = payload[place.first_byte : place.first_byte + count].view(place.dtype)
        section.view(place.shard.local_shape).copy_(place.shard.read().detach())
    return payload


def _assembled(layouts: Sequence[Layout], payloads: Sequence[Tensor]) -> Factors:
    whole = _arrays(layouts)
    arrays = {name: array for name, (array, _) in whole.items()}
    for layout, payload in zip(layouts, payloads, strict=False):
        collect(layout, buffer_elements(layout, payload.numpy()), arrays)
    return {name: _tensor(array, dtype) for name, (array, dtype) in whole.items()}


def _arrays(layouts: Sequence[Layout]) -> dict[str, tuple[Elements, str]]:
    infos = {info.name: info for layout in layouts for info in layout.tensors}
    return {name: (np.zeros(i.shape, dtype_named(i.dtype).carrier), i.dtype) for name, i in infos.items()}


def _tensor(array: Elements, dtype: str) -> Tensor:
    signed = array.view(np.dtype(f"i{array.itemsize}"))  # torch's older versions know no uint16
    kind: Any = getattr(torch, dtype)
    return torch.from_numpy(signed).view(kind)


def _refuse_gaps(layouts: Sequence[Layout]) -> None:
    """Refuse factors that ranks describe differently, or of which nobody holds some elements."""
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    held: dict[str, np.ndarray[Any, np.dtype[np.bool_]]] = {}
    for layout in layouts:
        for info in layout.tensors:
            if shapes.setdefault(info.name, (info.shape, info.dtype)) != (info.shape, info.dtype):
                why = f"one rank has it as {shapes[info.name]}, another as {(info.shape, info.dtype)}"
                raise LoraUnsupported(info.name, why, _WHOLE)
            held.setdefault(info.name, np.zeros(info.shape, np.bool_))
        pieces = pieces_of(layout)
        for row, tensor in enumerate(layout.tensor.tolist()):
            info = layout.tensors[tensor]
            held[info.name][piece_index(pieces, row, len(info.shape))] = True
    for name, mask in held.items():
        if not mask.all():
            missing = mask.size - int(np.count_nonzero(mask))
            why = f"no trainer rank holds {missing} of its {mask.size} elements: all are to use the same adapters"
            raise LoraUnsupported(name, why, _WHOLE)
