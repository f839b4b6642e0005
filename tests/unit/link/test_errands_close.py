"""A hook that leaves while its daemon is frozen does not wait for the daemon."""

import socket
import time
from pathlib import Path

import pytest

from weightd.core.errors import WeightdError
from weightd.core.units import RunName
from weightd.link.errands import Errands

pytestmark = [pytest.mark.net, pytest.mark.timeout(60)]


def test_close_does_not_wait_for_a_binding_that_nobody_answers(tmp_path: Path) -> None:
    errors: list[WeightdError] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as frozen:
        frozen.bind(str(tmp_path / "fd.sock"))
        frozen.listen()
        errands = Errands(str(tmp_path / "fd.sock"), RunName("r"), 30.0, list, lambda: None, errors.append)
        errands.start()
        errands.session(1)
        time.sleep(0.3)
        begun = time.monotonic()
        errands.close()
        took_s = time.monotonic() - begun

    assert took_s < 5.0
    assert errors == []
