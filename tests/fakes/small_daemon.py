"""A daemon of a few threads that says what a test tells it to say, over real sockets and in real messages."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import zmq

from weightd.core.errors import WireError
from weightd.core.units import NO_TERM, Boot, NodeId, RunName
from weightd.core.wire import messages as m
from weightd.core.wire.blobs import BlobAssembler, cut_blob
from weightd.core.wire.codec import decode, encode
from weightd.link.fd_messages import (
    Accepted,
    Bind,
    Datagram,
    Denied,
    Offer,
    PoolHead,
    PoolKey,
    Pools,
    decode_request,
    receive_datagram,
    send_datagram,
)
from weightd.link.memory import Pool

T = TypeVar("T")

TURN_MS = 5


@dataclass
class Seen:
    """What the daemon has seen of one hook."""

    hello: m.TrainerHello | m.EngineHello
    boot: Boot
    session: int
    routing_id: bytes
    hellos: int = 1
    report: m.PublisherReport | m.ReceiverReport | None = None
    reports: list[m.PublisherReport | m.ReceiverReport] = field(default_factory=list)
    layout: bytes | None = None
    pools: dict[PoolKey, Pool] = field(default_factory=dict)
    bound: bool = False
    bye: str | None = None


class SmallDaemon:
    """Welcomes everybody, asks for layouts, takes pools, gives blobs and pools; goals are the test's."""

    def __init__(self, folder: Path, *, welcome: bool = True) -> None:
        self.folder = folder
        self.boot = Boot(int.from_bytes(os.urandom(4), "big"))
        self.hooks: dict[str, Seen] = {}
        self.blobs: dict[str, bytes] = {}
        self.given: dict[PoolKey, Pool] = {}
        self.refuse: WireError | None = None
        self.deny: WireError | None = None
        self.welcome = welcome
        self.junk: list[bytes] = []
        self._seq = 0
        self._out: queue.Queue[tuple[bytes, bytes]] = queue.Queue()
        self._blobs = BlobAssembler()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._accepted: list[socket.socket] = []

    # ------------------------------------------------------------ life

    def start(self) -> SmallDaemon:
        self._fd_socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._fd_socket.bind(str(self.folder / "fd.sock"))
        self._fd_socket.listen()
        self._fd_socket.settimeout(0.05)
        self._threads = [threading.Thread(target=t, daemon=True) for t in (self._route, self._accept)]
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        """End as a killed process does: sockets close, nothing is said."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._fd_socket.close()
        for sock in self._accepted:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for name in ("fd.sock", "control.sock"):
            (self.folder / name).unlink(missing_ok=True)

    def __enter__(self) -> SmallDaemon:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ------------------------------------------------------------ for the test

    def say(self, who: str, body: m.Body, run: str = "r", *, seq: int | None = None) -> None:
        self._send(self.hooks[who].routing_id, body, run, seq)

    def say_bytes(self, who: str, frame: bytes) -> None:
        self._out.put((self.hooks[who].routing_id, frame))

    def wait(self, look: Callable[[], T | None], what: str, limit_s: float = 10.0) -> T:
        """Wait for something to be seen."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            found = look()
            if found:
                return found
            time.sleep(0.005)
        raise AssertionError(f"not seen in {limit_s} s: {what}; last reports {[h.report for h in self.hooks.values()]}")

    def hook(self, who: str) -> Seen:
        """Wait for a hook that is complete: bound, its layout here, its pools offered."""

        def look() -> Seen | None:
            seen = self.hooks.get(who)
            if seen is None or seen.layout is None or not seen.bound or seen.report is None:
                return None
            due = len(seen.hello.regions) if isinstance(seen.hello, m.TrainerHello) else 0
            return seen if len(seen.pools) == due else None

        return self.wait(look, f"{who} complete")

    def receiver(self, who: str) -> m.ReceiverReport:
        report = self.hooks[who].report
        assert isinstance(report, m.ReceiverReport)
        return report

    def publisher(self, who: str) -> m.PublisherReport:
        report = self.hooks[who].report
        assert isinstance(report, m.PublisherReport)
        return report

    # ------------------------------------------------------------ control socket

    def _send(self, routing_id: bytes, body: m.Body, run: str = "r", seq: int | None = None) -> None:
        if seq is None:
            self._seq += 1
            seq = self._seq
        envelope = m.Envelope(m.PROTOCOL, RunName(run), NO_TERM, self.boot, seq, bytes(16), "node", body)
        self._out.put((routing_id, encode(envelope)))

    def _route(self) -> None:
        context = zmq.Context()
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.bind(f"ipc://{self.folder / 'control.sock'}")
        try:
            while not self._stop.is_set():
                while not self._out.empty():
                    router.send_multipart(self._out.get())
                if router.poll(TURN_MS):
                    routing_id, frame = router.recv_multipart()
                    self._take(routing_id, decode(frame))
        finally:
            router.close()
            context.term()

    def _take(self, routing_id: bytes, envelope: m.Envelope) -> None:
        body, who = envelope.body, envelope.sender
        match body:
            case m.TrainerHello() | m.EngineHello():
                self._greeted(routing_id, envelope, body)
                return
            case _ if who not in self.hooks or self.hooks[who].boot != envelope.boot:
                return
        seen = self.hooks[who]
        seen.routing_id = routing_id
        match body:
            case m.PublisherReport() | m.ReceiverReport():
                seen.report = body
                seen.reports.append(body)
            case m.BlobChunk():
                seen.layout = self._blobs.add(body, who) or seen.layout
            case m.BlobWanted(digest=digest, first=first) if digest in self.blobs:
                for chunk in cut_blob(self.blobs[digest], digest, first):
                    self._send(routing_id, chunk)
            case m.Bye(why=why):
                seen.bye = why
            case _:
                pass

    def _greeted(self, routing_id: bytes, envelope: m.Envelope, hello: m.TrainerHello | m.EngineHello) -> None:
        if self.refuse is not None:
            self._send(routing_id, m.Refusal(self.refuse))
            return
        known = self.hooks.get(envelope.sender)
        if known is not None and known.boot == envelope.boot:
            known.hellos += 1
            known.routing_id = routing_id
        else:
            session = int.from_bytes(os.urandom(4), "big") + 1
            known = self.hooks[envelope.sender] = Seen(hello, envelope.boot, session, routing_id)
        if self.welcome:
            self._send(routing_id, m.Welcome(NodeId("node"), known.session, 0.1, 0.5, m.MAX_FRAME_BYTES))
            if known.layout is None:
                self._blobs.expect(hello.layout_digest, hello.layout_nbytes, envelope.sender)
                self._send(routing_id, m.BlobWanted(hello.layout_digest))

    # ------------------------------------------------------------ descriptor socket

    def _accept(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                sock, _ = self._fd_socket.accept()
                self._accepted.append(sock)
                thread = threading.Thread(target=self._converse, args=(sock,), daemon=True)
                thread.start()

    def _converse(self, sock: socket.socket) -> None:
        seen: Seen | None = None
        for datagram in _datagrams(sock):
            request = decode_request(datagram, "a hook")
            if self.deny is not None:
                send_datagram(sock, Denied(self.deny))
                continue
            match request:
                case Bind(session=session):
                    seen = next((s for s in self.hooks.values() if s.session == session), None)
                    if seen is None:
                        sock.shutdown(socket.SHUT_RDWR)  # a session of the daemon before this one
                        return
                    seen.bound = True
                    send_datagram(sock, Accepted())
                case Offer(key=key, nbytes=nbytes):
                    assert seen is not None
                    seen.pools[key] = Pool.adopt(datagram.fds[0], nbytes, name=str(key))
                    send_datagram(sock, Accepted())
                case _:
                    heads = tuple(PoolHead(k, p.nbytes, str(k)) for k, p in self.given.items())
                    fds = [pool.fd for pool in self.given.values()]
                    send_datagram(sock, Pools(heads, more=False), fds)
        if seen is not None:
            seen.bound = False


def _datagrams(sock: socket.socket) -> Iterator[Datagram]:
    while True:
        try:
            datagram = receive_datagram(sock, "a hook")
        except OSError:
            return
        if datagram is None:
            return
        yield datagram
