"""A virtual clock: what happens when, in one deterministic order."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

Action = Callable[[], None]


@dataclass
class Clock:
    """Runs actions in the order of their times; ties in the order they were asked for."""

    seed: int
    now: float = 0.0
    _queue: list[tuple[float, int, Action]] = field(default_factory=list)
    _count: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def after(self, delay_s: float, action: Action) -> None:
        """Run an action after a delay."""
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._count, action))

    def step(self) -> bool:
        """Run the next action; return False if there is none."""
        if not self._queue:
            return False
        self.now, _, action = heapq.heappop(self._queue)
        action()
        return True

    def between(self, low_s: float, high_s: float) -> float:
        """Return a random delay."""
        return self.random.uniform(low_s, high_s)

    def chance(self, probability: float) -> bool:
        """Return whether something of this probability happens."""
        return probability > 0 and self.random.random() < probability
