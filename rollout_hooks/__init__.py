"""What a rollout engine imports: ``Receiver``, and ``Declaration`` for what its parameters are made of."""

from weightd.rollout_hooks.declare import Declaration
from weightd.rollout_hooks.receiver import Receiver

__all__ = ["Declaration", "Receiver"]
