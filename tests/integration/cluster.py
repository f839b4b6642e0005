"""Daemons and ranks of one test: started, told what to do, answered within a bound, and ended whatever happens."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import os
import resource
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from tests.integration.ranks import EngineSpec, TrainerSpec, live
from weightd.core.session.deadlines import Deadlines
from weightd.daemon.children import Children
from weightd.daemon.local_nodes import LocalNodes

ANSWER_S = 25.0
START_S = 60.0
"""For the first rank of a session to import torch on a busy machine."""

# Short, so that what is to end by a deadline ends within the test; long enough for two busy cores.
DEADLINES: Mapping[str, float] = {
    "attach_s": 10.0,
    "barrier_s": 2.0,
    "collect_s": 6.0,
    "plan_s": 6.0,
    "fetch_s": 8.0,
    "fetch_stall_s": 4.0,
    "apply_wait_s": 6.0,
    "apply_s": 6.0,
    "apply_stall_s": 4.0,
    "commit_ack_s": 4.0,
    "release_s": 8.0,
    "restart_s": 3.0,
    "heartbeat_s": 0.2,
    "heartbeat_timeout_s": 1.5,
    "drain_s": 2.0,
}

HOOK_DEADLINES = msgspec.convert(DEADLINES, Deadlines)


def _context() -> multiprocessing.context.ForkServerContext:
    """Ranks are forked from a process that has torch and the hooks already: a second each, not five."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["weightd.trainer_hooks.publisher", "weightd.rollout_hooks.receiver"])
    return context


CONTEXT = _context()


@dataclass(frozen=True)
class Answer:
    """What a rank answered: the value of the command, or the error that it raised."""

    who: str
    value: Any = None
    error: dict[str, Any] | None = None

    @property
    def codes(self) -> list[str]:
        """Codes of the error, those in a report one by one; none where it did not fail."""
        return self.error["codes"] if self.error else []

    @property
    def text(self) -> str:
        """The error's text."""
        return self.error["text"] if self.error else ""

    def fields(self, code: str) -> dict[str, Any]:
        """Return the fields of the first violation of ``code``."""
        assert self.error is not None, f"{self.who} did not fail"
        found: dict[str, Any] = self.error["fields"][self.error["codes"].index(code)]
        return found


class Rank:
    """One rank's process."""

    def __init__(self, name: str, spec: Any, target: Callable[..., None] = live) -> None:
        self.name = name
        self.spec = spec
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=target, args=(theirs, spec), name=name, daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    def tell(self, command: str, **arguments: Any) -> None:
        """Send a command; ``answer`` gets what comes of it."""
        self._pipe.send((command, arguments))

    def answer(self, timeout_s: float = ANSWER_S) -> Answer:
        """Return the answer to the command that was sent."""
        if not self._pipe.poll(timeout_s):
            raise AssertionError(f"{self.name} did not answer within {timeout_s} s")
        try:
            return Answer(self.name, **self._pipe.recv())
        except EOFError:
            raise AssertionError(f"{self.name} died without an answer") from None

    def ask(self, command: str, timeout_s: float = ANSWER_S, **arguments: Any) -> Any:
        """Send a command and return its value; an error fails the test with its text."""
        self.tell(command, **arguments)
        return value_of(self.answer(timeout_s))

    def fails(self, command: str, timeout_s: float = ANSWER_S, **arguments: Any) -> Answer:
        """Send a command that is to fail, and return its answer."""
        self.tell(command, **arguments)
        found = self.answer(timeout_s)
        assert found.error is not None, f"{self.name} {command} answered {found.value!r}, it was to fail"
        return found

    def kill(self) -> None:
        """End the process as if its host had taken it away."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.join(5)

    def freeze(self) -> None:
        """Stop the process where it is, for good."""
        os.kill(self.pid, signal.SIGSTOP)

    def end(self) -> None:
        """End it at the end of a test."""
        self._pipe.close()
        self._process.join(0.05)
        if self._process.is_alive():
            self._process.kill()
        self._process.join(5)
        self._process.close()


def value_of(answer: Answer) -> Any:
    """Return an answer's value; an error fails the test with its text."""
    assert answer.error is None, f"{answer.who}: {answer.text}"
    return answer.value


class Cluster:
    """Everything that one test starts."""

    def __init__(
        self,
        folder: Path,
        nodes: Iterable[str] = ("a", "b"),
        limits: Mapping[str, int] | None = None,
        **deadlines: float,
    ) -> None:
        self.nodes = LocalNodes(folder, tuple(nodes), {**DEADLINES, **deadlines}, limits)
        self.children = Children(folder / "logs")
        self.ranks: list[Rank] = []

    def __enter__(self) -> Self:
        try:
            for node in self.nodes.names:
                self.nodes.start(self.children, node)
            self.nodes.wait_until_up(self.children)
        except BaseException:
            self.children.stop_all()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in self.ranks:
            rank.end()
        self.children.stop_all()
        if error is not None:
            for node in self.nodes.names:
                error.add_note(f"daemon {node}:\n{self.children[self.nodes.child_name(node)].log_tail(30)}")

    # ------------------------------------------------------------ ranks

    def trainer(self, rank: int, world: int, node: str = "a", **more: Any) -> Rank:
        """Start a trainer rank."""
        spec = TrainerSpec(self.nodes.socket(node), rank, world, deadlines=HOOK_DEADLINES)
        return self._start(f"trainer {rank}", replace(spec, **more))

    def engine(self, engine: str, k: int, size: int, node: str = "a", **more: Any) -> Rank:
        """Start an engine rank."""
        spec = EngineSpec(self.nodes.socket(node), engine, k, size, deadlines=HOOK_DEADLINES)
        return self._start(f"{engine}[{k}]", replace(spec, **more))

    def again(self, rank: Rank, **changes: Any) -> Rank:
        """Start a rank anew, with what is said otherwise."""
        return self._start(rank.name, replace(rank.spec, **changes))

    def _start(self, name: str, spec: TrainerSpec | EngineSpec) -> Rank:
        return self.start(name, spec, live)

    def start(self, name: str, spec: Any, target: Callable[..., None]) -> Rank:
        """Start a rank of another kind: ``target`` is called with its pipe and ``spec``."""
        rank = Rank(name, spec, target)
        self.ranks.append(rank)
        return rank

    # ------------------------------------------------------------ daemons

    def kill_daemon(self, node: str, number: signal.Signals = signal.SIGKILL) -> None:
        """End a node's daemon without a word."""
        child = self.children[self.nodes.child_name(node)]
        child.send_signal(number)
        if number is signal.SIGKILL:
            child.wait(5)

    def let_files_grow_to(self, node: str, nbytes: int) -> None:
        """Let no file of a node's daemon grow beyond this: as a full disk, for what is not mapped yet."""
        resource.prlimit(self.children[self.nodes.child_name(node)].pid, resource.RLIMIT_FSIZE, (nbytes, nbytes))

    def start_daemon(self, node: str) -> None:
        """Start a node's daemon anew, on the state that it left."""
        self.nodes.start(self.children, node)
        self.nodes.wait_until_up(self.children)

    def status(self, node: str = "a", run: str = "run") -> dict[str, Any]:
        """Return what a node's daemon says of a run."""
        found: dict[str, Any] = self.nodes.status(node)["runs"][run]
        return found


def all_answer(ranks: Iterable[Rank], command: str, timeout_s: float = ANSWER_S, **arguments: Any) -> list[Answer]:
    """Send a command to several ranks at once, and return their answers in the same order."""
    asked = list(ranks)
    for rank in asked:
        rank.tell(command, **arguments)
    end = time.monotonic() + timeout_s
    return [rank.answer(max(end - time.monotonic(), 0.0)) for rank in asked]


def all_do(ranks: Iterable[Rank], command: str, timeout_s: float = ANSWER_S, **arguments: Any) -> list[Any]:
    """Do the same, and fail the test with the first error."""
    return [value_of(answer) for answer in all_answer(ranks, command, timeout_s, **arguments)]


def eventually(look: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Return once ``look`` returns true; fail the test if it never does."""
    end = time.monotonic() + timeout_s
    while not look():
        assert time.monotonic() < end, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


def attach_all(ranks: Iterable[Rank], timeout_s: float = ANSWER_S) -> list[Answer]:
    """Attach several ranks at once, after all of them have started, and return their answers."""
    listed = list(ranks)
    all_do(listed, "prepare", START_S)
    return all_answer(listed, "attach", timeout_s)


def attached(*ranks: Iterable[Rank]) -> None:
    """Attach several ranks at once; a refusal fails the test with its text."""
    for answer in attach_all([rank for some in ranks for rank in some]):
        value_of(answer)
