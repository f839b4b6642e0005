"""A model that DeepSpeed cuts unevenly, and engines of every supported setting around it."""

from __future__ import annotations

import gc
import importlib
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCAB, HIDDEN = 11, 6


class Block(nn.Module):
    """Attention and an MLP with one matrix for q, k and v and one for gate and up, beside a plain one."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv_proj = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN)
        self.gate_up = nn.Linear(HIDDEN, 2 * inner, bias=False)
        self.up = nn.Linear(HIDDEN, inner)
        self.down = nn.Linear(inner, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(self.norm(x)).chunk(3, -1)
        x = x + self.o_proj(q * k.sigmoid() + v)
        gate, up = self.gate_up(x).chunk(2, -1)
        out: Tensor = x + self.down(nn.functional.silu(gate) * up + self.up(x))
        return out


class Net(nn.Module):
    """Odd sizes, a 3-d parameter, one of a single element, one that is not trained, a tied head, a buffer."""

    def __init__(self, inner: int = 9) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList([Block(inner)])
        self.odd = nn.Parameter(torch.randn(7, 5, 3))
        self.one = nn.Parameter(torch.randn(1))
        self.frozen = nn.Parameter(torch.randn(4, 3), requires_grad=False)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.arange(4.0))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for layer in self.layers:
            h = layer(h)
        rest = self.odd.float().sum() + self.one.float().sum() + self.frozen.float().sum()
        out: Tensor = self.head(h).float().pow(2).mean() + rest * 1e-2
        return out


_CUTS = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*qkv_proj\.weight$"], "partition_type": "column", "shape": [3, -1], "partition_dim": 0},
        {"patterns": [r".*gate_up\.weight$"], "partition_type": "column", "shape": [2, -1], "partition_dim": 0},
        {"patterns": [r".*\.up\.weight$"], "partition_type": "column"},
        {"patterns": [r".*o_proj\.weight$", r".*down\.weight$"], "partition_type": "row"},
    ],
}


@dataclass(frozen=True)
class Setting:
    """How DeepSpeed is configured.

    Attributes:
        stage: Of ZeRO.
        tp: Ranks of tensor parallelism.
        init: Whether the model is built under ``zero.Init``.
        offload: Whether the optimizer's state, and under ZeRO-3 the parameters, are offloaded to the CPU.
        fp32: Whether it trains in fp32 instead of bfloat16.
        persistence: Elements up to which ZeRO-3 keeps a parameter gathered.
        accumulation: Micro-batches in a step.
        round_robin: Whether ZeRO-2 orders parameters otherwise in its flat groups.
        inner: Width of the MLP.
    """

    stage: int
    tp: int = 1
    init: bool = False
    offload: bool = False
    fp32: bool = False
    persistence: int = 0
    accumulation: int = 1
    round_robin: bool = False
    inner: int = 9

    def config(self) -> dict[str, Any]:
        """Return DeepSpeed's configuration; nothing in it compiles an extension."""
        zero: dict[str, Any] = {"stage": self.stage}
        if self.stage == 3:
            zero["stage3_param_persistence_threshold"] = self.persistence
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
            if self.stage == 3:
                zero["offload_param"] = {"device": "cpu"}
        if self.round_robin:
            zero["round_robin_gradients"] = True
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.accumulation,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": not self.fp32},
        }
        if self.tp > 1:
            config["tensor_parallel"] = {"autotp_size": self.tp, "partition_config": _CUTS}
        return config


def preload() -> None:
    """Import what ranks need, before they are forked: a minute on two cores if each of seven did it.

    ``deepspeed.initialize`` imports its Muon optimizer, which imports torch's compiler; ZeRO-3 collects garbage
    whenever it moves parameters, and need not look at all of that.
    """
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    gc.freeze()


def start(rank: int, world: int, port: int) -> None:
    """Make the process one rank of a gloo group, without compiling DeepSpeed's shared-memory collectives."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        DS_ACCELERATOR="cpu",
    )
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)


def build(setting: Setting) -> Any:
    """Return an engine; every rank draws the same weights."""
    import deepspeed

    torch.manual_seed(0)
    if setting.init:
        with deepspeed.zero.Init(config_dict_or_path=setting.config()):
            model = Net(setting.inner)
    else:
        model = Net(setting.inner)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(trained, lr=0.05), config=setting.config()
    )
    return engine


def micro_batch(engine: Any, seed: int) -> None:
    """Take one micro-batch, and the step if it is the last of one."""
    ids = torch.randint(0, VOCAB, (1, 4), generator=torch.Generator().manual_seed(seed))
    engine.backward(engine(ids))
    engine.step()


def truth(engine: Any, setting: Setting) -> dict[str, Tensor] | None:
    """Return every tensor whole, by DeepSpeed's own consolidation; None where it gives it to rank 0 alone."""
    if setting.stage == 3 or setting.tp > 1:
        found = engine._consolidated_16bit_state_dict()
        whole = None if found is None else {name: tensor.detach().clone() for name, tensor in found.items()}
    else:
        whole = {name: tensor.detach().clone() for name, tensor in engine.module_state_dict().items()}
    if whole is not None:  # consolidation over AutoTP alone leaves out what is no parameter
        whole.setdefault("seen", engine.module.get_buffer("seen").detach().clone())
    return whole
