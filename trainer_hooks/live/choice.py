"""Which memory a publisher uses, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from torch import nn

from weightd.core.errors import ConfigError
from weightd.trainer_hooks.attachment import TrainerAttachment
from weightd.trainer_hooks.describe import Casts
from weightd.trainer_hooks.live.aliases import storage_id, storage_of
from weightd.trainer_hooks.live.slots import LiveSlots
from weightd.trainer_hooks.live.stepping import Optimizers, Stepping
from weightd.trainer_hooks.shards import Shard

Memory = Literal["snapshot", "live"]
"""``snapshot``: two copies beside the parameters.  ``live``: the parameters themselves."""


def is_live(memory: Memory, casts: Casts) -> bool:
    """Return whether a publisher is live.

    Raises:
        ConfigError: The name is unknown; or a cast is asked for, which only a copy can be.
    """
    if memory not in get_args(Memory):
        raise ConfigError("memory", str(memory), f"is none of {', '.join(get_args(Memory))}")
    if memory == "live" and casts:
        why = 'live parameters are published as they lie: leave dtype= out, or use memory="snapshot"'
        raise ConfigError("dtype", str(casts), why)
    return memory == "live"


def stepping_of(attachment: TrainerAttachment, optimizers: Optimizers) -> Stepping | None:
    """Return what makes the steps of a live rank wait.

    Raises:
        ConfigError: An optimizer takes no hook.
    """
    slots = attachment.slots
    return Stepping(attachment, slots, optimizers) if isinstance(slots, LiveSlots) else None


def written_between_steps(source: object) -> Callable[[Shard], bool]:
    """Return what says of a shard that a trainer writes it between two steps: a module's buffers, in a forward."""
    buffers = source.buffers() if isinstance(source, nn.Module) else ()
    storages = {storage_id(s) for s in map(storage_of, buffers) if s is not None}

    def is_written(shard: Shard) -> bool:
        storage = storage_of(shard.read())
        return storage is not None and storage_id(storage) in storages

    return is_written
