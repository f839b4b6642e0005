"""Which part of a parameter DeepSpeed's AutoTP left on this rank: read from its record, never recomputed.

AutoTP decides widths from names, kv heads and a grain size, so 18 rows over 4 ranks may be
5,5,4,4 or 4,4,4,6, and the same shape is cut otherwise under another name.  The
widths that it used are frozen on the parameter when its layer is built.

Source: deepspeed 0.19.8, ``module_inject/layers.py`` (``_set_param_uc_meta``) and ``checkpoint/affine.py``;
0.19.6 has the widths without the ``affine_map``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from weightd.core.layout.boxes import Pieces, box, join, row_major
from weightd.trainer_hooks.adapters.leaves import Leaf
from weightd.trainer_hooks.faults import PiecesDoNotAddUp, UnsupportedPlacement

RECORD = "ds_autotp_universal_checkpoint_meta"
"""The attribute of every parameter of a layer that AutoTP replaced."""

_SUPPORTED = ("column, row and fused cuts whose widths AutoTP recorded on the parameter", "parameters it left alone")


class TensorCut(NamedTuple):
    """What a shard of tensor parallelism is of its tensor.

    Attributes:
        shape: Shape of the whole tensor.
        pieces: Its boxes; offsets and strides are those of the shard as a contiguous row-major array.
    """

    shape: tuple[int, ...]
    pieces: Pieces


def cut_of(leaf: Leaf, param: Tensor, local: tuple[int, ...]) -> TensorCut:
    """Return what this rank's shard of ``param`` is; no collective.

    Args:
        leaf: Where the parameter is.
        param: The parameter.
        local: Shape of this rank's shard, whole over ZeRO.

    Raises:
        UnsupportedPlacement: The record describes no boxes, or scales them; or there is none and there has to be.
        PiecesDoNotAddUp: The record is of another shape than the shard.
    """
    record = getattr(param, RECORD, None)
    if record is None:
        if getattr(param, "tensor_model_parallel", False):
            raise UnsupportedPlacement(leaf.name, "a tensor-parallel shard without AutoTP's record", _SUPPORTED)
        return TensorCut(local, box(local))
    conversion: Mapping[str, Any] = record.get("conversion") or record
    _refuse_unsupported(leaf.name, conversion)
    rank = _rank_in_group(leaf)
    table = conversion.get("affine_map")
    cut = _mapped(leaf.name, table, rank, local) if table else _by_widths(leaf.name, record, conversion, rank, local)
    held = int(cut.pieces.numel.sum())
    if held != _numel(local):
        raise PiecesDoNotAddUp(leaf.name, cut.shape, local, local, held, _numel(local))
    return cut


def _refuse_unsupported(name: str, conversion: Mapping[str, Any]) -> None:
    reason = conversion.get("unsupported_reason")
    if reason:
        raise UnsupportedPlacement(name, f"AutoTP says that it cannot be described: {reason}", _SUPPORTED)


def _rank_in_group(leaf: Leaf) -> int:
    """Return this rank's place in the tensor-parallel group: as its layer has it, else as the whole process has."""
    own = getattr(leaf.owner, "tp_index", None)
    if own is not None:
        return int(own)
    groups: Any = sys.modules.get("deepspeed.utils.groups")
    if groups is None:
        raise UnsupportedPlacement(leaf.name, "an AutoTP shard in a process without deepspeed", _SUPPORTED)
    return int(groups.get_tensor_model_parallel_rank())


# ---------------------------------------------------------------- the map of 0.19.7 and later


def _mapped(name: str, table: Mapping[str, Any], rank: int, local: tuple[int, ...]) -> TensorCut:
    shape = tuple(int(n) for n in table["logical_shape"])
    ranks: Mapping[Any, Any] = table["ranks"]
    mine = ranks.get(rank, ranks.get(str(rank)))  # as strings where the record came from a file
    if mine is None:
        raise UnsupportedPlacement(name, f"AutoTP's record is of ranks {sorted(ranks)}, this is {rank}", _SUPPORTED)
    if tuple(mine["shard_shape"]) != local:
        expected = tuple(mine["shard_shape"])
        raise PiecesDoNotAddUp(name, shape, expected, local, _numel(expected), _numel(local))
    return TensorCut(shape, join([_piece(name, p, shape) for p in mine["pieces"]], len(shape)))


def _piece(name: str, piece: Mapping[str, Any], shape: tuple[int, ...]) -> Pieces:
    """Return one entry of the map, which is two views in the words of ``torch.as_strided``, as a box."""
    if float(piece.get("scale", 1.0)) != 1.0:
        found = f"AutoTP holds it multiplied by {piece['scale']}, and only copies are published"
        raise UnsupportedPlacement(name, found, _SUPPORTED)
    extent = tuple(int(n) for n in piece["shape"])
    offset, strides = piece["source"]
    start, step = _as_indices(name, int(offset), strides, extent, shape)
    at, local_strides = piece["dest"]
    return box(extent, start, step, int(at), [int(s) for s in local_strides])


def _as_indices(
    name: str, offset: int, strides: Sequence[int], extent: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[list[int], list[int]]:
    """Return first index and step per dimension of a strided view of the whole tensor."""
    units = row_major(shape)
    if len(extent) != len(shape) or len(strides) != len(shape):
        raise UnsupportedPlacement(name, f"a piece of AutoTP's record is of shape {extent}, not a box", _SUPPORTED)
    start = [offset // unit % max(n, 1) for unit, n in zip(units, shape, strict=True)]
    step = [max(int(s) // unit, 1) if n > 1 else 1 for s, unit, n in zip(strides, units, extent, strict=True)]
    fits = all(
        n <= 1 or (int(s) == d * unit and first + (n - 1) * d < size)
        for s, d, unit, first, n, size in zip(strides, step, units, start, extent, shape, strict=True)
    )
    if not fits and 0 not in extent:
        found = f"a piece of AutoTP's record (offset {offset}, strides {tuple(strides)}) is no box of it"
        raise UnsupportedPlacement(name, found, _SUPPORTED)
    return start, step


# ---------------------------------------------------------------- the widths, where there is no map


def _by_widths(
    name: str, record: Mapping[str, Any], conversion: Mapping[str, Any], rank: int, local: tuple[int, ...]
) -> TensorCut:
    shape = conversion.get("original_shape") or record.get("logical_shape")
    if conversion.get("replicated"):
        return TensorCut(local, box(local))
    dim, widths = conversion.get("partition_dim"), _widths(record, conversion)
    if shape is None or dim is None or widths is None or any(rank >= len(w) for w in widths):
        raise UnsupportedPlacement(name, "AutoTP recorded neither a map nor widths of its shards", _SUPPORTED)
    shape = tuple(int(n) for n in shape)
    expected = (*shape[:dim], sum(w[rank] for w in widths), *shape[dim + 1 :])
    if expected != local or sum(map(sum, widths)) != shape[dim]:
        raise PiecesDoNotAddUp(name, shape, expected, local, _numel(expected), _numel(local))
    return TensorCut(shape, _blocks(shape, dim, widths, rank, local))


def _widths(record: Mapping[str, Any], conversion: Mapping[str, Any]) -> list[list[int]] | None:
    """Return the width on every rank, for each of the tensors that are fused into this one."""
    fused = conversion.get("sub_param_shard_widths")
    if fused:
        return [[int(n) for n in sub] for sub in fused]
    plain = record.get("partition_sizes")
    return [[int(n) for n in plain]] if plain else None


def _blocks(
    shape: tuple[int, ...], dim: int, widths: Sequence[Sequence[int]], rank: int, local: tuple[int, ...]
) -> Pieces:
    strides = row_major(local)
    found, first, at = [], 0, 0
    for sub in widths:
        extent, start = list(shape), [0] * len(shape)
        extent[dim], start[dim] = sub[rank], first + sum(sub[:rank])
        found.append(box(extent, start, offset=at * strides[dim], stride=strides))
        first, at = first + sum(sub), at + sub[rank]
    return join(found, len(shape))


def _numel(shape: Sequence[int]) -> int:
    n = 1
    for size in shape:
        n *= int(size)
    return n
