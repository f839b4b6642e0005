"""The states of one rollout rank: a pure machine that turns goals into steps.

Rules, in the manner of a protocol:

1. It performs no IO, reads no clock, takes no lock and runs no callback.  Its owner serialises all calls.
2. ``goal_arrived`` may be called at any time, by the thread that owns the control socket.  It acknowledges what
   needs neither a callback nor a copy: a commit, an abort, a fence, a write of bytes that are held already.
3. Callbacks and copies are *steps*.  Only ``next_step`` hands them out, only between ``entered`` and ``departed``,
   one at a time; the state changes when the step is handed out, that is *before* the callback runs.  Each step but
   ``Deliver`` and ``Raise`` ends with the ``…_done`` or ``…_failed`` call that is named in its docstring.
4. ``report()`` is the whole state at any moment.

Source: specification of the session, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weightd.core.errors import WireError
from weightd.core.units import NO_KEY, NO_OP, NO_TERM, Op, Term, Version, VersionKey
from weightd.core.wire.messages import ReceiverGoal, ReceiverReport, ReceiverState, SourceSlot


@dataclass(frozen=True, slots=True)
class RunPause:
    """Run the pause callback for ``key``; ends with ``pause_done`` or ``pause_failed``."""

    key: VersionKey


@dataclass(frozen=True, slots=True)
class RunCopy:
    """Copy ``key`` from ``sources``; ends with ``copy_done``, ``copy_stopped`` or ``copy_failed``."""

    key: VersionKey
    sources: tuple[SourceSlot, ...]


@dataclass(frozen=True, slots=True)
class RunResume:
    """Run the resume callback; ``key`` is what is served now; ends with ``resume_done``."""

    key: VersionKey


@dataclass(frozen=True, slots=True)
class Deliver:
    """``receive()`` returns ``version``."""

    version: Version


@dataclass(frozen=True, slots=True)
class Raise:
    """``receive()`` raises: an apply that had begun did not end in a served version."""

    key: VersionKey
    state: ReceiverState
    base: VersionKey
    error: WireError | None


Step = RunPause | RunCopy | RunResume | Deliver | Raise

BASES = frozenset({"unready", "serving", "torn"})
"""States that no order binds."""

IN_HAND = frozenset({"collecting", "fetching", "prepared", "applying"})
"""Stages of the run in which a version is undecided."""


@dataclass(slots=True)
class ReceiverMachine:
    """One receiver.  See the module's rules.

    Attributes:
        state: As in ``ReceiverReport``.
        key: What a state from ``pausing`` to ``fenced`` is about.
        base: Committed version whose bytes are whole in the parameters.
        committed: Newest commit known that names this engine.
        held: Version whose bytes are whole in the parameters, committed or not.
        planned_nbytes: Bytes of one apply under the plan that is built.
        plan_digest: Plan that is built; orders to pause or write need it.
        quiesced: The pause callback ran and no resume callback since.
        stopping: The copy in hand must end at its next boundary; read by the copying thread.
        applied_nbytes: Written by the copying thread as it goes.
    """

    state: ReceiverState = "unready"
    key: VersionKey = NO_KEY
    base: VersionKey = NO_KEY
    committed: VersionKey = NO_KEY
    held: VersionKey = NO_KEY
    op: Op = NO_OP
    term: Term = NO_TERM
    in_receive: bool = False
    leaving: bool = False
    quiesced: bool = False
    stopping: bool = False
    planned_nbytes: int = 0
    applied_nbytes: int = 0
    plan_digest: str = ""
    error: WireError | None = None
    closing: bool = False
    goal: ReceiverGoal = field(default_factory=ReceiverGoal)
    _busy: bool = False
    _written: bool = False
    _left: bool = False
    _outcome: Raise | None = None
    _found: Raise | None = None
    _told: VersionKey = NO_KEY

    # ------------------------------------------------------------ what others look at

    @property
    def servable(self) -> bool:
        """Whether the engine may serve with these bytes, as far as this rank knows."""
        return self.state == "serving" and not self.quiesced

    @property
    def waiting_in_barrier(self) -> bool:
        """Whether the rank is paused and nobody told it to write yet."""
        return self.state == "paused" and not self._busy

    @property
    def under_way(self) -> bool:
        """Whether an apply has begun whose outcome is open: the time limit of a wait does not touch it."""
        return self._busy or self._resume_due or self.state in ("pausing", "paused", "applying", "applied")

    def report(self) -> ReceiverReport:
        """Return the whole state."""
        return ReceiverReport(
            state=self.state,
            key=self.key,
            base=self.base,
            committed=self.committed,
            op=self.op,
            in_receive=self.in_receive,
            leave=self.leaving,
            applied_nbytes=self.applied_nbytes,
            plan_digest=self.plan_digest,
            error=self.error,
            closing=self.closing,
        )

    # ------------------------------------------------------------ doors for the control thread

    def goal_arrived(self, goal: ReceiverGoal) -> None:
        """Take the newest goal and follow it as far as no callback and no copy is needed.

        A goal of a lower term, or of a lower op in the same term, is below the floor and ignored.
        """
        if goal.term < self.term or (goal.op < self.op and goal.term == self.term and goal.order != "idle"):
            return
        if goal.term > self.term:
            self.term, self.op = goal.term, NO_OP  # ops count within a term
        self.goal = goal
        self._follow()

    def plan_built(self, digest: str, nbytes: int) -> None:
        """The view pairs of the rank plan ``digest`` exist; one apply copies ``nbytes``."""
        self.plan_digest, self.planned_nbytes = digest, nbytes
        self._follow()

    # ------------------------------------------------------------ doors for the thread in receive()

    def entered(self) -> None:
        """``receive()`` was called: a safe point."""
        self.in_receive, self.leaving, self._left = True, False, False
        self._found = self._outcome
        self._follow()

    def departed(self) -> None:
        """``receive()`` returns or raises."""
        self.in_receive, self.leaving = False, False

    def ask_leave(self) -> None:
        """The rank has waited in the barrier for too long."""
        if self.waiting_in_barrier:
            self.leaving = True

    def next_step(self, above: Version, at_least: Version | None) -> Step | None:
        """Hand out the next step, or None if there is nothing to do but wait.

        Args:
            above: Version that the last ``receive()`` returned.
            at_least: Version that this call asked for; then ``above`` does not matter.
        """
        if not self.in_receive or self._busy:
            return None
        if self._outcome is not None and not self._put_off:
            outcome, self._outcome = self._outcome, None
            self._told = outcome.key
            return outcome
        if not self._resume_due and self.state == "serving" and self._satisfies(above, at_least):
            return Deliver(self.base.version)
        return self.next_work()

    def next_work(self, *, begin: bool = True) -> RunPause | RunCopy | RunResume | None:
        """Hand out the next callback or copy, or None; how a call ends is not asked.

        Args:
            begin: Whether a new pause may begin, or only what has begun goes on.
        """
        if not self.in_receive or self._busy:
            return None
        if self._resume_due:
            self.quiesced = False
            self._busy = True
            return RunResume(self.base)
        if (begin or self.under_way) and self._may_pause():
            return self._begin_pause()
        if self._may_write():
            return self._begin_copy()
        return None

    def pause_done(self) -> None:
        """The pause callback returned."""
        self._busy = False
        self.quiesced = True
        self.state = "paused"
        self._follow()

    def pause_failed(self, error: WireError) -> None:
        """The pause callback raised: the pause is refused, the bytes are intact."""
        self._busy = False
        self.state, self.error = "refused", error
        self._told = self.key  # receive() raises what the callback raised
        self._follow()

    def copy_done(self, nbytes: int) -> None:
        """All planned bytes were copied, and every source stood still meanwhile."""
        self._busy = False
        self.applied_nbytes = nbytes
        self.held = self.key
        self.state = "applied"
        self._follow()

    def copy_stopped(self) -> None:
        """The copy ended early, because ``stopping`` was set."""
        stopped = self.key
        self._busy = False
        self.state = "torn"
        self._follow()
        if self._outcome is None and self.goal.order != "pause":  # a newer pause repeats the apply
            self._fail(stopped, self.goal.error)

    def copy_failed(self, error: WireError) -> None:
        """The copy could not be completed, or a source changed under it."""
        self._busy = False
        self.state = "torn"
        self._fail(self.key, error)
        self._follow()

    def resume_done(self) -> None:
        """The resume callback returned or raised; either way the bytes are served."""
        self._busy = False
        self._follow()

    # ------------------------------------------------------------ inside

    @property
    def _put_off(self) -> bool:
        """Whether a failure that this call found waits: while a version is in hand it is a rank's turn to be here.

        An engine that calls ``receive()`` once a version would otherwise raise what became of the last one, be missed
        in this one, and so on for ever.
        """
        in_hand = self.under_way or self.goal.order == "pause" or self.goal.stage in IN_HAND
        return in_hand and self._outcome is self._found

    @property
    def _resume_due(self) -> bool:
        return self.quiesced and self.state in ("serving", "unready")

    def _satisfies(self, above: Version, at_least: Version | None) -> bool:
        return self.base.version > above if at_least is None else self.base.version >= at_least

    def _acted(self) -> None:
        self.op = self.goal.op

    def _follow(self) -> None:
        """Act on the goal where neither a callback nor a copy is needed."""
        goal = self.goal
        if goal.order in ("commit", "resume") and goal.key.version >= self.committed.version:
            self.committed = goal.key  # acknowledged even while a callback runs
        if self._busy:
            same = goal.order == "idle" or (goal.order == "write" and goal.key == self.key)
            self.stopping = self.state == "applying" and not same
            return
        match goal.order:
            case "pause":
                if self.state == "applied" and goal.op > self.op:
                    self._return_to_base()  # a newer order for bytes whose fate was never told
            case "write":
                if goal.key == self.held:
                    self._answer_held()
            case "commit" | "resume":
                self._take_commit()
            case "abort":
                self._abort()
            case "fence":
                self._fence()
            case "left":
                self._leave()
            case "idle":
                pass

    def _may_pause(self) -> bool:
        goal = self.goal
        if goal.order != "pause" or self._left or goal.plan_digest != self.plan_digest:
            return False
        if self.state in ("paused", "refused", "torn", "fenced") and self.key == goal.key:
            return goal.op > self.op  # else this very order was answered already
        return True

    def _begin_pause(self) -> RunPause | None:
        self._acted()
        self.key, self.error, self.applied_nbytes = self.goal.key, None, 0
        if self.quiesced:
            self.state = "paused"
            return None
        self.state = "pausing"
        self._busy = True
        return RunPause(self.key)

    def _may_write(self) -> bool:
        goal = self.goal
        if goal.order != "write" or goal.plan_digest != self.plan_digest or self.key != goal.key:
            return False
        return self.state == "paused" or (self.state == "torn" and self.quiesced and goal.op > self.op)

    def _begin_copy(self) -> RunCopy:
        self._acted()
        self.state, self.error, self.leaving, self.stopping = "applying", None, False, False
        self.base = self.held = NO_KEY  # from here on the old bytes are not whole
        self.applied_nbytes = 0
        self._written = self._busy = True
        return RunCopy(self.key, self.goal.sources)

    def _answer_held(self) -> None:
        if self.state != "applied" or self.key != self.held:
            self.state, self.key, self.leaving, self.error = "applied", self.held, False, None
            self.applied_nbytes = self.planned_nbytes
        self._acted()

    def _take_commit(self) -> None:
        goal = self.goal
        if self.held != goal.key or goal.key == NO_KEY:
            return
        self.base = goal.key
        if self._outcome is not None and self._outcome.key.version < goal.key.version:
            self._outcome = None  # what became of an older one is no news any more
        if self.state in ("applied", "fenced"):
            self._acted()
            self.state, self.key = "applied", goal.key
            if goal.order == "resume":
                self._return_to_base()

    def _abort(self) -> None:
        """The version failed.  A rank at its base says so, too: the leader counts answers of all ranks."""
        if self.state == "applied" and self.base == self.key:
            return  # committed: an abort cannot be about it
        if self.held == self.goal.key != self.base:
            self.held = NO_KEY
        if self.state == "applied":
            self._return_to_base()
            self._fail(self.goal.key, self.goal.error)
        elif self.state == "fenced" and self.base != NO_KEY:
            self._outcome = None  # nothing was lost after all
            self._return_to_base()
        elif self.state not in BASES:
            self._return_to_base()
        self._acted()

    def _fence(self) -> None:
        goal = self.goal
        self._acted()
        if self.state == "fenced" and self.key == goal.key:
            return
        begun = self.state not in BASES
        self.state, self.key, self.leaving = "fenced", goal.key, False
        if begun or goal.error is not None:
            self._fail(goal.key, goal.error)

    def _leave(self) -> None:
        """All ranks of the engine leave, those that did not ask included; the pause is ordered again afterwards."""
        if self.state not in BASES and self.state not in ("paused", "refused"):
            return
        self._left |= self.leaving  # for whoever asked, the next pause stands for the next call
        self._acted()
        self._return_to_base()

    def _return_to_base(self) -> None:
        """Go back to what the bytes are worth; the resume callback, if due, is the next step."""
        self.leaving = False
        self.error = None
        self.key = NO_KEY
        if self.base != NO_KEY:
            self.state = "serving"
        else:
            self.state = "torn" if self._written else "unready"

    def _fail(self, key: VersionKey, error: WireError | None) -> None:
        """Have ``receive()`` raise, once for each version."""
        self.error = error
        if key != self._told or key == NO_KEY:
            self._outcome = Raise(key, self.state, self.base, error)
