"""Where a rank stands among those that cut a parameter with it, and what a cut says about its part."""

from __future__ import annotations

from typing import NamedTuple

from weightd.trainer_hooks.shards import Part


class Ring(NamedTuple):
    """One direction of parallelism.

    Attributes:
        rank: This rank's place.
        size: Number of ranks; 1 for no cut.
    """

    rank: int
    size: int


class Expertise(NamedTuple):
    """Which experts a rank has.

    Attributes:
        ring: Its place among the expert-parallel ranks, which have equal numbers of experts, in order.
        total: Experts of the whole model.
    """

    ring: Ring
    total: int

    @property
    def local(self) -> int:
        """Number of experts on each rank."""
        return self.total // self.ring.size

    @property
    def first(self) -> int:
        """Global number of this rank's expert 0."""
        return self.ring.rank * self.local


class Held(NamedTuple):
    """What a local tensor holds.

    Attributes:
        parts: Of each checkpoint tensor, by a template of its name; pieces lie in the packed row-major local tensor.
        padding: Elements that belong to no checkpoint tensor.
    """

    parts: tuple[Part, ...]
    padding: int = 0


class Partition(NamedTuple):
    """What Megatron writes on a parameter that is cut so.

    Attributes:
        dim: ``partition_dim``.
        strides: Values of ``partition_stride`` that are in use for it.
    """

    dim: int
    strides: tuple[int, ...]


class DoesNotFit(Exception):
    """A split and a local shape contradict each other; whoever knows the parameter's name tells the user."""
