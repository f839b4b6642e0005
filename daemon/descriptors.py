"""What the descriptor socket asks of the daemon: whose connection, whose pool, which pools for a plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

from weightd.core.plan.node_plan import LandingSource, TrainerSource
from weightd.core.units import RolloutRank, RunName
from weightd.daemon.admission import HookRefused
from weightd.daemon.workers import allowance_for, in_worker
from weightd.link.faults import MemoryRefused
from weightd.link.fd_messages import LANDING, PoolKey
from weightd.link.memory import Pool

if TYPE_CHECKING:
    from weightd.daemon.attached import AttachedHooks, Hook
    from weightd.daemon.config import Config
    from weightd.daemon.supervisor import RunSupervisor


class House(Protocol):
    """What is asked of the daemon."""

    config: Config
    hooks: AttachedHooks
    runs: dict[RunName, RunSupervisor]

    def ready_if_complete(self, hook: Hook) -> None:
        """Tell the run that a hook is ready, once nothing of it is lacking."""

    def closed(self, hook: Hook) -> None:
        """A hook's descriptor socket has closed: its process has ended, or its goodbye is on the way."""


class Descriptors:
    """Answers for a daemon (``fd_server.FdApp``)."""

    def __init__(self, daemon: House) -> None:
        self._daemon = daemon

    def on_bind(self, run: RunName, session: int, pid: int, uid: int) -> None:
        """Accept the connection of a hook that was welcomed."""
        hook = self._daemon.hooks.get(session)
        if hook is None or hook.run != run:
            raise HookRefused(f"pid {pid} (uid {uid})", run, f"there is no session {session}", "greet the daemon first")
        if hook.pid != pid:
            why = f"session {session} belongs to {hook.name}, pid {hook.pid}"
            raise HookRefused(f"pid {pid} (uid {uid})", run, why, "only the process that greeted may connect")
        if hook.bound:
            why = f"session {session} of {hook.name} is connected already"
            raise HookRefused(hook.name, run, why, "one descriptor connection a hook")
        hook.bound = True
        self._daemon.ready_if_complete(hook)

    async def on_offer(self, session: int, key: PoolKey, fd: int, nbytes: int) -> None:
        """Check and map a pool that a trainer rank announced in its hello."""
        hook = self._daemon.hooks.get(session)
        due = hook.due.get(key) if hook is not None else None
        if hook is None or due is None or key in hook.pools:
            os.close(fd)
            why = "it was offered twice" if hook is not None and due is not None else "the hello did not announce it"
            raise MemoryRefused(str(key), nbytes, nbytes, why)
        if nbytes != due:
            os.close(fd)
            raise MemoryRefused(str(key), due, nbytes, "its size is not that of the hello")
        pool = await in_worker(
            f"mapping {key}", partial(Pool.adopt, fd, nbytes, name=str(key)), allowance_s=allowance_for(nbytes)
        )
        if self._daemon.hooks.get(session) is not hook:
            pool.close()  # the hook ended meanwhile
            return
        hook.pools[key] = pool
        self._daemon.ready_if_complete(hook)

    async def on_take(self, session: int, plan_digest: str) -> Mapping[PoolKey, Pool]:
        """Return every pool that the rank plan of that digest copies from."""
        hook = self._daemon.hooks.get(session)
        if hook is None or not isinstance(hook.who, RolloutRank):
            raise HookRefused(f"session {session}", "", "it is no attached rollout rank", "greet the daemon first")
        run = self._daemon.runs[hook.run]
        plans = run.planning.rank_plans(hook.who, plan_digest)
        if plans is None:
            why = f"it has no plan {plan_digest} (any more)"
            raise HookRefused(hook.name, hook.run, why, "the next goal names the plan of the epoch in force")
        plan = plans.plans[self._daemon.config.node].ranks[hook.who]
        ranks = {s.rank for s in plan.sources if isinstance(s, TrainerSource)}
        boots = {rank: boot for rank, boot in plans.boots.items() if rank in ranks}
        pools = dict(self._daemon.hooks.offered(hook.run, boots))
        if any(isinstance(s, LandingSource) for s in plan.sources):
            pools |= {PoolKey(LANDING, half, 0): pool for half, pool in enumerate(plans.halves)}
        return pools

    def on_closed(self, session: int) -> None:
        """The hook's process has ended, or it closed its end."""
        hook = self._daemon.hooks.get(session)
        if hook is not None:
            self._daemon.closed(hook)
