"""From shards to a layout and the bytes of a slot."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.golden_text import check_golden
from weightd.core.errors import ConfigError
from weightd.core.layout.columns import RowRange, Unused
from weightd.core.layout.faults import BadEntry, UnknownDType
from weightd.core.units import NO_KEY, Attempt, Boot, TrainerRank, Version, VersionKey
from weightd.core.wire.messages import SlotRelease
from weightd.trainer_hooks.adapters.pick import holdings_of
from weightd.trainer_hooks.declared import declared_holdings
from weightd.trainer_hooks.describe import Described, describe_holdings
from weightd.trainer_hooks.faults import HoldingsChanged, PiecesDoNotAddUp
from weightd.trainer_hooks.renaming import renamed_holdings
from weightd.trainer_hooks.slots import Slots

KEY = VersionKey(Version(3), Attempt(Boot(1), 1))


def described(source: Any, casts: Any = None, unused: Any = ()) -> Described:
    return describe_holdings(holdings_of(source), casts, unused, "layout of trainer rank 0")


@pytest.fixture
def model() -> nn.Module:
    model = nn.Module()
    model.odd = nn.Parameter(torch.arange(15.0).reshape(3, 5))
    model.narrow = nn.Parameter(torch.arange(7).to(torch.bfloat16))
    model.across = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
    model.scale = nn.Parameter(torch.tensor(2.5))
    model.register_buffer("flags", torch.tensor([True, False, True]))
    return model


@pytest.fixture
def slots(model: nn.Module) -> Iterator[Slots]:
    slots = Slots(TrainerRank(0), described(model), "digest")
    yield slots
    slots.close()


def element(slots: Slots, what: Described, name: str) -> np.ndarray[Any, Any]:
    """Return a tensor's bits in slot 1, read with the layout's numbers only."""
    layout = what.layout
    row = next(i for i in range(layout.pieces) if layout.tensors[layout.tensor[i]].name == name)
    buffer = layout.buffers[layout.buffer[row]]
    n = len(layout.tensors[layout.tensor[row]].shape)
    size = {"float32": 4, "bfloat16": 2, "bool": 1}[buffer.dtype]
    flat = slots.pools[1].payload[buffer.base : buffer.base + buffer.nbytes].view(f"u{size}")
    shape = layout.extent[row, :n].tolist()
    strides = [size * s for s in layout.stride[row, :n].tolist()]
    return np.lib.stride_tricks.as_strided(flat[layout.offset[row] :], shape, strides)


def test_sections_by_type_and_every_tensor_on_a_cache_line(model: nn.Module) -> None:
    what = described(model)

    assert [(b.name, b.base, b.nbytes, b.kind) for b in what.layout.buffers] == [
        ("float32", 0, 192, "slot"),
        ("bfloat16", 192, 64, "slot"),
        ("bool", 256, 64, "slot"),
    ]
    assert what.payload_nbytes == 320
    assert sorted((p.shard.name, p.first_byte) for p in what.places) == [
        ("across", 64),
        ("flags", 256),
        ("narrow", 192),
        ("odd", 0),
        ("scale", 128),
    ]


def test_every_element_is_where_the_layout_says(model: nn.Module, slots: Slots) -> None:
    what = described(model)
    nbytes = slots.fill(1)

    assert nbytes == 4 * (15 + 12 + 1) + 2 * 7 + 3
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        bits = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[tensor.element_size()]
        expected = tensor.detach().contiguous().view(bits).numpy()
        assert np.array_equal(element(slots, what, name), expected.view(f"u{tensor.element_size()}")), name


def test_slot_is_odd_while_it_is_written_and_keeps_still_afterwards(model: nn.Module, slots: Slots) -> None:
    assert slots.pools[0].generation == 0
    slots.fill(0)
    assert slots.pools[0].generation == 2
    before = slots.pools[0].payload.copy()
    with torch.no_grad():
        model.get_parameter("odd").add_(1)
    assert np.array_equal(slots.pools[0].payload, before)


def test_generation_is_even_again_after_a_copy_that_raised(slots: Slots) -> None:
    slots._work[0][0].append((np.zeros(2, np.uint8), np.zeros(3, np.uint8)))
    with pytest.raises(ValueError, match="broadcast"):
        slots.fill(0)

    assert slots.pools[0].generation == 2


def test_states_free_and_release(slots: Slots) -> None:
    assert slots.free() == 0
    slots.published(0, KEY, "step 9")
    assert [(s.key, s.label, s.layout_digest) for s in slots.states()] == [
        (KEY, "step 9", "digest"),
        (NO_KEY, None, ""),
    ]
    assert slots.free() == 1
    slots.published(1, KEY._replace(version=Version(4)), None)
    assert slots.free() is None
    slots.release([SlotRelease(0, NO_KEY), SlotRelease(0, KEY._replace(version=Version(4))), SlotRelease(7, KEY)])
    assert slots.free() is None
    slots.release([SlotRelease(0, KEY)])
    assert slots.free() == 0


def test_parameter_that_was_bound_anew_is_read_where_it_is(model: nn.Module, slots: Slots) -> None:
    slots.fill(0)
    model.odd = nn.Parameter(torch.full((3, 5), 9.0))
    slots.fill(1)

    assert (element(slots, described(model), "odd").view(np.float32) == 9.0).all()


def test_parameter_of_another_shape_is_refused(model: nn.Module, slots: Slots) -> None:
    model.odd = nn.Parameter(torch.zeros(4, 5))
    with pytest.raises(HoldingsChanged) as caught:
        slots.fill(0)

    check_golden("errors/E_HOLDINGS", str(caught.value))
    assert slots.pools[0].generation == 0


def test_cast_on_publish() -> None:
    source = {"w": torch.tensor([1.0, 1.00390625, -3.0]), "n": torch.tensor([7])}
    what = described(source, torch.bfloat16)
    slots = Slots(TrainerRank(0), what, "")
    slots.fill(1)

    assert {t.name: t.dtype for t in what.layout.tensors} == {"w": "bfloat16", "n": "int64"}
    expected = source["w"].to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(element(slots, what, "w"), expected)
    slots.close()


def test_cast_by_name() -> None:
    source = {"w": torch.ones(3), "v": torch.ones(3)}

    assert [t.dtype for t in described(source, {"v": torch.float16}).layout.tensors] == ["float32", "float16"]
    with pytest.raises(ConfigError, match="dtype = 'x': this rank holds no tensor of that name"):
        described(source, {"x": torch.float16})


def test_cast_by_name_means_what_is_published_under_it() -> None:
    """Layers of a stage are renamed by its offset: one name is a layer's here and another's there."""
    source = {f"layers.{n}.w": torch.ones(3) for n in range(3)}
    shift = {f"layers.{n}": f"layers.{n + 1}" for n in range(3)}
    holdings = renamed_holdings(holdings_of(source), shift)
    found = describe_holdings(holdings, {"layers.2.w": torch.bfloat16}, (), "").layout

    assert [(t.name, t.dtype) for t in found.tensors] == [
        ("layers.1.w", "float32"),
        ("layers.2.w", "bfloat16"),
        ("layers.3.w", "float32"),
    ]
    of_the_model = describe_holdings(holdings, {"layers.0.w": torch.bfloat16}, (), "").layout
    assert [t.dtype for t in of_the_model.tensors] == ["bfloat16", "float32", "float32"]


def test_cast_by_a_tied_name_is_of_the_one_tensor() -> None:
    weight = torch.ones(3)
    source = {"emb": weight, "head": weight, "other": torch.ones(3)}

    assert [t.dtype for t in described(source, {"head": torch.bfloat16}).layout.tensors] == ["bfloat16", "float32"]
    with pytest.raises(ConfigError, match=r"is to be cast to torch.bfloat16, torch.float16"):
        described(source, {"emb": torch.float16, "head": torch.bfloat16})


def test_rank_that_holds_nothing_has_a_pool_all_the_same() -> None:
    what = described({"w": torch.empty(0, 3)})
    slots = Slots(TrainerRank(0), what, "")

    assert (what.layout.pieces, what.payload_nbytes, slots.fill(0)) == (0, 0, 0)
    slots.close()


def test_unused_by_name_by_rows_and_as_an_entry() -> None:
    entries = ["a", ("b", (1, 2)), Unused("c", RowRange(0, 1), "frozen")]
    what = described({n: torch.ones(3) for n in "abc"}, None, entries)

    assert [(u.name, u.rows, u.why) for u in what.layout.unused] == [
        ("a", None, "declared by the trainer"),
        ("b", RowRange(1, 2), "declared by the trainer"),
        ("c", RowRange(0, 1), "frozen"),
    ]


def test_unknown_element_type_is_refused() -> None:
    with pytest.raises(UnknownDType):
        described({"w": torch.ones(3, dtype=torch.complex128)})


def test_declared_shards_of_one_tensor_are_its_boxes() -> None:
    top, bottom = torch.ones(2, 3), torch.zeros(1, 3)
    holdings = declared_holdings([("w", (9, 3), (0, 0), (2, 3), top), ("w", (9, 3), (8, 0), (1, 3), bottom)])
    layout = describe_holdings(holdings, None, (), "").layout

    assert [t.name for t in layout.tensors] == ["w"]
    assert layout.start.tolist() == [[0, 0], [8, 0]]
    assert layout.extent.tolist() == [[2, 3], [1, 3]]


def test_declared_shards_that_disagree() -> None:
    holdings = declared_holdings([("w", (9,), (0,), (2,), torch.ones(2)), ("w", (8,), (2,), (2,), torch.ones(2))])
    with pytest.raises(BadEntry, match="declared as"):
        describe_holdings(holdings, None, (), "")


def test_declared_empty_shard() -> None:
    layout = describe_holdings(
        declared_holdings([("w", (3, 5), (3, 0), (0, 5), torch.empty(0, 5))]), None, (), ""
    ).layout

    assert (layout.pieces, layout.tensors[0].shape) == (0, (3, 5))


def test_declared_extent_that_is_not_the_tensors() -> None:
    with pytest.raises(PiecesDoNotAddUp) as caught:
        declared_holdings([("model.norm.weight", (9, 3), (0, 0), (3, 3), torch.ones(2, 3))])

    check_golden("errors/E_PIECES", str(caught.value))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.LayerNorm(3)


def replace_module(model: Tied) -> None:
    model.norm = nn.LayerNorm(3)


def remove_module(model: Tied) -> None:
    del model.norm


def untie(model: Tied) -> None:
    model.head.weight = nn.Parameter(torch.zeros(5, 3))


@pytest.mark.parametrize(
    "change, name, found",
    [
        (replace_module, "norm.weight", "of another"),
        (remove_module, "norm.weight", "gone"),
        (untie, "head.weight", "own"),
    ],
)
def test_what_is_no_longer_the_models_is_not_published(change: Callable[[Tied], None], name: str, found: str) -> None:
    """The old module's parameters can still be read; they are the weights of the step before, for ever."""
    model = Tied()
    slots = Slots(TrainerRank(0), described(model), "digest")
    slots.fill(0)
    change(model)
    with pytest.raises(HoldingsChanged, match=found) as caught:
        slots.fill(1)
    generation = slots.pools[1].generation
    slots.close()

    assert caught.value.name == name
    assert generation == 0


def test_a_wrapper_around_a_module_changes_nothing() -> None:
    model = Tied()
    slots = Slots(TrainerRank(0), described(model), "digest")
    wrapped: Any = torch.compile(model.norm, backend="eager")
    model.norm = wrapped

    assert slots.fill(0) == slots.fill(1)
    slots.close()


def test_an_entry_of_a_mapping_that_was_replaced_is_what_is_published() -> None:
    tensors = {"w": torch.zeros(3)}
    slots = Slots(TrainerRank(0), described(tensors), "digest")
    tensors["w"] = torch.ones(3)
    slots.fill(0)
    published = slots.pools[0].payload[:12].view(np.float32).tolist()
    slots.close()

    assert published == [1, 1, 1]


def test_what_moved_beside_something_that_was_refused_is_read_where_it_is() -> None:
    """The refused publish looked at ``a`` first: it must not be taken for bound."""
    tensors = {"a": torch.zeros(3), "b": torch.zeros(3)}
    slots = Slots(TrainerRank(0), described(tensors), "digest")
    kept = tensors["b"]
    tensors |= {"a": torch.ones(3), "b": torch.zeros(4)}
    with pytest.raises(HoldingsChanged):
        slots.fill(0)
    tensors["b"] = kept
    slots.fill(0)
    published = slots.pools[0].payload[:12].view(np.float32).tolist()
    slots.close()

    assert published == [1, 1, 1]


def test_same_memory_as_another_element_type_is_refused() -> None:
    tensors = {"w": torch.ones(3, dtype=torch.bfloat16)}
    slots = Slots(TrainerRank(0), described(tensors), "digest")
    slots.fill(0)
    tensors["w"].data = tensors["w"].data.view(torch.float16)
    with pytest.raises(HoldingsChanged, match="float16"):
        slots.fill(1)
    slots.close()
