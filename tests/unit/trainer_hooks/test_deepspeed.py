"""What is read from DeepSpeed's parameters and engines, and what is refused; they are stand-ins with its attributes.

``tests/hooks/test_deepspeed_describe.py`` meets the real ones.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.golden_text import check_golden
from weightd.core.errors import ConfigError
from weightd.trainer_hooks.adapters.deepspeed import StepEnd
from weightd.trainer_hooks.adapters.pick import holdings_of
from weightd.trainer_hooks.faults import HoldingsChanged, NotBetweenSteps, PiecesDoNotAddUp, UnsupportedPlacement
from weightd.trainer_hooks.publisher import Publisher

RECORD = "ds_autotp_universal_checkpoint_meta"


def partitioned(total: int = 10, rank: int = 3, parts: int = 4, **attributes: Any) -> nn.Parameter:
    """Return a parameter as ZeRO-3 leaves it: nothing in ``data``, a padded range in ``ds_tensor``."""
    param = nn.Parameter(torch.empty(0))
    size = -(-total // parts)
    shard: Any = torch.arange(rank * size, (rank + 1) * size, dtype=torch.float32)
    shard.ds_numel, shard.status, shard.final_location = size, SimpleNamespace(name="AVAILABLE"), None
    shard[max(total - rank * size, 0) :] = float("nan")
    known = {
        "ds_id": 1,
        "ds_shape": torch.Size((total,)),
        "ds_numel": total,
        "ds_tensor": shard,
        "ds_zero_partition_rank": rank,
        "ds_zero_partition_world_size": parts,
        "ds_secondary_tensor": None,
        "_z3_optimizer": SimpleNamespace(),
    }
    for name, value in {**known, **attributes}.items():
        setattr(param, name, value)
    return param


def recorded(param: Any, conversion: dict[str, Any], **restore: Any) -> dict[str, Any]:
    """Give a parameter AutoTP's record, and return it as a source."""
    setattr(param, RECORD, {"conversion": conversion, **restore})
    return {"w": param}


class Layer(nn.Module):
    """A layer that AutoTP replaced."""

    def __init__(self, weight: nn.Parameter, tp_index: int) -> None:
        super().__init__()
        self.weight = weight
        self.tp_index = tp_index


# ---------------------------------------------------------------- partitions


@pytest.mark.parametrize("rank, held", [(0, [0, 1, 2]), (2, [6, 7, 8]), (3, [9])])
def test_padding_is_neither_described_nor_read(rank: int, held: list[int]) -> None:
    (shard,) = holdings_of({"w": partitioned(rank=rank)}).shards

    assert (shard.local_shape, shard.numel, shard.padding) == ((len(held),), len(held), 0)
    assert shard.parts[0].pieces.start.tolist() == [[held[0]]]
    assert shard.read().tolist() == held


def test_rank_behind_the_last_element_holds_an_empty_shard() -> None:
    (shard,) = holdings_of({"one": partitioned(total=1, rank=2)}).shards

    assert (shard.parts[0].shape, len(shard.parts[0].pieces), shard.read().numel()) == ((1,), 0, 0)


def test_partition_that_the_optimizer_moves_is_read_where_it_is() -> None:
    param: Any = partitioned(rank=0)
    (shard,) = holdings_of({"w": param}).shards
    param.ds_tensor.data = torch.tensor([7.0, 8.0, 9.0])

    assert shard.read().tolist() == [7, 8, 9]


def test_partition_that_is_gone() -> None:
    param: Any = partitioned(rank=0)
    (shard,) = holdings_of({"w": param}).shards
    param.ds_tensor = None

    with pytest.raises(HoldingsChanged, match="no partition"):
        shard.read()


def test_partition_that_is_not_what_its_counts_say() -> None:
    with pytest.raises(PiecesDoNotAddUp) as caught:
        holdings_of({"w": partitioned(ds_zero_partition_world_size=2, rank=1)})

    check_golden("errors/E_PIECES.zero3", str(caught.value))


def test_partitions_that_are_gathered_are_no_ties() -> None:
    """Two parameters of one gathering buffer, or none: what their data points to says nothing."""
    shared = torch.ones(10)
    first, second = partitioned(), partitioned()
    first.data = second.data = shared

    assert holdings_of({"a": first, "b": second}).aliases == ()
    assert holdings_of({"a": first, "b": first}).aliases == (("b", "a"),)


# ---------------------------------------------------------------- AutoTP

FUSED = {"partition_dim": 0, "sub_param_shard_widths": [[2, 1], [2, 1]], "original_shape": (6, 2)}
"""Two stacked tensors of three rows; rank 1 has row 2 and row 5."""


def mapped(*pieces: dict[str, Any], shape: tuple[int, ...] = (6, 2), local: tuple[int, ...] = (2, 2)) -> Any:
    ranks = {0: {"shard_shape": [4, 2], "pieces": []}, 1: {"shard_shape": list(local), "pieces": list(pieces)}}
    return {"affine_map": {"logical_shape": list(shape), "ranks": ranks}}


def row(source: int, dest: int, **more: Any) -> dict[str, Any]:
    return {"shape": [1, 2], "source": [2 * source, [2, 1]], "dest": [2 * dest, [2, 1]], **more}


def held_rows(source: Any) -> list[Any]:
    pieces = holdings_of(source).shards[0].parts[0].pieces
    return [pieces.start.tolist(), pieces.extent.tolist(), pieces.offset.tolist()]


@pytest.mark.parametrize("conversion", [FUSED, mapped(row(2, 0), row(5, 1))], ids=["widths", "map"])
def test_fused_rows_by_widths_and_by_map(conversion: dict[str, Any]) -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    recorded(weight, conversion)

    assert held_rows(Layer(weight, 1)) == [[[2, 0], [5, 0]], [[1, 2], [1, 2]], [0, 2]]


def test_rank_of_the_process_where_no_layer_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = SimpleNamespace(get_tensor_model_parallel_rank=lambda: 1)
    monkeypatch.setitem(__import__("sys").modules, "deepspeed.utils.groups", groups)

    assert held_rows(recorded(nn.Parameter(torch.zeros(2, 2)), FUSED))[0] == [[2, 0], [5, 0]]


def test_plain_widths_and_replicas_without_a_map() -> None:
    weight = nn.Parameter(torch.zeros(3, 4))
    recorded(weight, {"partition_dim": 1, "original_shape": (3, 9)}, partition_sizes=(5, 4))
    bias = nn.Parameter(torch.zeros(3))
    recorded(bias, {"replicated": True, "original_shape": (3,)})

    assert held_rows(Layer(weight, 1)) == [[[0, 5]], [[3, 4]], [0]]
    assert held_rows(Layer(bias, 1)) == [[[0]], [[3]], [0]]


def test_partition_of_a_tensor_parallel_shard() -> None:
    """Elements 1 to 3 of rank 1's (2, 2): the end of row 2 and row 5."""
    param = partitioned(total=4, rank=1, parts=4, ds_shape=(2, 2))
    recorded(param, FUSED)

    assert held_rows(Layer(param, 1)) == [[[2, 1]], [[1, 1]], [0]]


SCALED = mapped(row(2, 0), row(5, 1, scale=0.5))

REFUSED_RECORDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "scaled": (SCALED, {}),
    "unsupported": ({"unsupported_reason": "shared-QK with an odd number of heads"}, {}),
    "unrecorded": ({"partition_dim": 0, "original_shape": (6, 2)}, {}),
    "no_box": (mapped({"shape": [1, 2], "source": [4, [2, 3]], "dest": [0, [2, 1]]}, row(5, 1)), {}),
    "flattened": (mapped({"shape": [4], "source": [4, [1]], "dest": [0, [1]]}), {}),
}


@pytest.mark.parametrize("case", REFUSED_RECORDS)
def test_records_that_describe_no_copy(case: str) -> None:
    conversion, restore = REFUSED_RECORDS[case]
    weight = nn.Parameter(torch.zeros(2, 2))
    recorded(weight, conversion, **restore)
    with pytest.raises(UnsupportedPlacement) as caught:
        holdings_of(Layer(weight, 1))

    check_golden(f"errors/E_PLACEMENT.autotp_{case}", str(caught.value))


@pytest.mark.parametrize(
    "conversion",
    [mapped(row(2, 0), row(5, 1), local=(3, 2)), mapped(row(2, 0)), {**FUSED, "original_shape": (7, 2)}],
    ids=["shape", "piece missing", "widths"],
)
def test_record_of_another_shard(conversion: dict[str, Any]) -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    recorded(weight, conversion)
    with pytest.raises(PiecesDoNotAddUp):
        holdings_of(Layer(weight, 1))


def test_rank_that_the_record_does_not_have() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    recorded(weight, mapped(row(2, 0), row(5, 1)))
    with pytest.raises(UnsupportedPlacement, match=r"of ranks \[0, 1\], this is 2"):
        holdings_of(Layer(weight, 2))


# ---------------------------------------------------------------- refusals


def with_shard(**attributes: Any) -> nn.Parameter:
    param = partitioned()
    for name, value in attributes.items():
        setattr(vars(param)["ds_tensor"], name, value)
    return param


REFUSED: dict[str, Any] = {
    "nvme": with_shard(final_location=SimpleNamespace(value="nvme")),
    "swapped_out": with_shard(status=SimpleNamespace(name="NOT_AVAILABLE")),
    "quantised": with_shard(ds_quant_scale=torch.ones(1)),
    "hpz": partitioned(ds_secondary_tensor=torch.ones(2)),
    "hpz_group": partitioned(ds_zero_param_process_group=object()),
    "mics": partitioned(comm=SimpleNamespace(param_shard_group=object())),
    "experts": partitioned(allreduce=False),
    "0d": partitioned(total=1, ds_shape=torch.Size(())),
    "uninitialised": partitioned(_z3_optimizer=None),
}


@pytest.mark.parametrize("case", REFUSED)
def test_memory_that_is_not_understood_is_refused_by_name(case: str) -> None:
    with pytest.raises(UnsupportedPlacement) as caught:
        holdings_of({"layers.0.w": REFUSED[case]})

    check_golden(f"errors/E_PLACEMENT.zero_{case}", str(caught.value))


# ---------------------------------------------------------------- masters


def fragment(shape: tuple[int, ...], start: int, numel: int) -> nn.Parameter:
    param = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
    address = SimpleNamespace(start=start, numel=numel)
    values = torch.arange(float(start), float(start + numel))
    mapping = SimpleNamespace(lp_fragment_address=address, hp_fragment=values) if numel else None
    vars(param)["_hp_mapping"] = mapping
    return param


def test_masters_are_this_ranks_slice() -> None:
    held, none = holdings_of({"held": fragment((3, 4), 3, 6), "none": fragment((2,), 0, 0)}, masters=True).shards

    assert (held.dtype, held.local_shape, held.read().tolist()) == (torch.float32, (6,), [3, 4, 5, 6, 7, 8])
    assert held.parts[0].pieces.start.tolist() == [[0, 3], [1, 0], [2, 0]]
    assert (none.dtype, none.parts[0].shape, none.numel, none.read().dtype) == (torch.float32, (2,), 0, torch.float32)


def test_master_that_was_let_go() -> None:
    param: Any = fragment((3, 4), 3, 6)
    (shard,) = holdings_of({"w": param}, masters=True).shards
    param._hp_mapping = None
    with pytest.raises(HoldingsChanged, match="without one"):
        shard.read()


def test_frozen_parameter_has_no_master_and_is_published_as_it_is() -> None:
    frozen = partitioned(rank=0)
    frozen.requires_grad_(False)
    (shard,) = holdings_of({"w": frozen}, masters=True).shards

    assert shard.read().tolist() == [0, 1, 2]


def test_trained_parameter_without_a_readable_master() -> None:
    weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    recorded(weight, FUSED)
    with pytest.raises(UnsupportedPlacement, match="no master that can be read"):
        holdings_of(Layer(weight, 1), masters=True)


def linked(*places: tuple[int, int, int]) -> dict[str, nn.Parameter]:
    """Return parameters of one flat group, each (its place there, elements, its master's place in the flat masters)."""
    flat, masters = torch.zeros(20, dtype=torch.bfloat16), torch.zeros(20)
    params: dict[str, nn.Parameter] = {}
    for number, (at, numel, master) in enumerate(places):
        param = nn.Parameter(flat[at : at + numel])
        address = SimpleNamespace(start=0, numel=numel)
        fragment = masters[master : master + numel]
        vars(param)["_hp_mapping"] = SimpleNamespace(lp_fragment_address=address, hp_fragment=fragment)
        params[f"w{number}"] = param
    return params


def test_masters_in_the_order_of_their_parameters() -> None:
    assert len(holdings_of(linked((6, 3, 0), (9, 4, 3)), masters=True).shards) == 2


def test_masters_in_another_order_than_recorded() -> None:
    with pytest.raises(UnsupportedPlacement) as caught:
        holdings_of(linked((6, 3, 4), (9, 4, 0)), masters=True)

    check_golden("errors/E_PLACEMENT.zero_round_robin", str(caught.value))


def test_engine_with_masters_in_another_order() -> None:
    engine = DeepSpeedEngine()
    engine.round_robin = True

    assert len(holdings_of(engine).shards) == 2
    with pytest.raises(UnsupportedPlacement, match="round_robin_gradients"):
        holdings_of(engine, masters=True)


def test_master_on_nvme() -> None:
    optimizer = SimpleNamespace(
        fp32_partitioned_groups_flat=[torch.zeros(3)],
        grad_position={7: (0, 0, 3)},
        get_param_id=lambda _: 7,
        _swappable_optimizer_subgroup=lambda _: True,
    )
    with pytest.raises(UnsupportedPlacement, match="its master is on NVMe"):
        holdings_of({"w": partitioned(_z3_optimizer=optimizer)}, masters=True)


def test_masters_of_what_has_none() -> None:
    with pytest.raises(ConfigError, match="only DeepSpeed's ZeRO keeps masters"):
        holdings_of({"w": torch.ones(3)}, masters=True)
    with pytest.raises(ConfigError, match="a declared shard has no master"):
        Publisher.from_shards([], run="r", rank=0, world=1, masters=True)


# ---------------------------------------------------------------- engines


class DeepSpeedEngine(nn.Module):
    """What the adapter asks an engine."""

    __module__ = "deepspeed.runtime.engine"

    def __init__(self, module: nn.Module | None = None, quantised: bool = False, size: int = 1) -> None:
        super().__init__()
        self.module = module or nn.Linear(2, 3)
        self.quantised, self.size = quantised, size
        self.global_steps = self.skipped_steps = self.micro_steps = self._unmanaged_backward_count = 0
        self._is_gradient_accumulation_boundary: bool | None = None
        self._running_engine_step, self.managed, self.applied, self.zenflow = False, True, True, False
        self.round_robin = False

    def zero_quantized_weights(self) -> bool:
        return self.quantised

    def zero_round_robin_gradients(self) -> bool:
        return self.round_robin

    def gradient_accumulation_steps(self) -> int:
        return self.size

    def managed_gradient_accumulation(self) -> bool:
        return self.managed

    def was_step_applied(self) -> bool:
        return self.applied


class PipelineEngine(DeepSpeedEngine):
    __module__ = "deepspeed.runtime.pipe.engine"


class DeepSpeedHybridEngine(DeepSpeedEngine):
    __module__ = "deepspeed.runtime.hybrid_engine"


def zenflow() -> DeepSpeedEngine:
    engine = DeepSpeedEngine()
    engine.zenflow = True
    return engine


def around(param: nn.Parameter, quantised: bool = False) -> DeepSpeedEngine:
    module = nn.Module()
    module.weight = param
    return DeepSpeedEngine(module, quantised)


def of_experts() -> nn.Parameter:
    param = nn.Parameter(torch.zeros(2))
    vars(param)["allreduce"] = False
    return param


REFUSED_ENGINES: dict[str, Any] = {
    "pipeline": PipelineEngine(),
    "hybrid": DeepSpeedHybridEngine(),
    "zenflow": zenflow(),
    "quantised_weights": around(partitioned(), quantised=True),
    "experts_without_zero": around(of_experts()),
}


@pytest.mark.parametrize("case", REFUSED_ENGINES)
def test_engines_that_are_refused(case: str) -> None:
    with pytest.raises(UnsupportedPlacement) as caught:
        holdings_of(REFUSED_ENGINES[case])

    check_golden(f"errors/E_PLACEMENT.engine_{case}", str(caught.value))


def test_engine_inside_of_another_module() -> None:
    with pytest.raises(UnsupportedPlacement, match=r"actor cannot be described: deepspeed\.runtime\.engine"):
        holdings_of(nn.ModuleDict({"actor": DeepSpeedEngine()}))


def test_engine_has_the_names_of_its_module() -> None:
    assert [s.name for s in holdings_of(DeepSpeedEngine()).shards] == ["weight", "bias"]


def refusal(engine: DeepSpeedEngine) -> str:
    (prepare,) = holdings_of(engine).prepare
    try:
        prepare()
    except NotBetweenSteps as error:
        return error.found
    return ""


def test_between_two_steps_and_in_the_middle_of_one() -> None:
    engine = DeepSpeedEngine(size=4)
    found = []
    for engine.micro_steps in range(6):
        found.append(refusal(engine).split(" of ")[0])

    assert found == ["", "1", "2", "3", "", "1"]


def test_while_a_step_runs_and_after_it_raised() -> None:
    engine = DeepSpeedEngine()
    engine._running_engine_step = True

    assert refusal(engine) == "engine.step() is running, or raised"


def test_accumulation_that_the_caller_counts() -> None:
    engine = DeepSpeedEngine(size=4)
    engine.micro_steps = 1
    found = []
    for engine._is_gradient_accumulation_boundary in (False, True):
        found.append(refusal(engine))
    engine.managed, engine._unmanaged_backward_count = False, 2
    found.append(refusal(engine))
    engine._unmanaged_backward_count = 0

    assert found == [
        "set_gradient_accumulation_boundary(False) says that more is to come",
        "",
        "2 micro-batches were taken since, and no engine.step()",
    ]
    assert refusal(engine) == ""


def test_skipped_step_is_published_with_a_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = DeepSpeedEngine()
    end = StepEnd(engine)
    engine.global_steps, engine.skipped_steps, engine.applied = 5, 1, False
    with caplog.at_level(logging.WARNING):
        end.check()
        end.check()

    assert [r.getMessage() for r in caplog.records] == [
        "DeepSpeed skipped step 5 for overflow: what is published now is as before it"
    ]
