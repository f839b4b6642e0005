"""Cases of the field that a trainer's hook decides: replicas, padding, ties, names, coverage, casts.

Numbers are those of the case log; what engines receive goes through the real proof, plans and copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from tests.hooks.delivery import Held, delivered, differing
from tests.hooks.peft_models import Net, adapted, merged_by_peft, whole_numbers
from tests.hooks.published import Rank, unequal
from weightd.core.errors import ConfigError, Refused, WeightdError, flatten
from weightd.core.layout.cuts import spans
from weightd.core.units import TrainerRank
from weightd.rollout_hooks.declare import Declaration
from weightd.trainer_hooks.exchange import Exchange
from weightd.trainer_hooks.facts import Facts
from weightd.trainer_hooks.faults import HoldingsChanged, NamesCollide, NothingToPublish, ReplicasDisagree, TieBroken
from weightd.trainer_hooks.identity import Identity
from weightd.trainer_hooks.lora import LoraAdapter
from weightd.trainer_hooks.names import canonical_names
from weightd.trainer_hooks.replicas import Replicas

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")  # PEFT's advice on small models


def counting(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return distinct numbers, so that no permutation and no off-by-one can pass."""
    return torch.arange(torch.Size(shape).numel()).to(dtype).view(shape)


def rows(name: str, tensor: Tensor, first: int, end: int, shape: Sequence[int] = ()) -> Any:
    """Return rows of a tensor as a declared shard."""
    return name, tuple(shape or tensor.shape), (first, 0), (end - first, *tensor.shape[1:]), tensor[first:end].clone()


def needs(**tensors: Sequence[int]) -> Callable[[int], Declaration]:
    """Return what an engine of one rank needs: whole tensors, dots written as two underscores."""

    def declare(_: int) -> Declaration:
        declaration = Declaration("float32")
        for name, shape in tensors.items():
            declaration.replicated(name.replace("__", "."), shape)
        return declaration

    return declare


def refusal(call: Callable[[], object]) -> str:
    """Return the text of the refusal, with every violation."""
    with pytest.raises(WeightdError) as caught:
        call()
    return str(caught.value)


class Talk:
    """Stands in for a process group: ranks are threads, and a gathering is a barrier."""

    def __init__(self, world: int) -> None:
        self.world, self.barrier, self.shown = world, threading.Barrier(world, timeout=20), [torch.empty(0)] * world

    def rank(self, rank: int) -> Exchange:
        return _Seat(self, rank)

    def ranks(self, call: Callable[[int], Any]) -> list[Any]:
        """Call once for each rank, at once, and return what each returned or raised."""
        with ThreadPoolExecutor(self.world) as pool:
            calls = [pool.submit(call, rank) for rank in range(self.world)]
            return [c.exception(30) or c.result() for c in calls]


class _Seat(Exchange):
    def __init__(self, talk: Talk, rank: int) -> None:
        self._talk, self.rank, self._identity = talk, rank, Identity(TrainerRank(rank), talk.world)

    def gather(self, mine: Tensor) -> list[Tensor]:
        self._talk.shown[self.rank] = mine.clone()
        self._talk.barrier.wait()
        every = list(self._talk.shown)
        self._talk.barrier.wait()
        return every


def compared(sources: Sequence[Any]) -> list[Any]:
    """Publish one source per rank with a comparison of replicas, and return what each rank got."""
    talk = Talk(len(sources))

    def publish(rank: int) -> Held:
        held = Rank(sources[rank], rank, len(sources))
        replicas = Replicas(held.layout, talk.rank(rank))
        found = held.fill()
        replicas.check(found[1])
        return found

    return talk.ranks(publish)


# ------------------------------------------------------------ replicas


def test_o07_two_data_parallel_replicas_are_one_source() -> None:
    found = compared([{"a.w": counting(4, 3), "b": counting(5)} for _ in range(2)])

    assert (
        differing(delivered(found, 1, needs(a__w=(4, 3), b=(5,)))[0], {"a.w": counting(4, 3), "b": counting(5)}) == []
    )


def test_o07_replicas_that_differ_in_one_byte_are_refused_by_both_ranks() -> None:
    second = {"a.w": counting(4, 3), "b": counting(5)}
    second["a.w"].view(torch.uint8)[2, 7] ^= 1
    found = compared([{"a.w": counting(4, 3), "b": counting(5)}, second])

    assert [type(error) for error in found] == [ReplicasDisagree] * 2
    assert {(error.name, error.ranks) for error in found} == {("a.w", (0, 1))}
    assert "replicas disagree" in str(found[0])


def test_o07_without_torch_distributed_the_check_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"check_replicas: it needs torch.distributed"):
        Rank({"w": counting(2)}, check_replicas=True)


def test_o29_embedding_on_two_pipeline_stages() -> None:
    embed = counting(6, 2)
    stages = [{"embed.weight": embed, "layers.0.w": counting(3)}, {"embed.weight": embed.clone(), "norm": counting(4)}]
    found = compared(stages)
    params = delivered(found, 1, needs(embed__weight=(6, 2), layers__0__w=(3,), norm=(4,)))[0]

    assert differing(params, {"embed.weight": embed, "layers.0.w": counting(3), "norm": counting(4)}) == []
    stages[1]["embed.weight"][5, 1] += 1
    assert {(e.name, e.ranks) for e in compared(stages)} == {("embed.weight", (0, 1))}


# ------------------------------------------------------------ padding


def test_o12_vocabulary_that_does_not_divide() -> None:
    table = counting(49, 4)
    ranks = [Rank([rows("emb", table, a, b)], r, 5).fill() for r, (a, b) in enumerate(spans([10, 10, 10, 10, 9]))]

    assert torch.equal(delivered(ranks, 1, needs(emb=(49, 4)))[0]["emb"], table)


@pytest.mark.parametrize("declared", [True, False])
def test_o12_padding_row_is_dropped_only_when_it_is_declared(declared: bool) -> None:
    padded = torch.cat([counting(49, 4), torch.full((1, 4), float("nan"))])
    facts = Facts(true_shapes={"emb": (49, 4)}) if declared else None
    ranks = [Rank([rows("emb", padded, 10 * r, 10 * r + 10)], r, 5, facts=facts).fill() for r in range(5)]
    if declared:
        assert torch.equal(delivered(ranks, 1, needs(emb=(49, 4)))[0]["emb"], padded[:49])
        return
    text = refusal(lambda: delivered(ranks, 1, needs(emb=(49, 4))))
    assert "E_DESCRIPTION" in text
    assert "50" in text
    assert "49" in text


def test_o16_padded_shape_that_is_global_already_is_trimmed_not_multiplied() -> None:
    padded = torch.cat([counting(10, 3), torch.full((2, 3), float("nan"))])
    facts = Facts(true_shapes={"emb": (10, 3)})
    ranks = [Rank([rows("emb", padded, 6 * r, 6 * r + 6)], r, 2, facts=facts) for r in range(2)]

    assert {t.shape for rank in ranks for t in rank.layout.tensors} == {(10, 3)}
    assert torch.equal(delivered([r.fill() for r in ranks], 1, needs(emb=(10, 3)))[0]["emb"], padded[:10])


@pytest.mark.parametrize("declared", [True, False])
def test_o17_rows_padded_to_a_divisor(declared: bool) -> None:
    padded = torch.cat([counting(10, 2), torch.full((6, 2), float("nan"))])
    facts = Facts(true_shapes={"emb": (10, 2)}) if declared else None
    ranks = [Rank([rows("emb", padded, 8 * r, 8 * r + 8)], r, 2, facts=facts).fill() for r in range(2)]
    if declared:
        assert torch.equal(delivered(ranks, 1, needs(emb=(10, 2)))[0]["emb"], padded[:10])
        return
    text = refusal(lambda: delivered(ranks, 1, needs(emb=(10, 2))))
    assert "16" in text
    assert "10" in text


# ------------------------------------------------------------ ties and shared storage


def test_o27_tied_head_is_one_transfer_and_its_namesake_another() -> None:
    weight = counting(5, 3)
    source = {"embed.weight": weight, "lm_head.weight": weight, "mtp.lm_head.weight": weight.clone() + 1}
    rank = Rank(source, facts=Facts(ties={"lm_head.weight": "embed.weight"}))
    params = delivered([rank.fill()], 1, needs(lm_head__weight=(5, 3), mtp__lm_head__weight=(5, 3)))[0]

    assert [t.name for t in rank.layout.tensors] == ["embed.weight", "mtp.lm_head.weight"]
    assert differing(params, {"lm_head.weight": weight, "mtp.lm_head.weight": weight + 1}) == []


def test_o28_tie_that_identity_denies_is_refused_where_the_tensors_differ() -> None:
    source = {"embed.weight": torch.ones(4, 2), "lm_head.weight": torch.full((4, 2), 2.0)}
    rank = Rank(source, facts=Facts(ties={"lm_head.weight": "embed.weight"}))
    with pytest.raises(TieBroken, match=r"8 of 8 elements differ") as caught:
        rank.fill()

    assert "neither of the two is picked" in str(caught.value)


def test_o28_tie_that_identity_denies_delivers_both_while_they_are_equal() -> None:
    source = {"embed.weight": counting(4, 2), "lm_head.weight": counting(4, 2)}
    rank = Rank(source, facts=Facts(ties={"lm_head.weight": "embed.weight"}))
    params = delivered([rank.fill()], 1, needs(embed__weight=(4, 2), lm_head__weight=(4, 2)))[0]

    assert differing(params, source) == []


def test_o30_views_of_one_buffer_are_two_parameters() -> None:
    base = counting(4, 4)
    rank = Rank({"a": base[:2], "b": base[2:]})

    assert rank.layout.aliases == ()
    assert differing(delivered([rank.fill()], 1, needs(a=(2, 4), b=(2, 4)))[0], {"a": base[:2], "b": base[2:]}) == []


def test_o31_views_of_one_storage_take_the_room_of_the_storage_once() -> None:
    storage = counting(64, 1024)
    rank = Rank({f"w{i}": storage[i] for i in range(64)})

    assert rank.described.payload_nbytes == 256 << 10
    assert unequal(rank.publish(), {f"w{i}": storage[i] for i in range(64)}) == []


# ------------------------------------------------------------ names


def test_o32_wrappers_in_every_order_leave_no_trace() -> None:
    raw = "module._orig_mod._fsdp_wrapped_module.layers.0._orig_mod._checkpoint_wrapped_module.w"

    assert dict(canonical_names([raw])) == {raw: "layers.0.w"}
    assert dict(canonical_names(["encoder.module.w", "head"])) == {
        "encoder.module.w": "encoder.module.w",
        "head": "head",
    }


def test_o32_real_submodule_keeps_its_name_below_wrappers() -> None:
    encoder = nn.ModuleDict({"module": nn.Linear(2, 2, bias=False)})
    inner: Any = torch.compile(encoder, backend="eager")
    model = torch.compile(nn.ModuleDict({"encoder": inner}), backend="eager")

    assert Rank(model).names() == ["encoder.module.weight"]


def test_o33_base_layer_of_an_adapter_is_the_layer() -> None:
    raw = "base_model.model.layers.0.q_proj.base_layer.weight"

    assert dict(canonical_names([raw])) == {raw: "layers.0.q_proj.weight"}
    names = Rank(adapted(), lora="merged").names()
    assert "layers.0.q.weight" in names
    assert not [name for name in names if "lora" in name or "base_layer" in name or "base_model" in name]


def test_o34_trained_copy_is_published_and_the_original_is_not() -> None:
    model = adapted(modules_to_save=["lm_head"])
    head = model.base_model.model.lm_head
    with torch.no_grad():
        head.original_module.weight.fill_(0)
        head.modules_to_save["default"].weight.fill_(5)

    assert torch.equal(Rank(model, lora="merged").publish()["lm_head.weight"], torch.full((11, 6), 5.0))
    pairs = {n: p.detach() for n, p in model.named_parameters() if "lora" not in n}
    assert torch.equal(Rank(pairs).publish()["lm_head.weight"], torch.full((11, 6), 5.0))


def test_o34_with_several_adapters_the_copy_of_the_active_one_is_published() -> None:
    model = adapted(modules_to_save=["lm_head"])
    model.add_adapter("b", LoraConfig(r=2, target_modules=["q"], modules_to_save=["lm_head"]))
    whole_numbers(model)
    model.set_adapter("b")

    assert unequal(Rank(model, lora="merged").publish(), merged_by_peft(model)) == []


def test_o35_no_adapter_tensor_reaches_an_engine_that_has_none() -> None:
    """The names are those of the model without adapters, whatever adapters there are; under FSDP2 in tests/hooks."""
    model = adapted(modules_to_save=["lm_head"])
    plain = sorted(Rank(Net()).names())
    model.add_adapter("ref", LoraConfig(r=2, target_modules=["q", "o"], modules_to_save=["lm_head"]))

    assert sorted(Rank(model, lora="merged").names()) == plain
    assert sorted(Rank(torch.compile(model, backend="eager"), lora="merged").names()) == plain


def multimodal(kept: bool) -> Callable[[int], Declaration]:
    def declare(_: int) -> Declaration:
        d = Declaration("float32")
        d.replicated("language_model.model.layers.0.w", (3, 2))
        (d.kept if kept else d.replicated)("visual.layers.0.w", (2, 2))
        return d

    return declare


def test_o36_tower_without_a_map_is_refused_with_the_names_of_both_sides() -> None:
    held = Rank({"model.layers.0.w": counting(3, 2)}).fill()
    text = refusal(lambda: delivered([held], 1, multimodal(kept=True)))

    assert "E_NAME" in text
    assert "language_model.model.layers.0.w" in text
    assert "model.layers.0.w" in text.replace("language_model.model.layers.0.w", "")


def test_o36_tower_with_a_map() -> None:
    held = Rank({"model.layers.0.w": counting(3, 2)}, renamed={"model": "language_model.model"}).fill()
    params = delivered([held], 1, multimodal(kept=True))[0]

    assert torch.equal(params["language_model.model.layers.0.w"], counting(3, 2))
    assert params["visual.layers.0.w"].isnan().all()
    text = refusal(lambda: delivered([held], 1, multimodal(kept=False)))
    assert "visual.layers.0.w" in text


def test_o36_tower_that_the_trainer_has_is_declared_not_synced() -> None:
    source = {"model.layers.0.w": counting(3, 2), "visual.layers.0.w": counting(2, 2)}
    options: dict[str, Any] = {"renamed": {"model": "language_model.model"}, "facts": Facts(not_synced=["visual.*"])}
    held = Rank(source, **options).fill()

    assert delivered([held], 1, multimodal(kept=True))[0]["visual.layers.0.w"].isnan().all()
    text = refusal(lambda: delivered([held], 1, multimodal(kept=False)))
    assert "visual.layers.0.w" in text


def test_o37_blocks_with_equal_inner_names() -> None:
    blocks = nn.ModuleDict(
        {"blocks": nn.ModuleList(nn.ModuleDict({"q": nn.Linear(2, 2, bias=False)}) for _ in range(2))}
    )

    assert Rank(blocks).names() == ["blocks.0.q.weight", "blocks.1.q.weight"]
    pairs = [("attn.q.weight", counting(2)), ("attn.q.weight", counting(2) + 1)]
    with pytest.raises(NamesCollide, match=r"2 tensors are called attn.q.weight"):
        Rank(iter(pairs))


# ------------------------------------------------------------ coverage


def ten() -> dict[str, Tensor]:
    return {f"w{i}": counting(2, 3) + 10 * i for i in range(10)}


def engine_of_ten(kept: Sequence[str]) -> Callable[[int], Declaration]:
    def declare(_: int) -> Declaration:
        d = Declaration("float32")
        for name in ten():
            (d.kept if name in kept else d.replicated)(name, (2, 3))
        return d

    return declare


def test_o40_declared_subset_changes_only_what_is_in_it() -> None:
    rest = [f"w{i}" for i in range(2, 10)]
    params = delivered([Rank(ten(), facts=Facts(not_synced=rest)).fill()], 1, engine_of_ten(rest))[0]

    assert [name for name, tensor in params.items() if not tensor.isnan().all()] == ["w0", "w1"]
    assert differing({n: params[n] for n in ("w0", "w1")}, {n: ten()[n] for n in ("w0", "w1")}) == []


def test_o40_subset_that_nobody_declared_is_refused() -> None:
    only = {name: tensor for name, tensor in ten().items() if name in ("w0", "w1")}
    with pytest.raises(Refused) as caught:
        delivered([Rank(only).fill()], 1, engine_of_ten(()))

    assert "E_NAME" in [e.code for e in flatten([caught.value])]
    assert "w9" in str(caught.value)


def test_o40_subset_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"not_synced = 'v\*': it matches none of the 10 names"):
        Rank(ten(), facts=Facts(not_synced=["v*"]))
    with pytest.raises(NothingToPublish, match="all 10 names"):
        Rank(ten(), facts=Facts(not_synced=["w*"]))


def test_o41_plain_tensor_beside_a_sharded_one() -> None:
    emb, head = counting(5, 2), counting(3, 2)
    ranks = [
        Rank([rows("emb", emb, a, b), rows("head", head, 0, 3)], r, 2).fill() for r, (a, b) in enumerate(spans([3, 2]))
    ]

    assert differing(delivered(ranks, 2, needs(emb=(5, 2), head=(3, 2)))[1], {"emb": emb, "head": head}) == []


def test_o42_buffers_are_published_like_parameters() -> None:
    model = nn.Linear(2, 2, bias=False)
    model.register_buffer("seen", torch.zeros(8))
    rank = Rank(model)
    model.get_buffer("seen").copy_(counting(8))

    assert torch.equal(delivered([rank.fill()], 1, needs(weight=(2, 2), seen=(8,)))[0]["seen"], counting(8))
    model._buffers["seen"] = torch.zeros(4)
    with pytest.raises(HoldingsChanged, match=r"seen was attached as \(8,\)"):
        rank.fill()
    assert "E_DESCRIPTION" in refusal(lambda: delivered([Rank(model).fill()], 1, needs(weight=(2, 2), seen=(8,))))


def test_o43_buffers_of_both_pipeline_stages() -> None:
    stages = [Rank({f"layers.{r}.router.bias": counting(4) + r}, r, 2).fill() for r in range(2)]
    shapes = {"layers__0__router__bias": (4,), "layers__1__router__bias": (4,)}

    assert torch.equal(delivered(stages, 1, needs(**shapes))[0]["layers.1.router.bias"], counting(4) + 1)
    assert "layers.1.router.bias" in refusal(lambda: delivered(stages[:1], 1, needs(**shapes)))


def test_o44_adapter_that_does_not_train_is_published_whole() -> None:
    model = adapted()
    model.add_adapter("old", LoraConfig(r=2, target_modules=["q", "o"]))
    whole_numbers(model)
    for name, parameter in model.named_parameters():
        if ".old." in name:
            parameter.requires_grad_(False)
    found = Rank(model, lora=LoraAdapter("old")).publish()

    assert sorted(found) == [
        f"base_model.model.layers.{i}.{m}.lora_{f}.weight" for i in (0, 1) for m in "oq" for f in "AB"
    ]
    q = model.base_model.model.layers[1].q
    assert torch.equal(found["base_model.model.layers.1.q.lora_B.weight"], q.lora_B["old"].weight)


def test_o44_publish_that_binds_nothing_is_an_error() -> None:
    with pytest.raises(NothingToPublish, match="no module of this model has an adapter"):
        Rank(Net(), lora="merged")
    with pytest.raises(ConfigError, match="the model has the adapters"):
        Rank(adapted(), lora=LoraAdapter("older"))
    model: Any = get_peft_model(Net(), LoraConfig(r=2, target_modules=["q"]))
    found = Rank(model, lora="merged")
    model.base_model.set_adapter([])
    with pytest.raises(NothingToPublish):
        found.fill()


# ------------------------------------------------------------ casts


def bfloat16_engine(_: int) -> Declaration:
    d = Declaration("bfloat16")
    d.replicated("w", (2,))
    return d


def test_o48_cast_that_is_declared_rounds_ties_to_even() -> None:
    source = {"w": torch.tensor([1.00390625, 1.01171875])}
    params = delivered([Rank(source, dtype=torch.bfloat16).fill()], 1, bfloat16_engine)[0]

    assert [1.0, 1.015625] == params["w"].tolist()


def test_o48_cast_that_nobody_declared_is_refused() -> None:
    source = {"w": torch.tensor([1.00390625, 1.01171875])}
    text = refusal(lambda: delivered([Rank(source).fill()], 1, bfloat16_engine))

    assert "E_DESCRIPTION" in text
    assert "float32" in text
    assert "bfloat16" in text


def test_o48_factors_in_float32_of_a_base_in_bfloat16() -> None:
    model = adapted(target_modules=["q"])
    for block in model.base_model.model.layers:
        block.q.base_layer.to(torch.bfloat16)
    merged = Rank(model, lora="merged", dtype=torch.bfloat16).publish()
    adapter = Rank(model, lora="adapter", dtype=torch.bfloat16).publish()

    assert {t.dtype for t in (*merged.values(), *adapter.values())} == {torch.bfloat16}
    expected = merged_by_peft(model)
    assert torch.equal(merged["layers.0.q.weight"], expected["layers.0.q.weight"].to(torch.bfloat16))


def test_o53_cast_at_the_source_halves_the_bytes() -> None:
    rank = Rank({"w": torch.zeros(1 << 20)}, dtype=torch.bfloat16)

    assert (2 << 20, 2 << 20) == (rank.described.payload_nbytes, rank.slots.fill(0))
