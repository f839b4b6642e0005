"""The first page of every pool: what it is, whether it is being written, what a landing holds.

The page is a fixed layout of little-endian numbers, read and written in place
through numpy; each number is aligned to its size, so that it is never seen half written.

===========  =====================================================================
bytes        field
===========  =====================================================================
0-8          magic
8-16         version of this layout, size of this page (two uint32)
16-24        generation: odd while the payload is written
24-32        payload_nbytes
32-64        term, version, attempt boot, attempt count (landings; else 0)
64-128       plan digest, ASCII, padded with zeros (landings)
128-144      buckets, buckets_per_bit (landings)
144-1024     reserved, zero
1024-4096    bitmap of buckets that were checked, lowest bit first (landings)
===========  =====================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from weightd.core.units import NO_KEY, NO_TERM, Attempt, Boot, Term, Version, VersionKey

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

HEADER_BYTES = 4096
"""One page, so that the payload starts page-aligned."""

MAGIC = b"WEIGHTD\x01"
LAYOUT_VERSION = 1

_BITMAP_OFFSET = 1024
BITMAP_BITS = 8 * (HEADER_BYTES - _BITMAP_OFFSET)
"""24,576 buckets with a bit each: at 32 MiB a bucket, a landing of 768 GiB."""

_FIELDS = np.dtype(
    {
        "names": [
            "magic",
            "layout_version",
            "header_nbytes",
            "generation",
            "payload_nbytes",
            "term",
            "version",
            "attempt_boot",
            "attempt_count",
            "plan_digest",
            "buckets",
            "buckets_per_bit",
            "bitmap",
        ],
        "formats": [
            "S8",
            "<u4",
            "<u4",
            "<i8",
            "<i8",
            "<i8",
            "<i8",
            "<i8",
            "<i8",
            "S64",
            "<i8",
            "<i8",
            ("u1", (HEADER_BYTES - _BITMAP_OFFSET,)),
        ],
        "offsets": [0, 8, 12, 16, 24, 32, 40, 48, 56, 64, 128, 136, _BITMAP_OFFSET],
        "itemsize": HEADER_BYTES,
    }
)


class Description(NamedTuple):
    """What a landing holds, in its own words: enough to find it again after a restart.

    Attributes:
        term: Of the leader that ordered the fetch.
        key: Version and attempt of the bytes.
        plan_digest: Plan that lays them out.
        buckets: Buckets of that plan.
    """

    term: Term
    key: VersionKey
    plan_digest: str
    buckets: int


NOTHING = Description(NO_TERM, NO_KEY, "", 0)


class Header:
    """A view of a pool's first page."""

    def __init__(self, page: NDArray[np.uint8]) -> None:
        self._fields = page[:HEADER_BYTES].view(_FIELDS)
        self._generation: NDArray[np.int64] = self._fields["generation"]
        self._bitmap: NDArray[np.uint8] = self._fields["bitmap"][0]

    def initialise(self, payload_nbytes: int) -> None:
        """Write a fresh header into a page of zeros.  The magic comes last: a torn header is none."""
        self._fields["layout_version"] = LAYOUT_VERSION
        self._fields["header_nbytes"] = HEADER_BYTES
        self._fields["payload_nbytes"] = payload_nbytes
        self._fields["magic"] = MAGIC

    def fault(self, nbytes: int) -> str:
        """Return why this is no header of a pool of ``nbytes`` in all, or an empty text."""
        if self._fields["magic"][0] != MAGIC:
            return "its first page is no header of weightd"
        found = int(self._fields["layout_version"][0])
        if found != LAYOUT_VERSION or int(self._fields["header_nbytes"][0]) != HEADER_BYTES:
            return f"its header has layout {found}, this build reads layout {LAYOUT_VERSION}"
        due = pool_nbytes(self.payload_nbytes) if self.payload_nbytes >= 0 else -1
        if due != nbytes:
            return f"its header speaks of {self.payload_nbytes:,} bytes of payload, which is not its size"
        return ""

    @property
    def payload_nbytes(self) -> int:
        """Bytes of payload, before rounding to pages."""
        return int(self._fields["payload_nbytes"][0])

    @property
    def generation(self) -> int:
        """Counter of writes: odd while one is under way."""
        return int(self._generation[0])

    def bump(self) -> int:
        """Count one: before the first byte of a write, and after the last.  Return the new value."""
        self._generation[0] += 1
        return self.generation

    @property
    def description(self) -> Description:
        """What the pool says it holds."""
        row = self._fields[0]
        attempt = Attempt(Boot(int(row["attempt_boot"])), int(row["attempt_count"]))
        key = VersionKey(Version(int(row["version"])), attempt)
        digest = bytes(row["plan_digest"]).decode("ascii", "replace")
        return Description(Term(int(row["term"])), key, digest, int(row["buckets"]))

    def describe(self, held: Description) -> None:
        """Say what the pool is going to hold, and that none of it is there yet."""
        per_bit = max(1, -(-held.buckets // BITMAP_BITS))
        self._bitmap[:] = 0
        self._fields["term"] = held.term
        self._fields["version"] = held.key.version
        self._fields["attempt_boot"] = held.key.attempt.boot
        self._fields["attempt_count"] = held.key.attempt.number
        self._fields["plan_digest"] = held.plan_digest.encode("ascii")
        self._fields["buckets"] = held.buckets
        self._fields["buckets_per_bit"] = per_bit

    @property
    def buckets_per_bit(self) -> int:
        """Buckets that share a bit: 1, unless a landing has more than ``BITMAP_BITS`` of them."""
        return max(1, int(self._fields["buckets_per_bit"][0]))

    def mark(self, bits: Iterable[int]) -> None:
        """Say that the buckets of these bits are there and were checked."""
        for bit in bits:
            self._bitmap[bit >> 3] |= np.uint8(1 << (bit & 7))

    def marked(self) -> frozenset[int]:
        """Return the bits that are set, among those of the described buckets."""
        bits = -(-self.description.buckets // self.buckets_per_bit)
        on = np.unpackbits(self._bitmap, count=max(0, min(bits, BITMAP_BITS)), bitorder="little")
        return frozenset(int(i) for i in np.flatnonzero(on))

    def continue_from(self, other: Header) -> None:
        """Take over what another pool says of itself, its generation included."""
        self.describe(other.description)
        self._bitmap[:] = other._bitmap
        self._generation[0] = other.generation


def pool_nbytes(payload_nbytes: int) -> int:
    """Return the size of the whole memfd of a pool: the header page and whole pages of payload.

    >>> pool_nbytes(0), pool_nbytes(1), pool_nbytes(4096)
    (4096, 8192, 8192)
    """
    return HEADER_BYTES + -(-payload_nbytes // HEADER_BYTES) * HEADER_BYTES
