"""Models in every layout of FSDP2, and the engines that take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.hooks.delivery import Params
from weightd.core.layout.cuts import balanced_sizes
from weightd.rollout_hooks.declare import Declaration

WORLD = 8
VOCAB, HIDDEN = 11, 6

Build = Callable[[], nn.Module | None]
"""Makes this rank's part of a model; None on a rank that is not in its mesh."""


class Net(nn.Module):
    """Odd sizes, dimensions below the world size, a tied head, buffers, a 0-d parameter."""

    def __init__(self, inner: int = 10) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, HIDDEN)
        self.gate = nn.Linear(HIDDEN, inner, bias=False)
        self.up = nn.Linear(HIDDEN, inner)
        self.down = nn.Linear(inner, HIDDEN)
        self.few = nn.Parameter(torch.randn(3, 5))
        self.one = nn.Parameter(torch.randn(1))
        self.cube = nn.Parameter(torch.randn(7, 2, 3))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("seen", torch.arange(5.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.emb(ids)
        h = h + self.down(torch.relu(self.gate(h) + 1) * self.up(h)) * self.one
        rest: Tensor = (self.few.sum() + self.cube.sum()) * self.scale
        out: Tensor = self.head(h).float().mean() + rest.float()
        return out


def shard(model: Net, mesh: DeviceMesh, each: bool = False, **options: Any) -> nn.Module:
    """Apply ``fully_shard``, to the layers first if ``each``; it takes no 0-d parameter."""
    for layer in [model.up, model.down] if each else []:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, ignored_params={model.scale}, **options)
    return model


def one_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (WORLD,))


def plain() -> nn.Module:
    return shard(Net(), one_mesh())


def nested() -> nn.Module:
    return shard(Net(), one_mesh(), each=True)


def mixed() -> nn.Module:
    """Masters are fp32; what is gathered for a forward is bf16."""
    return shard(Net(), one_mesh(), each=True, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def offloaded() -> nn.Module:
    return shard(Net(), one_mesh(), offload_policy=CPUOffloadPolicy(pin_memory=False))


def second_dimension() -> nn.Module:
    def place(p: nn.Parameter) -> Shard | None:
        return Shard(1) if p.ndim > 1 and p.shape[1] % WORLD == 0 else None

    return shard(Net(inner=16), one_mesh(), shard_placement_fn=place)


def ignored() -> nn.Module:
    """More than the scalar stays whole on every rank."""
    model = Net()
    weight = model.up.get_parameter("weight")
    fully_shard(model, mesh=one_mesh(), ignored_params={model.scale, model.few, weight})
    return model


def not_resharded() -> nn.Module:
    """Parameters stay gathered after a forward: they show as plain, whole tensors then."""
    return shard(Net(), one_mesh(), each=True, reshard_after_forward=False)


def cut_anew_after_forward() -> nn.Module:
    """Behind a forward parameters are cut over four ranks, a copy that shows in the place of those over eight."""
    return shard(Net(), one_mesh(), each=True, reshard_after_forward=WORLD // 2)


def hybrid() -> nn.Module:
    return shard(Net(), init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("rep", "shard")))


PLAN = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}


def with_tensor_parallel(inner: int, **more: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        mesh = init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("dp", "tp"))
        model = Net(inner)
        parallelize_module(model, mesh["tp"], {**PLAN, **more})
        return shard(model, mesh["dp"])

    return build


def seven_rows() -> nn.Module | None:
    """dp 3 x tp 2, where the placements read from left to right put the last row on the wrong rank; two ranks idle."""
    mesh = DeviceMesh("cpu", torch.arange(6).reshape(3, 2), mesh_dim_names=("dp", "tp"))
    if mesh.get_coordinate() is None:
        return None
    model = Net(inner=7)
    parallelize_module(model, mesh["tp"], PLAN)
    return shard(model, mesh["dp"])


def hybrid_with_tensor_parallel(inner: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("rep", "dp", "tp"))
        model = Net(inner)
        parallelize_module(model, mesh["tp"], PLAN)
        return shard(model, mesh["rep", "dp"])

    return build


@dataclass(frozen=True)
class Case:
    """One layout.

    Attributes:
        build: Makes the model.
        inner: Its odd size.
        tied: Whether head and embedding still are one parameter.
        dtype: What is published, if not what is held.
        forward: Whether torch can compute with it; it does not with a dimension that tensor parallelism cuts unevenly.
    """

    build: Build
    inner: int = 10
    tied: bool = True
    dtype: torch.dtype | None = None
    forward: bool = True


CASES: dict[str, Case] = {
    "plain": Case(plain),
    "nested": Case(nested),
    "mixed precision": Case(mixed),
    "mixed precision, bf16 published": Case(mixed, dtype=torch.bfloat16),
    "offloaded": Case(offloaded),
    "Shard(1)": Case(second_dimension, 16),
    "ignored": Case(ignored),
    "not resharded": Case(not_resharded),
    "cut anew after a forward": Case(cut_anew_after_forward),
    "HSDP": Case(hybrid),
    "FSDP+TP": Case(with_tensor_parallel(10)),
    "FSDP+TP, 9 rows on 4 x 2": Case(with_tensor_parallel(9), 9, forward=False),
    "FSDP+TP, 7 rows on 3 x 2": Case(seven_rows, 7, forward=False),
    "FSDP+TP, tie broken": Case(with_tensor_parallel(10, head=ColwiseParallel()), tied=False),
    "HSDP+TP": Case(hybrid_with_tensor_parallel(10)),
    "HSDP+TP, 7 rows": Case(hybrid_with_tensor_parallel(7), 7, forward=False),
}


# ------------------------------------------------------------ training


class Training:
    """A model and its optimizer."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = case.build()
        self._optimizer = None if self.model is None else torch.optim.SGD(self.model.parameters(), lr=0.1)

    def forward(self) -> list[str]:
        """Run a forward, or gather as one would, and return the parameters in whose place something shows behind it."""
        if self.model is None:
            return []
        before = dict(self.model.named_parameters())
        if self.case.forward:
            with torch.no_grad():
                self.model(torch.arange(6).reshape(1, 6))
        else:
            cast("FSDPModule", self.model).unshard()
        return [name for name, p in self.model.named_parameters() if p is not before[name]]

    def step(self) -> None:
        """Change every parameter."""
        if self.model is None or self._optimizer is None:
            return
        if self.case.forward:
            self.model(torch.arange(6).reshape(1, 6)).backward()
        else:
            reshard(self.model)
            for p in self.model.parameters():
                p.grad = p.detach() * 0.5 + 1
        self._optimizer.step()
        self._optimizer.zero_grad()


def reshard(model: nn.Module) -> None:
    """Let go of what is gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# ------------------------------------------------------------ truth and engine


def whole(model: nn.Module) -> Params:
    """Return every published tensor by torch's own collective; gathered parameters are let go of first."""
    reshard(model)
    found: Params = {}
    for name, tensor in [*model.named_parameters(), ("seen", model.get_buffer("seen"))]:
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found[name] = full.detach().clone()
    return found


def declaration(case: Case, size: int, k: int) -> Declaration:
    """Return what rank ``k`` of an engine of ``size`` needs: fused, cut unevenly, and whole parameters."""
    inner = balanced_sizes(case.inner, size)
    d = Declaration("bfloat16" if case.dtype is torch.bfloat16 else "float32")
    d.column("emb.weight", (VOCAB, HIDDEN), balanced_sizes(VOCAB, size), k)
    if case.tied:
        d.tied("head.weight", "emb.weight")
    else:
        d.column("head.weight", (VOCAB, HIDDEN), balanced_sizes(VOCAB, size), k)
    d.gate_up("gate_up.weight", ("gate.weight", "up.weight"), (case.inner, HIDDEN), inner, k)
    d.column("up.bias", (case.inner,), inner, k)
    d.row("down.weight", (HIDDEN, case.inner), inner, k)
    d.replicated("down.bias", (HIDDEN,))
    d.replicated("few", (3, 5))
    d.replicated("one", (1,))
    d.cut("cube", (7, 2, 3), 0, balanced_sizes(7, size), k)
    d.replicated("scale", ())
    d.replicated("seen", (5,))
    return d


def expected(case: Case, truth: Params, size: int, k: int) -> Params:
    """Return what the parameters of rank ``k`` hold: slices of the whole tensors."""
    full = {name: t if case.dtype is None else t.to(case.dtype) for name, t in truth.items()}

    def part(name: str, dim: int = 0) -> Tensor:
        sizes = balanced_sizes(full[name].shape[dim], size)
        return full[name].narrow(dim, sum(sizes[:k]), sizes[k])

    found = {name: full[name] for name in ("down.bias", "few", "one", "scale", "seen")}
    found |= {name: part(name) for name in ("emb.weight", "up.bias", "cube")}
    found |= {
        "down.weight": part("down.weight", 1),
        "gate_up.weight": torch.cat([part("gate.weight"), part("up.weight")]),
    }
    return found if case.tied else {**found, "head.weight": part("head.weight")}
