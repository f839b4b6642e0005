"""Why a hook is not taken on by this daemon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weightd.core.errors import Story, WeightdError


@dataclass(eq=False)
class HookRefused(WeightdError):
    """This daemon does not take the hook on, whatever its run says.

    Attributes:
        who: The rank.
        run: Its run.
        why: The rule that it breaks, with its numbers.
        hint: What to do.
    """

    code: ClassVar[str] = "E_ADMISSION"
    who: str
    run: str
    why: str
    hint: str

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"{self.who} of run {self.run!r} not taken on: {self.why}",
            effect="the rank is not attached; the run and its other ranks are not touched",
            next=self.hint,
        )
