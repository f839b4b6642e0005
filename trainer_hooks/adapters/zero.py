"""Which elements of a parameter lie in this rank's memory under DeepSpeed's ZeRO, and where; no collective.

======================= ===================================== ==========================================================
                        in the trainer's element type         fp32 masters
======================= ===================================== ==========================================================
ZeRO-1, ZeRO-2          the parameter, whole                  this rank's slice of the flat group: ``_hp_mapping``
ZeRO-3                  ``ds_tensor``, a flat range           the same range, in the optimizer's flat partitions
======================= ===================================== ==========================================================

``ds_tensor`` is the truth also of parameters that are persistent or gathered: their ``data`` is a
copy, which the end of every step makes anew.  The number of ranks that share a parameter is read from
each: under ``zero.Init`` with AutoTP it is not one number for the model.

Source: deepspeed 0.19.8, ``runtime/zero/partition_parameters.py``, ``runtime/zero/stage3.py``,
``utils/tensor_fragment.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weightd.core.layout.boxes import Pieces, box, no_pieces
from weightd.core.layout.flat import flat_range
from weightd.trainer_hooks.adapters.leaves import Leaf
from weightd.trainer_hooks.faults import HoldingsChanged, PiecesDoNotAddUp, UnsupportedPlacement

PARTITIONED = "ds_id"
"""The attribute that makes a parameter ZeRO-3's."""

FRAGMENT = "_hp_mapping"
"""The attribute of a parameter that ZeRO-1 or -2 trains; None where this rank holds nothing of its masters."""

SUPPORTED = (
    "ZeRO-1, -2 and -3, with zero.Init and with AutoTP",
    "optimizer and parameters offloaded to the CPU",
    "the engine that deepspeed.initialize returned",
)

UNLINKED = "DeepSpeed records its master in another place than where it is (round_robin_gradients)"
LINKED = ("masters without round_robin_gradients", "what the trainer computes with (masters=False)")


class Held(NamedTuple):
    """Memory of this rank.

    Attributes:
        dtype: Its element type.
        shape: Its shape.
        pieces: Which elements of the parameter it holds, as this rank's tensor-parallel shard has them.
        read: Returns it as it is now.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Pieces
    read: Callable[[], Tensor]


def is_partitioned(param: Tensor) -> bool:
    """Say whether ZeRO-3 keeps the parameter."""
    return hasattr(param, PARTITIONED)


def shape_of(param: Any) -> tuple[int, ...]:
    """Return the parameter's shape before ZeRO cut it; of an AutoTP shard, that of the shard."""
    return tuple(param.ds_shape if is_partitioned(param) else param.shape)


def refuse_unknown(name: str, param: Any) -> None:
    """Refuse a parameter whose memory is not what the table above says.

    Raises:
        UnsupportedPlacement: It is one of experts, 0-d, of a strange class, or not (only) in ``ds_tensor``.
    """
    if type(param) not in (Tensor, nn.Parameter):
        kind = type(param)
        raise UnsupportedPlacement(name, f"a tensor of type {kind.__module__}.{kind.__qualname__}", SUPPORTED)
    refuse_experts(name, param)
    found = _unknown_partition(param) if is_partitioned(param) else None
    if found is None and shape_of(param) == ():
        found = "DeepSpeed does not train 0-d parameters; make it of shape (1,)"
    if found is not None:
        raise UnsupportedPlacement(name, found, SUPPORTED)


def refuse_experts(name: str, param: Any) -> None:
    """Refuse a parameter that DeepSpeed does not reduce over all data-parallel ranks.

    Raises:
        UnsupportedPlacement: It is of MoE or AutoEP experts.
    """
    if not getattr(param, "allreduce", True):
        found = "a parameter of experts (MoE, AutoEP), which differ between ranks under one name"
        raise UnsupportedPlacement(name, found, SUPPORTED)


def _unknown_partition(param: Any) -> str | None:
    shard = getattr(param, "ds_tensor", None)
    if shard is None or not hasattr(param, "ds_shape"):
        return "a ZeRO-3 parameter that is not partitioned yet"
    if _is_on_disk(shard):
        return "its partition is on NVMe (offload_param), so nothing of it is in memory"
    if hasattr(shard, "ds_quant_scale"):
        return "its partition is quantised (zero_quantized_nontrainable_weights)"
    if getattr(param, "ds_secondary_tensor", None) is not None or getattr(param, "ds_zero_param_process_group", None):
        return "hpZ keeps a second partition of it (zero_hpz_partition_size)"
    if hasattr(getattr(param, "comm", None), "param_shard_group"):
        return "MiCS partitions it within groups (mics_shard_size)"
    if getattr(param, "_z3_optimizer", None) is None and param.requires_grad:
        return "a ZeRO-3 parameter that deepspeed.initialize has not taken over: its memory is still to move"
    return None


def _is_on_disk(shard: Any) -> bool:
    place = getattr(shard, "final_location", None)
    status = getattr(shard, "status", None)
    return getattr(place, "value", place) == "nvme" or getattr(status, "name", "") == "NOT_AVAILABLE"


# ---------------------------------------------------------------- the trainer's element type


def held_bits(leaf: Leaf, param: Any) -> Held:
    """Return the memory that holds the parameter in the type that the trainer computes in.

    Raises:
        PiecesDoNotAddUp: The partition is not of the size that its counts say.
    """
    shape = shape_of(param)
    if not is_partitioned(param):
        return Held(param.dtype, shape, box(shape), leaf.read)
    low, high = _flat_range(leaf.name, param)
    read = partial(_read_partition, leaf, high - low)
    return Held(param.ds_tensor.dtype, (high - low,), flat_range(shape, low, high), read)


def _flat_range(name: str, param: Any) -> tuple[int, int]:
    """Return first and one past the last element of this rank's partition; the padding at the end is none."""
    total, size = int(param.ds_numel), int(param.ds_tensor.ds_numel)
    rank, parts = int(param.ds_zero_partition_rank), int(param.ds_zero_partition_world_size)
    if size != -(-total // parts) or param.ds_tensor.numel() != size or not 0 <= rank < parts:
        expected, found = (-(-total // parts),), tuple(param.ds_tensor.shape)
        raise PiecesDoNotAddUp(name, shape_of(param), expected, found, total, param.ds_tensor.numel())
    low = min(rank * size, total)
    return low, min(low + size, total)


def _read_partition(leaf: Leaf, numel: int) -> Tensor:
    """Return the partition without its padding; the optimizer moves it, so it is looked up each time."""
    param: Any = leaf.read()
    shard: Tensor | None = getattr(param, "ds_tensor", None)
    if shard is None or shard.numel() < numel:
        now = "no partition" if shard is None else f"a partition of {shard.numel()} elements"
        raise HoldingsChanged(leaf.name, f"a partition of {numel} elements", now)
    return shard if shard.numel() == numel else shard.narrow(0, 0, numel)


# ---------------------------------------------------------------- fp32 masters


def master_dtype(params: Iterable[Any]) -> torch.dtype:
    """Return the element type of the masters, also for ranks that hold none of some parameter."""
    for param in params:
        fragment = getattr(param, FRAGMENT, None)
        groups: list[Tensor] = getattr(getattr(param, "_z3_optimizer", None), "fp32_partitioned_groups_flat", [])
        found: Tensor | None = fragment.hp_fragment if fragment is not None else groups[0] if groups else None
        if found is not None:
            return found.dtype
    return torch.float32


def refuse_unlinked(named: Iterable[tuple[str, Any]]) -> None:
    """Refuse masters that are not where DeepSpeed records them.

    A flat group of masters is in the order of the flat group of parameters, so between the two all places
    differ by the same number of elements.  Under ``round_robin_gradients`` 0.19.8 orders both anew and
    records the masters' places in the old order.

    Raises:
        UnsupportedPlacement: The places of two parameters differ by different numbers.
    """
    shifts: dict[object, int] = {}
    for name, param in named:
        mapping = getattr(param, FRAGMENT, None)
        if mapping is None:
            continue
        master: Tensor = mapping.hp_fragment
        groups = param.untyped_storage().data_ptr(), master.untyped_storage().data_ptr()
        shift = param.storage_offset() + int(mapping.lp_fragment_address.start) - master.storage_offset()
        if shifts.setdefault(groups, shift) != shift:
            raise UnsupportedPlacement(name, UNLINKED, LINKED)


def held_masters(leaf: Leaf, param: Any, dtype: torch.dtype) -> Held:
    """Return the memory that holds the parameter's master; of a frozen parameter, which has none, the parameter.

    Args:
        leaf: Where the parameter is.
        param: The parameter.
        dtype: Element type of the masters.

    Raises:
        UnsupportedPlacement: It is trained, and its master cannot be read.
        PiecesDoNotAddUp: The partition is not of the size that its counts say.
    """
    if is_partitioned(param):
        return _partitioned_master(leaf, param, dtype) if param.requires_grad else held_bits(leaf, param)
    if hasattr(param, FRAGMENT):
        return _fragment(leaf, param, dtype)
    if param.requires_grad and param.dtype != torch.float32:
        raise UnsupportedPlacement(leaf.name, "it has no master that can be read", ("ZeRO-1, -2 and -3",))
    return held_bits(leaf, param)


def _partitioned_master(leaf: Leaf, param: Any, dtype: torch.dtype) -> Held:
    low, high = _flat_range(leaf.name, param)
    optimizer = param._z3_optimizer
    group, _, size = optimizer.grad_position[optimizer.get_param_id(param)]
    if getattr(optimizer, "_swappable_optimizer_subgroup", lambda _: False)(group):
        raise UnsupportedPlacement(leaf.name, "its master is on NVMe (offload_optimizer)", SUPPORTED)
    if int(size) != int(param.ds_tensor.ds_numel):
        raise PiecesDoNotAddUp(leaf.name, shape_of(param), (param.ds_tensor.ds_numel,), (int(size),), high - low, size)
    read = partial(_read_partitioned_master, leaf, high - low)
    return Held(dtype, (high - low,), flat_range(shape_of(param), low, high), read)


def _read_partitioned_master(leaf: Leaf, numel: int) -> Tensor:
    """Return this rank's range of the master, where the optimizer keeps it: it may offload and reload it."""
    param: Any = leaf.read()
    optimizer = param._z3_optimizer
    group, offset, _ = optimizer.grad_position[optimizer.get_param_id(param)]
    flat: Tensor = optimizer.fp32_partitioned_groups_flat[group]
    return flat.narrow(0, int(offset), numel)


def _fragment(leaf: Leaf, param: Any, dtype: torch.dtype) -> Held:
    mapping, shape = getattr(param, FRAGMENT), shape_of(param)
    if mapping is None:
        return Held(dtype, (0,), no_pieces(len(shape)), partial(torch.empty, 0, dtype=dtype))
    address = mapping.lp_fragment_address
    low, high = int(address.start), int(address.start) + int(address.numel)
    return Held(dtype, (high - low,), flat_range(shape, low, high), partial(_read_fragment, leaf, high - low))


def _read_fragment(leaf: Leaf, numel: int) -> Tensor:
    mapping = getattr(leaf.read(), FRAGMENT, None)
    fragment: Tensor | None = getattr(mapping, "hp_fragment", None)
    if fragment is None:
        raise HoldingsChanged(leaf.name, f"a master of {numel} elements", "without one")
    return fragment
