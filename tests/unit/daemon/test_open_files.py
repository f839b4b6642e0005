"""A daemon that runs out of descriptors refuses hooks; ZeroMQ would end the process."""

import os
import resource
from collections.abc import Iterator

import pytest

from weightd.daemon import open_files


@pytest.fixture(autouse=True)
def limit_as_it_was() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def lowest_free() -> int:
    number = os.dup(0)
    os.close(number)
    return number


def limit_to(files: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    limit_to(200)
    open_files.raise_limit()

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == min(hard, 1 << 20)


def test_hooks_are_refused_while_there_is_room_to_say_so() -> None:
    limit_to(lowest_free() + open_files.RESERVE + 1)
    assert open_files.why_full() == ""

    limit_to(lowest_free() + open_files.RESERVE - 1)
    assert "files are open of" in open_files.why_full()
