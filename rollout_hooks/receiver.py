"""What an engine rank adds to its loop: one ``Receiver``, and ``receive()`` between two steps.

::

    with Receiver(model, run="grpo-7", engine="E0", k=rank, size=4) as receiver:
        while True:
            version = receiver.receive()
            generate(model)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, assert_never

from weightd.core.errors import WeightdError
from weightd.core.layout.columns import Layout
from weightd.core.layout.files import LayoutFile, encode_file
from weightd.core.session.deadlines import Deadlines
from weightd.core.session.faults import ApplyFailed
from weightd.core.units import NO_VERSION, EngineId, EngineRank, NodeId, RolloutRank, SlotName, Version
from weightd.core.wire.messages import ReceiverReport, ReceiverState
from weightd.link.known_errors import error_from_daemon
from weightd.rollout_hooks.attachment import EngineAttachment
from weightd.rollout_hooks.faults import ApplyEnded, NotAttached, NotServable, ReceiveTimeout
from weightd.rollout_hooks.state import Deliver, Raise, RunCopy, RunPause, RunResume, Step
from weightd.rollout_hooks.targets import Layouts, Target, Targets, targets_of

Callback = Callable[[Version], None]
"""Called with a version; runs no collective and calls no method of the receiver but ``state`` and ``version``."""

_DAEMON_S = 30.0
"""For a daemon to answer at all, unless ``attach_s`` is less: as long as one is given to restart."""

_REPORT_S = 15.0
"""The hook waits this much longer than the leader, whose report says more than a deadline here could."""

_TURN_S = 1.0
"""A wait is cut at this length, because what it may last depends on a state that changes meanwhile."""


class Receiver:
    """Receives versions into one rank of one engine.

    All ranks of the engine call ``receive()`` between the same two steps.  Use from one thread.

    Attributes:
        run: Name of the training job.
        rank: This rollout rank.
        size: Number of ranks of the engine.
    """

    def __init__(
        self,
        target: Target,
        *,
        run: str,
        engine: str,
        k: int,
        size: int,
        slot: str | None = None,
        socket: str | os.PathLike[str] | None = None,
        layout: Layouts = None,
        before_apply: Callback | None = None,
        after_apply: Callback | None = None,
        attach_s: float | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        """Prepare a receiver; nothing is connected before ``attach``.

        Args:
            target: The engine's module, or its tensors by name; written in place.
            run: Name of the training job, as the trainer has it.
            engine: Name of the engine in the roster.
            k: This rank in the engine, from 0.
            size: Number of the engine's ranks.
            slot: Name of this rank's device; by default one of this process.
            socket: The daemon's control socket or its directory; by default ``WEIGHTD_SOCKET``, else
                ``/run/weightd``.
            layout: What the parameters are made of: a ``Declaration`` or a ``Layout``; by default the
                module's own parameters and persistent buffers, each whole (tensor parallelism 1).
            before_apply: Called before parameters are written, with the version to come; if it raises, the
                pause is refused, nothing is written, and ``receive()`` raises the same.
            after_apply: Called before ``receive()`` goes on with whole, committed bytes, with their version.
            attach_s: Limit of ``attach`` in seconds; by default ``deadlines.attach_s``.
            deadlines: This hook's own limits.
        """
        self.run = run
        self.rank = RolloutRank(EngineId(engine), EngineRank(k))
        self.size = size
        self._target = target
        self._layouts = layout
        self._before = before_apply
        self._after = after_apply
        self._slot = slot or f"pid-{os.getpid()}"
        self._socket = socket
        self._deadlines = deadlines or Deadlines()
        self._attach_s = self._deadlines.attach_s if attach_s is None else attach_s
        self._attachment: EngineAttachment | None = None
        self._returned = NO_VERSION

    # ------------------------------------------------------------ layout

    def describe(self) -> Layout:
        """Return what this rank needs.

        Raises:
            UnsupportedTarget: A parameter cannot be written into.
            Refused: Parameters and layout differ.
        """
        return self._targets().layout

    def export_layout(self, path: str | os.PathLike[str]) -> Path:
        """Write the layout for ``weightd plan`` and return its path.

        Args:
            path: The file, or a directory that is to hold ``<engine>-<k>.layout``.
        """
        node = self._attachment.node if self._attachment is not None else ""
        file = LayoutFile(self.rank, self.size, self.describe(), NodeId(node), SlotName(self._slot))
        target = Path(path) / file.name if Path(path).is_dir() else Path(path)
        target.write_bytes(encode_file(file))
        return target

    def _targets(self) -> Targets:
        return targets_of(self._target, self._layouts, str(self.rank))

    # ------------------------------------------------------------ life

    def attach(self) -> Self:
        """Greet the daemon and wait until the run's ranks are all there, proved, and planned for this rank.

        Raises:
            DaemonAbsent: No daemon answers on this node.
            Refused: The run, or this rank, is refused; the report holds every violation.
            DeadlinePassed: ``attach_s`` is over.
            UnsupportedTarget: A parameter cannot be written into.
            BuffersOverlap: Another receiver of this process writes into the same memory.
        """
        if self._attachment is not None:
            return self
        begun = time.monotonic()
        attachment = EngineAttachment(
            self.run, self.rank, self.size, self._targets(), self._slot, self._socket, self._deadlines
        )
        attachment.claim()
        try:
            attachment.open(begun + min(_DAEMON_S, self._attach_s))
            attachment.wait_joined(self._attach_s + _REPORT_S, begun)
        except BaseException as error:
            attachment.end(f"attach failed: {type(error).__name__}")
            raise
        self._attachment = attachment
        return self

    def close(self) -> None:
        """Leave the run in order; harmless when done twice.  The parameters stay as they are."""
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.end("closed by the engine")

    def __enter__(self) -> Self:
        return self.attach()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ versions

    @property
    def report(self) -> ReceiverReport:
        """The whole state, as the daemon is told."""
        return self._attached("report").report()

    @property
    def state(self) -> ReceiverState:
        """State of this rank."""
        return self.report.state

    @property
    def version(self) -> Version:
        """Committed version whose bytes are whole in the parameters; 0 if there is none."""
        return self.report.base.version

    def assert_servable(self) -> None:
        """Return if the engine may serve with these bytes, as far as this rank knows.

        Raises:
            NotServable: It may not: nothing committed yet, paused, being written, torn, or fenced.
        """
        attachment = self._attached("assert_servable()")
        with attachment.changed:
            machine = attachment.machine
            if machine.servable:
                return
            why = str(error_from_daemon(machine.error)) if machine.error is not None else ""
            raise NotServable(str(self.rank), machine.state, machine.key.version, why)

    def receive(self, version: int | None = None, timeout_s: float | None = None) -> Version:
        """Wait for a version and apply it; collective per engine, and this rank's safe point.

        At once if a committed version above the one returned last is served already.  A version that has begun
        to be applied runs to its outcome, whatever the limit says.

        Args:
            version: The smallest number that will do; by default whatever is above the one returned last.
            timeout_s: Limit of the waiting, in seconds; None for none.

        Returns:
            The version that is served now: committed, and whole on all ranks of the engine.

        Raises:
            ReceiveTimeout: Nothing came in time; the parameters are untouched.
            EnginePoisoned: The engine was left out of a version and is fenced.
            WeightdError: An apply that had begun failed; says why.  ``assert_servable`` tells what is left.
            PeerGone: The daemon is gone for longer than ``restart_s``.
        """
        attachment = self._attached("receive()")
        wanted = None if version is None else Version(version)
        with attachment.changed:
            attachment.machine.entered()
            attachment.tell_if_changed()
        try:
            return self._receive(attachment, wanted, timeout_s, time.monotonic())
        finally:
            with attachment.changed:
                attachment.machine.departed()
                attachment.tell_if_changed()

    def _receive(
        self, attachment: EngineAttachment, wanted: Version | None, timeout_s: float | None, begun: float
    ) -> Version:
        machine = attachment.machine
        paused_at: float | None = None
        asked_leave = False

        def look() -> Step | None:
            step = machine.next_step(self._returned, wanted)
            attachment.tell_if_changed()
            if step is None:
                attachment.raise_undecided()
            return step

        while True:
            step: Step | None = attachment.wait_for(look, self._wake_at(timeout_s, begun), f"receiving on {self.rank}")
            if step is not None:
                found = self._carry_out(attachment, step)
                if found is not None:
                    return found
                continue
            now = time.monotonic()
            with attachment.changed:
                paused_at = None if not machine.waiting_in_barrier else paused_at or now
                if timeout_s is None or now < begun + timeout_s or machine.leaving:
                    continue
                if paused_at is not None and now >= paused_at + self._deadlines.barrier_s:
                    machine.ask_leave()
                    asked_leave = True
                    attachment.tell_if_changed()
                elif not machine.under_way:
                    raise self._timeout(attachment, wanted, timeout_s, now - begun, asked_leave)

    @staticmethod
    def _wake_at(timeout_s: float | None, begun: float) -> float:
        turn = time.monotonic() + _TURN_S
        end = turn if timeout_s is None else begun + timeout_s
        return min(turn, end) if end > time.monotonic() else time.monotonic() + _TURN_S / 20

    def _carry_out(self, attachment: EngineAttachment, step: Step) -> Version | None:
        """Carry out one step; return the version if ``receive()`` is to return it."""
        match step:
            case RunPause(key=key):
                self._pause(attachment, key.version)
            case RunCopy():
                self._copy(attachment, step)
            case RunResume(key=key):
                self._resume(attachment, key.version)
            case Deliver(version=version):
                self._returned = version
                return version
            case Raise(key=key, state=state, base=base, error=error):
                raise (
                    error_from_daemon(error)
                    if error is not None
                    else ApplyEnded(str(self.rank), str(key), state, base.version)
                )
            case _:
                assert_never(step)
        return None

    def _pause(self, attachment: EngineAttachment, version: Version) -> None:
        try:
            if self._before is not None:
                self._before(version)
        except BaseException as error:
            why = f"its pause callback raised {type(error).__name__}: {error}"
            refused = ApplyFailed(str(self.rank), version, why, 0, attachment.machine.planned_nbytes)
            self._end_step(attachment, partial(attachment.machine.pause_failed, refused.to_wire()))
            raise
        self._end_step(attachment, attachment.machine.pause_done)

    def _copy(self, attachment: EngineAttachment, step: RunCopy) -> None:
        machine, plan = attachment.machine, attachment.plan
        assert plan is not None

        def look_up(done: int) -> bool:
            machine.applied_nbytes = done  # the control thread's next repeat reports it
            return machine.stopping

        try:
            nbytes = plan.apply(step.key, step.sources, look_up)
        except WeightdError as error:
            self._end_step(attachment, partial(machine.copy_failed, error.to_wire()))
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"
            failed = ApplyFailed(str(self.rank), step.key.version, why, machine.applied_nbytes, plan.nbytes)
            self._end_step(attachment, partial(machine.copy_failed, failed.to_wire()))
            raise
        else:
            ended = partial(machine.copy_done, nbytes) if nbytes == plan.nbytes else machine.copy_stopped
            self._end_step(attachment, ended)

    def _resume(self, attachment: EngineAttachment, version: Version) -> None:
        try:
            if self._after is not None:
                self._after(version)
        finally:
            self._end_step(attachment, attachment.machine.resume_done)

    @staticmethod
    def _end_step(attachment: EngineAttachment, ended: Callable[[], None]) -> None:
        with attachment.changed:
            ended()
            attachment.tell_if_changed()

    def _timeout(
        self, attachment: EngineAttachment, wanted: Version | None, timeout_s: float, waited_s: float, left: bool
    ) -> ReceiveTimeout:
        goal, base = attachment.goal, attachment.machine.base
        smallest = self._returned + 1 if wanted is None else wanted
        return ReceiveTimeout(
            str(self.rank), smallest, base.version, goal.stage, goal.waiting_for, waited_s, timeout_s, left
        )

    def _attached(self, call: str) -> EngineAttachment:
        if self._attachment is None:
            raise NotAttached(call, "not attached, or closed")
        return self._attachment
