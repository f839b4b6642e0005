"""Steps of a live rank: none begins while its parameters are published, unless a copy stands in for them.

A step waits for the decision over the version, which is when its memory is released.  Past ``step_wait_s`` it
copies the version to the other slot, waits until the readers that had begun have ended, and goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from weightd.core.errors import ConfigError, binary_size
from weightd.core.units import NO_KEY, VersionKey
from weightd.trainer_hooks.attachment import TrainerAttachment
from weightd.trainer_hooks.faults import LiveMemoryRead, SlotNotFree
from weightd.trainer_hooks.live.slots import COPY, LIVE, LiveSlots

log = logging.getLogger("weightd.live")

Optimizers = object | Iterable[object] | None
"""Optimizers of torch, or wrappers of one (``.optimizer``); None stands for every one of the process."""


class Stepping:
    """Makes the steps of one attached live rank wait."""

    def __init__(self, attachment: TrainerAttachment, slots: LiveSlots, optimizers: Optimizers) -> None:
        """Hook into optimizers.

        Raises:
            ConfigError: One takes no hook.
        """
        self._attachment = attachment
        self._slots = slots
        self._handles: list[RemovableHandle] = []
        if optimizers is None:
            self._handles.append(register_optimizer_step_pre_hook(self._hook))
            return
        for optimizer in optimizers if isinstance(optimizers, list | tuple) else [optimizers]:
            self._handles.append(_torch_optimizer(optimizer).register_step_pre_hook(self._hook))

    def close(self) -> None:
        """Let go of the optimizers."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def before_step(self) -> None:
        """Return once the parameters may be written.

        Raises:
            LiveMemoryWritten: They were, while they were published.
            LiveMemoryRead: They are in a copy, and somebody still reads them.
            SlotNotFree: There is no room for a copy: the version before is not decided either.
            MemoryExhausted: There is no memory for a copy.
            PeerGone: The daemon is gone for longer than ``restart_s``.
        """
        if self._attachment.forked:
            return  # a child steps in memory of its own
        key = self._slots.keys[LIVE]
        if key != NO_KEY:
            self._wait_or_move(key)
        with self._attachment.changed:
            self._slots.raise_written()
            self._slots.begin_writing()

    def _hook(self, *_: object) -> None:
        self.before_step()

    def _wait_or_move(self, key: VersionKey) -> None:
        begun, limit_s = time.monotonic(), self._attachment.deadlines.step_wait_s
        if self._released(begun + limit_s, f"waiting with a step for version {key.version}"):
            return
        goal = self._attachment.ledger.goal
        why = f": the run waits for {goal.waiting_for}" if goal.waiting_for else ""
        waited = time.monotonic() - begun
        self._wait_for_room(key)
        nbytes = self._copy(key)
        if nbytes:
            text = "step: version %d was not released after %.1f s (step_wait_s %.1f)%s; %s copied, the step goes on"
            log.warning(text, key.version, waited, limit_s, why, binary_size(nbytes))
        self._wait_for_readers(key)

    def _released(self, deadline_at: float, doing: str) -> bool:
        found = self._attachment.wait_for(lambda: self._slots.keys[LIVE] == NO_KEY or None, deadline_at, doing)
        return found is not None

    def _wait_for_room(self, key: VersionKey) -> None:
        """Wait until the other slot is free, or holds this version already."""
        slots, attachment = self._slots, self._attachment
        begun, limit_s = time.monotonic(), attachment.deadlines.release_s

        def look() -> bool | None:
            return slots.keys[LIVE] == NO_KEY or slots.keys[COPY] in (NO_KEY, key) or None

        if attachment.wait_for(look, begun + limit_s, f"waiting for room for a copy of version {key.version}") is None:
            waited, why = time.monotonic() - begun, attachment.ledger.goal.waiting_for
            raise SlotNotFree(int(attachment.ledger.rank), int(key.version), slots.taken(), waited, limit_s, why)

    def _copy(self, key: VersionKey) -> int:
        """Copy what is published, and say so; return the bytes."""
        if self._slots.keys[COPY] == key or self._slots.keys[LIVE] != key:
            return 0
        nbytes = self._slots.copy()
        with self._attachment.changed:
            moved = self._slots.copied(key)
        if moved:
            self._attachment.tell()
        return nbytes

    def _wait_for_readers(self, key: VersionKey) -> None:
        begun, limit_s = time.monotonic(), self._attachment.deadlines.restart_s
        if not self._released(begun + limit_s, f"waiting for the readers of version {key.version}"):
            waited, why = time.monotonic() - begun, self._attachment.ledger.goal.waiting_for
            raise LiveMemoryRead(int(self._attachment.ledger.rank), int(key.version), waited, limit_s, why)


def _torch_optimizer(optimizer: object) -> torch.optim.Optimizer:
    """Return the optimizer of torch that steps: itself, or what a wrapper wraps."""
    seen = optimizer
    while not isinstance(seen, torch.optim.Optimizer):
        inner = getattr(seen, "optimizer", None)
        if inner is None or inner is seen:
            kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            why = "no optimizer of torch; leave it out, and call before_step() before whatever writes the parameters"
            raise ConfigError("optimizer", kind, why)
        seen = inner
    return seen
