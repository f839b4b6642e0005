"""What a trainer imports: ``Publisher``, and adapters that describe what its ranks hold."""

from weightd.trainer_hooks.publisher import Publisher

__all__ = ["Publisher"]
