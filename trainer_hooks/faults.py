"""What a trainer's hook refuses, and what its waits end with.

::

    TrainerHookError
    ├── UnsupportedPlacement   E_PLACEMENT        a tensor that no adapter can describe
    ├── PiecesDoNotAddUp       E_PIECES           a rule and a framework disagree about a shard
    ├── NamesCollide           E_NAMES            two tensors would have one name
    ├── HoldingsChanged        E_HOLDINGS         the model is not the one that was attached
    ├── FrozenChanged          E_FROZEN           a tensor that was declared frozen was written
    ├── TieBroken              E_TIE              two tensors that are declared one weight differ
    ├── ReplicasDisagree       E_REPLICAS         two ranks hold different bytes of one box
    ├── ExchangeFailed         E_EXCHANGE         trainer ranks did not show each other something in time
    ├── NothingToPublish       E_NOTHING          a publish would bind no tensor
    ├── LoraUndecided          E_LORA_CHOICE      a PEFT model, and nobody says what of it is published
    ├── LoraUnsupported        E_LORA             a module of PEFT that cannot be published as asked
    ├── LiveMemoryRefused      E_LIVE             a parameter that cannot live in shared memory
    ├── LiveMemoryWritten      E_LIVE_WRITTEN     parameters were written while they were published
    ├── LiveMemoryRead         E_LIVE_READ        a step would write what somebody still reads
    ├── NotBetweenSteps        E_STEP             the trainer is in the middle of a step
    ├── WorldUnknown           E_WORLD            nobody says which trainer rank this is
    ├── NotAttached            E_NOT_ATTACHED     publish() or wait() before attach() or after close()
    ├── SlotNotFree            E_SLOT             no slot became free in time
    ├── VersionNotDecided      E_WAIT             wait() ended by its own limit
    └── OutcomeUnknown         E_OUTCOME          a version was decided while this rank was not connected
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weightd.core.errors import Story, WeightdError, some

_NOTHING_SENT = "nothing was published"


class TrainerHookError(WeightdError):
    """An error of the hook in a trainer."""


@dataclass(eq=False)
class UnsupportedPlacement(TrainerHookError):
    """A tensor that cannot be described; it is refused by name and never guessed.

    Attributes:
        name: The tensor.
        found: What it is.
        supported: What would do.
    """

    code: ClassVar[str] = "E_PLACEMENT"
    name: str
    found: str
    supported: tuple[str, ...]

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"{self.name} cannot be described: {self.found}",
            which=f"supported: {some(self.supported)}",
            effect=_NOTHING_SENT,
            next="use a supported form, or declare this rank's shards with Publisher.from_shards",
        )


@dataclass(eq=False)
class PiecesDoNotAddUp(TrainerHookError):
    """The boxes that follow from the placements are not what the rank holds.

    Attributes:
        name: The tensor.
        shape: Its logical shape.
        expected: Local shape that follows from the placements.
        found: Shape of the local tensor.
        described: Elements of all boxes.
        held: Elements of the local tensor.
        padding: Elements of it that are declared to be padding.
    """

    code: ClassVar[str] = "E_PIECES"
    name: str
    shape: tuple[int, ...]
    expected: tuple[int, ...]
    found: tuple[int, ...]
    described: int
    held: int
    padding: int = 0

    def story(self) -> Story:
        """Return the lines of the text."""
        pad = f" and {self.padding} of padding" if self.padding else ""
        return Story(
            what=f"{self.name} {self.shape}: the placements give this rank {self.expected} "
            f"({self.described} elements{pad}), it holds {self.found} ({self.held} elements)",
            effect=_NOTHING_SENT,
            next="report the placements and the version of torch, or declare the shards with Publisher.from_shards",
        )


@dataclass(eq=False)
class NamesCollide(TrainerHookError):
    """Two different tensors would be published under one name.

    Attributes:
        name: The name without wrappers' prefixes.
        raw: The names that lead to it.
    """

    code: ClassVar[str] = "E_NAMES"
    name: str
    raw: tuple[str, ...]

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"{len(self.raw)} tensors are called {self.name} once wrappers' prefixes are gone and renamed= is "
            f"applied: {some(self.raw)}",
            effect=_NOTHING_SENT,
            next="pass the module that holds the model, or a mapping with the names of the checkpoint",
        )


@dataclass(eq=False)
class HoldingsChanged(TrainerHookError):
    """A tensor is no longer of the shape, element type or placement that was attached.

    Attributes:
        name: The tensor.
        attached: What it was.
        found: What it is.
    """

    code: ClassVar[str] = "E_HOLDINGS"
    name: str
    attached: str
    found: str

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"{self.name} was attached as {self.attached} and is {self.found} now",
            effect=f"{_NOTHING_SENT}; engines keep what they serve",
            next="close this publisher and attach a new one: the run plans again for the new layout",
        )


@dataclass(eq=False)
class NotBetweenSteps(TrainerHookError):
    """The trainer's engine is in the middle of a step: what it holds is no version that it would name.

    Attributes:
        step: Steps that it has finished.
        found: What it is in the middle of.
        then: When it may be published.
    """

    code: ClassVar[str] = "E_STEP"
    step: int
    found: str
    then: str

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"the trainer is in the middle of a step, {self.step} are finished: {self.found}",
            effect=f"{_NOTHING_SENT}, no parameter was read; engines keep what they serve",
            next=self.then,
        )


@dataclass(eq=False)
class FrozenChanged(TrainerHookError):
    """A tensor that was declared frozen is not the one that lies in the slots.

    Attributes:
        name: The tensor.
        found: What happened to it.
    """

    code: ClassVar[str] = "E_FROZEN"
    name: str
    found: str

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"{self.name} is declared frozen and {self.found} since it was copied",
            effect=f"{_NOTHING_SENT}; engines keep what they serve",
            next="leave it out of frozen, or do not write it",
        )


@dataclass(eq=False)
class TieBroken(TrainerHookError):
    """Two tensors that are declared to be one weight differ.

    Attributes:
        name: The further name.
        canonical: The name that it is declared to be tied to.
        found: Shape and element type of the one.
        other: Those of the other.
        differing: Elements that differ; 0 where shape or element type do.
        compared: Elements of both that this rank holds.
    """

    code: ClassVar[str] = "E_TIE"
    name: str
    canonical: str
    found: str
    other: str
    differing: int
    compared: int

    def story(self) -> Story:
        """Return the lines of the text."""
        numbers = (
            f"they are two tensors, and {self.differing} of {self.compared} elements differ on this rank"
            if self.differing
            else f"the one is {self.found}, the other {self.other}"
        )
        return Story(
            what=f"{self.name} is declared to be tied to {self.canonical}: {numbers}",
            which=f"{self.found} each" if self.differing else "",
            effect=f"{_NOTHING_SENT}; neither of the two is picked",
            next="tie them again in the model, or leave them out of ties and publish both",
        )


@dataclass(eq=False)
class ReplicasDisagree(TrainerHookError):
    """Two trainer ranks hold different bytes of what both would publish.

    Attributes:
        name: The tensor.
        start: First index of the box, per dimension.
        extent: Number of indices, per dimension.
        ranks: Both trainer ranks.
    """

    code: ClassVar[str] = "E_REPLICAS"
    name: str
    start: tuple[int, ...]
    extent: tuple[int, ...]
    ranks: tuple[int, ...]

    def story(self) -> Story:
        """Return the lines of the text."""
        both = " and ".join(str(rank) for rank in self.ranks)
        return Story(
            what=f"replicas disagree: {self.name}, box {list(self.extent)} from {list(self.start)}",
            who=f"trainer ranks {both} hold different bytes",
            effect=f"{_NOTHING_SENT} on any rank; engines keep what they serve",
            next="find out which of them left the others: other batches, or a buffer that nobody broadcasts",
        )


@dataclass(eq=False)
class ExchangeFailed(TrainerHookError):
    """Trainer ranks were to show each other something before a publish, and did not.

    Attributes:
        setting: What needs the exchange.
        rank: This trainer rank.
        world: Number of trainer ranks.
        waited_s: Seconds waited.
        limit_s: The limit.
        why: What torch says.
    """

    code: ClassVar[str] = "E_EXCHANGE"
    setting: str
    rank: int
    world: int
    waited_s: float
    limit_s: float
    why: str

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"{self.setting}: the exchange among {self.world} trainer ranks failed after {self.waited_s:.1f} s "
            f"(collect_s {self.limit_s:.1f}): {self.why}",
            who=f"trainer rank {self.rank}",
            effect=f"{_NOTHING_SENT}, and nothing more is exchanged; the trainer's own process groups are as they were",
            next="look at the logs of the other trainer ranks: all publish alike; then close and attach on all of them",
        )


@dataclass(eq=False)
class NothingToPublish(TrainerHookError):
    """What was asked for leaves no tensor to publish.

    Attributes:
        why: What leaves none.
        held: What this rank holds.
    """

    code: ClassVar[str] = "E_NOTHING"
    why: str
    held: tuple[str, ...]

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"nothing would be published: {self.why}",
            which=f"this rank holds {some(self.held)}" if self.held else "this rank holds nothing",
            effect=f"{_NOTHING_SENT}; engines keep what they serve",
            next="name what is to be published",
        )


@dataclass(eq=False)
class LoraUndecided(TrainerHookError):
    """A model with adapters, and nobody says what of it is published.

    Attributes:
        module: A module with an adapter.
        count: How many there are.
        choices: What ``lora=`` may be.
    """

    code: ClassVar[str] = "E_LORA_CHOICE"
    module: str
    count: int
    choices: tuple[str, ...]

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"{self.count} modules of PEFT are in this model, {self.module} the first, and lora= is not given",
            effect=f"{_NOTHING_SENT}: base weights without their adapters would be an old policy",
            next=f"choose lora= as one of {some(self.choices)}",
        )


@dataclass(eq=False)
class LoraUnsupported(TrainerHookError):
    """A module of PEFT that cannot be published as asked.

    Attributes:
        module: The module.
        found: What it is.
        supported: What would do.
    """

    code: ClassVar[str] = "E_LORA"
    module: str
    found: str
    supported: tuple[str, ...]

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"{self.module} cannot be published: {self.found}",
            which=f"supported: {some(self.supported)}",
            effect=_NOTHING_SENT,
            next="use a supported form, or merge the adapter yourself and publish the model that is left",
        )


@dataclass(eq=False)
class LiveMemoryRefused(TrainerHookError):
    """A parameter that cannot be moved into shared memory under all that holds it.

    Attributes:
        name: The tensor.
        why: What is in the way.
    """

    code: ClassVar[str] = "E_LIVE"
    name: str
    why: str

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"{self.name} cannot live in shared memory: {self.why}",
            effect=f"{_NOTHING_SENT}; every parameter has its values and memory of its own",
            next="give it memory of its own (p.data = p.data.clone()) and let go of what holds the old one, or publish "
            'copies: memory="snapshot"',
        )


@dataclass(eq=False)
class LiveMemoryWritten(TrainerHookError):
    """Live parameters were written between their publish and its decision.

    Attributes:
        name: A tensor of which bytes changed.
        version: The version that was published.
    """

    code: ClassVar[str] = "E_LIVE_WRITTEN"
    name: str
    version: int

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"{self.name} was written while version {self.version} was published from the same memory",
            effect=f"engines that serve version {self.version} may hold a mix of it and of what was written",
            next="call before_step() before whatever writes the parameters, then publish again",
        )


@dataclass(eq=False)
class LiveMemoryRead(TrainerHookError):
    """A step may not begin: its version is in a copy, and somebody still reads the live memory.

    Attributes:
        rank: The trainer rank.
        version: The version.
        waited_s: Seconds waited since the copy.
        limit_s: The limit.
        waiting_for: What the run waits for, in the leader's words.
    """

    code: ClassVar[str] = "E_LIVE_READ"
    rank: int
    version: int
    waited_s: float
    limit_s: float
    waiting_for: str = ""

    def story(self) -> Story:
        """Return the lines of the text."""
        why = f"the run waits for {self.waiting_for}" if self.waiting_for else "the leader names nothing it waits for"
        return Story(
            what=f"no step: version {self.version} was copied, and its live memory is still read after "
            f"{self.waited_s:.1f} s (restart_s {self.limit_s:.1f})",
            which=why,
            who=f"trainer rank {self.rank}",
            effect="the parameters were not written",
            next="weightd status names who applies; calling before_step() again waits again",
        )


@dataclass(eq=False)
class WorldUnknown(TrainerHookError):
    """Nobody says which trainer rank this is, or two sources disagree.

    Attributes:
        tried: Each source with what it said.
    """

    code: ClassVar[str] = "E_WORLD"
    tried: tuple[str, ...]

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"rank and world size of this trainer are not known: {'; '.join(self.tried)}",
            effect="no daemon was asked",
            next="initialise torch.distributed, pass rank= and world=, or set RANK and WORLD_SIZE",
        )


@dataclass(eq=False)
class NotAttached(TrainerHookError):
    """A call that needs an attached publisher.

    Attributes:
        call: The call.
        state: What the publisher is instead.
    """

    code: ClassVar[str] = "E_NOT_ATTACHED"
    call: str
    state: str

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"{self.call} needs an attached publisher, this one is {self.state}",
            next="call attach(), or use the publisher as a context manager",
        )


@dataclass(eq=False)
class SlotNotFree(TrainerHookError):
    """All slots are taken by versions that are not released.

    Attributes:
        rank: The trainer rank.
        version: Version that was to be published.
        taken: Each slot with the version it holds.
        waited_s: Seconds waited.
        limit_s: The limit.
        waiting_for: What the run waits for, in the leader's words.
    """

    code: ClassVar[str] = "E_SLOT"
    rank: int
    version: int
    taken: tuple[str, ...]
    waited_s: float
    limit_s: float
    waiting_for: str = ""

    def story(self) -> Story:
        """Return the lines of the text."""
        why = f"the run waits for {self.waiting_for}" if self.waiting_for else "the leader names nothing it waits for"
        return Story(
            what=f"version {self.version} not published: no slot became free in {self.waited_s:.1f} s "
            f"(release_s {self.limit_s:.1f})",
            which=f"{some(self.taken)}; {why}",
            who=f"trainer rank {self.rank}",
            effect="the parameters were not read; engines keep what they serve",
            next="weightd status",
        )


@dataclass(eq=False)
class VersionNotDecided(TrainerHookError):
    """``wait()`` reached its limit before the version was decided.

    Attributes:
        version: Version that was waited for.
        until: What was waited for.
        stage: Stage of the version in hand.
        waiting_for: What it waits for, in the leader's words.
        waited_s: Seconds waited.
        limit_s: The limit.
    """

    code: ClassVar[str] = "E_WAIT"
    version: int
    until: str
    stage: str
    waiting_for: str
    waited_s: float
    limit_s: float

    def story(self) -> Story:
        """Return the lines of the text."""
        why = f", waiting for {self.waiting_for}" if self.waiting_for else ""
        return Story(
            what=f"version {self.version} was not {self.until} after {self.waited_s:.1f} s "
            f"(timeout_s {self.limit_s:.1f})",
            which=f"the run is in stage {self.stage or 'unknown'}{why}",
            effect="the version goes on; waiting for it again is allowed",
            next="weightd status",
        )


@dataclass(eq=False)
class OutcomeUnknown(TrainerHookError):
    """A version was decided, and this rank was not told how.

    Attributes:
        version: The version.
        committed: Last committed version.
    """

    code: ClassVar[str] = "E_OUTCOME"
    version: int
    committed: int

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"version {self.version} was decided before version {self.committed} was committed, and this rank was "
            "not told how",
            next=f"weightd status names what became of version {self.version}",
        )
