"""Layouts that an engine's own ``load_weights`` says: it runs once over tensors without memory, and is written down."""

from weightd.rollout_hooks.trace.compare import Difference, differences
from weightd.rollout_hooks.trace.probe import probe
from weightd.rollout_hooks.trace.traced import Traced, trace

__all__ = ["Difference", "Traced", "differences", "probe", "trace"]
