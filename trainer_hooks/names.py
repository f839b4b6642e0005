"""Names of the checkpoint from names of a wrapped module.

Wrappers put a component into the path of every parameter below them.  Whether
``module`` is one is known from the wrapper, not from the text: a model may well
have a child of that name.  The same holds for PEFT's ``base_model.model.`` and
``base_layer``.  A mapping has only its texts: there a prefix counts where *every*
name has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from weightd.trainer_hooks.faults import NamesCollide
from weightd.trainer_hooks.peft_types import wrapped_child

WRAPPERS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})
"""Components that only wrappers use: FSDP1, torch.compile, activation checkpointing."""

SAVED, ORIGINAL = "modules_to_save", "original_module"
"""PEFT's copies of a module that is trained whole, one per adapter, and the module that they stand for."""

_LEADING = ("module.", "base_model.model.")
"""DDP's prefix and PEFT's, in the order in which they lie around a model."""

_BASE = "base_layer"


def walk(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield every module below ``module``, itself included, with the prefix of its parameters' names.

    A module that is reachable by two names comes twice: that is how ties of whole modules show.
    """
    yield prefix, module
    wraps = "module" if isinstance(module, DistributedDataParallel | DataParallel) else wrapped_child(module)
    for key, child in module._modules.items():
        if child is not None:
            hidden = key in WRAPPERS or key == wraps
            yield from walk(child, prefix if hidden else f"{prefix}{key}.")


def without_wrappers(name: str) -> str:
    """Return a dotted name without components that only wrappers use.

    >>> without_wrappers("model._orig_mod.layers.0._checkpoint_wrapped_module.w")
    'model.layers.0.w'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def canonical_names(raw: Iterable[str]) -> Mapping[str, str]:
    """Return the checkpoint name of each name of a mapping of tensors; names that are not published have none.

    A leading ``module.`` is DDP's and a leading ``base_model.model.`` PEFT's where *every* name has it.
    ``base_layer`` in front of the last component is PEFT's, too.  Where a module has copies in
    ``modules_to_save``, the copy is published under the module's name, and ``original_module`` is not.

    Raises:
        NamesCollide: Two names become one, for instance copies of two adapters.

    >>> canonical_names(["module.a", "module.b._orig_mod.w"])
    {'module.a': 'a', 'module.b._orig_mod.w': 'b.w'}
    >>> canonical_names(["base_model.model.q.base_layer.weight"])
    {'base_model.model.q.base_layer.weight': 'q.weight'}
    >>> canonical_names(["head.original_module.w", "head.modules_to_save.default.w"])
    {'head.modules_to_save.default.w': 'head.w'}
    """
    short = {name: without_wrappers(name) for name in raw}
    for prefix in _LEADING:
        if short and all(name.startswith(prefix) for name in short.values()):
            short = {name: text.removeprefix(prefix) for name, text in short.items()}
    saved = {text.split(f".{SAVED}.")[0] for text in short.values() if f".{SAVED}." in text}
    kept = {name: _unwrapped(text, saved) for name, text in short.items()}
    names = {name: text for name, text in kept.items() if text is not None}
    refuse_collisions(names.items())
    return names


def refuse_collisions(names: Iterable[tuple[str, str]]) -> None:
    """Refuse two tensors of one name.

    Args:
        names: Pairs (name in the model, name that is published).

    Raises:
        NamesCollide: Two have the same published name.
    """
    by_name: dict[str, list[str]] = {}
    for raw, name in names:
        by_name.setdefault(name, []).append(raw)
    for name, several in by_name.items():
        if len(several) > 1:
            raise NamesCollide(name, tuple(several))


def _unwrapped(text: str, saved: set[str]) -> str | None:
    """Return a name without what PEFT's layers put into it; None for the original of a module that has a copy."""
    owner, _, rest = text.partition(f".{ORIGINAL}.")
    if rest and owner in saved:
        return None
    owner, _, rest = text.partition(f".{SAVED}.")
    if rest:
        text = f"{owner}.{rest.partition('.')[2]}"
    parts = text.split(".")
    while len(parts) > 1 and parts[-2] == _BASE:
        del parts[-2]
    return ".".join(parts)
