"""One rank of the FSDP2 tests: builds every case, describes it, and compares with ``full_tensor()``.

Started as ``python -m tests.hooks.fsdp2_ranks RANK WORLD PORT FOLDER``.  Verdicts are gathered first and
written by rank 0, so that a rank that is wrong does not leave the others in a collective.
"""

import json
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from weightd.core.errors import WeightdError
from weightd.core.layout.columns import Layout
from weightd.trainer_hooks.adapters.pick import holdings_of
from weightd.trainer_hooks.describe import describe_holdings
from weightd.trainer_hooks.publisher import Publisher
from weightd.trainer_hooks.slots import Slots


class Net(nn.Module):
    """Odd sizes, a dimension below the world size, a tied head, a buffer, a 0-d parameter."""

    def __init__(self, inner: int = 10) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.up = nn.Linear(6, inner)
        self.down = nn.Linear(inner, 6)
        self.few = nn.Parameter(torch.randn(3, 5))
        self.one = nn.Parameter(torch.randn(1))
        self.cube = nn.Parameter(torch.randn(7, 2, 3))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("seen", torch.arange(5.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.emb(ids)
        h = h + self.down(torch.relu(self.up(h))) * self.one
        rest: Tensor = (self.few.sum() + self.cube.sum()) * self.scale
        out: Tensor = self.head(h).float().mean() + rest.float()
        return out


def shard(model: Net, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Apply ``fully_shard``; it takes no 0-d parameter."""
    fully_shard(model, mesh=mesh, ignored_params={model.scale}, **options)
    return model


def plain(world: int) -> nn.Module:
    return shard(Net(), init_device_mesh("cpu", (world,)))


def mixed(world: int) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return shard(Net(), init_device_mesh("cpu", (world,)), mp_policy=policy)


def second_dimension(world: int) -> nn.Module:
    def place(p: nn.Parameter) -> Shard | None:
        return Shard(1) if p.ndim > 1 and p.shape[1] % world == 0 else None

    return shard(Net(inner=12), init_device_mesh("cpu", (world,)), shard_placement_fn=place)


def hybrid(world: int) -> nn.Module:
    return shard(Net(), init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("rep", "shard")))


def with_tensor_parallel(inner: int) -> Callable[[int], nn.Module]:
    def build(world: int) -> nn.Module:
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        model = Net(inner=inner)
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return shard(model, mesh["dp"])

    return build


def nested_after_forward(world: int) -> nn.Module:
    """Root and child keep their parameters gathered after a forward: they show as plain, whole tensors then."""
    model = Net()
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model.up, mesh=mesh, reshard_after_forward=False)
    shard(model, mesh, reshard_after_forward=False)
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.long))
    return model


CASES: dict[str, Callable[[int], nn.Module]] = {
    "plain": plain,
    "mixed precision": mixed,
    "Shard(1)": second_dimension,
    "HSDP": hybrid,
    "FSDP+TP": with_tensor_parallel(10),
    "FSDP+TP, 7 rows": with_tensor_parallel(7),
    "after a forward, not resharded": nested_after_forward,
}


def carve(layout: Layout, payload: np.ndarray[Any, Any]) -> dict[str, list[tuple[Any, np.ndarray[Any, Any]]]]:
    """Return each piece's box and elements, read with the layout's numbers only."""
    found: dict[str, list[tuple[Any, np.ndarray[Any, Any]]]] = {t.name: [] for t in layout.tensors}
    for row in range(layout.pieces):
        tensor = layout.tensors[layout.tensor[row]]
        buffer = layout.buffers[layout.buffer[row]]
        n = len(tensor.shape)
        start, extent = layout.start[row, :n].tolist(), layout.extent[row, :n].tolist()
        flat = payload[buffer.base : buffer.base + buffer.nbytes].view(np.float32)
        strides = [4 * s for s in layout.stride[row, :n].tolist()]
        piece = np.lib.stride_tricks.as_strided(flat[layout.offset[row] :], extent, strides)
        found[tensor.name].append(((start, extent), piece.copy()))
    return found


def whole(model: nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    """Return the truth, by torch's own collective."""
    for module in model.modules():
        getattr(module, "reshard", lambda: None)()
    truth: dict[str, np.ndarray[Any, Any]] = {}
    for name, tensor in [*model.named_parameters(), ("seen", model.get_buffer("seen"))]:
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        truth[name] = full.detach().numpy().copy()
    return truth


def check(model: nn.Module, world: int) -> list[str]:
    """Return what is wrong with a case on this rank, and on rank 0 with all of them together."""
    described = describe_holdings(holdings_of(model), None, (), "a test")
    layout = Publisher(model, run="r").describe()
    wrong = [] if layout.aliases == (("head.weight", "emb.weight"),) else [f"aliases {layout.aliases}"]
    slots = Slots(0, described, "", 1)  # type: ignore[arg-type]
    slots.fill(0)
    every: list[Any] = [None] * world
    dist.all_gather_object(every, carve(layout, slots.pools[0].payload))
    slots.close()
    for name, expected in whole(model).items():
        out = np.full(expected.shape, np.nan, np.float32)
        seen = np.zeros(expected.shape, int)
        for held in every:
            for (start, extent), piece in held[name]:
                box = tuple(slice(s, s + e) for s, e in zip(start, extent, strict=True))
                out[box] = piece
                seen[box] += 1
        if not np.array_equal(out, expected):
            wrong.append(f"{name}: not equal to full_tensor(), held {seen.min()} to {seen.max()} times")
        if seen.min() != seen.max() or prod(expected.shape) == 0:
            wrong.append(f"{name}: held {seen.min()} to {seen.max()} times")
    if "scratch" in every[0]:
        wrong.append("a buffer that is not persistent is published")
    return wrong


def refusal_of_partial(world: int) -> str:
    mesh = init_device_mesh("cpu", (world,))
    tensor = DTensor.from_local(torch.ones(2, 3), mesh, [Partial()], run_check=False)
    try:
        holdings_of({"layer.weight": tensor})
    except WeightdError as error:
        return str(error)
    return "not refused"


def main() -> None:
    rank, world, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    verdicts: dict[str, list[str]] = {}
    for name, build in CASES.items():
        torch.manual_seed(0)
        verdicts[name] = check(build(world), world)
    verdicts["partial"] = [refusal_of_partial(world)]
    every: list[Any] = [None] * world
    dist.all_gather_object(every, verdicts)
    if rank == 0:
        (folder / "verdicts.json").write_text(json.dumps(every))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
