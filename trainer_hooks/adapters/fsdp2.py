"""DTensors of ``fully_shard`` (FSDP2), alone or over tensor parallelism, described without any collective.

What the rank holds follows from the placements and its coordinate (``placements``), and is
compared with the local tensor's shape: a mismatch is refused, never guessed.

The sharded parameter is the authority.  After a forward, parameters that were
gathered stay in ``named_parameters()`` as whole tensors until the next backward or
``reshard()``; publishing those would publish a copy in the compute type.

Source: torch 2.13, ``torch.distributed.fsdp._fully_shard._fsdp_param``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from weightd.core.layout.boxes import no_pieces
from weightd.trainer_hooks.adapters.leaves import Leaf
from weightd.trainer_hooks.faults import UnsupportedPlacement
from weightd.trainer_hooks.placements import Cut, held_pieces, held_shape
from weightd.trainer_hooks.shards import Shard, refuse_unreadable, unfused

_PLACEMENTS = ("Shard", "Replicate", "_StridedShard left of the Shard it was cut by")

FsdpParam = Any
"""``FSDPParam``: private to torch, and the only place that names the sharded parameter while it is gathered."""

ShardedParams = dict[tuple[int, str], FsdpParam]
"""By (id of the owning module, attribute)."""


def sharded_params(modules: Iterable[nn.Module]) -> ShardedParams:
    """Return torch's record of every parameter that ``fully_shard`` manages in ``modules``."""
    found: ShardedParams = {}
    for module in modules:
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch before several groups per module
            one = getattr(state, "_fsdp_param_group", None)
            groups = [] if one is None else [one]
        for param in (p for group in groups for p in group.fsdp_params):
            info = param._module_info
            owners = [info.module, *info.shared_modules]
            keys = [info.param_name, *info.shared_param_names]
            found.update({(id(owner), key): param for owner, key in zip(owners, keys, strict=True)})
    return found


def sharded_reader(leaf: Leaf, param: FsdpParam | None) -> Callable[[], Tensor]:
    """Return a reader of the sharded parameter, gathered or not; ``param`` is torch's record of it."""
    return leaf.read if param is None else partial(_read_sharded, leaf, param)


def _read_sharded(leaf: Leaf, param: FsdpParam) -> Tensor:
    visible = leaf.read()
    # The second: with reshard_after_forward=n a forward leaves what is gathered cut over n ranks.
    if any(visible is getattr(param, name, None) for name in ("_unsharded_param", "_sharded_post_forward_param")):
        sharded: Tensor = param.sharded_param
        return sharded
    return visible


def dtensor_shard(name: str, read: Callable[[], Tensor]) -> Shard:
    """Return the shard of a DTensor.

    Raises:
        UnsupportedPlacement: A placement has no boxes (``Partial``), or the local tensor has no bytes here.
        PiecesDoNotAddUp: The placements are not what the local tensor's shape says.
    """
    tensor = read()
    assert isinstance(tensor, DTensor)
    local = tensor._local_tensor
    refuse_unreadable(name, local)
    shape = tuple(tensor.shape)
    cuts = cuts_of(name, tensor)
    # None: this rank is not in the tensor's mesh
    pieces = no_pieces(len(shape)) if cuts is None else held_pieces(shape, cuts)
    # Torch and the rule may have the 0 of an empty shard in different dimensions.
    local_shape = held_shape(shape, cuts) if cuts is not None and len(pieces) else tuple(local.shape)
    shard = unfused(name, shape, local.dtype, local_shape, pieces, partial(_read_local, read))
    return replace(shard, writes=partial(_writes, read))


def _read_local(read: Callable[[], Tensor]) -> Tensor:
    tensor = read()
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _writes(read: Callable[[], Tensor]) -> int:
    """Return the writes to a DTensor, and those to its local tensor that went past it: torch counts them apart."""
    tensor = read()
    return tensor._version + _read_local(read)._version


def cuts_of(name: str, tensor: DTensor) -> list[tuple[Cut, ...]] | None:
    """Return the cuts of each dimension in the order of the placements; None off the mesh.

    Raises:
        UnsupportedPlacement: As in ``dtensor_shard``.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    cuts: list[list[Cut]] = [[] for _ in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            raise UnsupportedPlacement(name, f"placement {placement!r} on mesh dimension {axis}", _PLACEMENTS)
        factor = _split_factor(placement) if kind == "_StridedShard" else 0
        cuts[_dim_of(placement)].append(Cut(mesh.size(axis), coordinate[axis], factor))
    for dim, chain in enumerate(cuts):
        _refuse_unlisted_cuts(name, dim, chain)
    return [tuple(chain) for chain in cuts]


def _refuse_unlisted_cuts(name: str, dim: int, chain: list[Cut]) -> None:
    """Refuse a strided cut of which only some outer cuts are listed: no rule says what the rank holds."""
    for at, cut in enumerate(chain):
        right = [c.parts for c in chain[at + 1 :]]
        if cut.split_factor and right and prod(right) != cut.split_factor:
            found = f"dimension {dim} is strided by {cut.split_factor}, the cuts to its right make {prod(right)} parts"
            raise UnsupportedPlacement(name, found, _PLACEMENTS)


def _split_factor(placement: Placement) -> int:
    return int(getattr(placement, "split_factor", 1))


def _dim_of(placement: Placement) -> int:
    return int(getattr(placement, "dim", 0))
