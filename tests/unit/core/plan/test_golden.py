"""The exact text of every refusal of the proof and the planner; its numbers add up."""

import msgspec
import pytest

from tests.golden_text import check_golden
from weightd.core.errors import Refused, WeightdError, WireError, error_from_wire
from weightd.core.layout.columns import RowRange
from weightd.core.plan import plan_faults as f
from weightd.core.plan import violations as v
from weightd.core.plan.proof import EFFECT

ROWS = v.Region((128, 0), (128, 896), (1, 1))

ERRORS: dict[str, WeightdError] = {
    # 512 rows over 4 trainer ranks are 128 each; rank 1's are missing: 128 x 896 = 114688 elements of 458752.
    "E_ELEM_UNCOVERED": v.ElementsUncovered(
        "model.layers.0.self_attn.k_proj.weight",
        (512, 896),
        "bfloat16",
        458752,
        458752,
        344064,
        114688,
        229376,
        (128, 0),
        (ROWS,),
        0,
        (0, 2, 3),
        ("E0[0]", "E0[1]"),
    ),
    "E_ELEM_UNCOVERED.nothing": v.ElementsUncovered(
        "k", (4, 4), "float32", 16, 8, 0, 8, 32, (2, 0), (v.Region((2, 0), (2, 4), (1, 1)),), 0, (), ("E0[1]",)
    ),
    "E_ELEM_AMBIGUOUS": v.ElementsAmbiguous(
        "w",
        (18,),
        18,
        1,
        (14,),
        (v.Region((14,), (1,), (1,)),),
        0,
        (2, 3),
        (v.Claim(v.Region((10,), (5,), (1,)), (2,)), v.Claim(v.Region((14,), (4,), (1,)), (3,))),
    ),
    "E_SRC_UNUSED": v.SourceUnused(
        "emb", (10, 2), 20, 20, 14, 2, 4, (7, 0), (v.Region((7, 0), (2, 2), (1, 1)),), 0, (1,)
    ),
    "E_NAME": v.NamesUnmatched(("lm_head.weight",), ("output.weight",), 10, 8, 1, 10, 8, 1),
    "E_DESCRIPTION.vocabulary": v.DescriptionConflict(
        "lm_head.weight",
        (
            v.Description((32064, 8), "bfloat16", (0, 1, 2, 3), ()),
            v.Description((32000, 8), "bfloat16", (), ("E0[0]", "E0[1]")),
        ),
        (RowRange(32001, 32064),),
    ),
    "E_DESCRIPTION.many": v.DescriptionConflict(
        "layers.0.w",
        (v.Description((4,), "float32", (0, 1), ()), v.Description((4,), "bfloat16", (), ("E0[0]",))),
        (),
        289,
        ("layers.1.w", "layers.2.w"),
    ),
    "E_DESCRIPTION.dtype": v.DescriptionConflict(
        "w", (v.Description((4,), "float32", (0,), ()), v.Description((4,), "bfloat16", (1,), ("E0[0]",)))
    ),
    "E_DESCRIPTION.dims": v.DescriptionConflict(
        "w", (v.Description((4, 3), "float32", (0,), ()), v.Description((4, 5), "float32", (1,), ()))
    ),
    "E_DESCRIPTION.ndim": v.DescriptionConflict(
        "w", (v.Description((0, 8), "float32", (0,), ()), v.Description((0,), "float32", (1,), ()))
    ),
    "E_TARGET_OVERLAP": v.TargetOverlap(
        "E0[1]", "qkv_proj.weight", "q", v.Region((0, 0), (4, 4), (1, 1)), "k", v.Region((0, 0), (2, 4), (1, 1)), 1
    ),
    "E_OUTSIDE_BUFFER": v.OutsideBuffer("trainer rank 3", "slot", 64, "w", v.Region((8, 0), (8, 2), (2, 1)), 32, 96, 2),
    "E_BUDGET": v.BudgetError(1, "w", 2),
    "E_SHAPE.block": v.BlockCut("model.layers.3.mlp.down_proj.weight", 1, 128, 192),
    "E_PLAN_MESSAGE": f.MalformedPlan("column source has 7 bytes, 8 were announced"),
    "E_PLAN_MISMATCH": f.PlanMismatch("E0[1]", "bytes of all rows", "80", "72"),
    "E_PLAN_BOUNDS": f.CopyOutOfBounds("E0[1]", 4, "target", "w13", 64, 60, (1, 2, 4), (0, 16, 2), 2, 1),
}


@pytest.mark.parametrize("name", ERRORS)
def test_text(name: str) -> None:
    check_golden(f"errors/{name}", str(ERRORS[name]))


def test_text_of_the_report() -> None:
    report = Refused(
        "coverage of 2 rollout ranks by 4 trainer ranks", (ERRORS["E_ELEM_UNCOVERED"], ERRORS["E_NAME"]), EFFECT
    )

    check_golden("errors/E_REFUSED.coverage", str(report))


@pytest.mark.parametrize("name", [n for n in ERRORS if n != "E_SHAPE.block"])
def test_an_error_is_the_same_on_the_other_side_of_a_socket(name: str) -> None:
    error = ERRORS[name]

    arrived = error_from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(error.to_wire()), type=WireError))

    assert type(arrived) is type(error)
    assert str(arrived) == str(error)


def test_a_block_cut_keeps_its_text_on_the_other_side() -> None:
    """Its code belongs to the shorthands of rosters, so only the text arrives."""
    arrived = error_from_wire(ERRORS["E_SHAPE.block"].to_wire())

    assert "E_SHAPE: model.layers.3.mlp.down_proj.weight is cut at 192" in str(arrived)
