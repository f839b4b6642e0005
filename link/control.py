"""A hook's end of the control socket: one DEALER, owned by one thread.

The thread greets, repeats the hook's whole state, hands goals to the hook, sends the blobs that the daemon
wants and collects those that the hook wants.  It never runs a callback, never copies a
parameter and never waits for the hook's own threads, so a commit is acknowledged at
any time.  When the daemon is silent it greets again, for as long as the hook lives: a
daemon that comes back finds the hook by itself.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import threading
import time
from collections import deque
from typing import Protocol

import zmq

from weightd.core.errors import InternalInvariantBroken, WeightdError
from weightd.core.session.deadlines import Deadlines
from weightd.core.units import Boot, RunName, Term, VersionKey
from weightd.core.wire.blobs import BlobAssembler, cut_blob
from weightd.core.wire.codec import decode, encode
from weightd.core.wire.faults import PeerProtocolError, ProtocolMismatch
from weightd.core.wire.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    BlobChunk,
    BlobWanted,
    Body,
    Bye,
    EngineHello,
    Envelope,
    PublisherGoal,
    PublisherReport,
    ReceiverGoal,
    ReceiverReport,
    Refusal,
    TrainerHello,
    Welcome,
)
from weightd.link.finding import DaemonPaths
from weightd.link.known_errors import error_from_daemon

LINGER_MS = 1000
"""For the last report and the goodbye to leave; a daemon that is gone must not hold up an exit for longer."""

HIGH_WATER = 64
"""Messages queued on either side; at 2 MiB a chunk that is 128 MiB, and a state repeats anyway."""

BURST = 64
"""Messages taken in one turn, before the repeats are looked at again."""

RECONNECT_MS = 50
RECONNECT_MAX_MS = 1000


class Face(Protocol):
    """The hook as its control thread sees it.  Nothing here may block or raise for a fault of the daemon."""

    def hello(self) -> TrainerHello | EngineHello:
        """Return the greeting."""
        ...

    def report(self) -> PublisherReport | ReceiverReport:
        """Return the whole state."""
        ...

    def term_and_key(self) -> tuple[Term, VersionKey]:
        """Return the newest term known, and the version that the next report is about."""
        ...

    def blob(self, digest: str) -> bytes | None:
        """Return a blob of the hook's, or None if it has none of that digest."""
        ...

    def welcomed(self, welcome: Welcome) -> None:
        """The daemon answered; its session may be a new one."""

    def goal_arrived(self, goal: PublisherGoal | ReceiverGoal) -> None:
        """The daemon repeated the goal."""

    def blob_arrived(self, digest: str, blob: bytes) -> None:
        """A blob that was wanted is whole."""

    def refused(self, error: WeightdError) -> None:
        """The hook is no part of the run, for good."""


class ListeningClock:
    """Seconds that a thread was there to listen.

    A process that was stopped, or held up for long, heard nobody because it did not listen: that proves nothing about
    the other side.  So time counts in turns of the thread's loop, each of them up to ``most_s``.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._turn = (0.0, time.monotonic())  # one value: read by other threads, too

    def now(self) -> float:
        """The time, on this clock; any thread may ask."""
        listened, ticked_at = self._turn
        return listened + min(time.monotonic() - ticked_at, self._most_s)

    def tick(self) -> None:
        """Begin another turn."""
        self._turn = (self.now(), time.monotonic())


class ControlLink:
    """The thread and its socket.

    Attributes:
        boot: This incarnation of the hook.
        greetings: Hellos sent.
        unanswered: Hellos sent since the daemon was heard.
        dropped: Messages that were dropped because they were no messages, or older than the last one.
    """

    def __init__(self, paths: DaemonPaths, run: RunName, sender: str, face: Face, deadlines: Deadlines) -> None:
        self.boot = Boot(secrets.randbits(63))
        self.greetings = 0
        self.unanswered = 0
        self.dropped = 0
        self._paths = paths
        self._run = run
        self._sender = sender
        self._face = face
        self._heartbeat_s = deadlines.heartbeat_s
        self._silence_s = deadlines.heartbeat_timeout_s
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._goodbye = ""
        self._regreet = False
        self._final = False
        self._wanted: deque[tuple[str, int]] = deque()
        self._blobs = BlobAssembler()
        self._listening = ListeningClock(2 * deadlines.heartbeat_s)
        self._heard_at = self._connected_at = self._listening.now()
        self._greeted = False
        self._seq = 0
        self._peer: tuple[int, int] = (0, -1)
        self._thread = threading.Thread(target=self._live, name=f"weightd control {sender}", daemon=True)

    # ------------------------------------------------------------ doors for the hook's threads

    def start(self) -> None:
        """Start the thread; it greets at once and until it is answered."""
        self._listening.tick()
        self._heard_at = self._listening.now()
        self._thread.start()

    def changed(self) -> None:
        """The state changed: report it now."""
        if not self._stopping:
            os.eventfd_write(self._wake, 1)

    def want(self, digest: str, nbytes: int) -> None:
        """Ask for a blob until it is there; ``blob_arrived`` gets it."""
        self._wanted.append((digest, nbytes))
        self.changed()

    def daemon_ended(self) -> None:
        """The descriptor socket ended: do not wait for the silence to be noticed here."""
        self._regreet = True
        self.changed()

    def silent_s(self) -> float:
        """Seconds of listening since the daemon was heard, or 0 while that is no cause for concern."""
        silent = self._listening.now() - self._heard_at
        return silent if silent > self._silence_s or not self._greeted else 0.0

    def close(self, why: str) -> None:
        """Send the last report and a goodbye, and end the thread; harmless when done twice."""
        if self._stopping:
            return
        self._goodbye = why
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        os.close(self._wake)

    # ------------------------------------------------------------ the thread

    def _live(self) -> None:
        # A context of its own: contexts do not survive a fork, and nobody else's linger can hold up this one's end.
        context = zmq.Context()
        try:
            while not self._stopping:
                socket = self._connected(context)
                try:
                    self._serve(socket)
                    self._say_goodbye(socket)
                finally:
                    socket.close()
        except WeightdError as error:
            self._refuse(error)  # what we were given to say is no message: its giver is told
        except Exception as error:  # noqa: BLE001  (a thread that died unseen would leave the hook waiting for ever)
            self._refuse(InternalInvariantBroken("the control thread lives", f"{type(error).__name__}: {error}"))
        finally:
            context.term()

    def _connected(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.DEALER)
        # A random name for each connection: a router ignores a second one of a name that it still knows.
        socket.setsockopt(zmq.ROUTING_ID, b"h" + secrets.token_bytes(15))
        socket.setsockopt(zmq.IMMEDIATE, 1)  # queue nothing for a daemon that is not there
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        # Answered by ZeroMQ's own threads: a frozen daemon is noticed, a busy one is not taken for dead.
        silence_ms = int(self._silence_s * 1000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(self._heartbeat_s * 1000)))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, silence_ms)
        socket.setsockopt(zmq.HEARTBEAT_TTL, silence_ms)
        socket.connect(self._paths.endpoint)
        self._greeted = self._regreet = False
        self._connected_at = self._listening.now()
        self._peer = (0, -1)  # nothing of an older connection can arrive here
        return socket

    def _serve(self, socket: zmq.Socket[bytes]) -> None:
        """Serve one connection, until the link is closed or the daemon is to be greeted anew."""
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        repeat_at = 0.0
        while not self._stopping and not self._regreet:
            self._listening.tick()
            now = time.monotonic()
            if now >= repeat_at:
                self._repeat(socket)
                repeat_at = now + self._heartbeat_s
            ready = dict(poller.poll(max(0, math.ceil((repeat_at - now) * 1000))))
            if socket in ready and self._receive(socket):
                repeat_at = 0.0
            if self._wake in ready:
                os.eventfd_read(self._wake)
                self._ask_for_blobs(socket)
                if self._greeted and not self._final and not self._stopping:
                    self._send(socket, self._face.report())

    def _repeat(self, socket: zmq.Socket[bytes]) -> None:
        """Say again what has no other way to be known: who is here, in which state, and what it lacks."""
        if self._final:
            return
        silent = self._listening.now() - max(self._heard_at, self._connected_at)
        if silent > self._silence_s:
            # A frame over the limit, for one, ends ZeroMQ's session for good: only another socket finds the daemon.
            self._regreet = True
            return
        if not self._greeted or silent > self._silence_s / 2:
            sent = self._send(socket, self._face.hello())
            self.greetings += sent
            self.unanswered += sent
        if self._greeted:
            self._send(socket, self._face.report())
            for digest, first in self._blobs.missing().items():
                self._send(socket, BlobWanted(digest, first))

    def _ask_for_blobs(self, socket: zmq.Socket[bytes]) -> None:
        while self._wanted:
            digest, nbytes = self._wanted.popleft()
            try:
                self._blobs.expect(digest, nbytes, self._who)
            except PeerProtocolError as error:
                self._refuse(error)
                return
            self._send(socket, BlobWanted(digest, self._blobs.missing()[digest]))

    def _receive(self, socket: zmq.Socket[bytes]) -> bool:
        """Take what has arrived; say whether the state is to be repeated at once."""
        answer_now = False
        for _ in range(BURST):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                answer_now |= self._take(socket, frames)
            except ProtocolMismatch as error:
                self._refuse(error)
            except PeerProtocolError:
                self.dropped += 1
        return answer_now

    def _take(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> bool:
        if len(frames) != 1:
            raise PeerProtocolError(self._who, f"{len(frames)} frames, 1 is due", "", sum(map(len, frames)))
        envelope = decode(frames[0], self._who)
        boot, seq = self._peer
        stale = envelope.boot == boot and envelope.seq <= seq and not isinstance(envelope.body, Welcome)
        if stale or envelope.run not in (self._run, ""):
            self.dropped += 1
            return False
        self._peer = (envelope.boot, envelope.seq)
        self._heard_at = self._listening.now()
        self.unanswered = 0
        match envelope.body:
            case Welcome() as welcome:
                first = not self._greeted
                self._greeted = True
                self._face.welcomed(welcome)
                return first
            case Refusal(error=error):
                self._refuse(error_from_daemon(error))
            case PublisherGoal() | ReceiverGoal() as goal:
                self._face.goal_arrived(goal)
            case BlobWanted(digest=digest, first=first_chunk):
                blob = self._face.blob(digest)
                for chunk in cut_blob(blob, digest, first_chunk) if blob is not None else ():
                    self._send(socket, chunk)
            case BlobChunk() as chunk:
                whole = self._blobs.add(chunk, self._who)
                if whole is not None:
                    self._face.blob_arrived(chunk.digest, whole)
            case Bye():
                self._greeted = False  # it stops in order; its successor is greeted by the repeats
            case _:
                self.dropped += 1
        return False

    def _refuse(self, error: WeightdError) -> None:
        self._final = True
        self._face.refused(error)

    def _send(self, socket: zmq.Socket[bytes], body: Body) -> bool:
        """Send unless there is no connection or no room; whatever is lost here is repeated or asked for again."""
        term, key = self._face.term_and_key()
        self._seq += 1
        envelope = Envelope(
            PROTOCOL, self._run, term, self.boot, self._seq, trace_of(self._run, key), self._sender, body
        )
        try:
            socket.send(encode(envelope), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _say_goodbye(self, socket: zmq.Socket[bytes]) -> None:
        """Say that the hook leaves in order, if it does."""
        if self._stopping and self._greeted and not self._final:
            self._send(socket, self._face.report())
            self._send(socket, Bye(self._goodbye))

    @property
    def _who(self) -> str:
        return f"the daemon at {self._paths.control}"


def trace_of(run: RunName, key: VersionKey) -> bytes:
    """Return the 16 bytes that follow a version through all processes; equal everywhere without telling."""
    return hashlib.blake2b(f"{run}/{key}".encode(), digest_size=16).digest()
