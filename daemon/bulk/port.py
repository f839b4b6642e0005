"""The port of bulk transports: what a sender lets others read, and what a receiver asks for.

Everything here blocks and belongs in threads of its own; ``Mailbox`` carries what they
have to say to the event loop.  ``daemon.bulk.tcp`` is one transport behind it.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from weightd.core.plan.node_plan import Bucket
    from weightd.core.units import NodeId, VersionKey
    from weightd.daemon.bulk.gather import Lease

TOKEN_BYTES = 32
"""Length of a ticket's secret: that of the HMAC-SHA256 it is the key of."""

MAX_TICKET_STREAMS = 64
"""Streams that one ticket opens: the largest setting of a receiver."""


def new_token() -> bytes:
    """Return the secret of a new ticket."""
    return secrets.token_bytes(TOKEN_BYTES)


@dataclass(frozen=True, slots=True)
class Grant:
    """Leave to read one version, for one receiver and one fetch.

    It is used up when the last of its streams has ended, and void after ``expires_at``.

    Attributes:
        ticket: Its number.
        token: Its secret, told to the receiver on the control channel.
        receiver: Node that may read.
        lease: What it may read.
        expires_at: On the clock of ``time.monotonic``.
        on_readers: Told the number of open streams when it changes, from a worker thread.
    """

    ticket: int
    token: bytes = field(repr=False)
    receiver: NodeId
    lease: Lease
    expires_at: float
    on_readers: Callable[[int], None] = field(default=lambda _: None)


class BulkServer(Protocol):
    """Serves the fetches of other nodes, in threads of its own."""

    @property
    def port(self) -> int:
        """TCP port that is listened on."""
        raise NotImplementedError

    def grant(self, grant: Grant) -> None:
        """Let the holder of the grant's secret read."""

    def revoke(self, ticket: int) -> None:
        """Void a grant and end its streams; harmless when done twice."""

    def close(self) -> None:
        """End every stream and every thread, within a second."""


class Stop:
    """Tells a fetch to stop, from any thread, at once: it closes what the fetch is waiting on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closers: list[Callable[[], None]] = []
        self._set = False

    @property
    def is_set(self) -> bool:
        """Whether ``set`` was called."""
        return self._set

    def set(self) -> None:
        """Stop; harmless when done twice, or after the end."""
        with self._lock:
            self._set = True
            closers, self._closers = self._closers, []
        for close in closers:
            close()

    def on_set(self, close: Callable[[], None]) -> None:
        """Call ``close`` when told to stop; at once if that has been."""
        with self._lock:
            if not self._set:
                self._closers.append(close)
                return
        close()


@dataclass(frozen=True, slots=True)
class FetchJob:
    """All buckets that a node fetches from one other, for one version.

    Attributes:
        sender: Node that has the bytes.
        receiver: This node.
        host: Numeric address of the sender's bulk server, from the configuration.
        port: Its port.
        ticket: From the sender's ``Ticket``.
        token: Likewise.
        key: The version.
        buckets: Those that are still lacking.
        of: Buckets of the node's whole plan, for texts.
        landing: Payload of the half that they land in.
        streams: TCP streams at once.
        deadline_at: For the whole fetch, on the clock of ``time.monotonic``.
        fetch_s: The limit that ``deadline_at`` follows from, for texts.
        stall_s: For the next byte.
    """

    sender: NodeId
    receiver: NodeId
    host: str
    port: int
    ticket: int
    token: bytes = field(repr=False)
    key: VersionKey
    buckets: Sequence[Bucket]
    of: int
    landing: NDArray[np.uint8] = field(repr=False)
    streams: int
    deadline_at: float
    fetch_s: float
    stall_s: float


@dataclass(frozen=True, slots=True)
class FetchResult:
    """What a fetch did.

    Attributes:
        nbytes: Bytes that landed and were checked, each bucket once.
        wire_nbytes: Payload bytes that crossed, those of repeated buckets included.
        repeated: Buckets that had to be asked for once more.
        seconds: From the first connection to the last bucket.
    """

    nbytes: int
    wire_nbytes: int
    repeated: int
    seconds: float


class BulkClient(Protocol):
    """Fetches; blocks the calling thread until all is there or it failed."""

    def fetch(self, job: FetchJob, stop: Stop, on_bucket: Callable[[Bucket], None]) -> FetchResult:
        """Fetch all buckets of a job.

        Args:
            job: What and from whom.
            stop: Ends it early.
            on_bucket: Told each bucket that landed and was checked, one at a time, from worker threads.

        Raises:
            TransferError: The bytes are not all there; which kind says why.
        """
        raise NotImplementedError
