"""Why a hook is not taken on by this daemon, or an epoch not by this node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weightd.core.errors import Story, WeightdError, binary_size, some


@dataclass(eq=False)
class HookRefused(WeightdError):
    """This daemon does not take the hook on, whatever its run says.

    Attributes:
        who: The rank.
        run: Its run.
        why: The rule that it breaks, with its numbers.
        hint: What to do.
    """

    code: ClassVar[str] = "E_ADMISSION"
    who: str
    run: str
    why: str
    hint: str

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"{self.who} of run {self.run!r} not taken on: {self.why}",
            effect="the rank is not attached; the run and its other ranks are not touched",
            next=self.hint,
        )


@dataclass(eq=False)
class PeerUnknown(WeightdError):
    """A node would have to fetch from nodes that its configuration does not name.

    Attributes:
        node: The node.
        unknown: Nodes that it lacks.
        known: Nodes that it knows.
        nbytes: Bytes of every version that would come from the unknown ones.
    """

    code: ClassVar[str] = "E_PEER_UNKNOWN"
    node: str
    unknown: tuple[str, ...]
    known: tuple[str, ...]
    nbytes: int

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"node {self.node} would fetch {binary_size(self.nbytes)} of every version from {some(self.unknown)}, "
            "which its configuration does not name",
            which=f"peers in the configuration of node {self.node}: {some(self.known)}",
            effect="the epoch is not planned; nothing was sent",
            next=f"add [peers.{self.unknown[0]}] to the configuration of node {self.node} and start its daemon again",
        )
