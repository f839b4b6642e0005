"""A rollout rank's attachment to its daemon: what it says of itself, and what it does about goals outside of receive().

The plan of an epoch is fetched by the control thread and built by the errands thread, so that an
engine that generates meanwhile is not asked for a safe point.
"""

from __future__ import annotations

import os
import threading
import time
from functools import partial

from weightd.core.errors import UnknownRemoteError, WeightdError
from weightd.core.layout.message import encode_layout
from weightd.core.plan.message import check_rank_plan, decode_rank_plan
from weightd.core.plan.plan_faults import PlanMismatch
from weightd.core.session.deadlines import Deadlines
from weightd.core.session.faults import DeadlinePassed
from weightd.core.units import NO_TERM, EngineRank, Epoch, RolloutRank, Term, Version, VersionKey
from weightd.core.wire.blobs import blob_digest
from weightd.core.wire.messages import EngineHello, PublisherGoal, ReceiverGoal, ReceiverReport, Welcome
from weightd.link.errands import Errand
from weightd.link.fds import FdChannel
from weightd.link.known_errors import error_from_daemon
from weightd.link.session import HookSession, process_start_time
from weightd.rollout_hooks.apply import PlanInUse, close_pools, readable
from weightd.rollout_hooks.state import ReceiverMachine
from weightd.rollout_hooks.targets import Targets, claim, unclaim

CHANGED = threading.Condition(threading.RLock())
"""The lock of all receivers of this process: one thread may wait for several of them."""

# A child that was forked while somebody held the lock would wait for ever for a thread that it does not have.
os.register_at_fork(after_in_child=lambda: CHANGED.__init__(threading.RLock()))  # type: ignore[misc]

_TAKE_S = 120.0
"""For the daemon to pass all pools of a plan, each mapped here with every page."""

_RETRY_S = 0.25
"""Between two tries to prepare a plan of a daemon that has just come back."""

_Wanted = tuple[int, Epoch, str]
"""What a plan was prepared for: the daemon's session, the epoch, the plan's digest."""


class EngineAttachment(HookSession):
    """One attachment, from the greeting to the goodbye.

    Attributes:
        machine: The rank's states, under ``changed``.
        plan: The plan that is built.
        goal: Newest goal.
        trouble: Why the plan is not prepared yet, if the daemon refused.
    """

    def __init__(
        self,
        run: str,
        rank: RolloutRank,
        size: int,
        targets: Targets,
        slot: str,
        socket: str | os.PathLike[str] | None,
        deadlines: Deadlines,
    ) -> None:
        super().__init__(run, str(rank), socket, deadlines, CHANGED)
        layout = encode_layout(targets.layout)
        digest = blob_digest(layout)
        self.blobs = {digest: layout}
        self.machine = ReceiverMachine()
        self.plan: PlanInUse | None = None
        self.goal = ReceiverGoal()
        self._targets = targets
        self._prepared: _Wanted | None = None
        self._asked: _Wanted | None = None
        self.trouble = ""
        self._failing_since: float | None = None
        self._plans: dict[str, bytes] = {}
        self._reported = self.machine.report()
        self._hello = EngineHello(
            engine=rank.engine,
            k=EngineRank(rank.k),
            size=size,
            pid=os.getpid(),
            start_time=process_start_time(),
            slot=slot,
            layout_digest=digest,
            layout_nbytes=len(layout),
        )

    # ------------------------------------------------------------ face of the control thread

    def hello(self) -> EngineHello:
        """Return the greeting."""
        return self._hello

    def report(self) -> ReceiverReport:
        """Return the whole state."""
        with self.changed:
            return self.machine.report()

    def term_and_key(self) -> tuple[Term, VersionKey]:
        """Return the newest term known, and the version in hand."""
        return self.goal.term, self.goal.key

    def welcomed(self, welcome: Welcome) -> None:
        """The daemon answered: a new session may have other memory than what is mapped."""
        with self.changed:
            super().welcomed(welcome)
            self._prepare_if_due()
            self.tell_if_changed()

    def first_errands(self) -> list[Errand]:
        """Return the preparation that was forgotten with the older session, if any was asked for."""
        with self.changed:
            self._asked = None
            due = self._preparation()
            return [] if due is None else [due]

    def goal_arrived(self, goal: PublisherGoal | ReceiverGoal) -> None:
        """Take the daemon's goal."""
        if not isinstance(goal, ReceiverGoal):
            return
        with self.changed:
            self.goal = goal
            self._prepare_if_due()
            self.machine.goal_arrived(goal)
            self.tell_if_changed()
            self.changed.notify_all()

    def blob_arrived(self, digest: str, blob: bytes) -> None:
        """The rank plan is here: have it built."""
        with self.changed:
            self._plans = {digest: blob}
            self._prepare_if_due()

    def raise_undecided(self) -> None:
        """Raise what the node says to a rank that stands in a version while nobody leads."""
        if self.goal.term == NO_TERM and self.goal.error is not None:
            raise error_from_daemon(self.goal.error)

    def tell_if_changed(self) -> None:
        """Report at once if the state is not the reported one."""
        report = self.machine.report()
        if report != self._reported:
            self._reported = report
            self.tell()

    # ------------------------------------------------------------ the plan of the epoch

    @property
    def _due(self) -> _Wanted | None:
        if not self.goal.plan_digest or self._welcome is None:
            return None
        return self._welcome.session, self.goal.epoch, self.goal.plan_digest

    def _prepare_if_due(self) -> None:
        errand = self._preparation()
        if errand is not None:
            self.errand(errand)

    def _preparation(self) -> Errand | None:
        """Return how to prepare the plan that the goal names, unless that is done or under way."""
        due = self._due
        if due is None or due == self._prepared:
            return None
        self.machine.plan_digest = ""  # no order is followed over memory that may not be the one it speaks of
        blob = self._plans.get(due[2])
        if blob is None:
            self.want(due[2], self.goal.plan_nbytes)
        if blob is None or due == self._asked:
            return None
        self._asked = due
        return partial(self._try_to_prepare, due, blob)

    def _try_to_prepare(self, due: _Wanted, blob: bytes, channel: FdChannel) -> None:
        """Prepare a plan; try again for a while where the daemon does not have everything together yet.

        After its restart it knows neither this plan nor its trainers' memory until they told it again.
        """
        try:
            self._prepare(due, blob, channel)
        except (UnknownRemoteError, PlanMismatch) as error:
            now = time.monotonic()
            self._failing_since = self._failing_since or now
            if now > self._failing_since + self.deadlines.restart_s:
                raise
            self.trouble = str(error)
            time.sleep(_RETRY_S)
            with self.changed:
                self._asked = None
                self._prepare_if_due()
        else:
            self._failing_since = None

    def _prepare(self, due: _Wanted, blob: bytes, channel: FdChannel) -> None:
        """Take the pools and build the pairs; runs on the errands thread."""
        digest = due[2]
        pools = channel.take(digest, time.monotonic() + _TAKE_S)
        current = self.plan
        if current is not None and current.same_memory(digest, pools):
            close_pools(pools.values())
            self._use(due, current)
            return
        try:
            plan = decode_rank_plan(blob)
            check_rank_plan(plan, self._targets.layout, readable(pools))
            built = PlanInUse(self.sender, digest, plan, pools, self._targets)
        except WeightdError:
            close_pools(pools.values())
            raise
        self._use(due, built)
        if current is not None:
            current.close()

    def _use(self, due: _Wanted, plan: PlanInUse) -> None:
        with self.changed:
            self.plan = plan
            self._prepared = due
            self.machine.plan_built(plan.digest if due == self._due else "", plan.nbytes)
            self.tell_if_changed()
            self.changed.notify_all()

    # ------------------------------------------------------------ beginning and end

    def wait_joined(self, attach_s: float, begun: float, grace_s: float = 0.0) -> None:
        """Wait until the first epoch is ready and its plan is built.

        Raises:
            DeadlinePassed: It is not, after ``attach_s`` and ``grace_s``: the leader's own report of the same limit
                says more, and is waited for that much longer.
            WeightdError: The run is refused, with the whole report.
        """

        def look() -> bool | None:
            return bool(self.goal.epoch and self._prepared is not None and self._prepared == self._due) or None

        if self.wait_for(look, begun + attach_s + grace_s, "waiting for the run's ranks") is None:
            raise DeadlinePassed(
                stage=self.goal.stage or "attaching",
                waited_for=(self.trouble or self.goal.waiting_for or "the leader",),
                version=0,
                bucket=None,
                waited_s=time.monotonic() - begun,
                limit_s=attach_s,
                setting="attach_s",
                serving=self.goal.committed.version,
            )

    def claim(self) -> None:
        """Note in this process whose memory this is.

        Raises:
            BuffersOverlap: Another receiver of this process writes there.
        """
        claim(self, self.sender, self.run, self._targets)

    def check_in_place(self, version: Version) -> None:
        """Return if what is going to be written still are the engine's parameters.

        Raises:
            TargetMoved: They were re-bound.
        """
        self._targets.check_in_place(self.sender, version)

    def end(self, why: str) -> None:
        """Leave in order and let go of the pools."""
        with self.changed:
            self.machine.closing = True
        self.shut(why)
        unclaim(self)
        if self.plan is not None:
            self.plan.close()
