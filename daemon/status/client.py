"""Asks a daemon for its status document; blocking, for the command line and tests."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

import zmq

from weightd.core.units import NO_TERM, Boot
from weightd.core.wire.codec import decode, encode
from weightd.core.wire.faults import PeerProtocolError
from weightd.core.wire.messages import PROTOCOL, Envelope, Status, StatusWanted
from weightd.link.faults import DaemonAbsent
from weightd.link.finding import DaemonPaths, why_silent


def ask_status(paths: DaemonPaths, timeout_s: float) -> dict[str, Any]:
    """Return the status document of the daemon at ``paths``.

    Raises:
        DaemonAbsent: Nobody answered within ``timeout_s``.
        PeerProtocolError: What answered is no daemon of this protocol.
    """
    question = Envelope(PROTOCOL, "", NO_TERM, Boot(secrets.randbits(63)), 1, b"\0" * 16, "cli", StatusWanted())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.ROUTING_ID, b"c" + secrets.token_bytes(15))
            socket.connect(paths.endpoint)
            begun = time.monotonic()
            socket.send(encode(question))
            if not socket.poll(int(timeout_s * 1000)):
                raise DaemonAbsent(paths.control, time.monotonic() - begun, why_silent(paths.control, 1))
            answer = decode(socket.recv(), f"the daemon at {paths.control}").body
    finally:
        context.term()
    if not isinstance(answer, Status):
        raise PeerProtocolError(
            f"the daemon at {paths.control}", f"{type(answer).__name__}, Status is due", "$.body", 0
        )
    document: dict[str, Any] = json.loads(answer.document)
    return document
