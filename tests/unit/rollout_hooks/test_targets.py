"""The memory that a receiver writes into."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.golden_text import check_golden
from weightd.core.errors import Refused
from weightd.core.layout.build import LayoutBuilder
from weightd.core.units import Version
from weightd.rollout_hooks.declare import Declaration
from weightd.rollout_hooks.faults import BuffersOverlap, TargetMoved, UnsupportedTarget
from weightd.rollout_hooks.targets import Targets, claim, flat_bytes, targets_of, unclaim

WHO = "E0[1]"


class Engine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, 5))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("kept", torch.zeros(4, dtype=torch.bfloat16))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)


def test_own_parameters_and_persistent_buffers_are_needed_whole() -> None:
    targets = targets_of(Engine(), None, WHO)

    assert [(t.name, t.shape, t.dtype) for t in targets.layout.tensors] == [
        ("w", (3, 5), "float32"),
        ("scale", (), "float32"),
        ("kept", (4,), "bfloat16"),
    ]
    assert [b.nbytes for b in targets.buffers] == [60, 4, 8]
    assert [b.kind for b in targets.layout.buffers] == ["param"] * 3


def test_views_share_the_parameters_memory() -> None:
    engine = Engine()
    targets = targets_of(engine, None, WHO)
    targets.buffers[0].view(np.float32)[:] = np.arange(15)
    targets.buffers[1].view(np.float32)[:] = 7

    assert engine.w.tolist() == torch.arange(15.0).reshape(3, 5).tolist()
    assert engine.scale.item() == 7


def test_own_strides_are_described() -> None:
    w = torch.zeros(4, 3).t()
    targets = targets_of({"w": w}, None, WHO)

    assert targets.layout.stride.tolist() == [[1, 3]]
    assert targets.buffers[0].nbytes == 48


def test_gaps_of_strides_are_part_of_the_buffer_and_of_no_piece() -> None:
    wide = torch.zeros(3, 10)
    targets = targets_of({"w": wide[:, 2:5]}, None, WHO)

    assert targets.buffers[0].nbytes == 4 * 23
    assert targets.buffers[0].ctypes.data == wide.data_ptr() + 8
    assert targets.layout.stride.tolist() == [[10, 1]]


def test_tied_parameters_are_one_buffer_and_an_alias() -> None:
    emb, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = emb.weight
    layout = targets_of(nn.ModuleDict({"emb": emb, "head": head}), None, WHO).layout

    assert [b.name for b in layout.buffers] == ["emb.weight"]
    assert layout.aliases == (("head.weight", "emb.weight"),)


def test_compiled_module_has_the_names_of_its_module() -> None:
    compiled: Any = torch.compile(Engine(), backend="eager")

    assert [t.name for t in targets_of(compiled, None, WHO).layout.tensors] == ["w", "scale", "kept"]


def test_declaration_is_compared_with_the_parameters() -> None:
    d = Declaration("float32")
    d.column("w", (18, 5), (5, 5, 4, 4), 2)
    with pytest.raises(Refused) as caught:
        targets_of({"w": torch.zeros(5, 5), "b": torch.zeros(5)}, d, WHO)

    check_golden("errors/declaration_refused", str(caught.value))


def test_second_name_of_a_declared_parameter_needs_no_declaration() -> None:
    d = Declaration("float32")
    d.replicated("emb", (5, 3))
    d.tied("head", "emb")
    w = torch.zeros(5, 3)
    targets = targets_of({"emb": w, "head": w}, d, WHO)

    assert [b.name for b in targets.layout.buffers] == ["emb"]


def test_layout_is_compared_with_the_tensors_it_names() -> None:
    b = LayoutBuilder()
    row = b.add_tensor("w", (3, 5), "float32")
    b.add_piece(row, b.add_buffer("w", 60, "float32", "param"), (0, 0), (3, 5))
    layout = b.build()

    assert targets_of({"w": torch.zeros(3, 5), "other": torch.zeros(1)}, layout, WHO).names == ("w",)
    with pytest.raises(Refused, match="declared was 60 bytes of float32"):
        targets_of({"w": torch.zeros(2, 5)}, layout, WHO)
    with pytest.raises(Refused, match="has none of that name"):
        targets_of({"v": torch.zeros(3, 5)}, layout, WHO)


def _half_of_declared() -> None:
    d = Declaration("float32")
    d.replicated("w", (3, 4))
    targets_of({"w": torch.zeros(4, 3).t()}, d, WHO)


def _overlapping() -> None:
    memory = torch.zeros(10)
    targets_of({"low": memory[:6], "high": memory[4:]}, None, WHO)


REFUSED: dict[str, Callable[[], object]] = {
    "meta": lambda: targets_of({"w": torch.zeros(3, device="meta")}, None, WHO),
    "sparse": lambda: targets_of({"w": torch.eye(3).to_sparse()}, None, WHO),
    "dtype": lambda: targets_of({"w": torch.zeros(3, dtype=torch.complex128)}, None, WHO),
    "expanded": lambda: targets_of({"w": torch.zeros(1, 3).expand(4, 3)}, None, WHO),
    "strided": _half_of_declared,
    "overlap": _overlapping,
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_written_into_is_refused_by_name(case: str) -> None:
    with pytest.raises(UnsupportedTarget) as caught:
        REFUSED[case]()

    check_golden(f"errors/E_TARGET.{case}", str(caught.value))


@pytest.fixture
def claimed() -> Iterator[Targets]:
    targets = targets_of({"w": torch.zeros(10), "v": torch.zeros(0)}, None, "E0[0]")
    claim("first", "E0[0]", "run-a", targets)
    yield targets
    unclaim("first")
    unclaim("second")


def test_two_receivers_of_a_process_do_not_share_memory(claimed: Targets) -> None:
    memory = torch.from_numpy(claimed.buffers[0]).view(torch.float32)
    with pytest.raises(BuffersOverlap) as caught:
        claim("second", "E1[0]", "run-b", targets_of({"x": memory[8:]}, None, "E1[0]"))

    assert caught.value.code == "E_RANK_DUP"
    check_golden("errors/E_RANK_DUP.buffers", str(caught.value))
    claim("second", "E1[0]", "run-b", targets_of({"x": torch.zeros(10)}, None, "E1[0]"))


def test_closed_receiver_claims_nothing(claimed: Targets) -> None:
    unclaim("first")
    claim("second", "E1[0]", "run-b", claimed)


def rebound(engine: Engine) -> None:
    engine.w.data = torch.zeros(3, 5)


def replaced(engine: Engine) -> None:
    engine.w = nn.Parameter(engine.w.detach().clone())


def cast(engine: Engine) -> None:
    engine.bfloat16()


def removed(engine: Engine) -> None:
    del engine.w


@pytest.mark.parametrize("move", [rebound, replaced, cast, removed])
def test_parameters_that_were_moved_are_named(move: Callable[[Engine], None]) -> None:
    """Views of the memory that they had would take every byte, and the engine would serve its old ones."""
    engine = Engine()
    targets = targets_of(engine, None, WHO)
    targets.check_in_place(WHO, Version(8))
    engine.w.data.fill_(3)
    targets.check_in_place(WHO, Version(8))
    move(engine)
    with pytest.raises(TargetMoved) as caught:
        targets.check_in_place(WHO, Version(8))

    assert "w" in caught.value.names
    assert set(caught.value.names) <= {"w", "scale"}


def test_tied_name_that_is_untied_has_moved() -> None:
    emb, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = emb.weight
    targets = targets_of(nn.ModuleDict({"emb": emb, "head": head}), None, WHO)
    head.weight = nn.Parameter(torch.zeros(5, 3))
    with pytest.raises(TargetMoved) as caught:
        targets.check_in_place(WHO, Version(8))

    assert caught.value.names == ("head.weight",)


def test_what_no_version_writes_may_move() -> None:
    engine = Engine()
    b = LayoutBuilder()
    row = b.add_tensor("w", (3, 5), "float32")
    b.add_piece(row, b.add_buffer("w", 60, "float32", "param"), (0, 0), (3, 5))
    targets = targets_of(engine, b.build(), WHO)
    engine.kept = torch.ones(4)

    targets.check_in_place(WHO, Version(8))


def test_empty_parameter_has_an_empty_buffer() -> None:
    assert flat_bytes(torch.zeros(0, 3)).nbytes == 0
