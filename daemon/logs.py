"""Log lines: one JSON object a line under a service manager, ``key=value`` on a terminal.

Facts travel in ``extra={"facts": {...}}``; the message says what happened.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping

_PRIORITY = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}
"""sd-daemon(3): a line that starts with ``<N>`` is filed under that priority."""


class _Json(logging.Formatter):
    def __init__(self, *, priority: bool) -> None:
        super().__init__()
        self._priority = priority

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "what": record.getMessage(),
            **_facts(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        text = json.dumps(line, default=str, ensure_ascii=False)
        return f"<{_PRIORITY.get(record.levelname, 6)}>{text}" if self._priority else text


class _Terminal(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = " ".join(f"{k}={v}" for k, v in _facts(record).items())
        text = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower():7} {record.getMessage()} {facts}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _facts(record: logging.LogRecord) -> Mapping[str, object]:
    facts = getattr(record, "facts", {})
    return facts if isinstance(facts, Mapping) else {}


def configure_logging(level: str, environ: Mapping[str, str]) -> None:
    """Send the log to standard error in the form its reader wants."""
    handler = logging.StreamHandler(sys.stderr)
    if sys.stderr.isatty():
        handler.setFormatter(_Terminal())
    else:
        handler.setFormatter(_Json(priority="JOURNAL_STREAM" in environ))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
