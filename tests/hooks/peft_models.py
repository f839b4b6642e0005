"""Small PEFT models for tests, and PEFT's own merge as the oracle."""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(6, 10)
        self.o = nn.Linear(10, 6, bias=False)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.norm(self.o(torch.relu(self.q(x))))
        return out


class Net(nn.Module):
    """Odd sizes, a head, a buffer."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.lm_head = nn.Linear(6, 11)
        self.register_buffer("seen", torch.arange(3.0))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.lm_head(x)
        return out


def adapted(**config: Any) -> Any:
    """Return ``Net`` with an adapter that is no longer zero; every number is a small integer."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q", "o"], **config}
    model: Any = get_peft_model(Net(), LoraConfig(**options))
    whole_numbers(model)
    return model


def whole_numbers(model: nn.Module, seed: int = 1) -> None:
    """Fill all parameters with small integers, of which sums and products are exact in every order."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-4, 5, parameter.shape, generator=draw))


def merged_by_peft(model: Any) -> dict[str, Tensor]:
    """Return what PEFT's own merge makes of a copy of the model."""
    done = copy.deepcopy(model).merge_and_unload()
    return {name: tensor.detach() for name, tensor in done.state_dict().items()}


def bits(model: nn.Module) -> dict[str, bytes]:
    """Return every tensor's bytes, to see that none was written."""
    return {n: t.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for n, t in model.state_dict().items()}
