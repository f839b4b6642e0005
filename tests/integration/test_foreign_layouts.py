"""Layouts that a hook of ours would never send: the daemon refuses them by name, and takes the next hook on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from tests.integration.test_foreign_hooks import hello
from tests.integration.test_service import configured, started
from weightd.core.errors import WeightdError, flatten
from weightd.core.layout.build import LayoutBuilder
from weightd.core.layout.message import encode_layout
from weightd.core.units import Boot, RunName, Term
from weightd.core.wire import messages as m
from weightd.core.wire.blobs import blob_digest, cut_blob
from weightd.core.wire.codec import decode, encode
from weightd.link.known_errors import error_from_daemon

pytestmark = [pytest.mark.processes, pytest.mark.net]

ANSWER_S = 10.0


@pytest.fixture(scope="module")
def folder(module_folder: Path) -> Iterator[Path]:
    process = started(configured(module_folder))
    yield module_folder
    process.kill()
    process.communicate(timeout=10)


class Foreign:
    """Trainer rank 0 of a run of its own, over a real socket."""

    def __init__(self, folder: Path, run: str) -> None:
        self._run, self._seq = RunName(run), 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"ipc://{folder / 'run' / 'control.sock'}")

    def __enter__(self) -> Foreign:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()

    def say(self, body: m.Body) -> None:
        self._seq += 1
        envelope = m.Envelope(m.PROTOCOL, self._run, Term(0), Boot(7), self._seq, bytes(16), "trainer 0", body)
        self._socket.send(encode(envelope))

    def hear(self, kind: type[m.Body]) -> Any:
        """Return the next message of a kind; goals and other messages in between are passed over."""
        end = time.monotonic() + ANSWER_S
        while (left := end - time.monotonic()) > 0:
            if self._socket.poll(round(1000 * left)):
                body = decode(self._socket.recv()).body
                if isinstance(body, kind):
                    return body
        raise AssertionError(f"no {kind} within {ANSWER_S} s")

    def send_layout(self, blob: bytes) -> WeightdError:
        """Announce a layout, send it when asked, and return why the rank is refused."""
        digest = blob_digest(blob)
        self.say(hello(os.getpid(), digest, len(blob)))
        wanted = self.hear(m.BlobWanted)
        assert wanted.digest == digest
        for chunk in cut_blob(blob, digest):
            self.say(chunk)
        return error_from_daemon(self.hear(m.Refusal).error)


def honest() -> dict[str, Any]:
    """Return a layout that can stand, as the fields of its message."""
    b = LayoutBuilder()
    for name in ("w", "v"):
        b.add_piece(b.add_tensor(name, (4, 3), "float32"), b.add_buffer(name, 48, "float32", "slot"), (0, 0), (4, 3))
    found: dict[str, Any] = msgspec.msgpack.decode(encode_layout(b.build()))
    return found


def column(name: str, *values: int) -> Callable[[dict[str, Any]], None]:
    """Write the first numbers of a column anew."""

    def change(fields: dict[str, Any]) -> None:
        numbers = np.frombuffer(fields[name], "<i8").copy()
        numbers[: len(values)] = values
        fields[name] = numbers.tobytes()

    return change


def entry(table: str, row: int, place: int, value: Any) -> Callable[[dict[str, Any]], None]:
    """Write one value of a table's row anew."""

    def change(fields: dict[str, Any]) -> None:
        fields[table][row][place] = value

    return change


NAME, DTYPE, BASE = 0, 2, 5
"""Places in the rows of the tables of tensors and buffers."""

HOSTILE: dict[str, Callable[[dict[str, Any]], None]] = {
    "E_LAYOUT_BOX": column("start", 3, 0),
    "E_LAYOUT_BUFFER": column("offset", 1 << 40),
    "E_LAYOUT_COLUMNS": column("tensor", 1 << 40),
    "E_LAYOUT_CONFLICT": entry("tensors", 0, DTYPE, "int32"),
    "E_LAYOUT_DTYPE": entry("tensors", 0, DTYPE, "float31"),
    "E_LAYOUT_ENTRY": entry("buffers", 0, BASE, 3),
    "E_LAYOUT_NAME": entry("tensors", 1, NAME, "w"),
    "E_LAYOUT_MESSAGE": entry("tensors", 0, NAME, 5),
}


@pytest.mark.parametrize("code", HOSTILE)
def test_a_hostile_layout_is_refused_by_name(folder: Path, code: str) -> None:
    fields = honest()
    HOSTILE[code](fields)
    with Foreign(folder, code) as hook:
        error = hook.send_layout(msgspec.msgpack.encode(fields))

    assert code in [e.code for e in flatten([error])], str(error)


def test_a_layout_whose_content_is_another(folder: Path) -> None:
    """Every rule holds, but it is not the layout that its digest names."""
    fields = honest()
    fields["tensors"][0][NAME] = "u"
    with Foreign(folder, "content") as hook:
        error = hook.send_layout(msgspec.msgpack.encode(fields))

    assert error.code == "E_LAYOUT_MESSAGE"
    assert "its content has digest" in str(error)


def test_a_layout_larger_than_the_memory_that_was_announced(folder: Path) -> None:
    b = LayoutBuilder()
    b.add_piece(b.add_tensor("w", (1 << 20,), "uint8"), b.add_buffer("w", 1 << 20, "uint8", "slot"), (0,), (1 << 20,))
    with Foreign(folder, "memory") as hook:
        error = hook.send_layout(encode_layout(b.build()))

    assert error.code == "E_MEMORY"
    assert "the region carries 4,096" in str(error)


def test_who_lies_about_the_size_of_a_layout_is_refused_and_holds_up_nobody(folder: Path) -> None:
    blob = msgspec.msgpack.encode(honest())
    digest = blob_digest(blob)
    with Foreign(folder, "liar") as liar, Foreign(folder, "honest") as other:
        liar.say(hello(os.getpid(), digest, 5))
        liar.hear(m.BlobWanted)
        other.say(hello(os.getpid(), digest, len(blob)))
        assert other.hear(m.BlobWanted).digest == digest
        for chunk in cut_blob(blob, digest):
            other.say(chunk)
        error = error_from_daemon(liar.hear(m.Refusal).error)

    assert error.code == "E_PROTOCOL"
    assert f"{len(blob):,} bytes, announced were 5" in str(error)
