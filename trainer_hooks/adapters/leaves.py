"""The named tensors of a module or a mapping, and where each is found again at the next publish."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from weightd.trainer_hooks.faults import NamesCollide, UnsupportedPlacement
from weightd.trainer_hooks.names import canonical_names, walk

Source = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""What a publisher is given: a module, a mapping, or the pairs of ``named_parameters()``."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A named tensor and the table that holds it.

    Attributes:
        name: HF checkpoint name.
        raw: Name in the source, with wrappers' prefixes.
        table: The module's table of parameters or buffers, or the mapping.
        key: Its key there.
        owner: The module, or None for a mapping.
    """

    name: str
    raw: str
    table: Mapping[str, Tensor | None]
    key: str
    owner: nn.Module | None = None

    def read(self) -> Tensor:
        """Return the tensor that has the name now; a framework may re-bind it between two steps."""
        tensor = self.table.get(self.key)
        if tensor is None:
            raise UnsupportedPlacement(self.name, "it was removed from its module", ("a tensor",))
        return tensor


def leaves_of(source: Source) -> tuple[Leaf, ...]:
    """Return every parameter and persistent buffer, tied ones under each of their names.

    Raises:
        NamesCollide: Two tensors have one name once wrappers' prefixes are gone.
    """
    if isinstance(source, nn.Module):
        return tuple(_of_module(source))
    # A mapping itself is kept: its entries may be re-bound.
    table = cast("Mapping[str, Tensor]", source) if isinstance(source, Mapping) else _table_of(source)
    names = canonical_names(table)
    return tuple(Leaf(name, key, table, key) for key, name in names.items())


def _table_of(pairs: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    table: dict[str, Tensor] = {}
    for name, tensor in pairs:
        if name in table:
            raise NamesCollide(name, (name, name))
        table[name] = tensor
    return table


def _of_module(module: nn.Module) -> Iterator[Leaf]:
    seen: dict[str, Leaf] = {}
    for prefix, owner in walk(module):
        buffers = {k: t for k, t in owner._buffers.items() if k not in owner._non_persistent_buffers_set}
        for table, keys in ((owner._parameters, owner._parameters), (owner._buffers, buffers)):
            for key in keys:
                if table[key] is None:
                    continue
                leaf = Leaf(prefix + key, prefix + key, table, key, owner)
                other = seen.setdefault(leaf.name, leaf)
                if other is not leaf:
                    raise NamesCollide(leaf.name, (other.raw, leaf.raw))
                yield leaf
