"""What is published of a model with LoRA adapters: the merged weights, or one adapter's own tensors."""

from weightd.trainer_hooks.lora.choice import Lora, LoraAdapter

__all__ = ["Lora", "LoraAdapter"]
