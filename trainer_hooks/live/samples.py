"""Whether published bytes were written: a few thousand words of them, compared before and after.

An optimizer writes every element, so a sample sees its step, whatever way it was made.  Torch's own counters of
writes do not: what is written through ``.data``, as DeepSpeed does, is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from weightd.link.copies import Bytes
from weightd.trainer_hooks.live.homes import Home

SAMPLES = 4096
"""Words compared: about 50 microseconds, each a miss of the caches."""

_WORD_BYTES = 8


class Samples:
    """A few words of every storage."""

    def __init__(self, payload: Bytes, homes: Sequence[Home]) -> None:
        """Choose them, evenly.

        Args:
            payload: Live memory, shape (nbytes,).
            homes: The storages in it.
        """
        self._homes = homes
        self._words: NDArray[np.uint64] = payload[: payload.nbytes // _WORD_BYTES * _WORD_BYTES].view(np.uint64)
        each = max(1, SAMPLES // max(1, len(homes)))
        chosen = [self._of(home, each) for home in homes]
        self._owner = np.repeat(np.arange(len(homes)), [len(c) for c in chosen])
        self._at = np.concatenate(chosen) if chosen else np.zeros(0, np.int64)
        self._kept = self._words[self._at]

    @staticmethod
    def _of(home: Home, count: int) -> NDArray[np.int64]:
        first, words = home.first_byte // _WORD_BYTES, home.nbytes // _WORD_BYTES
        return first + np.unique(np.linspace(0, max(words - 1, 0), min(count, words), dtype=np.int64))

    def keep(self) -> None:
        """Note the words as they are."""
        self._kept = self._words[self._at]

    def changed(self) -> str:
        """Return the name of a storage whose words are no longer those that were noted, or an empty text."""
        differing = np.flatnonzero(self._kept != self._words[self._at])
        return self._homes[int(self._owner[differing[0]])].name if len(differing) else ""
