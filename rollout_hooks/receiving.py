"""What happens inside ``receive()``: callbacks, copies, and how the call ends.

Calling it is the safe point of this thread, hence of every receiver that is at home in it: under the policy
``all`` no engine is resumed before every engine is decided, so one thread that holds ranks of two engines
must let both of them pause and write in one call.  A receiver is at home in the thread that called
its ``receive()`` last, or that attached it; one that another thread serves from is never touched.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

from weightd.core.errors import WeightdError
from weightd.core.session.faults import ApplyFailed
from weightd.core.units import NO_VERSION, Version
from weightd.link.known_errors import error_from_daemon
from weightd.rollout_hooks.attachment import CHANGED, EngineAttachment
from weightd.rollout_hooks.faults import ApplyEnded, ReceiveTimeout
from weightd.rollout_hooks.state import Deliver, Raise, ReceiverMachine, RunCopy, RunPause, RunResume, Step

Callback = Callable[[Version], None]
"""Called with a version; runs no collective and calls no ``receive()``."""

_TURN_S = 1.0
"""A wait is cut at this length, because what it may last depends on states that change meanwhile."""

_SHORT_TURN_S = 0.05
"""The same, once only the end of what has begun is waited for."""


@dataclass(eq=False)
class Worker:
    """Carries out the steps of one receiver.

    Attributes:
        attachment: Its attachment.
        before: Called before parameters are written.
        after: Called before ``receive()`` goes on with whole, committed bytes.
        home: Thread that its steps may run in.
        returned: Version that its last ``receive()`` returned.
        raised: What a callback raised in another receiver's call; its own next call raises it.
    """

    attachment: EngineAttachment
    before: Callback | None
    after: Callback | None
    home: int = field(default_factory=threading.get_ident)
    returned: Version = NO_VERSION
    raised: BaseException | None = None
    _visits: int = 0
    _paused_at: float | None = None

    @property
    def machine(self) -> ReceiverMachine:
        """Its states; under ``CHANGED``."""
        return self.attachment.machine

    def enter(self) -> None:
        """A thread is at a safe point for it."""
        self._visits += 1
        self.machine.entered()
        self.attachment.tell_if_changed()

    def depart(self) -> None:
        """That thread goes on."""
        self._visits -= 1
        if not self._visits:
            self.machine.departed()
        self.attachment.tell_if_changed()

    def leave_if_overdue(self, now: float, barrier_s: float) -> bool:
        """Ask to leave the barrier after ``barrier_s`` in it; say whether that was asked now."""
        self._paused_at = (self._paused_at or now) if self.machine.waiting_in_barrier else None
        if self._paused_at is None or now < self._paused_at + barrier_s or self.machine.leaving:
            return False
        self.machine.ask_leave()
        self.attachment.tell_if_changed()
        return True

    # ------------------------------------------------------------ steps, outside of the lock

    def carry_out(self, step: RunPause | RunCopy | RunResume) -> None:
        """Carry out one step; raises what a callback raises."""
        match step:
            case RunPause(key=key):
                self._pause(key.version)
            case RunCopy():
                self._copy(step)
            case RunResume(key=key):
                self._resume(key.version)
            case _:
                assert_never(step)

    def _pause(self, version: Version) -> None:
        try:
            if self.before is not None:
                self.before(version)
        except BaseException as error:
            why = f"its pause callback raised {type(error).__name__}: {error}"
            refused = ApplyFailed(self.attachment.sender, version, why, 0, self.machine.planned_nbytes)
            self._end(partial(self.machine.pause_failed, refused.to_wire()))
            raise
        try:
            self.attachment.check_in_place(version)  # after the callback, which may be what moves them
        except WeightdError as error:
            self._end(partial(self.machine.pause_failed, error.to_wire()))
            raise
        self._end(self.machine.pause_done)

    def _copy(self, step: RunCopy) -> None:
        machine, plan = self.machine, self.attachment.plan
        assert plan is not None, "a write is followed only over a plan that is built"

        def look_up(done: int) -> bool:
            machine.applied_nbytes = done  # the control thread's next repeat reports it
            return machine.stopping

        try:
            self.attachment.check_in_place(step.key.version)  # an apply may be repeated without a new pause
            nbytes = plan.apply(step.key, step.sources, look_up)
        except WeightdError as error:
            self._end(partial(machine.copy_failed, error.to_wire()))
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"
            failed = ApplyFailed(self.attachment.sender, step.key.version, why, machine.applied_nbytes, plan.nbytes)
            self._end(partial(machine.copy_failed, failed.to_wire()))
            raise
        else:
            self._end(partial(machine.copy_done, nbytes) if nbytes == plan.nbytes else machine.copy_stopped)

    def _resume(self, version: Version) -> None:
        try:
            if self.after is not None:
                self.after(version)
        finally:
            self._end(self.machine.resume_done)

    def _end(self, ended: Callable[[], None]) -> None:
        with CHANGED:
            ended()
            self.attachment.tell_if_changed()


_workers: list[Worker] = []
"""Every attached receiver of this process; under ``CHANGED``."""

os.register_at_fork(after_in_child=_workers.clear)


def register(worker: Worker) -> None:
    """Note that a receiver has attached."""
    with CHANGED:
        _workers.append(worker)


def unregister(worker: Worker) -> None:
    """Note that a receiver has closed."""
    with CHANGED:
        if worker in _workers:
            _workers.remove(worker)


def receive(worker: Worker, wanted: Version | None, timeout_s: float | None) -> Version:
    """Serve every receiver of this thread until ``worker``'s call ends, and return its version.

    Raises:
        BaseException: As ``Receiver.receive`` says, and what callbacks raise.
    """
    if worker.raised is not None:
        raised, worker.raised = worker.raised, None
        raise raised
    with CHANGED:
        worker.home = threading.get_ident()
        others = [w for w in _workers if w.home == worker.home and w is not worker]
    with _safe_point([worker, *others]):
        return _Call(worker, others, wanted, timeout_s).run()


@contextmanager
def _safe_point(workers: Sequence[Worker]) -> Iterator[None]:
    with CHANGED:
        for worker in workers:
            worker.enter()
    try:
        yield
    finally:
        with CHANGED:
            for worker in workers:
                worker.depart()


class _Call:
    """One call of ``receive()``."""

    def __init__(
        self, worker: Worker, others: Sequence[Worker], wanted: Version | None, timeout_s: float | None
    ) -> None:
        self._worker = worker
        self._others = others
        self._wanted = wanted
        self._timeout_s = timeout_s
        self._begun = time.monotonic()
        self._outcome: Version | BaseException | None = None
        self._left = False

    def run(self) -> Version:
        """Go on until there is an outcome, and nothing of the others is under way."""
        doing = f"receiving on {self._worker.attachment.sender}"
        while not self._settled():
            found = self._worker.attachment.wait_for(self._look, self._turn_ends_at(), doing)
            if found is not None:
                self._take(*found)
            else:
                self._check_time()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        assert self._outcome is not None, "settled means that there is one"
        self._worker.returned = self._outcome
        return self._outcome

    def _settled(self) -> bool:
        with CHANGED:
            return self._outcome is not None and not any(w.machine.under_way for w in self._others)

    def _look(self) -> tuple[Worker, Step] | None:
        """Return the next step of whoever has one; this call's own receiver first."""
        found: tuple[Worker, Step] | None = None
        if self._outcome is None:
            step = self._worker.machine.next_step(self._worker.returned, self._wanted)
            self._worker.attachment.tell_if_changed()
            if step is not None:
                return self._worker, step
            self._worker.attachment.raise_undecided()
        for other in self._others:
            work = other.machine.next_work(begin=self._outcome is None)
            other.attachment.tell_if_changed()
            if work is not None and found is None:
                found = other, work
                break
        return found

    def _take(self, worker: Worker, step: Step) -> None:
        if isinstance(step, Deliver):
            self._outcome = step.version
        elif isinstance(step, Raise):
            self._outcome = _error_of(worker, step)
        else:
            try:
                worker.carry_out(step)
            except Exception as error:  # noqa: BLE001  (a callback's; raised by the call of the receiver it belongs to)
                if worker is self._worker:
                    self._outcome = error
                else:
                    worker.raised = error

    def _turn_ends_at(self) -> float:
        now = time.monotonic()
        if self._outcome is not None:
            return now + _SHORT_TURN_S
        end = now + _TURN_S if self._timeout_s is None else self._begun + self._timeout_s
        return min(now + _TURN_S, end) if end > now else now + _SHORT_TURN_S

    def _check_time(self) -> None:
        """Ask to leave barriers that nobody comes to, and end a call in which nothing has begun."""
        now = time.monotonic()
        over = self._timeout_s is not None and now >= self._begun + self._timeout_s
        if not over and self._outcome is None:
            return
        with CHANGED:
            barrier_s = self._worker.attachment.deadlines.barrier_s
            for other in self._others:
                other.leave_if_overdue(now, barrier_s)
            if self._outcome is None:
                self._left |= self._worker.leave_if_overdue(now, barrier_s)
                if not self._worker.machine.under_way:
                    self._outcome = self._timeout(now - self._begun)

    def _timeout(self, waited_s: float) -> ReceiveTimeout:
        goal, machine = self._worker.attachment.goal, self._worker.machine
        smallest = self._worker.returned + 1 if self._wanted is None else self._wanted
        return ReceiveTimeout(
            self._worker.attachment.sender,
            smallest,
            machine.base.version,
            goal.stage,
            goal.waiting_for,
            waited_s,
            self._timeout_s or 0.0,
            self._left,
        )


def _error_of(worker: Worker, step: Raise) -> WeightdError:
    if step.error is not None:
        return error_from_daemon(step.error)
    return ApplyEnded(worker.attachment.sender, str(step.key), step.state, step.base.version)
