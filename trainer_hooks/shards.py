"""What an adapter says about one rank: its shards, in the words of the layout and with a way to read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from weightd.core.dtypes import DTYPES
from weightd.core.layout.faults import UnknownDType
from weightd.trainer_hooks.faults import PiecesDoNotAddUp, UnsupportedPlacement
from weightd.trainer_hooks.placements import Box


@dataclass(frozen=True, slots=True)
class Shard:
    """What this rank holds of one logical tensor.

    Attributes:
        name: HF checkpoint name.
        shape: Logical shape.
        dtype: Element type of the local tensor.
        local_shape: Shape of the local tensor; padding of its storage is no part of it.
        boxes: Boxes of the logical tensor with their place in the local tensor; none for an empty shard.
        read: Returns the local tensor as it is now; a framework may have re-bound it since.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    read: Callable[[], Tensor]


class Stray(NamedTuple):
    """A tensor that is read and no longer is the model's.

    Attributes:
        name: The tensor.
        attached: What it was.
        found: What it is.
    """

    name: str
    attached: str
    found: str


def no_stray() -> Stray | None:
    """Return None: declared tensors are what their holder says."""
    return None


@dataclass(frozen=True, slots=True)
class Holdings:
    """All that a rank holds.

    Attributes:
        shards: One per logical tensor, under unique names.
        aliases: Pairs (name, canonical name) of tied tensors.
        stray: Looks whether the shards still are the model's.
    """

    shards: tuple[Shard, ...]
    aliases: tuple[tuple[str, str], ...] = ()
    stray: Callable[[], Stray | None] = no_stray


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """Return the layout's name of a torch element type.

    Raises:
        UnknownDType: Layouts have no such type.
    """
    text = str(dtype).removeprefix("torch.")
    if text not in DTYPES:
        raise UnknownDType("tensors", name, text, tuple(DTYPES))
    return text


def checked(shard: Shard) -> Shard:
    """Return the shard if its boxes account for every element of the local tensor.

    Raises:
        PiecesDoNotAddUp: They do not: the rule that made them is not what the framework did.
    """
    local = shard.read()
    described = sum(prod(box.extent) for box in shard.boxes)
    if tuple(local.shape) != shard.local_shape or described != local.numel():
        raise PiecesDoNotAddUp(shard.name, shard.shape, shard.local_shape, tuple(local.shape), described, local.numel())
    return shard


def refuse_unreadable(name: str, tensor: Tensor) -> None:
    """Refuse what has no bytes that this process can copy.

    Raises:
        UnsupportedPlacement: A meta tensor, a device that is not the CPU, or storage that is not strided.
    """
    if tensor.is_meta:
        raise UnsupportedPlacement(name, "a meta tensor has no bytes", ("initialised tensors on the CPU",))
    if tensor.layout is not torch.strided:
        raise UnsupportedPlacement(name, f"layout {tensor.layout}", ("torch.strided",))
    if tensor.device.type != "cpu":
        raise UnsupportedPlacement(name, f"device {tensor.device}", ("cpu", "CPUOffloadPolicy() of fully_shard"))
