"""What a declaration of a Megatron rank is refused for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weightd.core.errors import Story, some
from weightd.trainer_hooks.faults import TrainerHookError


@dataclass(eq=False)
class RulesDoNotFit(TrainerHookError):
    """Rules and parameters that contradict each other, or have no counterpart.

    Attributes:
        names: The parameters, or the patterns of rules that match none.
        found: What is wrong, with the numbers.
        kind: What is listed beside it: ``rules`` or ``parameters``.
        listed: The rules that were tried, or the parameters that there are.
    """

    code: ClassVar[str] = "E_RULES"
    names: tuple[str, ...]
    found: str
    kind: str
    listed: tuple[str, ...]

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"{some(self.names)}: {self.found}",
            which=f"{self.kind}: {some(self.listed, shown=12)}",
            effect="nothing was published",
            next="correct the rules of Megatron(...): exactly one for each parameter; Skip(why) for what is not "
            "published, optional=True for what only other pipeline stages have",
        )
