"""An FSDP2 trainer in live memory, and an engine that cuts its model in two: what runs inside their processes."""

from __future__ import annotations

import multiprocessing.connection
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.integration.ranks import obey
from weightd.core.session.deadlines import Deadlines
from weightd.link import copies
from weightd.rollout_hooks.declare import Declaration
from weightd.rollout_hooks.receiver import Receiver
from weightd.trainer_hooks.publisher import Publisher

Values = dict[str, NDArray[np.float32]]
VOCAB, HIDDEN, INNER, SIZE = 11, 6, 10, 2


class Net(nn.Module):
    """Uneven and tied shards, a buffer that every forward writes, a parameter outside of FSDP."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, HIDDEN)
        self.up = nn.Linear(HIDDEN, inner)
        self.down = nn.Linear(inner, HIDDEN)
        self.few = nn.Parameter(torch.randn(3, 5))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.emb.weight
        self.seen = nn.Buffer(torch.zeros(5))

    def forward(self, ids: Tensor) -> Tensor:
        self.seen.add_(1.0)
        h = self.emb(ids)
        h = h + self.down(torch.relu(self.up(h)))
        out: Tensor = self.head(h).pow(2).mean() + self.few.sum() * self.scale
        return out


def shapes(inner: int) -> dict[str, tuple[int, ...]]:
    """Return the logical shape of everything that is published."""
    return {
        "emb.weight": (VOCAB, HIDDEN),
        "up.weight": (inner, HIDDEN),
        "up.bias": (inner,),
        "down.weight": (HIDDEN, inner),
        "down.bias": (HIDDEN,),
        "few": (3, 5),
        "scale": (),
        "seen": (5,),
    }


@dataclass(frozen=True)
class LiveSpec:
    """A rank of the live trainer, or of its engine."""

    socket: Path
    rank: int
    world: int = 2
    port: int = 0
    inner: int = INNER
    dwell_s: float = 0.0
    memory: Any = "live"
    deadlines: Deadlines = field(default_factory=Deadlines)


class LiveTrainer:
    """One rank of the trainer."""

    def __init__(self, spec: LiveSpec) -> None:
        address = f"tcp://127.0.0.1:{spec.port}"
        dist.init_process_group("gloo", init_method=address, rank=spec.rank, world_size=spec.world)
        torch.manual_seed(0)
        self.model = Net(spec.inner)
        mesh = init_device_mesh("cpu", (spec.world,))
        fully_shard(self.model.up, mesh=mesh)
        fully_shard(self.model, mesh=mesh, ignored_params={self.model.scale})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        engines = {"E0": SIZE} if spec.rank == 0 else None
        self.publisher = Publisher(
            self.model,
            run="run",
            engines=engines,
            socket=spec.socket,
            attach_s=20.0,
            deadlines=spec.deadlines,
            memory=spec.memory,
        )

    def prepare(self) -> None:
        """Be constructed."""

    def attach(self) -> None:
        """Attach to the run."""
        self.publisher.attach()

    def step(self, times: int = 1) -> None:
        """Train."""
        for _ in range(times):
            self.model(torch.tensor([[1, 2, 3]])).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def forward(self) -> None:
        """Write what a forward writes."""
        with torch.no_grad():
            self.model(torch.tensor([[1, 2, 3]]))

    def publish(self) -> int:
        """Publish."""
        return int(self.publisher.publish())

    def publish_and_step(self) -> int:
        """Publish, and make the next step at once."""
        version = self.publish()
        self.step()
        return version

    def wait(self, version: int, until: Any = "committed", timeout_s: float = 20.0) -> None:
        """Wait for a version's outcome."""
        self.publisher.wait(version, until, timeout_s)

    def full(self) -> Values:
        """Return every tensor whole, by torch's own collective."""
        for module in self.model.modules():
            getattr(module, "reshard", lambda: None)()
        found: Values = {}
        for name, tensor in [*self.model.named_parameters(), ("seen", self.model.get_buffer("seen"))]:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found[name] = whole.detach().clone().numpy()
        return found

    def replace(self) -> None:
        """Load a state as other parameter objects, in other memory."""
        state = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
        self.model.load_state_dict(state, assign=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def reload(self) -> None:
        """Load a state into the parameters that there are, and save it again."""
        self.model.load_state_dict({k: v.detach().clone() for k, v in self.model.state_dict().items()})

    def in_memory(self) -> list[str]:
        """Return the parameters that lie in the live slot."""
        attachment = self.publisher._attachment
        assert attachment is not None
        payload = attachment.slots.pools[0].payload
        first = int(payload.ctypes.data)
        named = [(n, p._local_tensor if isinstance(p, DTensor) else p) for n, p in self.model.named_parameters()]
        return [n for n, p in named if first <= p.data_ptr() < first + payload.nbytes]

    def write_without_a_word(self) -> None:
        """Write the parameters as no optimizer does."""
        with torch.no_grad():
            for p in self.model.parameters():
                (p._local_tensor if isinstance(p, DTensor) else p).data.add_(1.0)

    def slots(self) -> list[int]:
        """Return the version of each slot."""
        attachment = self.publisher._attachment
        assert attachment is not None
        return [int(k.version) for k in attachment.slots.keys]

    def usage(self) -> tuple[int, int]:
        """Return open descriptors and KiB of memory in use, shared memory included."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return len(os.listdir("/proc/self/fd")), pages * 4

    def publish_and_step_often(self, times: int, warm: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Publish and step again and again; return the usage after ``warm`` of them and after all."""
        begun = self.usage()
        for done in range(times):
            begun = self.usage() if done == warm else begun
            self.publish_and_step()
        return begun, self.usage()

    def close(self) -> None:
        """Leave the run."""
        self.publisher.close()


class LiveEngine:
    """One rank of the engine."""

    def __init__(self, spec: LiveSpec) -> None:
        k, inner = spec.rank, spec.inner
        self._dwell_s = spec.dwell_s
        declared = Declaration("float32")
        half = [inner // 2, inner - inner // 2]
        declared.column("up.weight", (inner, HIDDEN), half, k)
        declared.column("up.bias", (inner,), half, k)
        declared.row("down.weight", (HIDDEN, inner), half, k)
        for name in ("emb.weight", "down.bias", "few", "scale", "seen"):
            declared.replicated(name, shapes(inner)[name])
        self._params = {name: torch.zeros(p.shape) for name, p in declared.parameters().items()}
        self.receiver = Receiver(
            self._params,
            run="run",
            engine="E0",
            k=k,
            size=SIZE,
            socket=spec.socket,
            layout=declared,
            attach_s=20.0,
            deadlines=spec.deadlines,
        )

    def prepare(self) -> None:
        """Be constructed."""

    def attach(self) -> None:
        """Attach to the run."""
        self.receiver.attach()

    def receive(self, version: int | None = None, timeout_s: float = 20.0) -> int:
        """Receive a version."""
        return int(self.receiver.receive(version, timeout_s))

    def receive_all(self, last: int) -> int:
        """Receive versions up to ``last``."""
        version = 0
        while version < last:
            version = self.receive()
        return version

    def copy_slowly(self, pair_s: float) -> None:
        """Take this long over every pair from now on; what is copied is as ever."""

        def slowly(pairs: Iterable[copies.Pair]) -> int:
            done = 0
            for pair in pairs:
                done += at_once([pair])
                time.sleep(pair_s)
            return done

        at_once = copies.run_pairs
        copies.run_pairs = slowly

    def state(self) -> str:
        """Return the receiver's state."""
        return str(self.receiver.state)

    def params(self) -> Values:
        """Return everything that it holds."""
        return {name: tensor.clone().numpy() for name, tensor in self._params.items()}


def cut(full: Values, k: int) -> Values:
    """Return what engine rank ``k`` is to hold."""
    half = full["up.bias"].shape[0] // 2
    mine = slice(0, half) if k == 0 else slice(half, None)
    rows: dict[str, Any] = {"up.weight": np.s_[mine], "up.bias": np.s_[mine], "down.weight": np.s_[:, mine]}
    return {name: full[name][rows[name]] if name in rows else full[name] for name in shapes(1)}


def trainer(pipe: multiprocessing.connection.Connection, spec: LiveSpec) -> None:
    """Be a trainer rank."""
    obey(pipe, lambda: LiveTrainer(spec))


def engine(pipe: multiprocessing.connection.Connection, spec: LiveSpec) -> None:
    """Be an engine rank."""
    obey(pipe, lambda: LiveEngine(spec))
