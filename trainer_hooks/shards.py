"""What an adapter says about one rank: its shards, in the words of the layout and with a way to read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from weightd.core.dtypes import DTYPES
from weightd.core.layout.boxes import Pieces
from weightd.core.layout.faults import UnknownDType
from weightd.trainer_hooks.faults import PiecesDoNotAddUp, UnsupportedPlacement


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What a local tensor holds of one logical tensor.

    Attributes:
        name: HF checkpoint name.
        shape: Logical shape.
        pieces: Boxes of the logical tensor; their offsets and strides are those of the local tensor as a
            contiguous row-major array, whatever its own strides are.
    """

    name: str
    shape: tuple[int, ...]
    pieces: Pieces

    @property
    def numel(self) -> int:
        """Elements held."""
        return int(self.pieces.numel.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A local tensor of this rank, and what it is of the logical tensors.

    Attributes:
        name: Its name in the model, without wrappers' prefixes.
        dtype: Its element type.
        local_shape: Its shape; padding of its storage is no part of it.
        parts: What it holds of each logical tensor: one part unless the trainer fuses tensors; of an empty
            shard, parts without a piece.
        read: Returns the local tensor as it is now; a framework may have re-bound it since.
        padding: Elements of the local tensor that belong to no logical tensor.
        render: Writes the published values into a tensor of ``local_shape`` and of the published element type,
            where they are not the local tensor's own; None copies it, and casts where the types differ.
        frozen: It is declared never to change: it is copied into each slot once.
        writes: Torch's count of writes to it; None takes that of what ``read`` returns.
    """

    name: str
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    parts: tuple[Part, ...]
    read: Callable[[], Tensor]
    padding: int = 0
    render: Callable[[Tensor], None] | None = None
    frozen: bool = False
    writes: Callable[[], int] | None = None

    @property
    def written(self) -> int:
        """Torch's count of writes to it."""
        return self.read()._version if self.writes is None else self.writes()

    @property
    def numel(self) -> int:
        """Elements of logical tensors that it holds; 0 for an empty shard."""
        return sum(part.numel for part in self.parts)


def unfused(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    local_shape: tuple[int, ...],
    pieces: Pieces,
    read: Callable[[], Tensor],
) -> Shard:
    """Return the shard of one logical tensor, called as the local one.

    Raises:
        PiecesDoNotAddUp: The pieces are not what the rank holds.
    """
    return checked(Shard(name, dtype, local_shape, (Part(name, shape, pieces),), read))


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
        shards: One per local tensor.
        aliases: Pairs (name, canonical name) of tied tensors.
        stray: Looks whether the shards still are the model's.
        prepare: Runs before every publish, in order, and raises where there is nothing to publish now.
        ties: Pairs of names that are declared to be one weight, and are two tensors here.
    """

    shards: tuple[Shard, ...]
    aliases: tuple[tuple[str, str], ...] = ()
    stray: Callable[[], Stray | None] = no_stray
    prepare: tuple[Callable[[], None], ...] = ()
    ties: tuple[tuple[str, str], ...] = ()


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
    """Return the shard if its pieces account for every element of the local tensor, less padding.

    Raises:
        PiecesDoNotAddUp: They do not: the rule that made them is not what the framework did.
    """
    local = shard.read()
    if tuple(local.shape) != shard.local_shape or shard.numel + shard.padding != local.numel():
        shape = shard.parts[0].shape if len(shard.parts) == 1 else shard.local_shape
        raise PiecesDoNotAddUp(
            shard.name, shape, shard.local_shape, tuple(local.shape), shard.numel, local.numel(), shard.padding
        )
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
