from __future__ import annotations

import pytest

from tests.golden_text import check_error_is_whole, check_golden
from weightd.core.errors import Refused
from weightd.rollout_hooks.declare import Declaration
from weightd.rollout_hooks.parameters import Parameter, described


def test_the_texts_of_every_mismatch() -> None:
    d = Declaration("bfloat16")
    d.column("model.layers.0.mlp.up_proj.weight", (18, 3), (5, 5, 4, 4), 2)
    d.replicated("model.norm.weight", (3,))
    real = {
        "model.layers.0.mlp.up_proj.weight": Parameter((5, 3), "bfloat16"),
        "lm_head.bias": Parameter((13,), "float32"),
    }
    with pytest.raises(Refused) as report:
        d.check(real, "layout of rollout rank E0[2]")

    check_golden("errors/E_DECLARATION", str(report.value))
    for violation in report.value.violations:
        check_error_is_whole(violation)


def test_a_parameter_in_a_text() -> None:
    assert "(4, 3) bfloat16" == described(Parameter((4, 3), "bfloat16"))
    assert "" == described(None)
