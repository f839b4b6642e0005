"""Large things in small messages: a blob is cut into chunks, and put together by its digest.

Layouts and rank plans are blobs.  Whoever lacks one asks for it by digest; chunks
may come doubled, in any order and from several senders: only the digest of the
whole decides, and a blob that is not what it is called never leaves this module.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightd.core.wire.faults import PeerProtocolError
from weightd.core.wire.limits import MAX_BLOB_BYTES
from weightd.core.wire.messages import CHUNK_BYTES, BlobChunk

if TYPE_CHECKING:
    from collections.abc import Iterator

DIGEST_BYTES = 16
"""128 bits: two of the blobs of a run are equal by chance once in 10^30 runs, and it fits a log line."""

MAX_OPEN_BLOBS = 1024
"""Blobs in assembly at once: the layouts of all ranks of a node and of what it plans, with room."""


def blob_digest(blob: bytes) -> str:
    """Return the digest that names a blob: blake2b of 16 bytes, in hex."""
    return hashlib.blake2b(blob, digest_size=DIGEST_BYTES).hexdigest()


def chunk_count(nbytes: int) -> int:
    """Return the number of chunks of a blob; an empty one has one empty chunk.

    >>> chunk_count(0), chunk_count(CHUNK_BYTES), chunk_count(CHUNK_BYTES + 1)
    (1, 1, 2)
    """
    return max(1, -(-nbytes // CHUNK_BYTES))


def cut_blob(blob: bytes, digest: str, first: int = 0) -> Iterator[BlobChunk]:
    """Yield the chunks of a blob from number ``first`` on.

    Args:
        blob: All of it.
        digest: Its name, as ``blob_digest`` gives it; passed in so that it is computed once per blob.
        first: First chunk that the other side lacks.
    """
    count = chunk_count(len(blob))
    for index in range(first, count):
        data = blob[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
        yield BlobChunk(digest, index, count, len(blob), data)


@dataclass(slots=True)
class _Assembly:
    """One blob that is being put together."""

    nbytes: int
    chunks: dict[int, bytes] = field(default_factory=dict)


class BlobAssembler:
    """Puts announced blobs together; holds at most ``max_nbytes`` of ``max_blobs`` blobs at once.

    Only what was expected is taken: a size is announced before (in a hello, a report
    or a goal), so that no peer decides how much memory its chunks may fill.
    """

    def __init__(self, max_blobs: int = MAX_OPEN_BLOBS, max_nbytes: int = MAX_BLOB_BYTES) -> None:
        self._max_blobs = max_blobs
        self._max_nbytes = max_nbytes
        self._open: dict[str, dict[int, _Assembly]] = {}  # by digest and size: one who lies about it holds up nobody

    def expect(self, digest: str, nbytes: int, who: str) -> None:
        """Announce a blob; harmless if it was announced already.  Another size is another blob until one is whole.

        Args:
            digest: Its name.
            nbytes: Its size.
            who: Who announced it, for the error.

        Raises:
            PeerProtocolError: It would exceed the limits.
        """
        sizes = self._open.get(digest, {})
        if nbytes in sizes:
            return
        known = [a for of in self._open.values() for a in of.values()]
        if len(known) >= self._max_blobs:
            raise _refused(who, f"blob {digest} announced while {self._max_blobs:,} others are incomplete", 0)
        announced = sum(a.nbytes for a in known)
        if announced + nbytes > self._max_nbytes:
            what = (
                f"blob {digest} of {nbytes:,} bytes announced beside {announced:,}, the limit is {self._max_nbytes:,}"
            )
            raise _refused(who, what, 0)
        self._open.setdefault(digest, {})[nbytes] = _Assembly(nbytes)

    def forget(self, digest: str) -> None:
        """Drop a blob that nobody needs any more."""
        self._open.pop(digest, None)

    def missing(self) -> dict[str, int]:
        """Return each incomplete blob with the first chunk it lacks, as ``BlobWanted`` asks for it."""
        return {digest: min(_first_gap(a.chunks) for a in of.values()) for digest, of in self._open.items()}

    def add(self, chunk: BlobChunk, who: str) -> bytes | None:
        """Take a chunk in, and return the whole blob if it was the last one.

        A chunk of a blob that is not expected (any more) is dropped: it was doubled or late.

        Raises:
            PeerProtocolError: The chunk contradicts its blob, or the whole is not what its digest
                says; in that case all its chunks are dropped and it stays expected.
        """
        sizes = self._open.get(chunk.digest)
        if sizes is None:
            return None
        assembly = sizes.get(chunk.nbytes) or next(iter(sizes.values()))
        _check_chunk(chunk, assembly.nbytes, who)
        assembly.chunks.setdefault(chunk.index, chunk.data)
        if len(assembly.chunks) < chunk.count:
            return None
        blob = b"".join(assembly.chunks[i] for i in range(chunk.count))
        found = blob_digest(blob)
        if found != chunk.digest:
            assembly.chunks.clear()
            raise _refused(who, f"blob {chunk.digest} has the digest {found}", len(blob))
        del self._open[chunk.digest]  # with every other size, none of which it can have
        return blob


def _check_chunk(chunk: BlobChunk, nbytes: int, who: str) -> None:
    """Refuse a chunk whose numbers do not follow from the size of its blob."""
    count = chunk_count(nbytes)
    if (chunk.nbytes, chunk.count) != (nbytes, count) or chunk.index >= count:
        what = (
            f"chunk {chunk.index} of {chunk.count} of blob {chunk.digest} with {chunk.nbytes:,} bytes; "
            f"announced were {nbytes:,} bytes, {count} chunks"
        )
        raise _refused(who, what, len(chunk.data))
    due = min(CHUNK_BYTES, nbytes - chunk.index * CHUNK_BYTES)
    if len(chunk.data) != due:
        what = f"chunk {chunk.index} of blob {chunk.digest} holds {len(chunk.data):,} bytes, {due:,} are due"
        raise _refused(who, what, len(chunk.data))


def _first_gap(chunks: dict[int, bytes]) -> int:
    """Return the smallest number that is not there."""
    index = 0
    while index in chunks:
        index += 1
    return index


def _refused(who: str, what: str, nbytes: int) -> PeerProtocolError:
    return PeerProtocolError(who, what, "", nbytes)
