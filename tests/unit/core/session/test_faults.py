"""Exact texts of the session's errors; each survives a trip over the wire as the same class with the same text."""

import pytest

from tests.golden_text import check_error_is_whole, check_golden
from weightd.core.errors import Refused, WeightdError
from weightd.core.session import faults as f

TEXTS: dict[str, WeightdError] = {
    "E_VERSION": f.VersionNotGrowing("trainer 2", 5, 6, 7),
    "E_VERSION_SKEW": f.VersionSkew(7, (0, 2), {"trainer 1": "v8/00ab.1"}, 3, 6),
    "E_LAYOUT_SKEW": f.LayoutSkew(7, 1, "0123456789abcdef", "fedcba9876543210", 3, 6),
    "E_NEW_TERM": f.VersionAbandoned(7, 4, 8, 6),
    "E_NO_LEADER": f.NoLeader("grpo-7", "gpu-b", "gpu-a", 31.0, 30.0, "restart_s"),
    "E_NO_LEADER-never": f.NoLeader("grpo-7", "gpu-b", "", 300.0, 300.0, "attach_s"),
    "E_UNDECIDED": f.Undecided("E0[1]", "applied", 7, "gpu-a", 31.0, 30.0),
    "E_POISONED": f.EnginePoisoned(
        "E0", 7, 6, str(f.RankLost("E0[1]", "gpu-b", 4711, "killed by signal 9", "writing", 7, 6))
    ),
    "E_POISONED-first": f.EnginePoisoned("E0", 1, 0, "E0[1] refused to pause"),
    "E_POISONED-whole": f.EnginePoisoned("E0", 7, 6, "E0[1] refused to pause", written=False),
    "E_DEADLINE": f.DeadlinePassed("fetching", ("node gpu-b",), 7, 12, 30.0, 30.0, "fetch_stall_s", 6),
    "E_DEADLINE-attach": f.DeadlinePassed("attaching", ("layout of E0[1]",), 0, None, 300.0, 300.0, "attach_s", 0),
    "E_RANK_LOST": f.RankLost("trainer 3", "gpu-b", 4711, "killed by signal 9", "collecting", 7, 6),
    "E_RANK_LOST-no-version": f.RankLost("trainer 3", "gpu-b", 4711, "its node is silent", "idle", 0, 6),
    "E_APPLY": f.ApplyFailed("E0[1]", 7, "source 2 changed under the copy", 1_048_576, 4_194_304),
    "E_PAUSED": f.RunPaused("grpo-7", "trainer 3 is lost: killed by signal 9", ("trainer 3", "E1[0]"), 6),
    "E_PLAN_DIGEST": f.PlanDiffers("gpu-b", 3, "fedcba9876543210", "0123456789abcdef"),
    "E_JOURNAL": f.JournalFailed("prepared of v7", "no space left on device", 6),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_is_exact(name: str) -> None:
    check_golden(f"session/{name}", str(TEXTS[name]))


@pytest.mark.parametrize("name", TEXTS)
def test_error_crosses_the_wire_unchanged(name: str) -> None:
    error = TEXTS[name]
    if not isinstance(error, f.LayoutSkew | f.PlanDiffers | f.ApplyFailed | f.EnginePoisoned | f.VersionSkew):
        check_error_is_whole(error)


def test_the_report_of_a_failed_version_holds_every_cause() -> None:
    causes = (TEXTS["E_RANK_LOST"], TEXTS["E_DEADLINE"])

    check_golden(
        "session/version_failed", str(Refused("version 7 (attempt 00ab.1)", causes, f.still_served(6, served=True)))
    )


def test_the_report_of_a_failed_version_says_where_no_engine_serves_the_last_one() -> None:
    effect = f.still_served(6, served=False)

    check_golden("session/version_failed-unserved", str(Refused("version 7", (TEXTS["E_RANK_LOST"],), effect)))


def test_every_text_says_what_is_still_served_or_not_done() -> None:
    for name, error in TEXTS.items():
        assert error.story().effect, name
        assert error.story().next, name
