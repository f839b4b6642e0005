"""The header page: its bytes are pinned, its generation counts, its bitmap says what landed."""

import numpy as np
import pytest
from numpy.typing import NDArray

from weightd.core.units import Attempt, Boot, Term, Version, VersionKey
from weightd.link.header import BITMAP_BITS, HEADER_BYTES, MAGIC, NOTHING, Description, Header, pool_nbytes

HELD = Description(Term(3), VersionKey(Version(42), Attempt(Boot(2**62 + 1), 2)), "ab" * 16, 10)


def page() -> NDArray[np.uint8]:
    return np.zeros(HEADER_BYTES, dtype=np.uint8)


def fresh(payload_nbytes: int = 5000) -> tuple[Header, NDArray[np.uint8]]:
    bytes_ = page()
    header = Header(bytes_)
    header.initialise(payload_nbytes)
    return header, bytes_


@pytest.mark.parametrize("payload, whole", [(0, 4096), (1, 8192), (4096, 8192), (4097, 12288)])
def test_sizes_are_whole_pages(payload: int, whole: int) -> None:
    assert whole == pool_nbytes(payload)


def test_the_layout_is_pinned() -> None:
    """Pools outlive daemons: another build must find every field where this one left it."""
    header, bytes_ = fresh()
    header.bump()
    header.describe(HELD)
    header.mark([0, 9])

    at = bytes_.tobytes()
    assert MAGIC == at[0:8]
    assert (1, 4096) == tuple(np.frombuffer(at[8:16], "<u4"))
    assert (1, 5000, 3, 42, 2**62 + 1, 2) == tuple(np.frombuffer(at[16:64], "<i8"))
    assert b"ab" * 16 + bytes(32) == at[64:128]
    assert (10, 1) == tuple(np.frombuffer(at[128:144], "<i8"))
    assert bytes(1024 - 144) == at[144:1024]
    assert bytes([1, 2]) + bytes(3070) == at[1024:]


def test_a_description_is_read_back() -> None:
    header, _ = fresh()
    assert header.description == NOTHING

    header.describe(HELD)

    assert HELD == header.description


def test_describing_anew_forgets_what_landed() -> None:
    header, _ = fresh()
    header.describe(HELD)
    header.mark(range(10))
    assert frozenset(range(10)) == header.marked()

    header.describe(HELD)

    assert frozenset() == header.marked()


def test_marks_outside_of_the_plan_do_not_count() -> None:
    header, _ = fresh()
    header.describe(HELD)
    header.mark([3, 10, 500])

    assert frozenset([3]) == header.marked()


@pytest.mark.parametrize("buckets, per_bit", [(0, 1), (BITMAP_BITS, 1), (BITMAP_BITS + 1, 2), (3 * BITMAP_BITS, 3)])
def test_more_buckets_than_bits_share_them(buckets: int, per_bit: int) -> None:
    header, _ = fresh()
    header.describe(HELD._replace(buckets=buckets))

    assert per_bit == header.buckets_per_bit


def test_the_generation_counts() -> None:
    header, bytes_ = fresh()

    assert [1, 2, 3] == [header.bump() for _ in range(3)]
    assert 3 == Header(bytes_).generation


@pytest.mark.parametrize(
    "field, value, why",
    [
        ("magic", b"OTHER", "no header of weightd"),
        ("layout_version", 2, "has layout 2, this build reads layout 1"),
        ("header_nbytes", 8192, "layout"),
        ("payload_nbytes", -1, "which is not its size"),
        ("payload_nbytes", 4096, "which is not its size"),
        ("payload_nbytes", 2**62, "which is not its size"),
    ],
)
def test_a_wrong_field_is_a_fault(field: str, value: object, why: str) -> None:
    header, _ = fresh()
    assert "" == header.fault(pool_nbytes(5000))
    header._fields[field] = value

    assert why in header.fault(pool_nbytes(5000))


def test_a_page_of_zeros_is_no_header() -> None:
    assert "no header of weightd" in Header(page()).fault(HEADER_BYTES)
