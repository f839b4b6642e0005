"""``weightd serve`` in a process whose disk hangs and whose loop stands when its test says so.

run: python -m tests.integration.hanging_daemon FILE serve --config …

While FILE exists, opening a journal waits in its worker thread, as on a disk that does not answer; SIGUSR1 blocks the
main thread, and with it the loop, until SIGUSR2.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from weightd.daemon.cli import main


def hang_while_there_is(file: Path) -> None:
    """Have every fsync wait while ``file`` exists."""
    fsync = os.fsync

    def hanging(fd: int) -> None:
        while file.exists():
            time.sleep(0.02)
        fsync(fd)

    setattr(os, "fsync", hanging)  # noqa: B010 - its type takes objects with a file number, too


def block_on_a_signal() -> None:
    """Have SIGUSR1 block the main thread until SIGUSR2."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])

    def block(number: int, frame: FrameType | None) -> None:
        signal.sigwait([signal.SIGUSR2])

    signal.signal(signal.SIGUSR1, block)


if __name__ == "__main__":
    hang_while_there_is(Path(sys.argv[1]))
    block_on_a_signal()
    main(sys.argv[2:])
