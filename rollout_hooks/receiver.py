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
from pathlib import Path
from types import TracebackType
from typing import Self

from weightd.core.layout.columns import Layout
from weightd.core.layout.files import LayoutFile, encode_file
from weightd.core.session.deadlines import Deadlines
from weightd.core.units import EngineId, EngineRank, NodeId, RolloutRank, SlotName, Version
from weightd.core.wire.messages import ReceiverReport, ReceiverState
from weightd.link.known_errors import error_from_daemon
from weightd.rollout_hooks.attachment import EngineAttachment
from weightd.rollout_hooks.faults import NotAttached, NotServable
from weightd.rollout_hooks.receiving import Callback, Worker, receive, register, unregister
from weightd.rollout_hooks.targets import Layouts, Target, Targets, targets_of

_DAEMON_S = 30.0
"""For a daemon to answer at all, unless ``attach_s`` is less: as long as one is given to restart."""

_REPORT_S = 15.0
"""The hook waits this much longer than the leader, whose report says more than a deadline here could."""


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
            layout: What the parameters are made of: a ``Declaration`` or a ``Layout``, for instance that of
                ``rollout_hooks.trace``; by default the module's own parameters and persistent buffers,
                each whole (tensor parallelism 1).
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
        self._worker: Worker | None = None

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
        if self._attachment is not None and self._attachment.forked:
            self.close()
        if self._attachment is not None:
            return self
        begun = time.monotonic()
        attachment = EngineAttachment(
            self.run, self.rank, self.size, self._targets(), self._slot, self._socket, self._deadlines
        )
        attachment.claim()
        try:
            attachment.open(begun + min(_DAEMON_S, self._attach_s))
            attachment.wait_joined(self._attach_s, begun, _REPORT_S)
        except BaseException as error:
            attachment.end(f"attach failed: {type(error).__name__}")
            raise
        self._attachment = attachment
        self._worker = Worker(attachment, self._before, self._after)
        register(self._worker)
        return self

    def close(self) -> None:
        """Leave the run in order; harmless when done twice.  The parameters stay as they are."""
        attachment, worker, self._attachment, self._worker = self._attachment, self._worker, None, None
        if worker is not None:
            unregister(worker)
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
        """Wait for a version and apply it; collective per engine, and the safe point of this thread's receivers.

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
        self._attached("receive()")
        assert self._worker is not None
        return receive(self._worker, None if version is None else Version(version), timeout_s)

    def _attached(self, call: str) -> EngineAttachment:
        if self._attachment is None:
            raise NotAttached(call, "not attached, or closed")
        if self._attachment.forked:
            raise NotAttached(call, self._attachment.forked)
        return self._attachment
