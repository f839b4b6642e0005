"""What is published of a PEFT model, against PEFT's own merge and its own checkpoint."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor, nn

from tests.hooks.peft_models import Net, adapted, bits, merged_by_peft, whole_numbers
from tests.hooks.published import Rank, unequal
from weightd.core.errors import ConfigError, WeightdError
from weightd.core.layout.boxes import box, join
from weightd.core.layout.flat import flat_range
from weightd.core.layout.local import piece_index, piece_view
from weightd.trainer_hooks.adapters.pick import holdings_of
from weightd.trainer_hooks.facts import Facts
from weightd.trainer_hooks.faults import (
    HoldingsChanged,
    LoraUndecided,
    LoraUnsupported,
    NotBetweenSteps,
    NothingToPublish,
)
from weightd.trainer_hooks.lora import LoraAdapter, merge
from weightd.trainer_hooks.lora import holdings as holdings_module
from weightd.trainer_hooks.lora.holdings import lora_holdings
from weightd.trainer_hooks.lora.merge import delta_of, write_merged
from weightd.trainer_hooks.lora.merger import Merger
from weightd.trainer_hooks.shards import Holdings

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")  # PEFT's advice on these small models


def rank(model: Any, lora: Any = "merged", **options: Any) -> Rank:
    return Rank(model, lora=lora, **options)


# ------------------------------------------------------------ merged

CONFIGS: dict[str, dict[str, Any]] = {
    "linear": {},
    "scaled by r": {"r": 2, "lora_alpha": 3},
    "rank-stabilised": {"use_rslora": True, "lora_alpha": 4},
    "embedding and head": {"target_modules": ["emb", "lm_head", "q"]},
    "another rank for one module": {"rank_pattern": {"o": 2}, "alpha_pattern": {"o": 6}},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "bias trains": {"bias": "all"},
}


@pytest.mark.parametrize("config", CONFIGS)
def test_merged_is_what_peft_merges(config: str) -> None:
    model = adapted(**CONFIGS[config])
    before, found = bits(model), rank(model)

    assert unequal(found.publish(), merged_by_peft(model)) == []
    assert bits(model) == before


def test_merged_is_what_peft_merges_at_every_publish() -> None:
    model = adapted()
    found = rank(model)
    for seed in range(3):
        whole_numbers(model, seed)

        assert unequal(found.publish(), merged_by_peft(model)) == []


def test_weights_that_are_stored_transposed() -> None:
    from transformers.pytorch_utils import Conv1D

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = Conv1D(7, 5)  # type: ignore[no-untyped-call]

    model: Any = get_peft_model(Gpt(), LoraConfig(r=2, target_modules=["fc"], fan_in_fan_out=True))
    whole_numbers(model)

    assert unequal(rank(model).publish(), merged_by_peft(model)) == []


def test_random_factors_in_low_precision_are_cast_once() -> None:
    model = adapted(target_modules=["q", "o", "emb"])
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    half = copy.deepcopy(model).to(torch.bfloat16)
    exact = {n: t.to(torch.bfloat16) for n, t in merged_by_peft(copy.deepcopy(half).float()).items()}

    assert unequal(rank(half).publish(), exact) == []
    single = rank(model, dtype=torch.bfloat16).publish()
    expected = {n: t.to(torch.bfloat16) for n, t in merged_by_peft(model).items()}
    assert all(torch.allclose(single[n].float(), t.float(), rtol=0.01, atol=1e-6) for n, t in expected.items())


def test_double_precision_is_merged_in_it() -> None:
    model = adapted().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(2.0**-40)  # lost in float32
    found = rank(model).publish()["layers.0.q.weight"]
    layer = model.base_model.model.layers[0].q
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight

    assert torch.equal(found, layer.base_layer.weight + b @ a * 2.0)
    assert not torch.equal(found, found.float().double())


def test_sum_of_a_low_precision_base_is_not_rounded_before_it_is_published() -> None:
    model = adapted()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    half = model.to(torch.bfloat16)
    found = rank(half, dtype=torch.float32).publish()["layers.0.q.weight"]
    exact = merged_by_peft(copy.deepcopy(half).float())["layers.0.q.weight"]

    assert torch.allclose(found, exact, rtol=1e-5, atol=1e-5)
    assert not torch.equal(found, found.to(torch.bfloat16).float())


def test_factor_of_another_module_than_the_attached_one_is_refused() -> None:
    """The old factor can still be read: it would be merged for ever."""
    model = adapted()
    found = rank(model)
    model.base_model.model.layers[0].q.lora_A["default"] = nn.Linear(6, 4, bias=False)
    with pytest.raises(HoldingsChanged, match=r"layers.0.q.lora_A.default.weight was attached as"):
        found.publish()


@pytest.mark.parametrize("lora", ["merged", "adapter"])
def test_engine_is_asked_for_its_step_before_the_others_are_waited_for(
    lora: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = holdings_of

    def busy() -> None:
        raise NotBetweenSteps(3, "1 of 2 micro-batches of the next step are taken", "publish behind it")

    def of_an_engine(*arguments: Any, **options: Any) -> Holdings:
        return replace(real(*arguments, **options), prepare=(busy,))

    monkeypatch.setattr(holdings_module, "holdings_of", of_an_engine)
    monkeypatch.setattr(Merger, "prepare", lambda _: pytest.fail("factors were exchanged"))
    found = rank(adapted(), lora)
    with pytest.raises(NotBetweenSteps):
        found.publish()


def test_layer_that_is_reachable_by_two_names_is_merged_once() -> None:
    model = adapted()
    expected = merged_by_peft(model)
    model.base_model.model.again = model.base_model.model.layers[0].q
    found = rank(model)

    assert unequal(found.publish(), expected) == []
    assert ("again.weight", "layers.0.q.weight") in found.layout.aliases


def test_factors_that_make_no_matrix_of_the_weights_shape_are_refused() -> None:
    model = adapted()
    model.base_model.model.layers[0].q.base_layer.weight = nn.Parameter(torch.ones(6, 10))
    with pytest.raises(
        LoraUnsupported, match=r"adapter default makes a matrix of \(10, 6\), the weight is of \(6, 10\)"
    ):
        rank(model)


def test_large_weight_is_computed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "_BLOCK", 13)
    model = adapted(target_modules=["q", "o", "emb"])

    assert unequal(rank(model).publish(), merged_by_peft(model)) == []


def test_several_active_adapters_are_summed_and_idle_ones_are_not() -> None:
    model = adapted()
    for name, r in (("b", 2), ("idle", 3)):
        model.add_adapter(name, LoraConfig(r=r, target_modules=["q"]))
    whole_numbers(model)
    model.base_model.set_adapter(["default", "b"])
    found = rank(model)
    both = merged_by_peft(model)

    assert unequal(found.publish(), both) == []
    model.base_model.set_adapter("idle")
    assert unequal(found.publish(), merged_by_peft(model)) == []
    assert unequal(merged_by_peft(model), both) != []


def test_adapter_that_is_merged_in_place_is_not_added_twice() -> None:
    model = adapted()
    found, expected = rank(model), merged_by_peft(model)
    model.merge_adapter()
    during = found.publish()
    model.unmerge_adapter()

    assert unequal(during, expected) == []
    assert unequal(found.publish(), expected) == []


def test_adapters_of_which_one_is_merged_in_place_and_another_is_not() -> None:
    """PEFT's layer computes with its base alone as soon as anything is merged into it."""
    model = adapted()
    model.add_adapter("b", LoraConfig(r=2, target_modules=["q"]))
    model.base_model.set_adapter(["default", "b"])
    found = rank(model)
    model.merge_adapter(["default"])
    layer, x = model.base_model.model.layers[0].q, torch.ones(1, 6)
    assert torch.equal(layer(x), layer.base_layer(x))
    with pytest.raises(LoraUnsupported, match=r"layers.0.q .*: default is merged into it and b is active and is not"):
        found.publish()
    model.merge_adapter(["b"])
    merged = found.publish()

    assert torch.equal(merged["layers.0.q.weight"], layer.base_layer.weight)


def test_adapters_of_a_model_that_is_no_peft_model() -> None:
    from peft import inject_adapter_in_model

    model: Any = inject_adapter_in_model(LoraConfig(r=2, target_modules=["q"]), Net())
    whole_numbers(model)
    merged = rank(model).publish()
    layer = model.layers[0].q

    assert sorted(merged) == sorted(Net().state_dict())
    expected = layer.base_layer.weight + layer.get_delta_weight("default")
    assert torch.equal(merged["layers.0.q.weight"], expected)


@pytest.mark.parametrize("wrap", ["compiled", "compiled inside"])
def test_names_are_those_of_the_model_whatever_is_around_it(wrap: str) -> None:
    model = adapted(modules_to_save=["lm_head"])
    expected = merged_by_peft(model)
    if wrap == "compiled":
        found = rank(torch.compile(model, backend="eager"))
    else:
        model.base_model.model.layers[0] = torch.compile(model.base_model.model.layers[0], backend="eager")
        found = rank(model)

    assert unequal(found.publish(), expected) == []


def test_memory_does_not_grow_by_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is computed is of one block: the largest tensor that a publish makes is looked at."""
    sizes: list[int] = []
    matmul = torch.Tensor.__matmul__

    def watched(left: Tensor, right: Tensor) -> Tensor:
        made = matmul(left, right)
        sizes.append(made.numel())
        return made

    monkeypatch.setattr(merge, "_BLOCK", 20)
    found = rank(adapted())
    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    found.publish()

    assert max(sizes) <= 20
    assert sum(sizes) == 2 * (60 + 60)


# ------------------------------------------------------------ any boxes


BOXES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "rows": (box((2, 10), (3, 0)), (2, 10)),
    "columns": (box((6, 3), (0, 4)), (6, 3)),
    "corner": (box((2, 3), (4, 7)), (2, 3)),
    "every other row": (box((3, 10), (1, 0), (2, 1)), (3, 10)),
    "flat range": (flat_range((6, 10), 7, 45), (38,)),
    "inside a row": (flat_range((6, 10), 41, 44), (3,)),
    "two runs of rows": (join([box((1, 10), (0, 0)), box((2, 10), (4, 0), offset=10)]), (3, 10)),
}
"""Pieces of a weight of (6, 10), and the shape of the tensor that holds them."""


@pytest.mark.parametrize("case", BOXES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("block", [1 << 22, 7])
def test_any_box_of_a_weight(case: str, transposed: bool, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2's rows and columns, ZeRO-3's flat ranges, strided cuts: the same code, by the boxes alone."""
    monkeypatch.setattr(merge, "_BLOCK", block)
    pieces, shape = BOXES[case]
    base = torch.randint(-9, 9, (6, 10)).float()
    rows, columns = (10, 6) if transposed else (6, 10)
    a, b = torch.randint(-9, 9, (2, columns)).float(), torch.randint(-9, 9, (rows, 2)).float()
    made = (b @ a).t() if transposed else b @ a
    expected = base + 1.5 * made
    local, out = torch.zeros(shape), torch.full(shape, float("nan"))
    for row in range(len(pieces)):
        view = piece_view(local.view(-1).numpy(), pieces, row)
        view[...] = base[piece_index(pieces, row, 2)].numpy()
    write_merged(out, local, pieces, [delta_of(1.5, a, b, transposed, torch.float32)])

    for row in range(len(pieces)):
        found = torch.from_numpy(piece_view(out.view(-1).numpy(), pieces, row).copy())
        assert torch.equal(found, expected[piece_index(pieces, row, 2)])


def test_flat_shards_of_two_ranks_make_the_merged_weight() -> None:
    """As ZeRO-3 would hold it: the base is cut flat, somewhere in a row, and the factors are whole."""
    model = adapted()
    holdings = lora_holdings(model, "merged", False, partial(pytest.fail, "nothing is to be exchanged"))
    assert holdings is not None
    for prepare in holdings.prepare:
        prepare()
    shard = next(s for s in holdings.shards if s.name == "layers.0.q.weight")
    layer = model.base_model.model.layers[0].q
    assert shard.render is not None
    merger, expected = shard.render.func.__self__, merged_by_peft(model)["layers.0.q.weight"]  # type: ignore[attr-defined]
    found = []
    for low, high in ((0, 23), (23, 60)):
        flat = layer.base_layer.weight.detach().reshape(-1)[low:high].clone()
        part = replace(shard.parts[0], pieces=flat_range((10, 6), low, high))
        cut = replace(shard, local_shape=(high - low,), parts=(part,), read=partial(torch.clone, flat))
        out = torch.empty(high - low)
        merger.write(merger.layers[shard.name], cut, out)
        found.append(out)

    assert torch.equal(torch.cat(found).view(10, 6), expected)


# ------------------------------------------------------------ one adapter


@pytest.mark.parametrize("config", ["linear", "embedding and head", "modules_to_save", "rank-stabilised"])
def test_one_adapter_is_what_peft_saves(config: str) -> None:
    model = adapted(**CONFIGS[config])
    found = rank(model, "adapter").publish()

    assert unequal(found, get_peft_model_state_dict(model, save_embedding_layers=False)) == []


def test_adapter_of_another_name_that_does_not_train() -> None:
    model = adapted()
    model.add_adapter("lora_A", LoraConfig(r=2, target_modules=["o"]))  # called as a part of the name is
    whole_numbers(model)
    found = rank(model, LoraAdapter("lora_A")).publish()

    assert not any(p.requires_grad for n, p in model.named_parameters() if "lora_A.lora_A" in n)
    assert unequal(found, get_peft_model_state_dict(model, adapter_name="lora_A")) == []
    assert len(found) == 4


def test_active_adapter_is_the_one_that_was_active_at_attach() -> None:
    model = adapted()
    model.add_adapter("b", LoraConfig(r=2, target_modules=["q"]))
    found, named = rank(model, "adapter"), rank(model, LoraAdapter("default"))
    before = found.publish()
    for now, text in (("b", "b"), (["default", "b"], "b, default"), ([], "none")):
        model.base_model.set_adapter(now)
        with pytest.raises(HoldingsChanged, match=rf"active adapter was attached as default and is {text} now"):
            found.publish()
        assert unequal(named.publish(), before) == []
    model.base_model.set_adapter("default")

    assert unequal(found.publish(), before) == []


def test_adapter_is_published_whatever_its_base_is() -> None:
    """A quantised base, or one elsewhere, is nothing that this process reads."""
    model = adapted(target_modules=["q"])
    for block in model.base_model.model.layers:
        block.q.base_layer.weight = nn.Parameter(torch.empty(10, 6, device="meta"))

    assert len(rank(model, "adapter").publish()) == 4
    with pytest.raises(WeightdError, match=r"layers.0.q.weight cannot be described: a meta tensor"):
        rank(model, "merged")


def test_which_adapter_is_asked_where_several_are_active() -> None:
    model = adapted()
    model.add_adapter("b", LoraConfig(r=2, target_modules=["q"]))
    model.base_model.set_adapter(["default", "b"])
    with pytest.raises(ConfigError, match=r"2 adapters are active, of \['b', 'default'\]"):
        rank(model, "adapter")
    with pytest.raises(ConfigError, match=r"LoraAdapter\('c'\)\": the model has the adapters \['b', 'default'\]"):
        rank(model, LoraAdapter("c"))


# ------------------------------------------------------------ refused


def test_peft_model_is_refused_where_nobody_says_what_is_published() -> None:
    with pytest.raises(LoraUndecided, match=r"4 modules of PEFT are in this model, layers.0.q the first") as caught:
        Rank(adapted())

    assert 'lora="merged", lora="adapter", lora=LoraAdapter(name)' in str(caught.value)


def test_factors_in_a_mapping_are_refused() -> None:
    with pytest.raises(LoraUndecided, match="with the PEFT model"):
        Rank(dict(adapted().named_parameters()))
    with pytest.raises(ConfigError, match="it needs the PEFT model itself"):
        rank(dict(Net().named_parameters()))


def test_declared_shards_have_no_adapters() -> None:
    with pytest.raises(ConfigError, match=r"lora = 'merged': shards are declared as they are published"):
        rank([("w", (2,), (0,), (2,), torch.ones(2))])


def test_masters_of_merged_weights_are_refused() -> None:
    """ZeRO-3 would give the base as it is held, and factors in the compute type: no master takes part."""
    with pytest.raises(ConfigError, match=r"masters = 'True': merged weights are computed from the factors that"):
        rank(adapted(), masters=True)


def test_model_without_adapters_binds_nothing() -> None:
    with pytest.raises(NothingToPublish, match="no module of this model has an adapter"):
        rank(Net())


def test_word_that_is_none() -> None:
    with pytest.raises(ConfigError, match="lora = 'unmerged': it is one of"):
        rank(adapted(), "unmerged")


def conv() -> nn.Module:
    model = nn.Module()
    model.c = nn.Conv1d(3, 4, 2)
    return model


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.w = nn.Parameter(torch.ones(2, 3, 4))


UNSUPPORTED: dict[str, tuple[Callable[[], Any], str]] = {
    "DoRA": (
        lambda: adapted(use_dora=True),
        r"layers.0.q cannot be published: adapter default is of DoraLinearVariant",
    ),
    "bias": (lambda: adapted(lora_bias=True, target_modules=["q"]), "adapter default has a bias"),
    "convolution": (lambda: get_peft_model(conv(), LoraConfig(r=2, target_modules=["c"])), "c cannot .*Conv1d"),
    "parameter": (
        lambda: get_peft_model(Experts(), LoraConfig(r=2, target_parameters=["experts.w"], target_modules=[])),
        "experts cannot .*ParamWrapper",
    ),
    "another method": (
        lambda: get_peft_model(Net(), IA3Config(target_modules=["q"], feedforward_modules=[])),
        "layers.0.q cannot .*ia3",
    ),
    "single tokens": (
        lambda: adapted(trainable_token_indices={"emb": [1, 2]}),
        r"emb cannot .*TrainableTokensWrapper",
    ),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
@pytest.mark.parametrize("lora", ["merged", "adapter"])
def test_what_is_more_than_two_factors_is_refused_by_module(case: str, lora: str) -> None:
    build, text = UNSUPPORTED[case]
    with pytest.raises(LoraUnsupported, match=text) as caught:
        rank(build(), lora)

    assert "supported: [LoRA of Linear and Embedding, modules_to_save]" in str(caught.value)


def test_learned_prompts_are_refused() -> None:
    config = PromptTuningConfig(num_virtual_tokens=2, task_type="FEATURE_EXTRACTION", token_dim=6, num_layers=1)
    model: Any = nn.Module()
    model.peft_probe = config
    prompt = type("PeftModel", (nn.Module,), {"__module__": "peft.peft_model"})()
    prompt.base_model, prompt.prompt_encoder = Net(), nn.ModuleDict()
    with pytest.raises(LoraUnsupported, match="learned prompts"):
        rank(prompt)


def test_disabled_adapters_are_refused_at_the_publish() -> None:
    model = adapted()
    found = rank(model)
    with model.disable_adapter(), pytest.raises(LoraUnsupported, match=r"layers.0.q .* its adapters are disabled"):
        found.publish()
    found.publish()


def test_no_active_adapter_binds_nothing() -> None:
    model = adapted()
    found = rank(model)
    model.base_model.set_adapter([])
    with pytest.raises(NothingToPublish, match="no adapter is active in any module"):
        found.publish()


def test_adapter_that_comes_or_goes_needs_a_new_attach() -> None:
    model = adapted()
    found = rank(model)
    model.add_adapter("b", LoraConfig(r=2, target_modules=["q"]))
    found.publish()
    model.set_adapter("b")
    with pytest.raises(HoldingsChanged, match=r"layers.0.q.lora_A.b.weight was attached as not there"):
        found.publish()
    model.set_adapter("default")
    model.delete_adapter("default")
    with pytest.raises(WeightdError):
        found.publish()


def test_another_copy_of_a_module_needs_a_new_attach() -> None:
    model = adapted(modules_to_save=["lm_head"])
    model.add_adapter("b", LoraConfig(r=2, target_modules=["q"], modules_to_save=["lm_head"]))
    found = rank(model)
    model.set_adapter("b")
    with pytest.raises(HoldingsChanged, match=r"lm_head.modules_to_save was attached as the copy of adapter default"):
        found.publish()


def test_weight_with_two_names_of_which_one_has_an_adapter() -> None:
    net = Net()
    net.lm_head.weight = net.emb.weight
    model: Any = get_peft_model(net, LoraConfig(r=2, target_modules=["emb"]))
    with pytest.raises(LoraUnsupported, match=r"emb cannot be published: its weight is that of lm_head.weight, too"):
        rank(model)


def test_merged_weight_is_never_frozen() -> None:
    with pytest.raises(ConfigError, match=r"frozen = 'layers.0.q.weight': what is published of it is computed"):
        rank(adapted(), facts=Facts(frozen=["layers.0.q.weight"]))


def test_frozen_base_beside_merged_weights() -> None:
    found = rank(adapted(), facts=Facts(frozen=["emb.*", "*.norm.*"]))

    assert found.slots.fill(0) - found.slots.fill(0) == 4 * (11 * 6 + 4 * 6)
