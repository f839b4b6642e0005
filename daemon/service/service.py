"""Tells the service manager how the daemon is: ready, alive, doing what, stopping.

Without a manager (no ``NOTIFY_SOCKET``) nothing happens.  A manager that cannot be
reached is no reason to stop serving: it is said in the log, once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import anyio
from anyio.abc import TaskStatus

from weightd.daemon import workers
from weightd.daemon.service.notify import Notifier
from weightd.daemon.service.status_line import House, status_line

log = logging.getLogger("weightd.service")

STATUS_EVERY_S = 2.0
"""Between two looks whether the status line has changed."""

TELL_S = 5.0
"""For the manager to take a message; a manager that hangs must not keep the daemon from its own stop."""

FULL_S = 0.05
"""Before a message is tried again that found the manager's socket full."""

STOP_MARGIN_S = 15.0
"""For an orderly stop beyond ``drain_s``: what is given up is told, threads end, sockets close."""


class Service:
    """The daemon as its service manager sees it; ``serve`` runs it.

    Attributes:
        notifier: The way to the manager, or None: there is no manager.
    """

    def __init__(self, daemon: House, environ: Mapping[str, str]) -> None:
        """Find the manager.

        Args:
            daemon: Whose state is told.
            environ: The process's environment.
        """
        self.notifier = Notifier.of(environ)
        self._daemon = daemon
        self._unreachable = False
        self._stopping = False

    async def serve(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Say that the daemon is ready; then feed the watchdog and keep the status line, until cancelled."""
        if self.notifier is None:
            task_status.started()
            return
        line = status_line(self._daemon)
        await self._tell(self.notifier, "READY=1", f"STATUS={line}")
        task_status.started()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep_status, self.notifier, line)
            if self.notifier.watchdog_s is not None:
                tasks.start_soon(self._feed, self.notifier, self.notifier.watchdog_s / 2)

    async def stopping(self) -> None:
        """Say that an orderly stop begins, and how long it may take."""
        self._stopping = True
        if self.notifier is None:
            return
        drain_s = self._daemon.config.deadlines.drain_s
        # Counts from now: a drain_s longer than the unit's TimeoutStopSec is not cut short by a SIGKILL.
        extend = f"EXTEND_TIMEOUT_USEC={round((drain_s + STOP_MARGIN_S) * 1_000_000)}"
        status = f"STATUS=stopping: up to {drain_s:g} s for versions that engines stand in"
        await self._tell(self.notifier, "STOPPING=1", status, extend)

    async def _feed(self, notifier: Notifier, every_s: float) -> None:
        """Feed the watchdog, from this loop, while every worker thread that has a job goes on with it."""
        while True:
            stuck = workers.stuck(self._daemon.config.deadlines.worker_s)
            if stuck:
                facts = {"stuck": [str(s) for s in stuck], "effect": "the service manager will start the daemon anew"}
                log.error("does not feed the watchdog", extra={"facts": facts})
            else:
                await self._tell(notifier, "WATCHDOG=1")
            await anyio.sleep(every_s)

    async def _keep_status(self, notifier: Notifier, told: str) -> None:
        while not self._stopping:
            line = status_line(self._daemon)
            if line != told:
                await self._tell(notifier, f"STATUS={line}")
                told = line
            await anyio.sleep(STATUS_EVERY_S)

    async def _tell(self, notifier: Notifier, *lines: str) -> None:
        """Send a message; wait a little while the manager has no room, since READY and STOPPING are told once."""
        single = [" ".join(line.splitlines()) for line in lines]
        why = f"its socket was full for {TELL_S:g} s"
        try:
            with anyio.move_on_after(TELL_S):
                while not notifier.send(*single):  # noqa: ASYNC110 - room in a datagram socket of another process
                    await anyio.sleep(FULL_S)
                why = ""
        except OSError as error:
            why = str(error)
        if why and not self._unreachable:
            facts = {"socket": notifier.address, "why": why, "not_told": single[0]}
            log.warning("the service manager does not hear", extra={"facts": facts})
        self._unreachable = bool(why)
