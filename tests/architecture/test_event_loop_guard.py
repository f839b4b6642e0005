"""The guard of ``tests/conftest.py`` works: daemon code cannot block the event loop in a test."""

import types

import pytest
from blockbuster import BlockingError

import weightd.daemon

SOURCE = """\
import time

async def wait():
    time.sleep(0.01)
"""


def _module_in_daemon() -> types.ModuleType:
    """A module whose code says it lies in the daemon's folder, as far as a stack frame can tell."""
    module = types.ModuleType("weightd.daemon.planted")
    exec(compile(SOURCE, f"{weightd.daemon.__path__[0]}/planted.py", "exec"), module.__dict__)
    return module


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_blocking_call_of_the_daemon_is_refused() -> None:
    with pytest.raises(BlockingError):
        await _module_in_daemon().wait()
