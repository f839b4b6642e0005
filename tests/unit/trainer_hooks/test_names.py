"""Names of wrapped models, and names that a user maps."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.hooks.published import Rank
from weightd.core.errors import ConfigError
from weightd.trainer_hooks.faults import NamesCollide
from weightd.trainer_hooks.names import canonical_names


def short(*names: str) -> list[str]:
    return list(canonical_names(names).values())


def test_wrappers_nest_and_repeat() -> None:
    assert short("module._orig_mod._orig_mod._fsdp_wrapped_module.a._checkpoint_wrapped_module._orig_mod.w") == ["a.w"]


def test_prefix_of_peft_goes_where_every_name_has_it() -> None:
    assert short("base_model.model.a.w", "base_model.model.b") == ["a.w", "b"]
    assert short("base_model.model.a.w", "b") == ["base_model.model.a.w", "b"]
    assert short("module.base_model.model.a.w") == ["a.w"]


def test_base_layer_counts_in_front_of_the_last_component_only() -> None:
    assert short("q.base_layer.weight", "base_layer.q.weight") == ["q.weight", "base_layer.q.weight"]
    assert short("q.base_layer.base_layer.bias") == ["q.bias"]


def test_copies_of_two_adapters_in_a_mapping_collide() -> None:
    with pytest.raises(NamesCollide):
        short("h.original_module.w", "h.modules_to_save.a.w", "h.modules_to_save.b.w")


def test_original_module_without_a_copy_is_a_module_like_any_other() -> None:
    assert short("h.original_module.w") == ["h.original_module.w"]


# ------------------------------------------------------------ renamed=


def tower() -> dict[str, torch.Tensor]:
    return {"model.layers.0.w": torch.ones(2), "model.norm": torch.ones(3), "modelx.w": torch.ones(1)}


def renamed(source: Any, how: Any, **options: Any) -> list[str]:
    return Rank(source, renamed=how, **options).names()


def test_prefixes_are_whole_components_and_the_longest_counts() -> None:
    how = {"model": "language_model.model", "model.norm": "final"}

    assert renamed(tower(), how) == ["language_model.model.layers.0.w", "final", "modelx.w"]


def test_dots_at_the_end_of_a_prefix_and_the_empty_prefix() -> None:
    assert renamed(tower(), {"model.": "m.", "": "rest"}) == ["m.layers.0.w", "m.norm", "rest.modelx.w"]
    assert renamed({"a.b.w": torch.ones(1)}, {"a": ""}) == ["b.w"]


def test_a_function_of_the_name() -> None:
    assert renamed(tower(), str.upper) == ["MODEL.LAYERS.0.W", "MODEL.NORM", "MODELX.W"]


def test_ties_are_renamed_on_both_sides() -> None:
    weight = torch.ones(5, 3)
    rank = Rank({"model.emb": weight, "lm_head": weight}, renamed={"model": "t.model", "lm_head": "t.lm_head"})

    assert rank.layout.aliases == (("t.lm_head", "t.model.emb"),)


def test_prefix_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"renamed = 'model.layer': it is the longest prefix of none of the 3 names"):
        renamed(tower(), {"model.layer": "x"})


def test_two_names_that_become_one_are_refused() -> None:
    with pytest.raises(NamesCollide, match=r"2 tensors are called w .*\[a.w, b.w\]"):
        renamed({"a.w": torch.ones(1), "b.w": torch.ones(1)}, {"a": "", "b": ""})


def test_errors_go_on_to_use_the_models_names() -> None:
    model = nn.ParameterDict({"w": torch.ones(3)})
    rank = Rank(model, renamed={"w": "x"})
    model["w"] = nn.Parameter(torch.ones(4))
    with pytest.raises(Exception, match=r"E_HOLDINGS: w was attached"):
        rank.publish()


def test_casts_use_the_new_names() -> None:
    found = Rank({"a.w": torch.ones(3)}, renamed={"a": "b"}, dtype={"b.w": torch.bfloat16}).publish()

    assert {"b.w": torch.bfloat16} == {name: tensor.dtype for name, tensor in found.items()}


def test_pairs_that_come_only_once_are_described_twice() -> None:
    rank = Rank(iter({"w": torch.ones(2)}.items()))

    assert rank.publisher.describe().tensors == rank.layout.tensors != ()
