"""Whether what a publisher reads still is the model's: after a module was replaced, its parameters are nobody's.

Looked at before every publish: one look-up per module and one comparison per tied name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import nn

from weightd.trainer_hooks.adapters.leaves import Leaf, Source, leaves_of
from weightd.trainer_hooks.names import walk
from weightd.trainer_hooks.shards import Stray

Identity = Callable[[Leaf], object]
"""What is equal for two names of one memory."""

_Edge = tuple[dict[str, nn.Module | None], str, nn.Module]
"""A module's table of children, a key of it, and the child that it held at attach."""


class Watch:
    """The leaves of a source as they were attached."""

    def __init__(
        self, source: Source, leaves: Sequence[Leaf], ties: Sequence[tuple[Leaf, Leaf]], same: Identity
    ) -> None:
        """Note where everything is.

        Args:
            source: What the publisher was given.
            leaves: Its tensors.
            ties: (further name, first name) of tied ones.
            same: Compares them.
        """
        self._source = source
        self._owners = [(leaf.name, leaf.owner) for leaf in leaves if leaf.owner is not None]
        self._ties = tuple(ties)
        self._same = same
        self._edges = tuple(_edges(source)) if isinstance(source, nn.Module) else ()

    def stray(self) -> Stray | None:
        """Return the first tensor that is no longer what was attached."""
        if any(children.get(key) is not child for children, key, child in self._edges):
            now = {leaf.name: leaf.owner for leaf in leaves_of(self._source)}
            for name, owner in self._owners:  # a wrapper that was put around a module changes none of them
                if now.get(name) is not owner:
                    return Stray(name, "a parameter of one module", "of another" if name in now else "gone")
        for further, first in self._ties:
            if self._same(further) != self._same(first):
                return Stray(further.name, f"another name of {first.name}", "a tensor of its own")
        return None


def _edges(module: nn.Module) -> Iterator[_Edge]:
    for _, parent in walk(module):
        for key, child in parent._modules.items():
            if child is not None:
                yield parent._modules, key, child
