"""What every test gets: hypothesis profiles, loud skips, and an event loop that refuses blocking calls."""

import os
from collections.abc import Iterator

import pytest
from blockbuster import blockbuster_ctx
from hypothesis import HealthCheck, settings

FULL = os.environ.get("WEIGHTD_FULL") == "1"

# No deadline: the machines that run this share their cores. CI draws the same examples every time, so that a red run
# is the change's doing; a developer's run and the full one look for new ones.
_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("developer", _UNTIMED)
settings.register_profile("ci", _UNTIMED, derandomize=True)
settings.register_profile("full", _UNTIMED, max_examples=2_000)
settings.load_profile("full" if FULL else "ci" if os.environ.get("CI") else "developer")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine or this run cannot do; the closing report says each reason with its count."""
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu and not _has_gpu():
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason="NOT RUN: needs a CUDA device, and torch sees none"))
    if not FULL:
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="NOT RUN: a long matrix; `make test-full` runs it"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _loop_is_never_blocked(request: pytest.FixtureRequest) -> Iterator[None]:
    """In async tests, a call in daemon code that blocks the event loop raises ``blockbuster.BlockingError``."""
    if "anyio_backend" not in request.fixturenames:
        yield
        return
    with blockbuster_ctx("weightd.daemon"):
        yield
