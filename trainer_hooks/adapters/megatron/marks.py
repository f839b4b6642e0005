"""What Megatron itself writes on parameters and modules, compared with what was declared of them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from weightd.trainer_hooks.adapters.megatron.place import Partition, Ring
from weightd.trainer_hooks.faults import UnsupportedPlacement
from weightd.trainer_hooks.names import walk
from weightd.trainer_hooks.shards import refuse_unreadable

SUPPORTED = (
    "Megatron's own parameters, cut in one of the ways of weightd.trainer_hooks.adapters.megatron",
    "Skip for what is not to be published",
)

_OPTIMIZERS = {"MegatronOptimizer", "_ParamAndGradBuffer", "_ParamAndGradBucket"}
"""Classes whose flat buffers are not cut by any rule of a model."""

_MARKS = ("ds_id", "_hp_mapping", "_is_sharded", "_is_flat_param", "quant_state")
"""Attributes by which other frameworks mark tensors that are only parts, although they look whole."""

_MIXERS = ("mixer.in_proj.", "mixer.conv1d.")
"""Fused projections of state-space layers, of which each part is cut for itself."""


def refuse_source(source: object) -> None:
    """Refuse an optimizer or a buffer of one: its flat ranges are cut by the optimizer's own rule.

    Raises:
        UnsupportedPlacement: It is one.
    """
    names = [cls.__name__ for cls in type(source).__mro__]
    if _OPTIMIZERS & set(names):
        found = f"a {names[0]}: buffers of the distributed optimizer are flat ranges of many parameters"
        raise UnsupportedPlacement("the source", found, ("the model, whose parameters it writes back", *SUPPORTED))


def refuse_foreign(name: str, tensor: Tensor) -> None:
    """Refuse what no rule can describe, however it is declared.

    Raises:
        UnsupportedPlacement: A tensor without bytes here, of another framework, of fp8, or a fused state-space weight.
    """
    if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point:
        raise UnsupportedPlacement(name, f"an fp8 parameter ({tensor.dtype}): its scales are kept elsewhere", SUPPORTED)
    kind = type(tensor)
    if kind not in (Tensor, nn.Parameter) and not isinstance(tensor, nn.Buffer):
        raise UnsupportedPlacement(name, f"a tensor of type {kind.__module__}.{kind.__qualname__}", SUPPORTED)
    for mark in (mark for mark in _MARKS if hasattr(tensor, mark)):
        raise UnsupportedPlacement(name, f"it is marked with {mark}, which Megatron does not do", SUPPORTED)
    refuse_unreadable(name, tensor)
    if getattr(tensor, "partition_sizes", None) is not None or any(mixer in f".{name}" for mixer in _MIXERS):
        raise UnsupportedPlacement(
            name, "a fused projection of a state-space layer, each part cut for itself", SUPPORTED
        )


def contradiction(tensor: Tensor, declared: Partition | None, ring: Ring) -> str:
    """Return how a parameter's own attributes contradict its rule; nothing where they agree or there are none.

    Args:
        tensor: The parameter; ``tensor_model_parallel``, ``partition_dim`` and ``partition_stride`` are read.
        declared: What the rule's split would have written there.
        ring: The ranks that it is cut over; over one rank, cut and whole are the same.
    """
    marked = getattr(tensor, "tensor_model_parallel", None)
    if marked is None:
        return ""
    dim, stride = getattr(tensor, "partition_dim", -1), getattr(tensor, "partition_stride", 1)
    if marked and dim >= tensor.ndim:
        return (
            f"partition_dim is {dim} and it has {tensor.ndim} dimensions: a flat range, as the distributed optimizer's"
        )
    if declared is None or not marked:
        if bool(marked) is (declared is not None) or ring.size == 1:
            return ""
        return f"declared {'whole' if declared is None else 'cut'}, tensor_model_parallel is {bool(marked)}"
    if dim != declared.dim:
        return f"declared cut along dimension {declared.dim}, partition_dim is {dim}"
    if stride not in declared.strides:
        usual = " or ".join(str(s) for s in declared.strides)
        return f"its split has partition_stride {usual}, partition_stride is {stride}"
    return ""


def layer_numbers(source: object) -> Mapping[str, int]:
    """Return ``layer_number`` (global, from 1) of every module that has one, by the module's name."""
    if not isinstance(source, nn.Module):
        return {}
    found = ((prefix.rstrip("."), getattr(module, "layer_number", None)) for prefix, module in walk(source))
    return {name: number for name, number in found if isinstance(number, int)}
