"""The words of ``Publisher(..., lora=...)``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """One adapter, whether it trains or not.

    Attributes:
        name: Its name in the model.
    """

    name: str


Lora = Literal["merged", "adapter"] | LoraAdapter
"""``merged``: base weights with all active adapters.  ``adapter``: the tensors of the one active adapter, under the
names of a PEFT checkpoint; ``LoraAdapter(name)``: those of another one."""

CHOICES = ('lora="merged"', 'lora="adapter"', "lora=LoraAdapter(name)")
"""For errors."""
