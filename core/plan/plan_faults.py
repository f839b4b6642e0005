"""Rank plans that a hook does not carry out, with the numbers that show why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weightd.core.errors import Story, WeightdError

_REFUSED = "the plan is not used; no byte was read or written"


@dataclass(eq=False)
class PlanError(WeightdError):
    """Base of what is wrong with a rank plan that came as bytes."""

    code: ClassVar[str] = "E_PLAN"


@dataclass(eq=False)
class MalformedPlan(PlanError):
    """Bytes that are no rank plan.

    Attributes:
        why: What is wrong, with the numbers.
    """

    code: ClassVar[str] = "E_PLAN_MESSAGE"
    why: str

    def story(self) -> Story:
        """Return the text."""
        return Story(
            what=f"no rank plan: {self.why}",
            effect=_REFUSED,
            next="hook and daemon come from one release: compare their versions",
        )


@dataclass(eq=False)
class PlanMismatch(PlanError):
    """A rank plan that does not fit the layout or the pools it is said to be for.

    Attributes:
        rank: The rollout rank.
        fact: What is compared.
        planned: What the plan says.
        found: What is there.
    """

    code: ClassVar[str] = "E_PLAN_MISMATCH"
    rank: str
    fact: str
    planned: str
    found: str

    def story(self) -> Story:
        """Return the text; it compares what was planned with what is there."""
        return Story(
            what=f"the plan of {self.rank} does not fit: {self.fact} is {self.planned} in the plan, {self.found} here",
            effect=_REFUSED,
            next="attach again, so that the rank is planned for the layout and pools it has",
        )


@dataclass(eq=False)
class CopyOutOfBounds(PlanError):
    """A row of a rank plan that leaves its memory, or is no copy at all.

    Attributes:
        rank: The rollout rank.
        row: The first such row.
        side: ``source`` or ``target``.
        where: The pool or the buffer.
        nbytes: Its length.
        offset: First byte of the row.
        extent: Elements per dimension.
        stride: Bytes per dimension.
        itemsize: Bytes of one element.
        others: Further such rows.
    """

    code: ClassVar[str] = "E_PLAN_BOUNDS"
    rank: str
    row: int
    side: str
    where: str
    nbytes: int
    offset: int
    extent: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int
    others: int = 0

    def story(self) -> Story:
        """Return the text; it names the first bad row and counts the others."""
        more = f" (and {self.others} more)" if self.others else ""
        return Story(
            what=f"row {self.row}{more} of the plan of {self.rank} does not lie in its {self.side}, {self.where} "
            f"of {self.nbytes} bytes",
            which=f"offset {self.offset}, extent {self.extent}, stride {self.stride}, itemsize {self.itemsize}",
            effect=_REFUSED,
            next="please report this: a daemon never plans such a row",
        )
