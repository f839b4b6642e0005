"""Hard limits of every decoded message; whatever exceeds one is refused before any type is looked at.

A frame is bounded first, and every byte of it yields at most one value.  The
other limits keep what a small hostile frame can make of itself small.
"""

from __future__ import annotations

from weightd.core.wire.messages import CHUNK_BYTES, MAX_FRAME_BYTES

ENVELOPE_BYTES = 64 << 10
"""Kept free in a frame for everything around its one large field: names, numbers, keys."""

MAX_TEXT_BYTES = MAX_FRAME_BYTES // 2
"""Longest text.  The longest that is sent is the report of a refused run, one block a violation."""

MAX_BINARY_BYTES = MAX_FRAME_BYTES // 2
"""Longest run of bytes: twice a blob's chunk, and room for the status document of a large run."""

MAX_LIST_ITEMS = 1 << 18
"""Longest list: a hundred times the ranks of the largest runs known (a few thousand)."""

MAX_MAP_ITEMS = 1 << 12
"""Most keys of one map: the widest struct has 17, an error's fields may be a table of ranks."""

MAX_CONTAINERS = 1 << 18
"""Most lists and maps of one frame.  An empty list is 1 byte on the wire and 64 in memory: 16 MiB at most.
The goal of 4,096 ranks has some 40,000."""

MAX_DEPTH = 32
"""Deepest nesting.  Our deepest message nests 9 levels; reports within reports add 2 each."""

MAX_BLOB_BYTES = 1 << 30
"""Largest blob.  The layout of 70,000 tensors is below 10 MiB, that of a million pieces below 150 MiB."""

MAX_BLOB_CHUNKS = MAX_BLOB_BYTES // CHUNK_BYTES
"""Most chunks of a blob."""

DATAGRAM_BYTES = 16 << 10
"""Largest message on the descriptor socket: 16 keys with names, or an error's text."""

DATAGRAM_FDS = 16
"""Most descriptors of one message there; the kernel would pass 253, a slot rarely has more than one."""
