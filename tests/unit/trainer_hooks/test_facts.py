"""What is declared about tensors: ties, padding, what is frozen, what is not published."""

from typing import Any

import pytest
import torch

from tests.hooks.published import Rank
from weightd.core.errors import ConfigError
from weightd.trainer_hooks.adapters.megatron import GateUp, Megatron, Rule
from weightd.trainer_hooks.facts import Facts
from weightd.trainer_hooks.faults import FrozenChanged, NothingToPublish, TieBroken


def rank(source: Any, **facts: Any) -> Rank:
    return Rank(source, slots=2, facts=Facts(**facts))


def two() -> dict[str, torch.Tensor]:
    return {"text.w": torch.arange(6.0).view(2, 3), "visual.w": torch.arange(4.0)}


@pytest.mark.parametrize("fact", ["frozen", "not_synced"])
def test_pattern_that_matches_nothing_is_refused(fact: str) -> None:
    with pytest.raises(ConfigError, match=rf"{fact} = 'vision\.\*': it matches none of the 2 names"):
        rank(two(), **{fact: ["visual.*", "vision.*"]})


@pytest.mark.parametrize("fact", ["frozen", "not_synced"])
def test_one_text_is_no_list_of_patterns(fact: str) -> None:
    with pytest.raises(ConfigError, match="it is one text"):
        rank(two(), **{fact: "visual.*"})


def test_name_that_is_not_held_is_refused() -> None:
    with pytest.raises(ConfigError, match="true_shapes = 'emb'"):
        rank(two(), true_shapes={"emb": (1,)})
    with pytest.raises(ConfigError, match="ties = 'a = b': this rank holds neither"):
        rank(two(), ties={"a": "b"})


# ------------------------------------------------------------ not synced


def test_what_is_not_synced_is_no_part_of_the_layout() -> None:
    assert rank(two(), not_synced=["visual.*"]).names() == ["text.w"]


def test_everything_not_synced_is_refused() -> None:
    with pytest.raises(NothingToPublish, match="not_synced matches all 2 names"):
        rank(two(), not_synced=["*"])


def test_tied_weight_of_which_one_name_is_not_synced() -> None:
    weight = torch.arange(6.0).view(2, 3)
    source = {"emb": weight, "head": weight, "other": weight}

    assert rank(source, not_synced=["head"]).layout.aliases == (("other", "emb"),)
    heir = rank(source, not_synced=["emb"])
    assert heir.layout.aliases == (("other", "head"),)
    assert torch.equal(heir.publish()["head"], weight)


# ------------------------------------------------------------ padding


def test_padding_is_cut_off_in_every_dimension() -> None:
    padded = torch.arange(12.0).view(4, 3)
    trimmed = rank({"w": padded}, true_shapes={"w": (3, 2)})

    assert torch.equal(trimmed.publish()["w"], padded[:3, :2])
    assert [6] == [place.shard.padding for place in trimmed.described.places]


def test_rank_that_holds_padding_only_holds_no_element() -> None:
    shards = [("w", (6, 2), (4, 0), (2, 2), torch.ones(2, 2))]
    found = rank(shards, true_shapes={"w": (4, 2)})

    assert [t.shape for t in found.layout.tensors] == [(4, 2)]
    assert found.layout.pieces == 0


def test_true_shape_is_of_a_name_and_not_of_a_pattern() -> None:
    """A pattern that passed as one and trimmed nothing would publish the padding."""
    with pytest.raises(ConfigError, match=r"true_shapes = '\*': it is none of the 1 names"):
        rank({"w": torch.ones(4, 3)}, true_shapes={"*": (3, 3)})
    assert rank({"w[0]": torch.ones(4, 3)}, true_shapes={"w[0]": (3, 3)}).layout.tensors[0].shape == (3, 3)


def test_true_shape_of_a_tied_name_is_that_of_the_weight() -> None:
    weight = torch.arange(12.0).view(4, 3)
    source = {"emb": weight, "head": weight}

    assert torch.equal(rank(source, true_shapes={"head": (3, 3)}).publish()["emb"], weight[:3])
    rank(source, true_shapes={"head": (3, 3), "emb": [3, 3]})
    with pytest.raises(ConfigError, match=r"true_shapes = 'head: \(2, 3\)': emb is the same memory, and \(3, 3\)"):
        rank(source, true_shapes={"emb": (3, 3), "head": (2, 3)})


@pytest.mark.parametrize("shape", [(5, 3), (4,), (-1, 3)])
def test_padding_that_makes_a_tensor_larger_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"w has shape \(4, 3\) here, and no padding makes that"):
        rank({"w": torch.ones(4, 3)}, true_shapes={"w": shape})


# ------------------------------------------------------------ frozen


def test_frozen_tensor_is_copied_into_each_slot_once() -> None:
    source = two()
    frozen = rank(source, frozen=["visual.*"])
    sizes = [frozen.slots.fill(slot) for slot in (0, 1, 0, 1)]
    source["text.w"].mul_(2)

    assert sizes == [40, 40, 24, 24]
    assert torch.equal(frozen.publish(0)["visual.w"], torch.arange(4.0))
    assert torch.equal(frozen.publish(1)["text.w"], 2 * torch.arange(6.0).view(2, 3))


def test_frozen_tensor_that_is_cast_is_copied_once_too() -> None:
    source = two()
    frozen = Rank(source, facts=Facts(frozen=["*"]), dtype=torch.bfloat16)

    assert [20, 0] == [frozen.slots.fill(0) for _ in range(2)]


def test_frozen_tensor_that_is_written_is_an_error_by_name() -> None:
    source = two()
    frozen = rank(source, frozen=["visual.w"])
    frozen.publish(0)
    source["visual.w"].add_(1)
    with pytest.raises(FrozenChanged, match=r"visual.w is declared frozen and was written 1 times"):
        frozen.publish(1)


def test_frozen_tensor_that_is_replaced_is_an_error_by_name() -> None:
    source = two()
    frozen = rank(source, frozen=["visual.w"])
    frozen.publish(0)
    source["visual.w"] = torch.arange(4.0)
    with pytest.raises(FrozenChanged, match=r"visual.w is declared frozen and is another tensor"):
        frozen.publish(1)


def test_copy_that_failed_is_made_again() -> None:
    frozen = rank(two(), frozen=["visual.w"])
    work = frozen.slots._frozen_work[0]
    frozen.slots._frozen_work[0] = ([], [(torch.ones(1), _fails)])
    with pytest.raises(ZeroDivisionError):
        frozen.publish()
    frozen.slots._frozen_work[0] = work

    assert torch.equal(frozen.publish()["visual.w"], torch.arange(4.0))


def _fails(_: torch.Tensor) -> None:
    raise ZeroDivisionError


def test_frozen_alias_is_the_weight_itself() -> None:
    weight = torch.ones(3)
    frozen = rank({"a": weight, "b": weight}, frozen=["b"])

    assert [12, 0] == [frozen.slots.fill(0) for _ in range(2)]


def test_part_of_a_fused_tensor_is_not_frozen_alone() -> None:
    declared = Megatron(rules=[Rule("fc1", GateUp("gate", "up"))])
    source = {"fc1": torch.ones(4, 3)}
    with pytest.raises(ConfigError, match=r"frozen = 'gate': it lies in one tensor, fc1, with .* not frozen: \['up'\]"):
        Rank(source, adapter=declared, facts=Facts(frozen=["gate"]))
    frozen = Rank(source, adapter=declared, facts=Facts(frozen=["gate", "up"]))

    assert [48, 0] == [frozen.slots.fill(0) for _ in range(2)]


# ------------------------------------------------------------ ties


def test_tie_that_identity_confirms_stays_one_tensor() -> None:
    weight = torch.ones(3)
    tied = rank({"a": weight, "b": weight}, ties={"a": "b"})

    assert tied.layout.aliases == (("b", "a"),)
    assert tied.described.verify == ()


def test_tie_to_a_name_that_nobody_holds_is_an_alias() -> None:
    assert rank({"emb": torch.ones(3)}, ties={"head": "emb"}).layout.aliases == (("head", "emb"),)
    assert rank({"head": torch.ones(3)}, ties={"head": "emb"}).layout.aliases == (("emb", "head"),)


def test_tie_to_a_further_name_is_one_to_the_tensor_itself() -> None:
    weight = torch.ones(3)
    source = {"emb": weight, "head": weight, "mtp": torch.ones(3)}

    assert rank(source, ties={"draft": "head"}).layout.aliases == (("head", "emb"), ("draft", "emb"))
    assert rank({"emb": weight}, ties={"a": "emb", "b": "a"}).layout.aliases == (("a", "emb"), ("b", "emb"))
    tied = rank(source, ties={"mtp": "head"})
    tied.publish()
    source["mtp"][0] = 2.0
    with pytest.raises(TieBroken, match=r"mtp .* emb: .*1 of 3 elements differ"):
        tied.publish()


def test_name_that_is_tied_to_two_tensors_ties_them() -> None:
    source = {"emb": torch.ones(3), "head": torch.zeros(3)}
    tied = rank(source, ties={"draft": "emb"} | {"head": "draft"})
    with pytest.raises(TieBroken, match="3 of 3 elements differ"):
        tied.publish()


def test_two_tensors_that_are_declared_one_are_compared_at_every_publish() -> None:
    source = {"emb": torch.arange(6.0).view(3, 2), "head": torch.arange(6.0).view(3, 2)}
    tied = rank(source, ties={"head": "emb"})

    assert sorted(tied.publish()) == ["emb", "head"]
    source["head"][1:, 1] += 1
    with pytest.raises(TieBroken, match=r"head .* emb: .*2 of 6 elements differ on this rank"):
        tied.publish()


def test_tie_of_different_cuts_is_compared_where_a_rank_holds_both() -> None:
    whole = torch.arange(12.0).view(4, 3)
    other = whole[1:3, :2].clone()
    shards = [("emb", (4, 3), (0, 0), (2, 3), whole[:2].clone()), ("head", (4, 3), (1, 0), (2, 2), other)]
    tied = rank(shards, ties={"head": "emb"})
    other[1] += 1  # row 2: the rank holds it of one of the two only
    tied.publish()
    other[0, 1] += 1
    with pytest.raises(TieBroken, match="1 of 2 elements differ"):
        tied.publish()


def test_tie_of_other_shapes_is_refused_at_once() -> None:
    with pytest.raises(TieBroken, match=r"the one is \(4, 2\) float32, the other \(3, 2\) float32"):
        rank({"emb": torch.ones(3, 2), "head": torch.ones(4, 2)}, ties={"head": "emb"})
