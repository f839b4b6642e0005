"""Exact texts under ``tests/golden``: a change of a text that people read shows in review.

``WEIGHTD_REWRITE_GOLDEN=1 pytest …`` writes what the code says now; the diff is then the thing to look at.
"""

import os
import re
from pathlib import Path

import msgspec

from weightd.core.errors import WeightdError, WireError, error_from_wire, ranges

GOLDEN = Path(__file__).parent / "golden"


def check_golden(name: str, text: str) -> None:
    """Compare ``text`` with ``tests/golden/<name>.txt``.

    Args:
        name: Path below ``tests/golden`` without suffix, for instance ``errors/E_OVERLAP``.
        text: What the code says, without a newline at its end.
    """
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("WEIGHTD_REWRITE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    assert path.exists(), f"no golden text {path.name}; WEIGHTD_REWRITE_GOLDEN=1 writes it"
    assert path.read_text(encoding="utf-8") == text + "\n"


def check_error_is_whole(error: WeightdError) -> None:
    """Check that an error is the same after a trip as bytes, and that its text shows every fact."""
    sent = msgspec.msgpack.encode(error.to_wire())
    arrived = error_from_wire(msgspec.msgpack.decode(sent, type=WireError))

    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert msgspec.json.encode(arrived.fields()) == msgspec.json.encode(error.fields())
    assert unshown(error) == []


def unshown(error: WeightdError) -> list[str]:
    """Return the facts of an error that its text does not show: scalars as they are, rank lists as ranges."""
    text = str(error)
    return [fact for fact in _facts(error.fields()) if not re.search(rf"(?<![\w.]){re.escape(fact)}(?!\w)", text)]


def _facts(value: object) -> list[str]:
    """Return what a value has to show: the keys of inner tables, ascending numbers as ranges, all else as it is."""
    match value:
        case None | "" | [] | () | {}:
            return []
        case dict():
            inner = [key for v in value.values() if isinstance(v, dict) for key in v]
            return [*inner, *(fact for v in value.values() for fact in _facts(v))]
        case list() | tuple():
            numbers = [v for v in value if isinstance(v, int)]
            if numbers == list(value) and sorted(set(numbers)) == numbers:
                return [ranges(numbers)]
            return [fact for v in value for fact in _facts(v)]
        case _:
            return [str(value)]
