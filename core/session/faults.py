"""How a version, an epoch or a wait can end badly.  They cross the wire, so their fields are plain data.

::

    SessionError
    ├── VersionNotGrowing   E_VERSION        a number that is not above the last committed one
    ├── VersionSkew         E_VERSION_SKEW   ranks publish different versions
    ├── LayoutSkew          E_LAYOUT_SKEW    a rank published with another layout than the epoch's
    ├── VersionAbandoned    E_NEW_TERM       a new leader does not know these bytes
    ├── NoLeader            E_NO_LEADER      nobody leads the run
    ├── Undecided           E_UNDECIDED      bytes are applied, and nobody says whether they count
    ├── EnginePoisoned      E_POISONED       an engine that is fenced
    ├── DeadlinePassed      E_DEADLINE       a wait that took too long
    ├── RankLost            E_RANK_LOST      a process or a node that is gone
    ├── ApplyFailed         E_APPLY          a rank that could not take the bytes
    ├── RunPaused           E_PAUSED         a run that lacks ranks
    ├── PlanDiffers         E_PLAN_DIGEST    a node that planned something else
    └── JournalFailed       E_JOURNAL        a record that could not be made durable

The report of a failed version is ``core.errors.Refused`` with one or more of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weightd.core.errors import Story, WeightdError, binary_size, some


def still_served(version: int, *, served: bool | None = None) -> str:
    """Return what engines serve while nothing new is committed.

    Args:
        version: Last committed version.
        served: Whether an engine serves it; None where that is not known.

    >>> still_served(6, served=True), still_served(6, served=False)
    ('engines still serve v6', 'last committed is v6; no engine serves it')
    >>> still_served(6), still_served(0)
    ('last committed is v6', 'no engine serves a version yet')
    """
    if not version:
        return "no engine serves a version yet"
    if served:
        return f"engines still serve v{version}"
    return f"last committed is v{version}" + ("" if served is None else "; no engine serves it")


def seconds(value: float) -> str:
    """Return seconds for a text: whole ones without a fraction.

    >>> seconds(30.0), seconds(12.34)
    ('30 s', '12.3 s')
    """
    shown = round(value, 1)
    return f"{int(shown)} s" if shown == int(shown) else f"{shown} s"


class SessionError(WeightdError):
    """A version's life, or a wait of it, that ended otherwise than wanted."""


@dataclass(eq=False)
class VersionNotGrowing(SessionError):
    """A publish with a number that is not above the last committed one.

    Attributes:
        group: Who published it.
        got: The number.
        expected_base: Last committed version.
        next_version: Smallest number that may be used.
    """

    code: ClassVar[str] = "E_VERSION"
    group: str
    got: int
    expected_base: int
    next_version: int

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"version {self.got} does not grow: last committed is {self.expected_base}",
            who=f"published by {self.group}",
            effect="it was not moved",
            next=f"publish under {self.next_version} or above; old weights go under a new number, too",
        )


@dataclass(eq=False)
class VersionSkew(SessionError):
    """Trainer ranks that publish different versions, or different attempts of one.

    Attributes:
        version: The version in hand.
        published: Trainer ranks that published it.
        elsewhere: What each other rank published instead, in words.
        world: Number of trainer ranks.
        serving: Last committed version.
    """

    code: ClassVar[str] = "E_VERSION_SKEW"
    version: int
    published: tuple[int, ...]
    elsewhere: dict[str, str]
    world: int
    serving: int

    def story(self) -> Story:
        """Return the lines of the text."""
        others = some(f"{who}: {what}" for who, what in self.elsewhere.items())
        return Story(
            what=f"version {self.version} was published by {len(self.published)} of {self.world} trainer ranks, "
            f"{len(self.elsewhere)} published another one instead",
            which=f"published by trainer ranks {some(self.published)}",
            who=f"instead of it: {others}",
            effect=f"version {self.version} failed on all ranks; {still_served(self.serving)}",
            next="let every rank publish the same steps in the same order",
        )


@dataclass(eq=False)
class LayoutSkew(SessionError):
    """A trainer rank published a version with another layout than the one the epoch was planned with.

    Attributes:
        version: The version in hand.
        rank: The trainer rank.
        got: Layout digest of its slot.
        expected: Layout digest of the epoch.
        epoch: The epoch.
        serving: Last committed version.
    """

    code: ClassVar[str] = "E_LAYOUT_SKEW"
    version: int
    rank: int
    got: str
    expected: str
    epoch: int
    serving: int

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"version {self.version} of trainer rank {self.rank} has layout {self.got[:12] or 'none'}, "
            f"epoch {self.epoch} was planned with {self.expected[:12]}",
            who=f"trainer rank {self.rank}",
            effect=f"version {self.version} failed on all ranks; {still_served(self.serving)}",
            next="attach again after a change of shapes or names; a new epoch is planned then",
        )


@dataclass(eq=False)
class VersionAbandoned(SessionError):
    """Bytes that were published under an earlier leader and never decided.

    Attributes:
        version: Their version.
        term: Term of the leader that answers.
        next_version: Smallest number that may be used.
        serving: Last committed version.
    """

    code: ClassVar[str] = "E_NEW_TERM"
    version: int
    term: int
    next_version: int
    serving: int

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"version {self.version} was published under an earlier leader and never decided; "
            f"term {self.term} leads now",
            effect=f"it was not moved; {still_served(self.serving)}",
            next=f"publish under {self.next_version} or above",
        )


@dataclass(eq=False)
class NoLeader(SessionError):
    """Nobody leads the run: trainer rank 0 has not attached anywhere, or its daemon is not heard.

    Attributes:
        run: The run.
        node: The node that waits.
        leader: Node that led last; empty where none did.
        waited_s: How long.
        limit_s: The limit.
        setting: Its name.
    """

    code: ClassVar[str] = "E_NO_LEADER"
    run: str
    node: str
    leader: str
    waited_s: float
    limit_s: float
    setting: str

    def story(self) -> Story:
        """Return the lines of the text."""
        last = f"node {self.leader} led last" if self.leader else "no leader was ever heard of"
        return Story(
            what=f"run {self.run} has no leader for {seconds(self.waited_s)} of {seconds(self.limit_s)} "
            f"({self.setting})",
            who=f"seen from node {self.node}; {last}",
            effect="no version moves; engines keep what they serve",
            next=f"look at the daemon of node {self.leader}"
            if self.leader
            else "start trainer rank 0, or check that its daemon and this one name each other as peers",
        )


@dataclass(eq=False)
class Undecided(SessionError):
    """A rank that is paused or applied, and no leader to say what follows.

    Attributes:
        who: The rank.
        state: Its state.
        version: The version it is about.
        leader: Node that led last.
        waited_s: How long.
        limit_s: The limit.
    """

    code: ClassVar[str] = "E_UNDECIDED"
    who: str
    state: str
    version: int
    leader: str
    waited_s: float
    limit_s: float

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"version {self.version} is undecided: {self.who} is {self.state} and node {self.leader} "
            f"was not heard for {seconds(self.waited_s)} of {seconds(self.limit_s)} (restart_s)",
            who=self.who,
            effect="the engine stands; it serves nothing until the decision",
            next=f"start the daemon of node {self.leader} again, or start trainer rank 0 anew",
        )


@dataclass(eq=False)
class EnginePoisoned(SessionError):
    """An engine that was left out of a version and is not to serve.

    Attributes:
        group: The engine.
        version: The version it was left out of.
        last_good_version: What it served before.
        first_cause: Text of the first thing that went wrong.
        written: Whether its ranks were told to write; else they hold what they held.
    """

    code: ClassVar[str] = "E_POISONED"
    group: str
    version: int
    last_good_version: int
    first_cause: str
    written: bool = True

    def story(self) -> Story:
        """Return the lines of the text."""
        # Bytes that nobody wrote are served again, should the version fail for every engine; that is not decided yet.
        whole = self.last_good_version and not self.written
        unless = f", unless version {self.version} fails for every engine" if whole else ""
        before = (
            f"it served v{self.last_good_version} before" if self.last_good_version else "it never served a version"
        )
        return Story(
            what=f"engine {self.group} is fenced since version {self.version}; {before}",
            which="first cause: " + self.first_cause.replace("\n", "\n  "),
            who=f"engine {self.group}, all ranks",
            effect=f"it is not servable; only a complete apply frees it{unless}",
            next="it takes part in the next version; look at the first cause if that one fails, too",
        )


@dataclass(eq=False)
class DeadlinePassed(SessionError):
    """A wait that took longer than its setting allows.

    Attributes:
        stage: Stage of the session.
        waited_for: The peers, named.
        version: Version in hand; 0 where there is none.
        bucket: Bucket in transfer, where one is known.
        waited_s: How long.
        limit_s: The limit.
        setting: Its name.
        serving: Last committed version.
    """

    code: ClassVar[str] = "E_DEADLINE"
    stage: str
    waited_for: tuple[str, ...]
    version: int
    bucket: int | None
    waited_s: float
    limit_s: float
    setting: str
    serving: int

    def story(self) -> Story:
        """Return the lines of the text."""
        what = f"version {self.version}" if self.version else "the run"
        bucket = "" if self.bucket is None else f", bucket {self.bucket}"
        return Story(
            what=f"{what} waited {seconds(self.waited_s)} of {seconds(self.limit_s)} in stage {self.stage}{bucket}",
            who=f"waited for {some(self.waited_for)}",
            effect=still_served(self.serving),
            next=f"look at the logs of who was waited for, or raise {self.setting} (now {seconds(self.limit_s)})",
        )


@dataclass(eq=False)
class RankLost(SessionError):
    """A rank whose process or node is gone.

    Attributes:
        who: The rank.
        node: Its node.
        pid: Its process there.
        why: What was seen.
        stage: Stage in which it was missed.
        version: Version in hand; 0 where there is none.
        serving: Last committed version.
    """

    code: ClassVar[str] = "E_RANK_LOST"
    who: str
    node: str
    pid: int
    why: str
    stage: str
    version: int
    serving: int

    def story(self) -> Story:
        """Return the lines of the text."""
        during = f" in stage {self.stage} of version {self.version}" if self.version else f" in stage {self.stage}"
        return Story(
            what=f"{self.who} is lost{during}: {self.why}",
            who=f"{self.who} (node {self.node}, pid {self.pid})",
            effect=still_served(self.serving),
            next=f"look at the log of {self.who} on node {self.node} and start it again",
        )


@dataclass(eq=False)
class ApplyFailed(SessionError):
    """A rank that refused to pause, or could not take the bytes, or took another number of them.

    Attributes:
        who: The rank.
        version: The version.
        why: What it said.
        applied_nbytes: Bytes it copied.
        planned_nbytes: Bytes of its plan.
    """

    code: ClassVar[str] = "E_APPLY"
    who: str
    version: int
    why: str
    applied_nbytes: int
    planned_nbytes: int

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"version {self.version} was not applied by {self.who}: {self.why}",
            which=f"{binary_size(self.applied_nbytes)} ({self.applied_nbytes:,}) of "
            f"{binary_size(self.planned_nbytes)} ({self.planned_nbytes:,}) bytes were copied",
            who=self.who,
            effect="its engine is left out of the version and fenced",
            next=f"look at the log of {self.who}",
        )


@dataclass(eq=False)
class RunPaused(SessionError):
    """A run that refuses publishes because ranks of it are missing.

    Attributes:
        run: The run.
        why: What happened.
        missing: Ranks that it lacks.
        serving: Last committed version.
    """

    code: ClassVar[str] = "E_PAUSED"
    run: str
    why: str
    missing: tuple[str, ...]
    serving: int

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"run {self.run} is paused: {self.why}",
            who=f"missing: {some(self.missing)}",
            effect=f"publishes are refused; {still_served(self.serving)}",
            next=f"start {self.missing[0] if self.missing else 'the missing ranks'} again; the run goes on by itself",
        )


@dataclass(eq=False)
class PlanDiffers(SessionError):
    """A node whose plan of an epoch is not the leader's.

    Attributes:
        node: The node.
        epoch: The epoch.
        expected: Digest of the leader's plan for it.
        got: Digest of its own.
    """

    code: ClassVar[str] = "E_PLAN_DIGEST"
    node: str
    epoch: int
    expected: str
    got: str

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"epoch {self.epoch}: node {self.node} planned {self.got[:12]}, the leader {self.expected[:12]}",
            who=f"node {self.node}",
            effect="the epoch was not adopted",
            next=f"compare the versions of weightd on node {self.node} and on the leader",
        )


@dataclass(eq=False)
class JournalFailed(SessionError):
    """A record that could not be made durable.

    Attributes:
        record: Kind of the record.
        why: What the file system said.
        serving: Last committed version.
    """

    code: ClassVar[str] = "E_JOURNAL"
    record: str
    why: str
    serving: int

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"the leader could not journal {self.record}: {self.why}",
            effect=f"nothing that depends on it was done; {still_served(self.serving)}",
            next="free or repair the disk of the state directory",
        )
