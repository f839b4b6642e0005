"""A trainer rank's attachment to its daemon: what it says of itself, and what it takes from goals."""

from __future__ import annotations

import os
import time
from functools import partial

from weightd.core.layout.message import encode_layout
from weightd.core.roster.topology import Roster
from weightd.core.session.deadlines import Deadlines
from weightd.core.session.faults import DeadlinePassed
from weightd.core.units import NO_EPOCH, Epoch, Term, TrainerRank, Version, VersionKey
from weightd.core.wire.blobs import blob_digest
from weightd.core.wire.messages import PublisherGoal, PublisherReport, ReceiverGoal, TrainerHello
from weightd.link.errands import Errand
from weightd.link.fds import FdChannel, PoolKey
from weightd.link.known_errors import error_from_daemon
from weightd.link.session import HookSession, process_start_time
from weightd.trainer_hooks.describe import Described
from weightd.trainer_hooks.faults import SlotNotFree, VersionNotDecided
from weightd.trainer_hooks.identity import Identity
from weightd.trainer_hooks.ledger import Ledger
from weightd.trainer_hooks.live.layout import LiveDescribed
from weightd.trainer_hooks.live.slots import LiveSlots
from weightd.trainer_hooks.slots import Slots

_OFFER_S = 60.0
"""For the daemon to check and map one slot, every page of it: 60 GiB at 1 GiB/s."""


class TrainerAttachment(HookSession):
    """One attachment, from the greeting to the goodbye.

    Attributes:
        slots: This rank's shared memory.
        ledger: What it knows of versions.
    """

    def __init__(
        self,
        run: str,
        identity: Identity,
        described: Described,
        roster: Roster | None,
        slot: str,
        socket: str | os.PathLike[str] | None,
        deadlines: Deadlines,
    ) -> None:
        """Make the shared memory; nothing is connected yet.

        Raises:
            MemoryExhausted: There is no memory for the slots.
        """
        super().__init__(run, f"trainer {identity.rank}", socket, deadlines)
        layout = encode_layout(described.layout)
        digest = blob_digest(layout)
        self.blobs = {digest: layout}
        self.slots: Slots = _slots(identity.rank, described, digest)
        self.ledger = Ledger(identity.rank)
        self._closing = False
        self._hello = TrainerHello(
            rank=identity.rank,
            world=identity.world,
            pid=os.getpid(),
            start_time=process_start_time(),
            slot=slot,
            layout_digest=digest,
            layout_nbytes=len(layout),
            regions=self.slots.regions(),
            roster=roster,
            live=self.slots.live,
        )

    # ------------------------------------------------------------ face of the control thread

    def hello(self) -> TrainerHello:
        """Return the greeting."""
        return self._hello

    def report(self) -> PublisherReport:
        """Return the whole state."""
        with self.changed:
            return PublisherReport(self.slots.states(), closing=self._closing)

    def term_and_key(self) -> tuple[Term, VersionKey]:
        """Return the newest term known, and the version in hand."""
        goal = self.ledger.goal
        return goal.term, goal.key

    def goal_arrived(self, goal: PublisherGoal | ReceiverGoal) -> None:
        """Take the daemon's goal."""
        if not isinstance(goal, PublisherGoal):
            return
        with self.changed:
            self.ledger.goal_arrived(goal, self.slots.keys)
            self.slots.release(goal.release)
            self.changed.notify_all()

    def first_errands(self) -> list[Errand]:
        """Offer every slot to the daemon of a new session."""
        rank = self._hello.rank
        return [partial(_offer, PoolKey(rank, slot, 0), self) for slot in range(len(self.slots.pools))]

    # ------------------------------------------------------------ waits

    @property
    def joined(self) -> Epoch:
        """The epoch that this rank is part of."""
        return self.ledger.goal.epoch

    def wait_joined(self, attach_s: float, begun: float, grace_s: float = 0.0) -> None:
        """Wait until the first epoch is ready.

        Raises:
            DeadlinePassed: It is not, after ``attach_s`` and ``grace_s``: the leader's own report of the same limit
                says more, and is waited for that much longer.
            WeightdError: The run is refused, with the whole report.
        """
        doing = "waiting for the run's ranks"
        if self.wait_for(lambda: self.joined or None, begun + attach_s + grace_s, doing) is None:
            goal = self.ledger.goal
            raise DeadlinePassed(
                stage=goal.stage or "attaching",
                waited_for=(goal.waiting_for or "the leader",),
                version=0,
                bucket=None,
                waited_s=time.monotonic() - begun,
                limit_s=attach_s,
                setting="attach_s",
                serving=goal.committed.version,
            )
        assert self.joined != NO_EPOCH

    def wait_slot(self, version: Version, release_s: float) -> int:
        """Wait for a slot that may be written.

        Raises:
            SlotNotFree: None is, after ``release_s``.
            WeightdError: The run is paused, or the daemon is gone.
        """
        begun = time.monotonic()

        def look() -> int | None:
            if self.ledger.goal.paused is not None:
                raise error_from_daemon(self.ledger.goal.paused)
            # A daemon that is away is given restart_s to come back, as everywhere; a publish that nobody hears
            # would only be missed later.
            return self.slots.free() if self.reachable else None

        slot = self.wait_for(look, begun + release_s, f"waiting for a slot for version {version}")
        if slot is None and not self.reachable:
            raise self.gone(f"waiting for a slot for version {version}")
        if slot is None:
            waited, why = time.monotonic() - begun, self.ledger.goal.waiting_for
            raise SlotNotFree(int(self._hello.rank), int(version), self.slots.taken(), waited, release_s, why)
        return slot

    def wait_outcome(self, version: Version, until: str, timeout_s: float | None) -> None:
        """Wait until ``version`` is committed, or until its slot may be overwritten.

        Raises:
            VersionNotDecided: Neither, after ``timeout_s``.
            WeightdError: It failed (the report), the run is paused, or the daemon is gone.
        """
        begun = time.monotonic()

        def look() -> bool | None:
            return self._outcome(version, until)

        deadline_at = None if timeout_s is None else begun + timeout_s
        if self.wait_for(look, deadline_at, f"waiting for version {version} to be {until}") is None:
            goal = self.ledger.goal
            waited = time.monotonic() - begun
            raise VersionNotDecided(version, until, goal.stage, goal.waiting_for, waited, timeout_s or 0.0)

    def _outcome(self, version: Version, until: str) -> bool | None:
        if self.ledger.committed(version):
            key = self.ledger.key_of(version)
            held = until == "released" and key is not None and self.slots.holds(key)
            return None if held else True
        failure = self.ledger.failure(version)
        if failure is not None:
            raise error_from_daemon(failure)
        goal = self.ledger.goal
        if goal.paused is not None and goal.key.version != version:
            raise error_from_daemon(goal.paused)
        return None

    # ------------------------------------------------------------ end

    def end(self, why: str) -> None:
        """Leave in order and let go of the memory."""
        with self.changed:
            self._closing = True
        self.shut(why)
        self.slots.close()


def _slots(rank: TrainerRank, described: Described, digest: str) -> Slots:
    if isinstance(described, LiveDescribed):
        return LiveSlots(rank, described, digest)
    return Slots(rank, described, digest)


def _offer(key: PoolKey, attachment: TrainerAttachment, channel: FdChannel) -> None:
    channel.offer(key, attachment.slots.pools[key.slot], time.monotonic() + _OFFER_S)
