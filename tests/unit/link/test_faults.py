"""The texts of errors between a hook and its daemon, and their trip as data."""

import pytest

from tests.golden_text import check_golden
from weightd.core.errors import WeightdError, error_from_wire
from weightd.link import faults

ERRORS = (
    faults.DaemonAbsent("/run/weightd/control.sock", 5.0, "No such file or directory"),
    faults.PeerGone(
        "the daemon at /run/weightd/fd.sock", "offering trainer 3 slot 0 region 1", "it closed the connection"
    ),
    faults.HookDeadline("the daemon at /run/weightd/fd.sock", "binding the descriptor socket", 10.0, 10.0),
    faults.MemoryRefused("trainer 3 slot 0 region 1", 8192, 4096, "its size is not the claimed one"),
    faults.MemoryExhausted("trainer 3", 3 << 30, "reserving the pages", "2.0 GiB are available", "free memory"),
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
