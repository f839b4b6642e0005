"""From worker threads to the event loop: posted from any thread, read by one task, on asyncio and trio alike."""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import anyio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Items in order of posting.  Use as a context manager around the threads that post.

    Not bounded by itself: what threads post is bounded by what they were given to do.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._wake = -1

    def __enter__(self) -> Self:
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        wake, self._wake = self._wake, -1
        os.close(wake)

    def post(self, item: T) -> None:
        """Put an item in; never blocks, and does nothing after the end."""
        if self._wake >= 0:
            self._items.append(item)
            os.eventfd_write(self._wake, 1)

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        """Return the next item; waits for one."""
        while not self._items:
            await anyio.wait_readable(self._wake)
            # Reset before looking: what is posted from here on wakes again.
            os.eventfd_read(self._wake)
        return self._items.popleft()
