"""Exact texts of the errors of the daemon itself and of its command line."""

import pytest

from tests.golden_text import check_error_is_whole, check_golden
from weightd.core.errors import WeightdError
from weightd.daemon.admission import HookRefused, PeerUnknown
from weightd.daemon.cli.plan_layouts import LayoutFileOfAnother, LayoutFilesMissing, LayoutFileUnreadable
from weightd.daemon.journal import JournalError

ERRORS: dict[str, WeightdError] = {
    "E_ADMISSION": HookRefused("E0[1]", "grpo-7", "1,024 hooks are attached", "raise limits.hooks"),
    "E_JOURNAL_FILE": JournalError("/var/lib/weightd/runs/r/leader.journal", 4096, "cannot be written: No space left"),
    "E_LAYOUT_FILES": LayoutFilesMissing("layouts", 6, 4, ("trainer-3.layout", "E0-1.layout")),
    "E_LAYOUT_FILE_READ": LayoutFileUnreadable("layouts/E0-1.layout", "Permission denied"),
    "E_PEER_UNKNOWN": PeerUnknown("b", ("c", "d"), ("a",), 3 << 20),
    "E_LAYOUT_FILE_RANK": LayoutFileOfAnother("E0-1.layout", "rank 1 of 4", "rank 1 of 2"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_the_text_of_each_error(name: str) -> None:
    error = ERRORS[name]

    assert name == error.code
    check_golden(f"errors/{name}", str(error))
    check_error_is_whole(error)
