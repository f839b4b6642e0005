"""What is refused of a traced layout, each with the line of the loader that made it so.

::

    RolloutHookError
    ├── NotTraced     E_TRACE            what a loader did and no copy can do
    ├── WrittenTwice  E_TRACE_TWICE      two writes that cover each other in part
    ├── NotWritten    E_TRACE_UNCOVERED  parameters that the loader never wrote
    └── ReLaid        E_RELAID           a parameter that holds other elements than its loader wrote
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weightd.core.errors import Story, some
from weightd.rollout_hooks.faults import RolloutHookError

UNTOUCHED = "no layout was made; nothing was written into the engine"


@dataclass(eq=False)
class NotTraced(RolloutHookError):
    """Something that a loader did and that no copy of checkpoint elements can do.

    Attributes:
        operation: What it did.
        parameter: The parameter that would have got it; empty where the loader had not come so far.
        tensor: The checkpoint tensor, if there is one.
        where: File and line of the loader.
        why: What it means.
    """

    code: ClassVar[str] = "E_TRACE"
    operation: str
    parameter: str
    tensor: str
    where: str
    why: str

    def story(self) -> Story:
        """Return the lines of the text."""
        into = f" for parameter {self.parameter}" if self.parameter else ""
        of = f" of {self.tensor}" if self.tensor else ""
        return Story(
            what=f"{self.operation}{of}{into} cannot be traced: {self.why}",
            which=f"at {self.where or 'an unknown line'}",
            next="declare the layout (Declaration), or load this engine through its own load_weights",
        )


@dataclass(eq=False)
class WrittenTwice(RolloutHookError):
    """Two writes into one parameter of which the later one covers a part of the earlier one.

    Attributes:
        parameter: The parameter.
        elements: Elements that are in both.
        first: File and line of the earlier write.
        second: File and line of the later one.
    """

    code: ClassVar[str] = "E_TRACE_TWICE"
    parameter: str
    elements: int
    first: str
    second: str

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"parameter {self.parameter}: {self.elements} elements are written twice, and the later write does "
            "not cover the earlier one whole",
            which=f"first at {self.first or 'an unknown line'}, then at {self.second or 'an unknown line'}",
            next="give the loader the checkpoint's tensors once each, or declare the layout (Declaration)",
        )


@dataclass(eq=False)
class NotWritten(RolloutHookError):
    """Parameters that the loader never wrote.

    Attributes:
        parameters: Their names.
    """

    code: ClassVar[str] = "E_TRACE_UNCOVERED"
    parameters: tuple[str, ...]

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"{len(self.parameters)} parameter(s) were never written by the loader: nobody would feed them",
            which=some(self.parameters),
            next="trace with all tensors of the checkpoint, or name what the engine keeps as it is: layout(kept=[...])",
        )


@dataclass(eq=False)
class ReLaid(RolloutHookError):
    """A parameter that does not hold the elements that its layout says, in the version it was loaded from.

    Attributes:
        parameter: The parameter.
        differing: Elements that differ.
        compared: Elements compared.
        element: The first of them that differs, counted in the parameter's memory.
        source: What the layout says lies there.
    """

    code: ClassVar[str] = "E_RELAID"
    parameter: str
    differing: int
    compared: int
    element: int
    source: str

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"parameter {self.parameter} holds other elements than its layout says: {self.differing} of "
            f"{self.compared} differ",
            which=f"the first is element {self.element}, which would be {self.source}",
            effect="a direct write would have gone to the wrong places; nothing was written",
            next="if the engine re-lays it after loading, load this parameter through the engine's own load_weights; "
            "otherwise compare the version given with the one that was loaded",
        )
