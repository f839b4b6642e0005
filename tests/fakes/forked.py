"""A call in a forked child: what it returns, or the code of what it raises."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
from collections.abc import Callable
from typing import Any

from weightd.core.errors import WeightdError


def in_child(call: Callable[[], Any], limit_s: float = 20.0) -> Any:
    """Fork, call, and return what comes of it: a value, or the code of an error."""
    mine, theirs = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        _answer(theirs, call)
    theirs.close()
    try:
        assert mine.poll(limit_s), f"the child did not answer within {limit_s} s"
        return mine.recv()
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        mine.close()


def _answer(pipe: multiprocessing.connection.Connection, call: Callable[[], Any]) -> None:
    """Be the child, to its end: nothing of the test is cleaned up here."""
    try:
        pipe.send(call())
    except WeightdError as error:
        pipe.send(error.code)
    except BaseException as error:  # noqa: BLE001  (whoever forked it is told)
        pipe.send(repr(error))
    finally:
        os._exit(0)
