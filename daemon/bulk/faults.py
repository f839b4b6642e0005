"""Errors of bulk memory that stay on their node; those that cross the wire are in ``core.wire.faults``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weightd.core.errors import Story, WeightdError, binary_size


@dataclass(eq=False)
class BudgetExceeded(WeightdError):
    """A landing does not fit into what the node may use for landings.

    Attributes:
        name: Whose landing.
        nbytes: Bytes that it needs: both halves.
        taken_nbytes: Bytes of the landings that are there.
        limit_nbytes: The budget of the node.
    """

    code: ClassVar[str] = "E_MEMORY_BUDGET"
    name: str
    nbytes: int
    taken_nbytes: int
    limit_nbytes: int

    def story(self) -> Story:
        """Return the lines of the text."""
        room = self.limit_nbytes - self.taken_nbytes
        return Story(
            what=f"no landing of {binary_size(self.nbytes)} for {self.name}: "
            f"{binary_size(self.taken_nbytes)} of the budget of {binary_size(self.limit_nbytes)} are taken",
            which=f"{self.nbytes - room:,} bytes are lacking: needed {self.nbytes:,}, "
            f"taken {self.taken_nbytes:,}, budget {self.limit_nbytes:,}",
            effect="nothing was allocated; the epoch before it stands",
            next="raise limits.memory_budget_bytes of this node, or put fewer remote ranks on it",
        )
