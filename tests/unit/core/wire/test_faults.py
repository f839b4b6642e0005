"""The texts of errors of messages and transfers, and their trip as data."""

import pytest

from tests.golden_text import check_golden
from weightd.core.errors import WeightdError, error_from_wire
from weightd.core.wire import faults

ERRORS = (
    faults.PeerProtocolError("node gpu-b", "Expected `int` >= 0", "$.body.rank", 97),
    faults.ProtocolMismatch("node gpu-b", 2, 1),
    faults.LocalProtocolError("Refusal", "9,000,000 bytes, the limit is 8,388,608", "$.body.error"),
    faults.PeerLost("gpu-a", "gpu-b", "v42/beef.1", 37, 118, 37 << 26, 118 << 26, "Connection reset by peer"),
    faults.DigestMismatch(37, 118, "v42/beef.1", "gpu-a", "gpu-b", "0a" * 16, "0b" * 16, 64 << 20),
    faults.StaleSource(37, "v42/beef.1", "gpu-a", "trainer 3 region 0", 4, 5),
    faults.TransferDeadline("gpu-a", "gpu-b", "v42/beef.1", 37, "the next byte", 30.2, 30.0, "fetch_stall_s"),
    faults.TransferCancelled("gpu-a", "v42/beef.1"),
    faults.TicketRefused("gpu-a", 7, "it is unknown, used up, expired, or has another secret"),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.code)
def test_texts(error: WeightdError) -> None:
    check_golden(f"errors/{error.code}", str(error))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.code)
def test_errors_are_the_same_on_the_other_side(error: WeightdError) -> None:
    arrived = error_from_wire(error.to_wire())

    assert type(arrived) is type(error)
    assert error.fields() == arrived.fields()
    assert str(error) == str(arrived)


def test_what_a_stale_source_is_doing_is_said() -> None:
    texts = [str(faults.StaleSource(0, "v1/1.1", "a", "trainer 0 region 0", 2, found)) for found in (3, 4, -1)]

    assert "odd: it is being written" in texts[0]
    assert "(" not in texts[1].splitlines()[0].partition("generation 4")[2]
    assert "it was closed" in texts[2]


def test_whose_build_is_older_is_said() -> None:
    assert "weightd of the peer" in str(faults.ProtocolMismatch("node b", 2, 1))
    assert "weightd of this process" in str(faults.ProtocolMismatch("node b", 1, 2))
