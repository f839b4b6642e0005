"""Every tensor in a storage is found, and nobody else notices the search."""

import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from weightd.trainer_hooks.live.aliases import storage_id, storage_of, tensors_in


class Kind(Tensor):
    """A subclass of a user's."""


class Narrower(Kind):
    """And one of that."""


@pytest.fixture
def hurried() -> Iterator[None]:
    """Threads that take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def number_of(tensor: Tensor) -> int:
    storage = storage_of(tensor)
    assert storage is not None
    return storage_id(storage)


def test_tensors_of_every_class_are_found() -> None:
    whole = torch.randn(12)
    held = [
        whole,
        nn.Parameter(whole[:3]),
        nn.Buffer(whole[3:5]),
        whole[5:7].as_subclass(Kind),
        whole[7:9].as_subclass(Narrower),
        whole.view(3, 4).t(),
    ]
    other = torch.randn(3)
    found = tensors_in([number_of(whole), number_of(other)])

    assert {id(t) for t in found[number_of(whole)]} == {id(t) for t in held}
    assert [id(t) for t in found[number_of(other)]] == [id(other)]


def test_a_tuple_that_another_thread_is_making_can_be_finished(hurried: None) -> None:
    many, tensor = [[n] for n in range(100_000)], torch.randn(3)
    stopping, failed, made = threading.Event(), [], 0

    def make_tuples() -> None:
        nonlocal made
        while not stopping.is_set():
            try:
                tuple(n for n in range(2000))
                made += 1
            except SystemError as error:
                failed.append(error)

    thread = threading.Thread(target=make_tuples)
    thread.start()
    try:
        for _ in range(10):
            tensors_in([number_of(tensor)])
    finally:
        stopping.set()
        thread.join()

    assert made > 0
    assert [] == failed, "it held what the other thread was in the middle of"
    assert len(many) == 100_000
