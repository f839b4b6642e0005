"""Which tensors a rank is found to hold, under which names; and what is refused."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.golden_text import check_golden
from weightd.trainer_hooks.adapters.pick import holdings_of
from weightd.trainer_hooks.faults import NamesCollide, UnsupportedPlacement
from weightd.trainer_hooks.names import canonical_names


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))
        self.register_buffer("kept", torch.zeros(4))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)
        self.register_parameter("absent", None)


class Wrapper(nn.Module):
    """Has its module below a name that only wrappers use."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.add_module(name, inner)


def names(source: Any) -> list[str]:
    return [s.name for s in holdings_of(source).shards]


def test_parameters_and_persistent_buffers() -> None:
    assert names(nn.Sequential(Inner())) == ["0.weight", "0.kept"]


@pytest.mark.parametrize("wrapper", ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
def test_wrappers_leave_no_trace_in_names(wrapper: str) -> None:
    assert names(nn.ModuleDict({"layers": Wrapper(wrapper, Inner())})) == ["layers.weight", "layers.kept"]


def test_compiled_module_has_the_names_of_its_module() -> None:
    assert names(torch.compile(Inner(), backend="eager")) == ["weight", "kept"]


def test_child_called_module_is_no_wrapper() -> None:
    assert names(nn.ModuleDict({"module": Inner()})) == ["module.weight", "module.kept"]


def test_module_in_front_of_every_name_of_a_mapping_is_ddp() -> None:
    assert canonical_names(["module.a.w", "module.b"]) == {"module.a.w": "a.w", "module.b": "b"}
    assert canonical_names(["module.a.w", "head"]) == {"module.a.w": "module.a.w", "head": "head"}


def test_tied_parameters_are_one_shard_and_an_alias() -> None:
    emb, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = emb.weight
    holdings = holdings_of(nn.ModuleDict({"emb": emb, "head": head}))

    assert [s.name for s in holdings.shards] == ["emb.weight"]
    assert holdings.aliases == (("head.weight", "emb.weight"),)


def test_parameters_that_share_memory_are_tied_too() -> None:
    w = torch.ones(3, 2)

    assert holdings_of({"a": w, "b": w.view(3, 2), "c": w.t()}).aliases == (("b", "a"),)


def test_0d_and_empty_tensors() -> None:
    shards = holdings_of({"scale": torch.tensor(2.0), "none": torch.empty(0, 3)}).shards

    assert [(s.name, s.numel, len(s.parts[0].pieces)) for s in shards] == [("scale", 1, 1), ("none", 0, 0)]


def test_shard_reads_what_its_module_holds_now() -> None:
    module = Inner()
    shard = holdings_of(module).shards[0]
    module.load_state_dict({"weight": torch.full((3, 2), 7.0), "kept": torch.zeros(4)}, assign=True)

    assert shard.read() is module.weight


def _with(mark: str, value: object) -> dict[str, torch.Tensor]:
    tensor = torch.ones(3, 2)
    setattr(tensor, mark, value)
    return {"w": tensor}


class Stranger(torch.Tensor):
    """A tensor whose bytes mean something that only its class knows."""


REFUSED: dict[str, Any] = {
    "meta": {"w": torch.empty(3, 2, device="meta")},
    "sparse": {"w": torch.eye(3).to_sparse()},
    "zero3": _with("ds_id", 5),
    "megatron": _with("tensor_model_parallel", True),
    "subclass": {"w": torch.ones(3).as_subclass(Stranger)},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_described_is_refused_by_name(case: str) -> None:
    with pytest.raises(UnsupportedPlacement) as caught:
        holdings_of(REFUSED[case])

    text = str(caught.value).replace(f"{__name__}.", "")
    check_golden(f"errors/E_PLACEMENT.{case}", text)


def test_wrapped_module_that_is_not_supported_is_refused_as_a_whole() -> None:
    class FullyShardedDataParallel(nn.Module):
        pass

    with pytest.raises(UnsupportedPlacement, match=r"decoder cannot be described: .*FullyShardedDataParallel"):
        holdings_of(nn.ModuleDict({"decoder": FullyShardedDataParallel()}))


def test_two_tensors_of_one_name() -> None:
    pairs = [("layer.w", torch.ones(2)), ("layer._orig_mod.w", torch.ones(2))]
    with pytest.raises(NamesCollide) as caught:
        holdings_of(pairs)

    check_golden("errors/E_NAMES", str(caught.value))
    with pytest.raises(NamesCollide):
        holdings_of([("w", torch.ones(2)), ("w", torch.ones(2))])
