"""A roster file from disk: TOML or JSON, by its suffix."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weightd.core.roster.violations import RosterFileUnreadable


def read_roster_table(path: Path) -> dict[str, Any]:
    """Return the table of a roster file.

    Raises:
        RosterFileUnreadable: The file is not there, is neither ``.toml`` nor ``.json``,
            is not written in what its suffix says, or does not hold one table.
    """
    readers: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": _parse_json}
    if path.suffix not in readers:
        raise RosterFileUnreadable(str(path), f"its suffix is {path.suffix!r}, not .toml or .json")
    try:
        table = readers[path.suffix](path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RosterFileUnreadable(str(path), error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise RosterFileUnreadable(str(path), str(error)) from error
    if not isinstance(table, dict):
        raise RosterFileUnreadable(str(path), "it holds no table of keys and values")
    return table


def _parse_json(text: str) -> Any:
    """Return JSON as objects, refusing a key that an object has twice: one of both would be lost unseen."""
    return json.loads(text, object_pairs_hook=_object)


def _object(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object's items as a dict."""
    table: dict[str, Any] = {}
    for key, value in items:
        if key in table:
            raise ValueError(f"the key {key!r} is there twice in one object")
        table[key] = value
    return table
