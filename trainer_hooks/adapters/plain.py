"""Plain tensors: whole on every rank, whether by DDP, by replication, or because there is one rank.

Equal boxes of several ranks are replicas; that they hold equal bytes is the
framework's promise (DDP keeps it; buffers it broadcasts only if asked to).
"""

from __future__ import annotations

from torch import Tensor, nn

from weightd.core.layout.boxes import box
from weightd.trainer_hooks.adapters.leaves import Leaf
from weightd.trainer_hooks.faults import UnsupportedPlacement
from weightd.trainer_hooks.shards import Shard, refuse_unreadable, unfused

_PLAIN = (
    "plain tensors and DDP",
    "FSDP2 (fully_shard) DTensors",
    "DeepSpeed engines, as deepspeed.initialize returns them",
    "Megatron's parameters, declared by adapter=Megatron(...)",
    "declared shards by Publisher.from_shards",
)

_MARKS = {
    "_is_sharded": "an FSDP1 parameter",
    "_is_flat_param": "an FSDP1 flat parameter",
    "quant_state": "a bitsandbytes parameter",
}
"""Attributes by which frameworks mark tensors that are only parts, although they look whole."""


def plain_shard(leaf: Leaf) -> Shard:
    """Return the shard of a tensor that is whole on this rank.

    Raises:
        UnsupportedPlacement: It only looks whole, or has no bytes here.
    """
    tensor = leaf.read()
    refuse_unreadable(leaf.name, tensor)
    _refuse_parts(leaf.name, tensor)
    shape = tuple(tensor.shape)
    return unfused(leaf.name, shape, tensor.dtype, shape, box(shape), leaf.read)


def refuse_fsdp1(name: str, module: nn.Module) -> None:
    """Refuse a module that keeps flat parameters.

    Raises:
        UnsupportedPlacement: It is wrapped by FSDP1 or Megatron, or is a DeepSpeed engine inside of another module.
    """
    for cls in type(module).__mro__:
        if cls.__name__ in ("FullyShardedDataParallel", "DeepSpeedEngine", "MegatronModule"):
            raise UnsupportedPlacement(name or "the module", f"{cls.__module__}.{cls.__name__}", _PLAIN)


def _refuse_parts(name: str, tensor: Tensor) -> None:
    if type(tensor) not in (Tensor, nn.Parameter) and not isinstance(tensor, nn.Buffer):
        kind = type(tensor)
        raise UnsupportedPlacement(name, f"a tensor of type {kind.__module__}.{kind.__qualname__}", _PLAIN)
    if getattr(tensor, "tensor_model_parallel", False):
        raise UnsupportedPlacement(name, "a Megatron tensor-parallel shard", _PLAIN)
    for mark, what in _MARKS.items():
        if hasattr(tensor, mark):
            raise UnsupportedPlacement(name, what, _PLAIN)
