"""The tree of deliberate errors, and the report that carries all of them at once.

An error is its fields.  The text is built from them, in this order and one line
each where it has something to say: *what* did not happen, with the numbers;
*which* parameter, box or field; *who* (ranks, node, process); *effect*, which
is what was not done and what is still served; *next*, one thing to do.  Fields
are plain values, so that an error crosses a socket as data and is the same
class, with the same text, on the other side.

Tree (codes in brackets are those of the coverage specification)::

    WeightdError
    ├── ConfigError                    before anything runs; exit code 78
    ├── LayoutError                    a shape or placement that cannot be described
    ├── RosterError ...                core.roster.violations
    ├── ElementError ...               core.plan.violations
    ├── SessionError                   a version's life: skew, deadline, failure
    ├── ProtocolError                  a message that may not be sent
    ├── TransferError                  bytes that did not arrive, or not these
    ├── MemoryError-like MemoryRefused a descriptor that is not what it claims
    ├── ApplyError                     an engine rank that could not take the bytes
    ├── Refused                        the report: every violation, in one raise
    └── InternalInvariantBroken        our fault; please report
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import msgspec

Plain = Any
"""A value made of None, bool, int, float, str, lists and str-keyed dicts."""

WIRE_VIOLATIONS = 32
"""Violations of a report that travel whole; a rank that misses every tensor of a large model violates thousands."""

SHOWN = 8
"""Lists in texts are cut after this many entries; more than a screenful helps nobody."""


class Story(NamedTuple):
    """The lines of an error's text; empty ones are left out."""

    what: str
    which: str = ""
    who: str = ""
    effect: str = ""
    next: str = ""


class WireError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An error as data.

    Attributes:
        code: Registered code of the class.
        fields: The class's fields as plain values.
        text: The text as its maker built it; used where the code is unknown.
        causes: Violations of a report.
    """

    code: str
    fields: dict[str, Plain]
    text: str
    causes: tuple[WireError, ...] = ()


_BY_CODE: dict[str, list[type[WeightdError]]] = {}
"""Classes by code; where the specification gives two errors one code, their fields tell them apart."""


@dataclass(eq=False)
class WeightdError(Exception):
    """Base of every deliberate error.  Subclasses are dataclasses: their fields are the facts."""

    code: ClassVar[str] = "E_WEIGHTD"
    exit_code: ClassVar[int] = 1

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "code" in cls.__dict__:
            _BY_CODE.setdefault(cls.code, []).append(cls)

    def __post_init__(self) -> None:
        # args hold the fields, so that copying and re-raising across processes rebuild the error.
        Exception.__init__(self, *(getattr(self, f.name) for f in dataclasses.fields(self)))

    def story(self) -> Story:
        """Return the lines of the text; every subclass that is raised overrides this."""
        return Story(what=type(self).__name__)

    def fields(self) -> dict[str, Plain]:
        """Return the facts as plain values, under the names of the specification."""
        return {f.name: msgspec.to_builtins(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def __str__(self) -> str:
        story = self.story()
        lines = [line for line in story[:-1] if line] + ([f"next: {story.next}"] if story.next else [])
        return f"{self.code}: " + "\n  ".join(lines)

    def to_wire(self) -> WireError:
        """Return the error as data, ready for a message."""
        return WireError(self.code, self.fields(), str(self))

    @classmethod
    def _from_fields(cls, fields: Mapping[str, Plain], _wire: WireError) -> Self:
        # The dataclass's annotations are the schema; lists come back as the tuples they were.
        built = msgspec.convert(dict(fields), _schema(cls), strict=False)
        return cls(**{f.name: getattr(built, f.name) for f in dataclasses.fields(cls)})


_SCHEMAS: dict[type[WeightdError], type[msgspec.Struct]] = {}


def _schema(cls: type[WeightdError]) -> type[msgspec.Struct]:
    """Return a struct with the fields of an error class, which msgspec can fill and check."""
    if cls not in _SCHEMAS:
        import typing

        hints = typing.get_type_hints(cls)
        _SCHEMAS[cls] = msgspec.defstruct(
            f"{cls.__name__}Fields",
            # A field with a default may be left out of the data: an absent number is not written as null.
            [(f.name, hints[f.name], *_default_of(f)) for f in dataclasses.fields(cls)],
        )
    return _SCHEMAS[cls]


def _default_of(field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    """Return a field's default as msgspec has it; nothing for a field that must be there."""
    if field.default_factory is not dataclasses.MISSING:
        return (msgspec.field(default_factory=field.default_factory),)
    return () if field.default is dataclasses.MISSING else (field.default,)


def error_from_wire(wire: WireError) -> WeightdError:
    """Return the error that ``wire`` describes, of its own class where code and fields are those of one."""

    def strangeness(cls: type[WeightdError]) -> int:
        return len({f.name for f in dataclasses.fields(cls)} ^ wire.fields.keys())

    for cls in sorted(_BY_CODE.get(wire.code, ()), key=strangeness):
        try:
            return cls._from_fields(wire.fields, wire)
        except (msgspec.ValidationError, TypeError, KeyError):
            continue
    return UnknownRemoteError(wire.code, wire.text)


def known_codes() -> dict[str, tuple[type[WeightdError], ...]]:
    """Return every registered error class, by code."""
    return {code: tuple(classes) for code, classes in _BY_CODE.items()}


def some(values: Iterable[object], shown: int = SHOWN) -> str:
    """Return a list for a text, cut at ``shown`` entries with the number of the rest.

    >>> some([1, 2, 3], shown=2)
    '[1, 2 and 1 more]'
    """
    items = [str(v) for v in values]
    rest = len(items) - shown
    return f"[{', '.join(items[:shown])} and {rest} more]" if rest > 0 else f"[{', '.join(items)}]"


def ranges(values: Iterable[int]) -> str:
    """Return whole numbers as ranges, the way rank lists are printed.

    >>> ranges([6, 7, 14, 15, 3])
    '3, 6-7, 14-15'
    """
    runs: list[list[int]] = []
    for v in sorted(set(values)):
        if runs and v == runs[-1][1] + 1:
            runs[-1][1] = v
        else:
            runs.append([v, v])
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs) or "none"


def binary_size(nbytes: int) -> str:
    """Return a byte count for a text, exact below 1 KiB.

    >>> binary_size(29360128), binary_size(12)
    ('28.0 MiB', '12 B')
    """
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


@dataclass(eq=False)
class UnknownRemoteError(WeightdError):
    """An error of a peer whose class this process does not know; its text is kept, and ``code`` is the peer's."""

    code: ClassVar[str] = "E_REMOTE"
    remote_code: str
    text: str

    def __post_init__(self) -> None:
        """Take over the peer's code: whoever looks for one finds it, whichever process knows the class."""
        WeightdError.__post_init__(self)
        setattr(self, "code", self.remote_code)  # noqa: B010 - one of a kind: elsewhere a code belongs to the class

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(what=self.text.removeprefix(f"{self.remote_code}: "))

    def __str__(self) -> str:
        return f"{self.remote_code}: {self.story().what}"


@dataclass(eq=False)
class Refused(WeightdError):
    """The full report: all violations together, never only the first.

    Attributes:
        subject: What was refused, for instance ``run grpo-7`` or ``version 42``.
        violations: Every violation, each with its own numbers.
        effect: What was not done and what is still served.
    """

    code: ClassVar[str] = "E_REFUSED"
    subject: str
    violations: tuple[WeightdError, ...]
    effect: str

    def story(self) -> Story:
        """Return the report: how many, each of them, and the effect."""
        n = sum(v.count if isinstance(v, MoreViolations) else 1 for v in self.violations)
        head = f"{self.subject} refused: {n} violation{'s' if n != 1 else ''}"
        return Story(
            what="\n  ".join([head, *(str(v).replace("\n", "\n  ") for v in self.violations)]), effect=self.effect
        )

    def fields(self) -> dict[str, Plain]:
        """Return subject, effect, and the code of each violation."""
        return {"subject": self.subject, "effect": self.effect, "codes": [v.code for v in self.violations]}

    def to_wire(self) -> WireError:
        """Return the report as data: its first violations whole, the rest counted, so that it fits a frame."""
        cut = self
        if len(self.violations) > WIRE_VIOLATIONS + 1:  # the one more is that of a report that was cut before
            rest = self.violations[WIRE_VIOLATIONS:]
            counts = Counter(v.code for v in rest)
            shown = (*self.violations[:WIRE_VIOLATIONS], MoreViolations(len(rest), dict(sorted(counts.items()))))
            cut = Refused(self.subject, shown, self.effect)
        return WireError(self.code, cut.fields(), str(cut), tuple(v.to_wire() for v in cut.violations))

    @classmethod
    def _from_fields(cls, fields: Mapping[str, Plain], wire: WireError) -> Self:
        return cls(str(fields["subject"]), tuple(error_from_wire(c) for c in wire.causes), str(fields["effect"]))


@dataclass(eq=False)
class MoreViolations(WeightdError):
    """Stands in a report that was sent for the violations that were left out of it.

    Attributes:
        count: How many.
        by_code: How many of each code; they add up to ``count``.
    """

    code: ClassVar[str] = "E_MORE"
    count: int
    by_code: dict[str, int]

    def story(self) -> Story:
        """Return the lines of the text."""
        kinds = ", ".join(f"{code} x {n:,}" for code, n in self.by_code.items())
        return Story(
            what=f"{self.count:,} more violations are not sent: {kinds}",
            next="export the layouts and run `weightd plan ROSTER --layouts DIR`: it prints all of them",
        )


def flatten(errors: Sequence[WeightdError]) -> tuple[WeightdError, ...]:
    """Return the errors with every report replaced by its violations."""
    out: list[WeightdError] = []
    for e in errors:
        out.extend(flatten(e.violations) if isinstance(e, Refused) else (e,))
    return tuple(out)


@dataclass(eq=False)
class ConfigError(WeightdError):
    """A setting that cannot stand; raised before any socket opens."""

    code: ClassVar[str] = "E_CONFIG"
    exit_code: ClassVar[int] = 78
    field: str
    value: str
    why: str
    source: str = ""

    def story(self) -> Story:
        """Return the lines of the text."""
        where = f" (from {self.source})" if self.source else ""
        stands = f" = {self.value!r}" if self.value else ""
        return Story(
            what=f"{self.field}{stands}{where}: {self.why}",
            effect="no socket was opened, nothing was started",
            next=f"correct {self.field} and start again",
        )


@dataclass(eq=False)
class InternalInvariantBroken(WeightdError):
    """A rule of ours does not hold: a fault of weightd, not of its user."""

    code: ClassVar[str] = "E_INTERNAL"
    exit_code: ClassVar[int] = 70
    rule: str
    facts: str

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"invariant {self.rule} does not hold: {self.facts}", next="please report this with the log around it"
        )
