"""Parameters are moved under everything that holds them, or not at all."""

import gc
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from weightd.link.memory import Pool
from weightd.trainer_hooks.adapters.pick import holdings_of
from weightd.trainer_hooks.faults import HoldingsChanged, LiveMemoryRefused
from weightd.trainer_hooks.live.layout import LiveDescribed, describe_live
from weightd.trainer_hooks.live.storages import LiveStorages


class Net(nn.Module):
    """A tied head, a padded weight, two parameters in one memory, a transposed one, one of another type, a 0-d one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight
        padded = torch.randn(5 * 4)
        self.padded = nn.Parameter(padded[: 3 * 4].view(3, 4))
        flat = torch.randn(40)
        self.left = nn.Parameter(flat[:15].view(3, 5))
        self.right = nn.Parameter(flat[16:36].view(5, 4))
        self.across = nn.Parameter(torch.randn(4, 3).t())
        self.brief = nn.Parameter(torch.randn(7).bfloat16())
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.flat = [flat, padded]


def described(source: nn.Module | dict[str, Tensor]) -> LiveDescribed:
    return describe_live(holdings_of(source), lambda _: False, (), "a test")


class Lived:
    """A source in live memory."""

    def __init__(self, source: nn.Module | dict[str, Tensor]) -> None:
        self.described = described(source)
        self.pool = Pool.create("trainer 0 slot 0 region 0", self.described.payload_nbytes)
        try:
            self.storages = LiveStorages(self.pool.payload, self.described.homes)
        except BaseException:
            self.pool.close()
            raise

    def piece(self, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
        """Return what the layout says of a tensor of one piece."""
        layout = self.described.layout
        info = next(t for t in layout.tensors if t.name == name)
        row = [t.name for t in layout.tensors].index(name)
        at = int(np.flatnonzero(layout.tensor == row)[0])
        buffer = layout.buffers[layout.buffer[at]]
        kind = np.dtype({"float32": np.float32, "bfloat16": np.uint16}[buffer.dtype])
        elements = self.pool.payload[buffer.base : buffer.base + buffer.nbytes].view(kind)[layout.offset[at] :]
        n = len(info.shape)
        strides = [s * kind.itemsize for s in layout.stride[at, :n].tolist()]
        return np.lib.stride_tricks.as_strided(elements, layout.extent[at, :n].tolist(), strides)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the pool."""
        first = int(self.pool.payload.ctypes.data)
        return first <= tensor.data_ptr() < first + self.pool.payload_nbytes

    def close(self) -> None:
        """Give everything back."""
        self.storages.leave()
        self.pool.close()


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def lived(net: Net) -> Iterator[Lived]:
    made = Lived(net)
    yield made
    made.close()


def same(name: str, lived: Lived, tensor: Tensor) -> bool:
    data = tensor.detach()
    found = data.view(torch.int16).clone().numpy().view(np.uint16) if data.dtype is torch.bfloat16 else data.tolist()
    return np.array_equal(lived.piece(name), np.array(found, lived.piece(name).dtype))


def test_objects_stay_and_their_bytes_are_those_that_the_layout_names() -> None:
    net = Net()
    before = {name: (p, p.detach().clone(), p.stride()) for name, p in net.named_parameters()}
    lived = Lived(net)

    for name, p in net.named_parameters():
        found, values, strides = before[name]
        assert p is found
        assert (torch.equal(values, p), strides) == (True, p.stride())
        assert lived.holds(p), name
        assert same(name, lived, p), name
    lived.close()


def test_what_an_optimizer_writes_is_in_the_memory(net: Net, lived: Lived) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    net.head(net.emb(torch.tensor([1, 2]))).sum().backward()
    for p in net.parameters():
        p.grad = torch.ones_like(p) if p.grad is None else p.grad
    optimizer.step()

    for name, p in net.named_parameters():
        assert not torch.equal(before[name], p), name
        assert same(name, lived, p), name


def test_views_their_bases_and_tied_names_move_along(net: Net, lived: Lived) -> None:
    flat, padded = net.flat

    assert net.head.weight is net.emb.weight
    assert lived.holds(flat)
    assert lived.holds(padded)
    with torch.no_grad():
        flat[0], padded[0] = 7.0, 8.0
        assert (float(net.left[0, 0]), float(net.padded[0, 0])) == (7.0, 8.0)
    assert len(lived.described.homes) == 6


def test_padding_of_a_storage_is_no_piece(net: Net, lived: Lived) -> None:
    home = next(h for h in lived.described.homes if h.name == "padded")

    assert home.nbytes == 5 * 4 * 4
    assert lived.piece("padded").size == 3 * 4


def test_leaving_gives_back_memory_of_its_own(net: Net) -> None:
    lived = Lived(net)
    values = {name: p.detach().clone() for name, p in net.named_parameters()}
    published = lived.pool.payload.copy()
    lived.storages.leave()
    for name, p in net.named_parameters():
        assert not lived.holds(p)
        assert torch.equal(values[name], p)
        assert p.untyped_storage().resizable()
    with torch.no_grad():
        net.left.zero_()

    assert np.array_equal(published, lived.pool.payload)
    lived.pool.close()
    Lived(net).close()


# ------------------------------------------------------------ refusals


def refused(source: nn.Module | dict[str, Tensor]) -> LiveMemoryRefused:
    with pytest.raises(LiveMemoryRefused) as caught:
        Lived(source)
    return caught.value


def test_a_storage_that_somebody_holds_refuses_and_everything_is_as_it_was(net: Net) -> None:
    values = {name: p.detach().clone() for name, p in net.named_parameters()}
    holder = net.right.untyped_storage()
    error = refused(net)

    assert error.name == "left and 1 more in one memory"
    assert "still holds its memory" in str(error)
    assert net.right.data_ptr() == holder.data_ptr() + 16 * 4
    for name, p in net.named_parameters():
        assert torch.equal(values[name], p)
        assert p.untyped_storage().resizable()
    del holder, error
    gc.collect()
    Lived(net).close()


def test_a_view_that_only_a_graph_of_autograd_holds_refuses_or_moves_along(net: Net) -> None:
    x = torch.randn(2, 6, requires_grad=True)
    out = (x @ net.emb.weight.t()).sum()
    expected = net.emb.weight.detach().sum(0)
    try:
        Lived(net).close()
    except LiveMemoryRefused as error:
        assert error.name == "emb.weight"  # noqa: PT017
    torch.autograd.backward(out)

    assert x.grad is not None
    assert torch.allclose(x.grad[0], expected)


def test_memory_that_numpy_looks_at_refuses() -> None:
    array = np.zeros(4, np.float32)
    tensor = torch.randn(4)
    view = tensor.numpy()

    assert "numpy" in str(refused({"w": torch.from_numpy(array)}))
    assert "numpy" in str(refused({"w": tensor}))
    assert view[0] == tensor[0]


def test_memory_that_other_processes_share_refuses() -> None:
    tensor = torch.randn(4)
    tensor.untyped_storage().share_memory_()

    assert "other processes" in str(refused({"w": tensor}))


def test_two_element_types_in_one_memory_refuse() -> None:
    flat = torch.zeros(8)
    tensors = {"a": flat[:4], "b": flat[4:].view(torch.bfloat16)}
    with pytest.raises(LiveMemoryRefused, match=r"b cannot live .* torch.bfloat16 .* with a, torch.float32"):
        described(tensors)


# ------------------------------------------------------------ what moves away later


def test_a_storage_that_was_replaced_takes_the_place_of_the_old_one(net: Net, lived: Lived) -> None:
    assert lived.storages.settle() == 0
    net.flat.clear()
    new = {name: p.detach() + 1 for name, p in net.named_parameters() if name not in ("left", "right")}
    for name, values in new.items():
        net.get_parameter(name).data = values.clone() if name != "across" else values.clone().t().contiguous().t()

    assert lived.storages.settle() == len(new) == 5  # padded without its padding, too
    for name, values in new.items():
        assert torch.equal(values, net.get_parameter(name))
        assert same(name, lived, net.get_parameter(name)), name
    assert lived.storages.settle() == 0


def test_a_parameter_object_that_was_replaced_is_found_under_its_name(net: Net, lived: Lived) -> None:
    state = {"scale": torch.tensor(5.0)}
    net.load_state_dict(state, strict=False, assign=True)

    assert lived.storages.settle() == 1
    assert same("scale", lived, torch.tensor(5.0))


def changed(lived: Lived) -> str:
    with pytest.raises(HoldingsChanged) as caught:
        lived.storages.settle()
    return str(caught.value)


def test_old_memory_that_is_still_held_is_not_overwritten(net: Net, lived: Lived) -> None:
    old = net.emb.weight.detach()
    kept = old.clone()
    net.emb.weight.data = torch.randn(11, 6)

    assert "something still holds the memory of the first" in changed(lived)
    assert torch.equal(kept, old)


def test_other_strides_another_size_and_memory_of_two_are_other_holdings(net: Net, lived: Lived) -> None:
    across, scale, left = net.across.data, net.scale.data, net.left.data
    net.across.data = torch.randn(3, 4)
    assert "strides (4, 1)" in changed(lived)
    net.across.data = across
    net.scale.data = torch.randn(3)[1]
    assert "from element 1 of its memory" in changed(lived)
    net.scale.data = torch.empty(9)[0]
    assert "in 36" in changed(lived)
    net.scale.data = scale
    net.left.data = torch.randn(3, 5)
    assert "right was attached as" in changed(lived)
    net.left.data = left
