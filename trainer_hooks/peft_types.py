"""What PEFT's modules are, told by their class: PEFT is not imported, and need not be installed.

A module that ``fully_shard`` wrapped is of a new class below its old one, so the first class that is PEFT's
own decides.

Source: peft 0.21, ``peft_model.py``, ``tuners/tuners_utils.py``, ``tuners/lora``, ``utils/other.py``.
"""

from __future__ import annotations

from torch import nn

_PACKAGE = "peft"

TUNER_LAYER = "BaseTunerLayer"
LORA_LAYER = "LoraLayer"
SAVER = "ModulesToSaveWrapper"
TRAINING_WRAPPER = "AuxiliaryTrainingWrapper"

_HIDDEN = {"PeftModel": "base_model", "BaseTuner": "model", TUNER_LAYER: "base_layer"}
"""Child that holds the model which a class of PEFT wraps."""


def peft_classes(module: nn.Module) -> tuple[str, ...]:
    """Return the names of PEFT's classes that a module is of, its own first; none for other modules.

    >>> peft_classes(nn.Linear(1, 1))
    ()
    """
    return tuple(cls.__name__ for cls in type(module).__mro__ if cls.__module__.split(".")[0] == _PACKAGE)


def peft_qualified(module: nn.Module) -> str:
    """Return the full name of a PEFT module's class, below what other frameworks made of it."""
    kinds = (c for c in type(module).__mro__ if c.__module__.split(".")[0] == _PACKAGE)
    return next((f"{c.__module__}.{c.__qualname__}" for c in kinds), "")


def wrapped_child(module: nn.Module) -> str | None:
    """Return the key of the child that a PEFT module only wraps, or None."""
    kinds = peft_classes(module)
    return next((key for kind, key in _HIDDEN.items() if kind in kinds), None)
