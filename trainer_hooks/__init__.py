"""What a trainer imports: ``Publisher``, ``Facts`` and ``LoraAdapter``, and adapters that describe what ranks hold."""

from weightd.trainer_hooks.facts import Facts
from weightd.trainer_hooks.lora import LoraAdapter
from weightd.trainer_hooks.publisher import Publisher

__all__ = ["Facts", "LoraAdapter", "Publisher"]
