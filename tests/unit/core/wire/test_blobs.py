"""Blobs: any order, doubled, late and wrong chunks; only the digest of the whole decides."""

import itertools
import random

import pytest

from weightd.core.wire.blobs import BlobAssembler, blob_digest, chunk_count, cut_blob
from weightd.core.wire.faults import PeerProtocolError
from weightd.core.wire.messages import CHUNK_BYTES, BlobChunk


def blob_of(chunks: int, rest: int = 5) -> bytes:
    return random.Random(chunks).randbytes(64) * ((chunks - 1) * CHUNK_BYTES // 64) + bytes(range(rest))


def chunks_of(blob: bytes) -> list[BlobChunk]:
    return list(cut_blob(blob, blob_digest(blob)))


def expecting(blob: bytes) -> BlobAssembler:
    assembler = BlobAssembler()
    assembler.expect(blob_digest(blob), len(blob), "node-a")
    return assembler


def test_the_digest_is_blake2b_of_16_bytes() -> None:
    # of b"abc", computed with another implementation: b2sum -l 128
    assert "cf4ab791c62b8d2b2109c90275287816" == blob_digest(b"abc")


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_any_size_comes_whole(nbytes: int) -> None:
    blob = bytes(nbytes)
    assembler = expecting(blob)

    taken = [assembler.add(chunk, "node-a") for chunk in chunks_of(blob)]

    assert blob == taken[-1]
    assert [None] * (chunk_count(nbytes) - 1) == taken[:-1]
    assert {} == assembler.missing()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_any_order_and_doubled_chunks_are_harmless(order: tuple[int, ...]) -> None:
    blob = blob_of(3)
    assembler, chunks = expecting(blob), chunks_of(blob)

    taken = [assembler.add(chunks[i], "node-a") for i in order for _ in range(2)]

    # Whole with the last one's first copy; its second copy is late and dropped.
    assert [None] * 4 + [blob, None] == taken


def test_what_is_missing_is_asked_for_from_the_first_gap() -> None:
    blob = blob_of(4)
    assembler, chunks = expecting(blob), chunks_of(blob)
    assembler.add(chunks[0], "node-a")
    assembler.add(chunks[2], "node-a")

    assert {blob_digest(blob): 1} == assembler.missing()
    assert chunks[1:] == list(cut_blob(blob, blob_digest(blob), first=1))


def test_nothing_unexpected_is_taken() -> None:
    blob = blob_of(1)

    assert BlobAssembler().add(chunks_of(blob)[0], "node-a") is None


def test_a_blob_that_is_forgotten_is_not_expected() -> None:
    blob = blob_of(1)
    assembler = expecting(blob)
    assembler.forget(blob_digest(blob))

    assert assembler.add(chunks_of(blob)[0], "node-a") is None


def test_a_blob_that_is_not_what_it_is_called_is_refused_and_may_come_again() -> None:
    blob = blob_of(2)
    assembler, chunks = expecting(blob), chunks_of(blob)
    forged = BlobChunk(chunks[0].digest, 0, 2, len(blob), bytes(CHUNK_BYTES))
    assembler.add(forged, "node-a")

    with pytest.raises(PeerProtocolError, match="has the digest"):
        assembler.add(chunks[1], "node-a")

    assert assembler.add(chunks[0], "node-a") is None
    assert blob == assembler.add(chunks[1], "node-a")


@pytest.mark.parametrize(
    "change",
    [{"index": 2}, {"count": 3}, {"count": 0}, {"nbytes": 1}, {"data": b"short"}, {"index": 2**62}],
    ids=str,
)
def test_a_chunk_that_contradicts_its_blob_is_refused(change: dict[str, object]) -> None:
    blob = blob_of(2)
    first = chunks_of(blob)[0]
    fields = {"digest": first.digest, "index": 0, "count": 2, "nbytes": len(blob), "data": first.data} | change

    with pytest.raises(PeerProtocolError):
        expecting(blob).add(BlobChunk(**fields), "node-a")  # type: ignore[arg-type]


def test_memory_is_bounded_before_it_is_filled() -> None:
    assembler = BlobAssembler(max_blobs=2, max_nbytes=100)
    assembler.expect("a", 60, "node-a")
    assembler.expect("a", 60, "node-a")

    with pytest.raises(PeerProtocolError, match="the limit is 100"):
        assembler.expect("b", 41, "node-a")
    with pytest.raises(PeerProtocolError, match="the limit is 100"):
        assembler.expect("a", 61, "node-a")
    assembler.expect("b", 40, "node-a")
    with pytest.raises(PeerProtocolError, match="2 others are incomplete"):
        assembler.expect("c", 0, "node-a")


def test_who_announces_another_size_holds_up_nobody() -> None:
    """Whichever comes first: only the digest of the whole tells who was right."""
    blob = blob_of(2)
    assembler = BlobAssembler()
    assembler.expect(blob_digest(blob), 7, "node-b")
    assembler.expect(blob_digest(blob), len(blob), "node-a")
    with pytest.raises(PeerProtocolError, match="has the digest"):
        assembler.add(BlobChunk(blob_digest(blob), 0, 1, 7, b"7 bytes"), "node-b")

    assert blob == [assembler.add(chunk, "node-a") for chunk in chunks_of(blob)][-1]
    assert {} == assembler.missing()
