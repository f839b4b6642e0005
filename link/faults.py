"""What can go wrong between a hook and its node's daemon, and with memory that both hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weightd.core.errors import Story, WeightdError, binary_size


@dataclass(eq=False)
class DaemonAbsent(WeightdError):
    """No daemon answers on this node.

    Attributes:
        path: The socket that was tried.
        waited_s: Seconds tried.
        why: What the last try ended with.
    """

    code: ClassVar[str] = "E_NO_DAEMON"
    path: str
    waited_s: float
    why: str

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"no daemon answers at {self.path}, tried for {self.waited_s:.1f} s: {self.why}",
            effect="nothing was attached, published or received",
            next="start `weightd serve` on this node, or point WEIGHTD_SOCKET at the socket of one that runs",
        )


@dataclass(eq=False)
class PeerGone(WeightdError):
    """The other end of a socket has ended.

    Attributes:
        peer: Who it was: ``the daemon at <path>``, or a hook with its pid.
        doing: What was being done.
        why: What the socket said.
    """

    code: ClassVar[str] = "E_PEER_GONE"
    peer: str
    doing: str
    why: str

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"{self.peer} is gone: {self.why}",
            which=f"while {self.doing}",
            next="read the end of its log; a hook attaches again by itself when its daemon is back",
        )


@dataclass(eq=False)
class HookDeadline(WeightdError):
    """A call of a hook took longer than it was given.

    Attributes:
        peer: Who was to answer.
        doing: What was waited for.
        waited_s: Seconds waited.
        limit_s: The limit.
    """

    code: ClassVar[str] = "E_HOOK_DEADLINE"
    peer: str
    doing: str
    waited_s: float
    limit_s: float

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"no answer from {self.peer} while {self.doing}: waited {self.waited_s:.1f} s of {self.limit_s:.1f} s",
            next="run `weightd status` on this node: it says what the daemon is doing",
        )


@dataclass(eq=False)
class MemoryRefused(WeightdError):
    """A descriptor is not the sealed memory that it claims to be; it was closed without being mapped.

    Attributes:
        name: Which pool: ``trainer 3 slot 0 region 1``.
        claimed_nbytes: Size that was claimed for it.
        found_nbytes: Size of what it is; -1 where it has none.
        why: The rule that it breaks.
    """

    code: ClassVar[str] = "E_MEMORY"
    name: str
    claimed_nbytes: int
    found_nbytes: int
    why: str

    def story(self) -> Story:
        """Return the lines of the text."""
        found = f"{self.found_nbytes:,}" if self.found_nbytes >= 0 else "none"
        return Story(
            what=f"shared memory of {self.name} refused: {self.why}",
            which=f"bytes claimed {self.claimed_nbytes:,}, found {found}",
            effect="the descriptor was closed before anything was mapped",
            next="make memory that others map with weightd.link.memory.Pool.create",
        )


@dataclass(eq=False)
class MemoryExhausted(WeightdError):
    """The system does not give the memory or the descriptors that a pool needs.

    Attributes:
        name: Which pool.
        nbytes: Its size.
        doing: The step that failed.
        why: What the system said.
        hint: What to look at.
    """

    code: ClassVar[str] = "E_MEMORY_EXHAUSTED"
    name: str
    nbytes: int
    doing: str
    why: str
    hint: str

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"no shared memory of {binary_size(self.nbytes)} for {self.name}: {self.doing}: {self.why}",
            effect="nothing was kept of it",
            next=self.hint,
        )
