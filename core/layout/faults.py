"""Layouts that cannot stand, each with the numbers that show it.

A fault of a layout is never retried: the side that described its memory has to
describe it differently.  Whoever builds a layout gets the first fault at once;
``checks.validate`` collects all of them into one report, which says once what
was not done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weightd.core.errors import Story, WeightdError, some

_REFUSED = "the layout is not used; no byte was read or written"


def _box(start: tuple[int, ...], extent: tuple[int, ...], step: tuple[int, ...]) -> str:
    """Return a box for a text: ``[0, 5) x [2, 10) step 2``."""
    parts = []
    for s, n, k in zip(start, extent, step, strict=True):
        parts.append(f"[{s}, {s + (n - 1) * k + 1})" + (f" step {k}" if k != 1 else ""))
    return " x ".join(parts) or "the one element"


@dataclass(eq=False)
class LayoutError(WeightdError):
    """A shape or placement that cannot be described."""

    code: ClassVar[str] = "E_LAYOUT"


@dataclass(eq=False)
class BoxOutOfBounds(LayoutError):
    """A piece reaches outside of its tensor, or has no sensible box at all.

    Attributes:
        tensor: Name of the tensor.
        shape: Its logical shape, in elements.
        piece: Row of the piece in the layout.
        start: First index per dimension.
        extent: Number of indices per dimension.
        step: Distance of neighbouring indices.
        others: Further pieces of the same layout with this fault.
    """

    code: ClassVar[str] = "E_LAYOUT_BOX"
    tensor: str
    shape: tuple[int, ...]
    piece: int
    start: tuple[int, ...]
    extent: tuple[int, ...]
    step: tuple[int, ...]
    others: int = 0

    def story(self) -> Story:
        """Return the lines of the text."""
        more = f" (and {self.others} more)" if self.others else ""
        return Story(
            what=f"piece {self.piece}{more} is no box inside its tensor {self.tensor} {self.shape}",
            which=f"{_box(self.start, self.extent, self.step)}: start {self.start}, extent {self.extent}, "
            f"step {self.step}; a start is at least 0, extents and steps at least 1, an empty shard is no piece",
            next="describe only the elements that the rank holds, without padding",
        )


@dataclass(eq=False)
class BufferOverrun(LayoutError):
    """A piece reaches outside of its buffer, or two of its elements share a place by a stride of 0.

    Attributes:
        buffer: Name of the buffer.
        elements: Elements that the buffer holds.
        tensor: Name of the tensor.
        piece: Row of the piece in the layout.
        offset: First element of the piece in the buffer.
        extent: Number of indices per dimension.
        stride: Buffer elements between neighbouring indices.
        others: Further pieces of the same layout with this fault.
    """

    code: ClassVar[str] = "E_LAYOUT_BUFFER"
    buffer: str
    elements: int
    tensor: str
    piece: int
    offset: int
    extent: tuple[int, ...]
    stride: tuple[int, ...]
    others: int = 0

    def story(self) -> Story:
        """Return the lines of the text."""
        last = self.offset + sum((n - 1) * s for n, s in zip(self.extent, self.stride, strict=True))
        more = f" (and {self.others} more)" if self.others else ""
        return Story(
            what=f"piece {self.piece}{more} of {self.tensor} does not lie in its buffer {self.buffer} "
            f"of {self.elements} elements",
            which=f"elements {self.offset} to {last}: extent {self.extent}, stride {self.stride}; "
            "a stride is at least 1 where the extent exceeds 1",
            next="compare offset and strides with the storage they were read from",
        )


@dataclass(eq=False)
class DuplicateName(LayoutError):
    """One name stands for two things.

    Attributes:
        table: ``tensors``, ``buffers``, ``aliases`` or ``kept``.
        names: The names that occur more than once.
    """

    code: ClassVar[str] = "E_LAYOUT_NAME"
    table: str
    names: tuple[str, ...]

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"more than once in {self.table}: {some(self.names)}",
            next="list every name once; a second name of the same memory is an alias",
        )


@dataclass(eq=False)
class UnknownDType(LayoutError):
    """An element type that has no entry in ``core.dtypes``.

    Attributes:
        table: ``tensors`` or ``buffers``.
        name: The entry that has it.
        dtype: The text that names no type.
        known: The names that are known.
    """

    code: ClassVar[str] = "E_LAYOUT_DTYPE"
    table: str
    name: str
    dtype: str
    known: tuple[str, ...]

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"{self.name} in {self.table} has the unknown element type {self.dtype!r}",
            which=f"known are {some(self.known, shown=len(self.known))}",
            next="cast it to a known type before it is published, or name the type as torch does without 'torch.'",
        )


@dataclass(eq=False)
class DTypeConflict(LayoutError):
    """A piece of one element type in a buffer of another; nothing converts while copying.

    Attributes:
        piece: Row of the piece in the layout.
        tensor: Name of the tensor.
        tensor_dtype: Its element type.
        buffer: Name of the buffer.
        buffer_dtype: Its element type.
        others: Further pieces of the same layout with this fault.
    """

    code: ClassVar[str] = "E_LAYOUT_CONFLICT"
    piece: int
    tensor: str
    tensor_dtype: str
    buffer: str
    buffer_dtype: str
    others: int = 0

    def story(self) -> Story:
        """Return the lines of the text."""
        more = f" (and {self.others} more)" if self.others else ""
        return Story(
            what=f"piece {self.piece}{more} of {self.tensor} ({self.tensor_dtype}) lies in buffer {self.buffer} "
            f"({self.buffer_dtype})",
            next="give the tensor the element type in which it lies in the buffer",
        )


@dataclass(eq=False)
class BadEntry(LayoutError):
    """An entry of a table that cannot stand.

    Attributes:
        table: ``tensors``, ``buffers``, ``aliases``, ``unused`` or ``kept``.
        name: The entry.
        why: What is wrong, with the numbers.
    """

    code: ClassVar[str] = "E_LAYOUT_ENTRY"
    table: str
    name: str
    why: str

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"{self.name!r} in {self.table}: {self.why}",
            next=f"correct the entry of {self.name!r}",
        )


@dataclass(eq=False)
class BadColumns(LayoutError):
    """Columns that are no columns of one layout: shape, element type or a reference to no row.

    Attributes:
        column: Name of the column.
        why: What is wrong, with the numbers.
    """

    code: ClassVar[str] = "E_LAYOUT_COLUMNS"
    column: str
    why: str

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(what=f"column {self.column}: {self.why}", next="build layouts with LayoutBuilder")


@dataclass(eq=False)
class BadCut(LayoutError):
    """Sizes that do not cut a dimension as they claim to.

    Attributes:
        size: Length of the dimension, in elements.
        parts: Number of parts, or the parts themselves.
        why: What is wrong, with the numbers.
    """

    code: ClassVar[str] = "E_LAYOUT_CUT"
    size: int
    parts: tuple[int, ...]
    why: str

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"a dimension of {self.size} cannot be cut into {some(self.parts)}: {self.why}",
            effect=_REFUSED,
            next="give the size of every part as the framework cuts it; three uneven rules are in use, none is guessed",
        )


@dataclass(eq=False)
class NotDescribable(LayoutError):
    """An operation on pieces whose result is no list of boxes, or would be too long a one.

    Attributes:
        operation: Name of the operation.
        why: What is wrong, with the numbers.
    """

    code: ClassVar[str] = "E_LAYOUT_OPERATION"
    operation: str
    why: str

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"{self.operation}: {self.why}", effect=_REFUSED, next="cut the tensor along other dimensions"
        )


@dataclass(eq=False)
class MalformedLayout(LayoutError):
    """Bytes that are no layout message.

    Attributes:
        why: What is wrong, with the numbers.
    """

    code: ClassVar[str] = "E_LAYOUT_MESSAGE"
    why: str

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"no layout message: {self.why}",
            effect=_REFUSED,
            next="export the layout again with the version that reads it",
        )
