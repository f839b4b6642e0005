"""Exact texts of the errors of a rollout rank's hook, and that they survive a trip as data."""

import pytest

from tests.golden_text import check_error_is_whole, check_golden
from weightd.core.errors import WeightdError
from weightd.rollout_hooks import faults

ERRORS: dict[str, WeightdError] = {
    "E_TARGET.device": faults.UnsupportedTarget("E0[1]", "mlp.weight", "it is on cuda:3", ("CPU tensors",)),
    "E_TARGET_MOVED": faults.TargetMoved("E0[1]", 8, ("mlp.gate_up_proj.weight", "norm.weight")),
    "E_NOT_RECEIVING": faults.NotAttached("receive()", "not attached, or closed"),
    "E_RECEIVE": faults.ReceiveTimeout("E0[1]", 8, 7, "collecting", "trainer 3 to publish, 5 of 600 s", 5.02, 5.0),
    "E_RECEIVE.left": faults.ReceiveTimeout("E0[1]", 1, 0, "prepared", "E0[2] to pause", 5.02, 5.0, left_barrier=True),
    "E_NOT_SERVABLE": faults.NotServable("E0[1]", "torn", 8, "E_SOURCE: trainer 3 slot 0 changed\n  E0[1]"),
    "E_NOT_SERVABLE.resume": faults.NotServable("E0[1]", "serving", 0, ""),
    "E_NOT_SERVABLE.unready": faults.NotServable("E0[1]", "unready", 0, ""),
    "E_SOURCE": faults.SourceChanged("E0[1]", "v8/00ff.1", "trainer 3 slot 0 region 0", 16, 17, "after"),
    "E_SOURCE.before": faults.SourceChanged("E0[1]", "v8/00ff.1", "landing half 1", 16, 18, "before"),
    "E_RANK_PLAN": faults.PlanUnusable("E0[1]", "5c5c5203777e", "the order names no slot of source 3"),
    "E_APPLY_ENDED": faults.ApplyEnded("E0[1]", "v8/00ff.1", "torn", 0),
    "E_APPLY_ENDED.whole": faults.ApplyEnded("E0[1]", "v8/00ff.1", "fenced", 7),
}


@pytest.mark.parametrize("name", ERRORS)
def test_the_text_of_each_error(name: str) -> None:
    error = ERRORS[name]

    assert name.split(".")[0] == error.code
    check_golden(f"errors/{name}", str(error))
    check_error_is_whole(error)


def test_every_class_has_a_text() -> None:
    """Overlapping buffers are shown where they are refused: they share a code with the roster's duplicate ranks."""
    classes = {c for c in vars(faults).values() if isinstance(c, type) and issubclass(c, faults.RolloutHookError)}

    assert {type(e) for e in ERRORS.values()} == classes - {faults.RolloutHookError, faults.BuffersOverlap}
