"""Plain values as MessagePack bytes."""

from __future__ import annotations

from typing import cast

import msgpack


def packed(value: object) -> bytes:
    """Return a value made of lists, text-keyed maps, texts, bytes and whole numbers as bytes, always the same ones.

    >>> packed({"w": [5, 3]}).hex()
    '81a177920503'
    """
    return cast("bytes", msgpack.packb(value))  # its annotation allows for the None of a streaming packer
