"""Parameters of a rollout rank as they are declared and as they really are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from weightd.core.errors import Story
from weightd.core.layout.faults import LayoutError


class Parameter(NamedTuple):
    """Shape and element type of one parameter of a rank, as declared or as it really is."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(eq=False)
class DeclarationMismatch(LayoutError):
    """A parameter is not what was declared.

    Attributes:
        parameter: Its name in the engine.
        declared: Shape and element type declared, or empty if it was not.
        actual: Shape and element type found, or empty if there is none.
    """

    code: ClassVar[str] = "E_DECLARATION"
    parameter: str
    declared: str
    actual: str

    def story(self) -> Story:
        """Return the lines of the text."""
        if not self.declared:
            what = f"parameter {self.parameter} {self.actual} is not declared: nobody would feed it"
            return Story(what, next="declare which tensors it is made of, or that the engine keeps it")
        if not self.actual:
            what = f"parameter {self.parameter} {self.declared} is declared, but the rank has none of that name"
            return Story(what, next="compare the name with named_parameters() of this rank")
        return Story(
            f"parameter {self.parameter} is {self.actual}, declared was {self.declared}",
            next="compare the sizes declared for this rank with those that its engine cut",
        )


def described(parameter: Parameter | None) -> str:
    """Return a parameter for a text; nothing for none."""
    return f"{parameter.shape} {parameter.dtype}" if parameter else ""
