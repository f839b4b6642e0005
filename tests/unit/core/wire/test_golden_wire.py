"""The bytes of every message are pinned: a change of one is a change of the protocol.

``WEIGHTD_REWRITE_GOLDEN=1 pytest …`` writes what the code says now; with it, ``PROTOCOL`` has to grow.
"""

import os
from pathlib import Path
from typing import get_args

import pytest

from tests.wire_samples import BODIES, envelope
from weightd.core.wire import messages as m
from weightd.core.wire.codec import decode, encode

FOLDER = Path(__file__).parents[3] / "golden" / "wire"


def name_of(body: m.Body) -> str:
    return type(body).__name__


@pytest.mark.parametrize("body", BODIES, ids=name_of)
def test_bytes_are_pinned(body: m.Body) -> None:
    path = FOLDER / f"{name_of(body)}.hex"
    frame = encode(envelope(body))
    if os.environ.get("WEIGHTD_REWRITE_GOLDEN") == "1":
        path.write_text("".join(f"{frame[i : i + 32].hex()}\n" for i in range(0, len(frame), 32)))

    assert bytes.fromhex(path.read_text()).hex() == frame.hex()


@pytest.mark.parametrize("body", BODIES, ids=name_of)
def test_pinned_bytes_are_still_understood(body: m.Body) -> None:
    frame = bytes.fromhex((FOLDER / f"{name_of(body)}.hex").read_text())

    assert envelope(body) == decode(frame)


def test_every_type_of_message_is_pinned_once() -> None:
    types = [arm.__name__ for arm in get_args(m.Body)]

    assert sorted(types) == sorted(name_of(body) for body in BODIES)
    assert sorted(types) == sorted(path.stem for path in FOLDER.glob("*.hex"))
