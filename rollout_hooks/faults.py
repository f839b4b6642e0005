"""What a rollout rank's hook refuses, and what its waits end with.

::

    RolloutHookError
    ├── UnsupportedTarget   E_TARGET         parameters that cannot be written into as they are
    ├── TargetMoved         E_TARGET_MOVED   parameters that lie elsewhere than when the rank attached
    ├── BuffersOverlap      E_RANK_DUP       two receivers of one process would write the same memory
    ├── NotAttached         E_NOT_RECEIVING  receive() before attach() or after close()
    ├── ReceiveTimeout      E_RECEIVE        no version in time; nothing had begun
    ├── NotServable         E_NOT_SERVABLE   these bytes are not to be served
    ├── SourceChanged       E_SOURCE         a source was overwritten while it was read
    ├── PlanUnusable        E_RANK_PLAN      a plan that does not fit this rank's memory
    └── ApplyEnded          E_APPLY_ENDED    an apply that had begun did not end in a served version
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weightd.core.errors import Story, WeightdError, some


class RolloutHookError(WeightdError):
    """An error of the hook in an engine."""


@dataclass(eq=False)
class UnsupportedTarget(RolloutHookError):
    """A parameter that cannot be written into as it is.

    Attributes:
        who: The rank.
        name: The parameter.
        found: What it is.
        supported: What would do.
    """

    code: ClassVar[str] = "E_TARGET"
    who: str
    name: str
    found: str
    supported: tuple[str, ...]

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"{self.name} of {self.who} cannot be written into: {self.found}",
            which=f"supported: {some(self.supported)}",
            effect="the rank did not attach; its parameters are untouched",
            next="give the receiver the engine's own parameters, initialised and on the CPU",
        )


@dataclass(eq=False)
class TargetMoved(RolloutHookError):
    """Parameters that lie elsewhere than when the rank attached: a copy would not reach the engine.

    Attributes:
        who: The rank.
        version: The version that was to be written.
        names: Every parameter whose memory, shape or element type is another, or that is gone.
    """

    code: ClassVar[str] = "E_TARGET_MOVED"
    who: str
    version: int
    names: tuple[str, ...]

    def story(self) -> Story:
        """Return the lines of the text."""
        count = len(self.names)
        return Story(
            what=f"version {self.version} not written on {self.who}: {count} parameter(s) are not where they were",
            which=f"re-bound, moved or removed since attach(): {some(self.names)}",
            effect="no byte was copied: the engine would have gone on with its old bytes",
            next="write parameters in place, or close the receiver before they are re-bound and attach a new one",
        )


@dataclass(eq=False)
class BuffersOverlap(RolloutHookError):
    """Two receivers of one process would write the same memory.

    Attributes:
        who: The rank that attaches.
        run: Its run.
        other: The rank that is attached.
        other_run: Its run.
        name: Parameter of the rank that attaches.
        other_name: Parameter that it overlaps.
        nbytes: Bytes they share.
    """

    # Registered by the roster's rank errors: the code is the specification's, this class never crosses a socket.
    who: str
    run: str
    other: str
    other_run: str
    name: str
    other_name: str
    nbytes: int

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"{self.who} of run {self.run} and {self.other} of run {self.other_run} would write the same memory",
            which=f"{self.name} and {self.other_name} share {self.nbytes:,} bytes",
            effect=f"{self.who} did not attach; {self.other} is not touched",
            next="give each receiver parameters of its own, or close the other one first",
        )


BuffersOverlap.code = "E_RANK_DUP"


@dataclass(eq=False)
class NotAttached(RolloutHookError):
    """A call that needs an attached receiver.

    Attributes:
        call: The call.
        state: What the receiver is instead.
    """

    code: ClassVar[str] = "E_NOT_RECEIVING"
    call: str
    state: str

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"{self.call} needs an attached receiver, this one is {self.state}",
            next="call attach(), or use the receiver as a context manager",
        )


@dataclass(eq=False)
class ReceiveTimeout(RolloutHookError):
    """No version came in time, and nothing had begun that would have to end.

    Attributes:
        who: The rank.
        wanted: Version that was waited for: the smallest that would do.
        serving: Version it serves; 0 where there is none.
        stage: Stage of the run.
        waiting_for: What the run waits for, in the leader's words.
        waited_s: Seconds waited.
        limit_s: The limit.
        left_barrier: Whether the rank was paused for a version and was let go.
    """

    code: ClassVar[str] = "E_RECEIVE"
    who: str
    wanted: int
    serving: int
    stage: str
    waiting_for: str
    waited_s: float
    limit_s: float
    left_barrier: bool = False

    def story(self) -> Story:
        """Return the lines of the text."""
        why = f", waiting for {self.waiting_for}" if self.waiting_for else ""
        left = "; it was paused for one, and not all ranks of its engine came" if self.left_barrier else ""
        still = f"it goes on with version {self.serving}" if self.serving else "it serves no version yet"
        return Story(
            what=f"{self.who} received no version >= {self.wanted} in {self.waited_s:.1f} s "
            f"(timeout_s {self.limit_s:.1f}){left}",
            which=f"the run is in stage {self.stage or 'unknown'}{why}",
            effect=f"no parameter was touched; {still}",
            next="call receive() again, on all ranks of the engine between the same two steps",
        )


@dataclass(eq=False)
class NotServable(RolloutHookError):
    """These bytes are not to be served.

    Attributes:
        who: The rank.
        state: Its state.
        version: Version that the state is about; 0 where there is none.
        why: What made it so.
    """

    code: ClassVar[str] = "E_NOT_SERVABLE"
    who: str
    state: str
    version: int
    why: str

    def story(self) -> Story:
        """Return the lines of the text."""
        if self.state == "serving":  # whole bytes, but the engine was paused and not told to go on
            return Story(
                what=f"{self.who} is not servable: it is paused, its resume callback is due",
                which=self.why.replace("\n", "\n  "),
                next="call receive(): it goes on with the bytes that it has",
            )
        about = f" in version {self.version}" if self.version else ""
        return Story(
            what=f"{self.who} is not servable: it is {self.state}{about}",
            which=self.why.replace("\n", "\n  "),
            next="call receive(); only a complete apply that is committed makes it servable",
        )


@dataclass(eq=False)
class SourceChanged(RolloutHookError):
    """A source was overwritten while it was read, or does not hold the version any more.

    Attributes:
        who: The rank that read.
        version: The bytes, as text with their attempt.
        source: The pool.
        expected: Generation that holds the version.
        found: Generation that was seen.
        when: ``before`` or ``after`` the copy.
    """

    code: ClassVar[str] = "E_SOURCE"
    who: str
    version: str
    source: str
    expected: int
    found: int
    when: str

    def story(self) -> Story:
        """Return the lines of the text."""
        writing = " (odd: it is being written)" if self.found % 2 else ""
        torn = "no byte was copied" if self.when == "before" else "the copy is discarded; the parameters are torn"
        return Story(
            what=f"{self.source} is at generation {self.found}{writing} {self.when} the copy of {self.version}, "
            f"generation {self.expected} held it",
            who=self.who,
            effect=torn,
            next="the next version; a source that changes while it is leased is a fault of weightd or of its trainer",
        )


@dataclass(eq=False)
class PlanUnusable(RolloutHookError):
    """A plan that does not fit the memory of this rank or of its sources.

    Attributes:
        who: The rank.
        plan_digest: The plan.
        why: What does not fit.
    """

    code: ClassVar[str] = "E_RANK_PLAN"
    who: str
    plan_digest: str
    why: str

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"plan {self.plan_digest[:12]} of {self.who} cannot be used: {self.why}",
            effect="no byte was copied",
            next="report this with the layouts of the run (export_layout)",
        )


@dataclass(eq=False)
class ApplyEnded(RolloutHookError):
    """An apply that had begun did not end in a served version, and the leader gave no report of it.

    Attributes:
        who: The rank.
        version: The bytes, as text with their attempt.
        state: State it ended in.
        serving: Version whose bytes are whole; 0 where there is none.
    """

    code: ClassVar[str] = "E_APPLY_ENDED"
    who: str
    version: str
    state: str
    serving: int

    def story(self) -> Story:
        """Return the lines of the text."""
        whole = f"the bytes of version {self.serving} are whole" if self.serving else "no version's bytes are whole"
        return Story(
            what=f"the apply of {self.version} on {self.who} ended as {self.state}",
            effect=f"the rank is not servable; {whole}",
            next="call receive() again: the rank takes part in the next version",
        )
