"""Errors of messages and of bytes between nodes.  They cross the wire, so they are plain data.

::

    ProtocolError
    ├── PeerProtocolError   E_PROTOCOL           a peer sent what may not be sent
    ├── ProtocolMismatch    E_PROTOCOL_VERSION   a peer speaks another version of the wire
    └── LocalProtocolError  E_PROTOCOL_LOCAL     we tried to send what may not be sent
    TransferError
    ├── PeerLost            E_PEER_LOST          a stream ended before its bytes did
    ├── DigestMismatch      E_DIGEST             these are not the bytes that were sent
    ├── StaleSource         E_STALE_SOURCE       the source was overwritten while it was read
    ├── TransferDeadline    E_TRANSFER_DEADLINE  bytes did not come in time
    ├── TransferCancelled   E_TRANSFER_CANCELLED it was told to stop
    └── TicketRefused       E_TICKET             no leave to read
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weightd.core.errors import Story, WeightdError, binary_size


class ProtocolError(WeightdError):
    """A message that breaks the rules of the wire."""


@dataclass(eq=False)
class PeerProtocolError(ProtocolError):
    """A peer sent something illegal; it was dropped whole.

    Attributes:
        who: The peer, as well as it is known: node id, rank, or pid and uid.
        what: The rule that was broken, with its numbers.
        path: The field, as ``$.body.rank``; empty where no field was reached.
        nbytes: Size of the message.
    """

    code: ClassVar[str] = "E_PROTOCOL"
    who: str
    what: str
    path: str
    nbytes: int

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"a message of {self.nbytes} bytes is not one of the protocol: {self.what}",
            which=f"field {self.path}" if self.path else "",
            who=f"sent by {self.who}",
            effect="the message was dropped, no part of it was acted on",
        )


@dataclass(eq=False)
class ProtocolMismatch(ProtocolError):
    """A peer speaks another version of the wire.

    Attributes:
        who: The peer.
        theirs: Its protocol number.
        ours: The number of this build.
    """

    code: ClassVar[str] = "E_PROTOCOL_VERSION"
    who: str
    theirs: int
    ours: int

    def story(self) -> Story:
        """Return the lines of the text."""
        newer = "the peer" if self.theirs > self.ours else "this process"
        return Story(
            what=f"{self.who} speaks protocol {self.theirs}, this process speaks {self.ours}",
            effect="the message was dropped; the two cannot take part in one run",
            next=f"install the weightd of {newer} on both sides",
        )


@dataclass(eq=False)
class LocalProtocolError(ProtocolError):
    """A message of ours may not be sent: a fault of weightd, not of its peer.

    Attributes:
        message: Type of the body.
        what: The rule that it breaks, with its numbers.
        path: The field, where one is known.
    """

    code: ClassVar[str] = "E_PROTOCOL_LOCAL"
    exit_code: ClassVar[int] = 70
    message: str
    what: str
    path: str = ""

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"{self.message} not sent: {self.what}",
            which=f"field {self.path}" if self.path else "",
            next="please report this with the log around it",
        )


class TransferError(WeightdError):
    """Bytes that did not arrive, or not these."""


@dataclass(eq=False)
class PeerLost(TransferError):
    """A bulk stream ended before its bytes did.

    Attributes:
        sender: Node that sends.
        receiver: Node that receives.
        version: Of the bytes, as text with its attempt.
        done_buckets: Checked buckets when the stream ended.
        buckets: Buckets of this fetch.
        done_nbytes: Bytes of the checked buckets.
        nbytes: Bytes of this fetch.
        why: What the socket said.
    """

    code: ClassVar[str] = "E_PEER_LOST"
    sender: str
    receiver: str
    version: str
    done_buckets: int
    buckets: int
    done_nbytes: int
    nbytes: int
    why: str

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"stream from node {self.sender} ended after {self.done_buckets} of {self.buckets} buckets of "
            f"{self.version} ({binary_size(self.done_nbytes)} of {binary_size(self.nbytes)}): {self.why}",
            who=f"node {self.sender} → node {self.receiver}",
            next=f"read the log of the daemon on node {self.sender}",
        )


@dataclass(eq=False)
class DigestMismatch(TransferError):
    """The bytes that arrived are not those that were sent, twice.

    Attributes:
        bucket: Index of the bucket.
        of: Buckets of the node's plan.
        version: Of the bytes, as text with its attempt.
        sender: Node that sent.
        receiver: Node that received.
        sent: xxh3_128 of the sender, hex.
        received: xxh3_128 of the receiver, hex.
        nbytes: Size of the bucket.
    """

    code: ClassVar[str] = "E_DIGEST"
    bucket: int
    of: int
    version: str
    sender: str
    receiver: str
    sent: str
    received: str
    nbytes: int

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"bucket {self.bucket} of {self.of}, {self.version}: xxh3_128 {self.sent} sent, "
            f"{self.received} received over {self.nbytes:,} bytes",
            who=f"node {self.sender} → node {self.receiver}",
            effect="the bucket was asked for once more and differed again; its bytes are not used",
            next="check memory and network of both nodes: the digest was taken from the sender's shared memory",
        )


@dataclass(eq=False)
class StaleSource(TransferError):
    """A source was overwritten while it was read, or does not hold the version any more.

    Attributes:
        bucket: Index of the bucket.
        version: That was asked for, as text with its attempt.
        sender: Node of the source.
        source: The trainer rank and region, as ``trainer 3 region 0``.
        expected: Generation that holds the version.
        found: Generation that was seen; -1 where the source was closed.
    """

    code: ClassVar[str] = "E_STALE_SOURCE"
    bucket: int
    version: str
    sender: str
    source: str
    expected: int
    found: int

    def story(self) -> Story:
        """Return the lines of the text."""
        writing = " (odd: it is being written)" if self.found % 2 else ""
        if self.found < 0:
            writing = " (it was closed)"
        return Story(
            what=f"bucket {self.bucket}, {self.version}: {self.source} is at generation {self.found}{writing}, "
            f"generation {self.expected} held the version",
            who=f"node {self.sender}",
            effect="the bytes read were discarded",
        )


@dataclass(eq=False)
class TransferDeadline(TransferError):
    """Bytes of a fetch did not come in time.

    Attributes:
        sender: Node that sends.
        receiver: Node that receives.
        version: Of the bytes, as text with its attempt.
        bucket: Bucket that was waited for; -1 before the first.
        doing: What was waited for.
        waited_s: Seconds waited.
        limit_s: The limit.
        setting: Name of the limit.
    """

    code: ClassVar[str] = "E_TRANSFER_DEADLINE"
    sender: str
    receiver: str
    version: str
    bucket: int
    doing: str
    waited_s: float
    limit_s: float
    setting: str

    def story(self) -> Story:
        """Return the lines of the text."""
        at = f" at bucket {self.bucket}" if self.bucket >= 0 else ""
        return Story(
            what=f"{self.version}{at}: {self.doing} took {self.waited_s:.1f} s, the limit is {self.limit_s:.1f} s",
            who=f"node {self.sender} → node {self.receiver}",
            next=f"read the log of the daemon on node {self.sender}, or raise {self.setting} (now {self.limit_s:.1f})",
        )


@dataclass(eq=False)
class TransferCancelled(TransferError):
    """A fetch was told to stop.

    Attributes:
        sender: Node that sends.
        version: Of the bytes, as text with its attempt.
    """

    code: ClassVar[str] = "E_TRANSFER_CANCELLED"
    sender: str
    version: str

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(what=f"the fetch of {self.version} from node {self.sender} was told to stop")


@dataclass(eq=False)
class TicketRefused(TransferError):
    """A node gives no leave to read from it.

    Attributes:
        sender: Node that was to send.
        ticket: Number of the ticket.
        why: What the node said.
    """

    code: ClassVar[str] = "E_TICKET"
    sender: str
    ticket: int
    why: str

    def story(self) -> Story:
        """Return the lines of the text."""
        return Story(
            what=f"node {self.sender} refused ticket {self.ticket}: {self.why}",
            effect="no byte was sent",
            next="ask for a new ticket: one serves one fetch and ends with it",
        )
