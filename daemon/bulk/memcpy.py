"""How fast this host copies memory: the floor that updates are compared with."""

from __future__ import annotations

import time

import numpy as np

SAMPLE_BYTES = 32 << 20
"""Larger than the caches that a core has to itself, small enough to touch in a moment."""

ROUNDS = 3


def measure_memcpy() -> float:
    """Return bytes per second of one thread's warm copy; the best of some, since others only slow it down."""
    source = np.ones(SAMPLE_BYTES, np.uint8)
    target = np.zeros(SAMPLE_BYTES, np.uint8)
    best_s = float("inf")
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        np.copyto(target, source)
        best_s = min(best_s, time.perf_counter() - begun)
    return SAMPLE_BYTES / best_s
