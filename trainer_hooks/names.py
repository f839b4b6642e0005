"""Names of the checkpoint from names of a wrapped module.

Wrappers put a component into the path of every parameter below them.  Whether
``module`` is one is known from the wrapper, not from the text: a model may well
have a child of that name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from weightd.trainer_hooks.faults import NamesCollide

WRAPPERS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})
"""Components that only wrappers use: FSDP1, torch.compile, activation checkpointing."""


def walk(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield every module below ``module``, itself included, with the prefix of its parameters' names.

    A module that is reachable by two names comes twice: that is how ties of whole modules show.
    """
    yield prefix, module
    wraps = isinstance(module, DistributedDataParallel | DataParallel)
    for key, child in module._modules.items():
        if child is not None:
            hidden = key in WRAPPERS or (wraps and key == "module")
            yield from walk(child, prefix if hidden else f"{prefix}{key}.")


def without_wrappers(name: str) -> str:
    """Return a dotted name without components that only wrappers use.

    >>> without_wrappers("model._orig_mod.layers.0._checkpoint_wrapped_module.w")
    'model.layers.0.w'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def canonical_names(raw: Iterable[str]) -> Mapping[str, str]:
    """Return the checkpoint name of each name of a mapping of tensors.

    A leading ``module.`` is DDP's where *every* name has it.

    Raises:
        NamesCollide: Two names become one.

    >>> canonical_names(["module.a", "module.b._orig_mod.w"])
    {'module.a': 'a', 'module.b._orig_mod.w': 'b.w'}
    """
    given = list(raw)
    short = {name: without_wrappers(name) for name in given}
    if given and all(name.startswith("module.") for name in short.values()):
        short = {name: text.removeprefix("module.") for name, text in short.items()}
    by_name: dict[str, list[str]] = {}
    for name, text in short.items():
        by_name.setdefault(text, []).append(name)
    for text, names in by_name.items():
        if len(names) > 1:
            raise NamesCollide(text, tuple(names))
    return short
