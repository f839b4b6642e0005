"""Child processes that end with this one: started, listened to, told things, and stopped within a bound.

A child prints one JSON object a line on its standard output (``say`` of the demo's
ranks) and reads orders, one line each, from its standard input; the end of
its input tells it to stop.  Everything else that it prints goes to a log file.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

Said = dict[str, Any]
"""What a child said: the JSON object of one line."""

# The kernel counts the thread that started the child as its parent: start children from one that lives on.
_TETHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: end when the parent does, however it ends
os.getppid() == int(sys.argv[1]) or sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""

_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Heard:
    """One thing heard from a child.

    Attributes:
        child: Its name.
        said: What it said; None when its output ended.
        status: Exit status once its output ended (negative: the signal), else None.
    """

    child: str
    said: Said | None
    status: int | None = None


class Child:
    """One process with its log; made by ``Children.start``."""

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path | None) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as err:
            self._process = subprocess.Popen(  # noqa: S603 - the command lines are our own
                [sys.executable, "-I", "-S", "-c", _TETHER, str(os.getpid()), *argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                env={**os.environ, **env},
                cwd=cwd,
                start_new_session=True,  # Ctrl-C reaches us alone, and we stop the children in order
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, or None while it runs."""
        return self._process.poll()

    def tell(self, order: Mapping[str, object]) -> None:
        """Send an order, one line of JSON; lost without a word if the child has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            return

    def listen(self, heard: queue.Queue[Heard]) -> None:
        """Put every line of its output, then its end, into ``heard``; runs in a thread of its own."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                try:
                    said = msgspec.json.decode(line, type=dict[str, Any])
                except msgspec.DecodeError:
                    with self.log.open("ab") as log:
                        log.write(line)
                    continue
                heard.put(Heard(self.name, said))
        heard.put(Heard(self.name, None, self._process.wait()))

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal; nothing happens if it has ended."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Close its input and send it a signal, without waiting."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self.send_signal(number)

    def wait(self, timeout_s: float) -> int | None:
        """Return its exit status, or None if it still runs after ``timeout_s``."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def log_tail(self, lines: int = 15) -> str:
        """Return the last lines of its log."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


class Children:
    """All children of a scene; leaving the block stops every one of them, by force if need be."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: dict[str, Child] = {}
        self._heard: queue.Queue[Heard] = queue.Queue()
        self._listeners: list[threading.Thread] = []
        logs.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_all()

    def __getitem__(self, name: str) -> Child:
        return self._children[name]

    def start(
        self, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> Child:
        """Start ``argv`` under ``name`` in folder ``cwd``, with ``env`` added to the environment.

        A child that had the name before is asked to stop.
        """
        before = self._children.get(name)
        if before is not None:
            before.stop()
        child = Child(name, argv, env or {}, self._logs / f"{name}.log", cwd)
        self._children[name] = child
        listener = threading.Thread(target=child.listen, args=(self._heard,), name=f"listen-{name}", daemon=True)
        listener.start()
        self._listeners.append(listener)
        return child

    def hear(self, timeout_s: float) -> Heard | None:
        """Return the next thing that any child says, or None after ``timeout_s``."""
        try:
            return self._heard.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            return None

    def stop_all(self, grace_s: float = _GRACE_S) -> None:
        """Ask all to stop, wait for ``grace_s`` in all, and kill what is left."""
        end = time.monotonic() + grace_s
        children = list(reversed(self._children.values()))
        for child in children:
            child.stop()
        for child in children:
            if child.wait(max(end - time.monotonic(), 0.0)) is None:
                child.send_signal(signal.SIGKILL)
                child.wait(_GRACE_S)
        for listener in self._listeners:
            listener.join(_GRACE_S)
