"""What can be wrong with how a roster is written: values, shapes, divisions, keys and files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import msgspec

from weightd.core.errors import Plain, Story, WeightdError
from weightd.core.roster.roster_error import RosterError, plural


@dataclass(eq=False)
class Remainder(RosterError):
    """Slots that do not divide into engines of one size.

    Attributes:
        total: Slots to divide.
        per_engine: Slots of one engine.
        remainder: What is left over.
    """

    code: ClassVar[str] = "E_REMAINDER"
    total: int
    per_engine: int
    remainder: int

    def story(self) -> Story:
        """Return the text: the division with its remainder."""
        engines = self.total // self.per_engine
        return Story(
            what=f"{plural(self.total, 'slot')} do not divide by {self.per_engine} per engine: "
            f"{plural(engines, 'engine')} x {self.per_engine} + {self.remainder} left over = {self.total}",
            effect="no engine was laid out",
            next=f"choose a total_slots that {self.per_engine} divides, or name each engine with its slots",
        )


@dataclass(eq=False)
class RosterShape(RosterError):
    """Counts that describe no engines: lists of different lengths, or an engine of no rank.

    Attributes:
        counts: Length of ``counts``, where lengths differ.
        offsets: Length of ``offsets``, where lengths differ.
        engine: Engine whose count is at fault.
        count: Its count.
        slots: Number of slots it lists, where that is not its count.
    """

    code: ClassVar[str] = "E_SHAPE"
    counts: int | None = None
    offsets: int | None = None
    engine: str | None = None
    count: int | None = None
    slots: int | None = None

    def fields(self) -> dict[str, Plain]:
        """Return the facts of the form at hand, and none of the other."""
        return {name: value for name, value in super().fields().items() if value is not None}

    def story(self) -> Story:
        """Return the text of the form at hand."""
        effect = "no engine was laid out"
        if self.engine is None:
            return Story(
                what=f"{plural(self.counts or 0, 'count')} for {plural(self.offsets or 0, 'offset')}: "
                "each engine needs one of both",
                effect=effect,
                next="give counts and offsets the same length",
            )
        if self.slots is not None:
            return Story(
                what=f"engine {self.engine} of {self.count} lists {plural(self.slots, 'slot')}",
                effect=effect,
                next="list one slot for each rank",
            )
        return Story(
            what=f"engine {self.engine} has {self.count} ranks, and needs at least 1",
            effect=effect,
            next=f"correct its size, or leave {self.engine} out",
        )


@dataclass(eq=False)
class RosterValue(RosterError):
    """A value with which a roster describes no topology at all.

    Attributes:
        field: Where it stands.
        value: What stands there.
        why: Why that cannot be.
    """

    code: ClassVar[str] = "E_ROSTER"
    field: str
    value: int | str
    why: str

    def story(self) -> Story:
        """Return the text: field, value and reason."""
        return Story(
            what=f"{self.field} = {self.value}: {self.why}",
            effect="the roster describes no topology",
            next=f"correct {self.field}",
        )


@dataclass(eq=False)
class UnknownKeys(WeightdError):
    """Keys of a roster file that mean nothing; a misspelt key is never ignored.

    Attributes:
        keys: The keys with their place.
        allowed: The keys that may stand at the top of a roster file.
    """

    code: ClassVar[str] = "E_UNKNOWN_KEY"
    exit_code: ClassVar[int] = 2
    keys: tuple[str, ...]
    allowed: tuple[str, ...]

    def story(self) -> Story:
        """Return the text: all unknown keys, and what is known."""
        return Story(
            what=f"unknown {'key' if len(self.keys) == 1 else 'keys'} in the roster: {', '.join(self.keys)}",
            which=f"a roster has the keys {', '.join(self.allowed)}",
            effect="nothing was judged",
            next="correct or remove what is unknown",
        )


@dataclass(eq=False)
class RosterFileUnreadable(WeightdError):
    """A roster file that cannot be read as one table.

    Attributes:
        path: The file.
        why: What the reader said.
    """

    code: ClassVar[str] = "E_ROSTER_FILE"
    exit_code: ClassVar[int] = 2
    path: str
    why: str

    def story(self) -> Story:
        """Return the text: the file and the reader's reason."""
        return Story(
            what=f"cannot read the roster {self.path}: {self.why}",
            effect="nothing was judged",
            next="give a .toml or .json file with one roster",
        )


def roster_value(field: str, value: object, why: str) -> RosterValue:
    """Return the error for any value; what is neither number nor text is shown as JSON.

    Long values are cut: the text has to name the fault, not to repeat the file.
    """
    if isinstance(value, int | str) and not isinstance(value, bool):
        return RosterValue(field, value, why)
    try:
        shown = msgspec.json.encode(value).decode()
    except (TypeError, msgspec.MsgspecError):
        shown = repr(value)
    return RosterValue(field, shown if len(shown) <= 80 else f"{shown[:77]}...", why)
