"""What a loader does and no copy can do is refused with the operation, the parameter and the loader's line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.golden_text import check_error_is_whole, check_golden
from weightd.core.errors import Refused, WeightdError, flatten
from weightd.core.layout.faults import BadEntry, UnknownDType
from weightd.rollout_hooks.faults import RolloutHookError
from weightd.rollout_hooks.receiver import Receiver
from weightd.rollout_hooks.trace import faults, trace

CHECKPOINT = {"t": ((2, 3), "float32"), "s": ((), "float32"), "u": ((2, 3), "float32")}
"""The tensors that each loader is given."""


class Engine(nn.Module):
    """Parameters of several types, a buffer that is not saved, and a loader that a test gives it."""

    def __init__(self, load: Callable[[Engine, dict[str, Tensor]], object]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, 3), requires_grad=False)
        self.bf = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16), requires_grad=False)
        self.ints = nn.Parameter(torch.zeros(2, 3, dtype=torch.int8), requires_grad=False)
        self.raw = nn.Parameter(torch.zeros(2, 12, dtype=torch.uint8), requires_grad=False)
        self.register_buffer("table", torch.zeros(2, 3), persistent=False)
        self._load = load

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._load(self, dict(weights))


def computes(e: Any, given: dict[str, Tensor]) -> None:
    scaled = given["t"] * given["s"]  # here
    e.w.data.copy_(scaled.t().reshape(2, 3))


def gathers(e: Any, given: dict[str, Tensor]) -> None:
    order = torch.tensor([1, 0])
    e.w.data.copy_(given["t"][order])  # here


def sorts(e: Any, given: dict[str, Tensor]) -> None:
    e.w.data.copy_(given["t"].sort(dim=1).values)  # here


def looks_at_an_element(e: Any, given: dict[str, Tensor]) -> None:
    if given["t"][0, 0].item() > 0:  # here
        e.w.data.copy_(given["t"])


def branches(e: Any, given: dict[str, Tensor]) -> None:
    if (given["t"] > 0).all():  # here
        e.w.data.copy_(given["t"])


def compares(e: Any, given: dict[str, Tensor]) -> None:
    e.w.data.copy_(given["t"])
    assert torch.equal(given["t"], given["u"])  # here


def counts(e: Any, given: dict[str, Tensor]) -> None:
    e.w.data[: len(given["t"].nonzero())] = 0  # here


def reads_what_it_wrote(e: Any, given: dict[str, Tensor]) -> None:
    e.w.data.copy_(given["t"])
    assert e.w[0, 0].item() == 0  # here


def goes_through_numpy(e: Any, given: dict[str, Tensor]) -> None:
    e.w.numpy()[:] = 1  # here


def hands_to_numpy(e: Any, given: dict[str, Tensor]) -> None:
    given["t"].numpy()  # here


def adds_in_place(e: Any, given: dict[str, Tensor]) -> None:
    e.w.data.add_(given["t"])  # here


def changes_what_it_is_given(e: Any, given: dict[str, Tensor]) -> None:
    given["t"].mul_(2)  # here
    e.w.data.copy_(given["t"])


def sets_the_storage(e: Any, given: dict[str, Tensor]) -> None:
    e.w.data.set_(given["t"])  # here


def re_binds_another_shape(e: Any, given: dict[str, Tensor]) -> None:
    e.w.data = given["t"].t()  # here


def quantises(e: Any, given: dict[str, Tensor]) -> None:
    e.ints.data.copy_(given["t"].to(torch.int8))  # here


def rounds_on_the_way(e: Any, given: dict[str, Tensor]) -> None:
    e.w.data.copy_(given["t"].to(torch.bfloat16))  # here


def reads_bytes(e: Any, given: dict[str, Tensor]) -> None:
    e.raw.data.copy_(given["t"].view(torch.uint8))  # here


def writes_bytes(e: Any, given: dict[str, Tensor]) -> None:
    e.w.data.view(torch.uint8).copy_(given["t"].repeat(1, 4))  # here


def takes_from_elsewhere(e: Any, given: dict[str, Tensor]) -> None:
    e.w.data.copy_(torch.arange(3.0))  # here


def fills_a_table(e: Any, given: dict[str, Tensor]) -> None:
    e.table.copy_(given["t"])  # here


def needs_two_types(e: Any, given: dict[str, Tensor]) -> None:
    e.w.data.copy_(given["t"])
    e.bf.data.copy_(given["t"])  # here


def writes_twice_in_part(e: Any, given: dict[str, Tensor]) -> None:
    e.w.data.copy_(given["t"])
    e.w.data[1].copy_(given["u"][1])  # here


def builds_twice_in_part(e: Any, given: dict[str, Tensor]) -> None:
    built = torch.empty(2, 3)
    built.copy_(given["t"])
    built[1] = given["u"][1]  # here
    e.w.data.copy_(built)


REFUSALS: dict[Callable[[Any, dict[str, Tensor]], None], str] = {
    computes: "E_TRACE",
    gathers: "E_TRACE",
    sorts: "E_TRACE",
    looks_at_an_element: "E_TRACE",
    branches: "E_TRACE",
    compares: "E_TRACE",
    counts: "E_TRACE",
    reads_what_it_wrote: "E_TRACE",
    goes_through_numpy: "E_TRACE",
    hands_to_numpy: "E_TRACE",
    adds_in_place: "E_TRACE",
    changes_what_it_is_given: "E_TRACE",
    sets_the_storage: "E_TRACE",
    re_binds_another_shape: "E_TRACE",
    quantises: "E_TRACE",
    rounds_on_the_way: "E_TRACE",
    reads_bytes: "E_TRACE",
    writes_bytes: "E_TRACE",
    takes_from_elsewhere: "E_TRACE",
    fills_a_table: "E_TRACE",
    needs_two_types: "E_TRACE",
    builds_twice_in_part: "E_TRACE",
    writes_twice_in_part: "E_TRACE_TWICE",
}
"""Loader to the code that it is refused with; the line is the one that says ``# here``."""


def refusal_of(engine: nn.Module) -> WeightdError:
    with pytest.raises(Refused) as refused:
        trace(engine, CHECKPOINT)
    (error,) = refused.value.violations
    return error


@pytest.mark.parametrize("load", REFUSALS, ids=lambda load: load.__name__)
def test_refusal_names_operation_parameter_and_line(load: Callable[[Any, dict[str, Tensor]], None]) -> None:
    engine = Engine(load)
    before = {name: (tensor, tensor.clone()) for name, tensor in engine.state_dict(keep_vars=True).items()}
    error = refusal_of(engine)

    assert REFUSALS[load] == error.code
    lines, first = inspect.getsourcelines(load)
    here = first + next(n for n, line in enumerate(lines) if line.endswith("# here\n"))
    assert f"{Path(__file__).name}:{here}" in str(error)
    check_error_is_whole(error)
    text = re.sub(r"\S*/test_traced_refusals\.py:\d+", "loader.py:7", str(error))
    check_golden(f"errors/{error.code}.{load.__name__}", text)
    after = engine.state_dict(keep_vars=True)
    assert all(after[name] is tensor and torch.equal(tensor, was) for name, (tensor, was) in before.items())


def test_what_a_loader_swallows_is_refused_all_the_same() -> None:
    def load(e: Any, given: dict[str, Tensor]) -> None:
        try:
            given["t"].tolist()
        except Exception:  # noqa: BLE001 - as loaders do around what is optional
            e.w.data.copy_(given["t"])

    error = refusal_of(Engine(load))

    assert isinstance(error, faults.NotTraced)
    assert ("tolist", "t") == (error.operation, error.tensor)


def test_every_refusal_is_found_at_once() -> None:
    def load(e: Any, given: dict[str, Tensor]) -> None:
        e.w.data.copy_(given["t"] + 1)
        e.bf.data.copy_(given["u"].flip(0))

    with pytest.raises(Refused) as refused:
        trace(Engine(load), CHECKPOINT)

    assert ["add for w", "flip for bf"] == [
        f"{v.operation} for {v.parameter}" for v in refused.value.violations if isinstance(v, faults.NotTraced)
    ]
    check_golden(
        "errors/E_REFUSED.trace", re.sub(r"\S*/test_traced_refusals\.py:\d+", "loader.py:7", str(refused.value))
    )


def test_a_later_write_that_covers_counts() -> None:
    def load(e: Any, given: dict[str, Tensor]) -> None:
        e.w.data[1].copy_(given["t"][1])
        e.w.data.copy_(given["u"])
        e.bf.data.copy_(given["t"])
        e.bf.data.zero_()

    traced = trace(Engine(load), CHECKPOINT)

    assert ["u"] == [piece.tensor for piece in traced.pieces]
    assert ("bf",) == traced.filled


def test_what_the_engine_does_for_itself_concerns_nobody() -> None:
    """A table that it computes anew, parameters that it wraps anew, a copy of one parameter in another."""

    def load(e: Any, given: dict[str, Tensor]) -> None:
        e.table.copy_(torch.ones(2, 3).cumsum(0))
        e.ints = nn.Parameter(e.ints.data, requires_grad=False)
        e.w.data.copy_(given["t"])
        e.w = nn.Parameter(e.w.data, requires_grad=False)
        e.bf.data.copy_(e.w)

    with pytest.raises(Refused, match="a second element type"):
        trace(Engine(load), CHECKPOINT)

    def load_again(e: Any, given: dict[str, Tensor]) -> None:
        load(e, given)
        e.bf.data.zero_()

    engine = Engine(load_again)
    traced = trace(engine, CHECKPOINT)

    assert ["t"] == [piece.tensor for piece in traced.pieces]
    assert not engine.get_buffer("table").any()


def test_memory_that_several_names_share_is_written_once() -> None:
    def load(e: Any, given: dict[str, Tensor]) -> None:
        e.w.data.copy_(given["t"])
        e.tied.data.copy_(given["u"])

    engine = Engine(load)
    engine.tied = engine.w
    traced = trace(engine, CHECKPOINT)

    assert {"tied": "w"} == traced.tied
    assert ["u"] == [piece.tensor for piece in traced.pieces]
    assert ("t", "s") == traced.unused


def test_errors_of_the_loader_are_its_own_and_the_engine_is_whole() -> None:
    def load(e: Any, given: dict[str, Tensor]) -> None:
        e.w = nn.Parameter(given["t"], requires_grad=False)
        raise KeyError("lm_head")

    engine = Engine(load)
    before = engine.w
    with pytest.raises(KeyError, match="lm_head"):
        trace(engine, CHECKPOINT)

    assert engine.w is before


def test_memory_that_is_swapped_is_put_back() -> None:
    def load(e: Any, given: dict[str, Tensor]) -> None:
        swap: Any = torch.utils.swap_tensors
        swap(e.w, nn.Parameter(given["t"], requires_grad=False))

    engine = Engine(load)
    engine.w.weight_loader = load  # type: ignore[attr-defined]  # as vLLM marks its parameters
    before, memory = engine.w, engine.w.data_ptr()
    traced = trace(engine, CHECKPOINT)

    assert engine.w is before
    assert memory == engine.w.data_ptr()
    assert {"weight_loader": load} == vars(engine.w)
    assert not engine.w.any()
    assert ["t"] == [piece.tensor for piece in traced.pieces]


def copies_one(e: Any, given: dict[str, Tensor]) -> None:
    e.w.data.copy_(given["t"])


def never_written() -> object:
    traced = trace(Engine(copies_one), CHECKPOINT)
    return Receiver(Engine(copies_one), run="r", engine="E0", k=0, size=1, layout=traced.layout())


def re_laid() -> object:
    engine = Engine(copies_one)
    traced = trace(engine, CHECKPOINT)
    tensor = torch.arange(6.0).reshape(2, 3)
    engine.w.copy_(tensor.t().reshape(2, 3))
    traced.probe(engine, {"t": tensor})
    return traced


FACES: dict[str, Callable[[], object]] = {
    "E_TRACE_UNCOVERED": never_written,
    "E_RELAID": re_laid,
}


@pytest.mark.parametrize("code", FACES)
def test_what_is_refused_of_a_trace(code: str) -> None:
    with pytest.raises(WeightdError) as raised:
        FACES[code]()

    (error,) = flatten([raised.value])
    assert code == error.code
    check_golden(f"errors/{code}", str(error))
    check_error_is_whole(error)


def test_every_class_is_refused_somewhere() -> None:
    classes = {c for c in vars(faults).values() if isinstance(c, type) and issubclass(c, RolloutHookError)}

    assert {*REFUSALS.values(), *FACES} == {c.code for c in classes - {RolloutHookError}}


def test_a_version_to_compare_with_that_is_another() -> None:
    traced = trace(Engine(copies_one), CHECKPOINT)
    for given in ({}, {"t": torch.zeros(3, 2)}):
        with pytest.raises(BadEntry):
            traced.probe(Engine(copies_one), given)


def test_an_element_type_that_nobody_knows() -> None:
    with pytest.raises(UnknownDType):
        trace(Engine(copies_one), {"t": ((2, 3), "float7")})
