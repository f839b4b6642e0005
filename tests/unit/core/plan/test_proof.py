from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.property.worlds import topology_of
from weightd.core.errors import InternalInvariantBroken, Refused, WeightdError
from weightd.core.layout.build import LayoutBuilder
from weightd.core.layout.columns import Layout
from weightd.core.plan import court
from weightd.core.plan.proof import CoverageProof, prove_coverage
from weightd.core.plan.violations import (
    DescriptionConflict,
    ElementsAmbiguous,
    ElementsUncovered,
    NamesUnmatched,
    OutsideBuffer,
    SourceUnused,
    TargetOverlap,
)
from weightd.core.units import EngineId, EngineRank, RolloutRank

Said = tuple[str, tuple[int, ...], str]


def shard(kind: str, *said: Said, unused: Sequence[str] = (), kept: Sequence[str] = ()) -> Layout:
    """A rank that holds or needs all of some tensors, each in its own buffer."""
    b = LayoutBuilder()
    for name, shape, dtype in said:
        size = {"float32": 4, "bfloat16": 2}[dtype]
        buffer = b.add_buffer(name, int(np.prod(shape)) * size, dtype, kind)
        b.add_piece(b.add_tensor(name, shape, dtype), buffer, (0,) * len(shape), shape)
    for name in unused:
        b.add_unused(name)
    for name in kept:
        b.add_kept(name)
    return b.build()


def prove(trainers: Sequence[Layout], ranks: Sequence[Layout]) -> CoverageProof:
    topology = topology_of([f"a/{r}" for r in range(len(trainers))], {"E0": [f"b/{k}" for k in range(len(ranks))]})
    return prove_coverage(topology, trainers, {rank(k): layout for k, layout in enumerate(ranks)})


def refusal(trainers: Sequence[Layout], ranks: Sequence[Layout]) -> tuple[WeightdError, ...]:
    with pytest.raises(Refused) as caught:
        prove(trainers, ranks)
    return caught.value.violations


def rank(k: int) -> RolloutRank:
    return RolloutRank(EngineId("E0"), EngineRank(k))


W: Said = ("w", (4, 2), "float32")
X: Said = ("x", (3,), "float32")


def test_names_on_one_side_only_are_all_named_with_totals() -> None:
    [error] = refusal(
        [shard("slot", W, X, ("y", (2,), "float32"), ("z", (2,), "float32"), unused=["z"])],
        [shard("param", W, ("x2", (3,), "float32")), shard("param", W, ("kept", (3,), "float32"), kept=["kept"])],
    )

    assert isinstance(error, NamesUnmatched)
    assert (error.unmatched_source, error.unmatched_target) == (("x", "y"), ("x2",))
    assert (error.source_total, error.source_matched, error.source_unused) == (4, 1, 1)
    assert (error.target_total, error.target_matched, error.target_kept) == (3, 1, 1)


def test_what_an_engine_keeps_is_not_fed_and_the_trainer_has_to_say_so() -> None:
    ranks = [shard("param", W, X, kept=["x"])]

    [error] = refusal([shard("slot", W, X)], ranks)

    assert isinstance(error, SourceUnused)
    assert (error.parameter, error.count) == ("x", 3)
    proof = prove([shard("slot", W, X, unused=["x"])], ranks)
    assert (proof.totals[rank(0)].nbytes, proof.source.declared) == (32, 3)


def test_what_is_declared_unused_may_be_used() -> None:
    proof = prove([shard("slot", W, X, unused=["x"])], [shard("param", W, X)])

    assert (proof.source.owned, proof.source.used, proof.source.declared) == (11, 11, 0)


@pytest.mark.parametrize(
    "shape,dtype", [((4, 3), "float32"), ((5, 2), "float32"), ((8,), "float32"), ((4, 2), "bfloat16")]
)
def test_ranks_that_disagree_on_shape_or_dtype(shape: tuple[int, ...], dtype: str) -> None:
    """Both directions, on either side: nothing is reshaped, cast or guessed."""
    other: Said = ("w", shape, dtype)
    for trainers, ranks in (([W, other], [W]), ([W], [W, other])):
        layouts = [shard("slot", t) for t in trainers], [shard("param", r) for r in ranks]

        [error] = refusal(*layouts)

        assert isinstance(error, DescriptionConflict)
        assert {d.shape for d in error.descriptions} == {(4, 2), shape}


def test_one_wrong_element_type_is_one_violation() -> None:
    """A cast that was forgotten is wrong for every tensor: 20 of them, and another fault is not drowned in it."""
    held: list[Said] = [(f"w{n:02d}", (4, 2), "float32") for n in range(20)]
    needed: list[Said] = [(name, shape, "bfloat16") for name, shape, _ in held]

    errors = refusal([shard("slot", *held, ("x", (4,), "float32"))], [shard("param", *needed, ("x", (5,), "float32"))])

    cast, shape = errors
    assert isinstance(cast, DescriptionConflict)
    assert (cast.parameter, cast.others, cast.also) == ("w00", 19, tuple(f"w{n:02d}" for n in range(1, 9)))
    assert "19 more alike: w01" in str(cast)
    assert "and 11 more" in str(cast)
    assert isinstance(shape, DescriptionConflict)
    assert (shape.parameter, shape.others) == ("x", 0)


def test_an_empty_tensor_is_covered_and_its_shape_kept() -> None:
    """A parameter of no element is a name like any other; (0, 8) is not (0,)."""
    empty: Said = ("e", (0, 8), "float32")

    proof = prove([shard("slot", W, empty)], [shard("param", W, empty)])

    assert proof.totals[rank(0)].elements == 8
    [error] = refusal([shard("slot", W, empty)], [shard("param", W, ("e", (0,), "float32"))])
    assert isinstance(error, DescriptionConflict)
    [error] = refusal([shard("slot", W)], [shard("param", W, empty)])
    assert isinstance(error, NamesUnmatched)


def test_a_scalar_and_a_vector_of_one_are_kept_apart() -> None:
    scalar: Said = ("s", (), "bfloat16")

    assert prove([shard("slot", scalar)], [shard("param", scalar)]).totals[rank(0)].nbytes == 2
    [error] = refusal([shard("slot", scalar)], [shard("param", ("s", (1,), "bfloat16"))])
    assert isinstance(error, DescriptionConflict)


def test_all_violations_of_all_ranks_come_together() -> None:
    wrong = ("v", (2,), "float32")
    errors = refusal(
        [shard("slot", W, wrong, ("only", (1,), "float32"))],
        [shard("param", W, X), shard("param", W, ("v", (2,), "bfloat16"))],
    )

    assert [e.code for e in errors] == ["E_NAME", "E_DESCRIPTION"]

    b = LayoutBuilder()
    buffer = b.add_buffer("w", 32, "float32", "param")
    tensor = b.add_tensor("w", (4, 2), "float32")
    b.add_piece(tensor, buffer, (0, 0), (3, 2))
    b.add_piece(tensor, buffer, (2, 0), (2, 2), offset=4)
    lacking = shard("slot", W, X)
    lacking = replace(lacking, extent=np.where(lacking.extent == 4, 3, lacking.extent))
    codes = [e.code for e in refusal([lacking], [b.build()])]
    assert codes == ["E_NAME", "E_TARGET_OVERLAP", "E_ELEM_UNCOVERED"]


def test_pieces_outside_of_their_buffers_are_refused_on_either_side() -> None:
    good_slot, good_param = shard("slot", W), shard("param", W)

    def beyond(layout: Layout) -> Layout:
        return replace(layout, offset=layout.offset + 1)

    [error] = refusal([beyond(good_slot)], [good_param])
    assert isinstance(error, OutsideBuffer)
    assert (error.rank, error.first_byte, error.end_byte, error.nbytes) == ("trainer rank 0", 4, 36, 32)
    [error] = refusal([good_slot], [good_param, beyond(good_param)])
    assert isinstance(error, OutsideBuffer)
    assert error.rank == "E0[1]"


def test_two_tensors_in_one_place_are_refused() -> None:
    b = LayoutBuilder()
    buffer = b.add_buffer("fused", 32, "float32", "param")
    for name in ("w", "v"):
        b.add_piece(b.add_tensor(name, (4, 2), "float32"), buffer, (0, 0), (4, 2))

    [error] = refusal([shard("slot", W, ("v", (4, 2), "float32"))], [b.build()])

    assert isinstance(error, TargetOverlap)
    assert (error.first, error.second, error.others) == ("w", "v", 0)


def test_ranks_proved_alone_say_nothing_about_what_is_unused() -> None:
    topology = topology_of(["a/0"], {"E0": ["b/0", "c/0"]})
    trainers, ranks = [shard("slot", W, X)], {rank(0): shard("param", W), rank(1): shard("param", X)}

    alone = prove_coverage(topology, trainers, {rank(0): ranks[rank(0)]}, only=[rank(0)])

    assert (alone.ranks, alone.whole) == ((rank(0),), False)
    assert prove_coverage(topology, trainers, ranks).whole
    with pytest.raises(Refused) as caught:
        prove_coverage(topology, [shard("slot", X)], ranks, only=[rank(0)])
    assert [type(v) for v in caught.value.violations] == [NamesUnmatched]


def test_layouts_and_topology_list_the_same_ranks() -> None:
    topology = topology_of(["a/0"], {"E0": ["b/0", "c/0"]})

    with pytest.raises(InternalInvariantBroken, match="1 for 2 rollout ranks"):
        prove_coverage(topology, [shard("slot", W)], {rank(0): shard("param", W)})
    with pytest.raises(InternalInvariantBroken, match="0 layouts for 1 trainer ranks"):
        prove_coverage(topology, [], {r: shard("param", W) for r in topology.rollout_ranks()})


def test_nobody_else_makes_a_proof() -> None:
    proof = prove([shard("slot", W)], [shard("param", W)])

    with pytest.raises(InternalInvariantBroken, match="prove_coverage"):
        replace(proof, _witness=object())


def test_tensors_judged_in_several_blocks_give_one_report(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [(f"t{i}", (4,), "float32") for i in range(5)]
    lacking = [(n, s, d) for n, s, d in names]
    trainers = [shard("slot", *lacking)]
    trainers = [replace(trainers[0], extent=trainers[0].extent - 1)]
    at_once = refusal(trainers, [shard("param", *names)])
    monkeypatch.setattr(court, "BLOCK_PIECES", 2)

    errors = refusal(trainers, [shard("param", *names)])

    assert [str(e) for e in errors] == [str(e) for e in at_once]
    assert len(errors) == 5
    assert all(isinstance(e, ElementsUncovered) and e.first_index == (3,) for e in errors)


def test_boxes_that_differ_in_nothing_but_their_step_are_no_replicas() -> None:
    def rows(start: int, step: int) -> Layout:
        b = LayoutBuilder()
        b.add_piece(
            b.add_tensor("w", (4,), "float32"), b.add_buffer("w", 8, "float32", "slot"), (start,), (2,), step=(step,)
        )
        return b.build()

    [error] = refusal([rows(0, 1), rows(0, 2), rows(2, 1)], [shard("param", ("w", (4,), "float32"))])

    assert isinstance(error, ElementsAmbiguous)
    assert (error.count, error.first_index, error.owners) == (2, (0,), (0, 1, 2))
