"""Several daemons on this machine, each a process and a node of its own, all on loopback: for demo, tests and bench."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weightd.daemon.children import Child, Children
from weightd.daemon.config import MAX_UNIX_PATH_BYTES
from weightd.daemon.status.client import ask_status
from weightd.link.faults import DaemonAbsent
from weightd.link.finding import daemon_paths

_TRY_S = 0.3

_SOCKET_PATH_BYTES = 70
"""Room for the folder's own name, an act's, a node's, and a socket's."""


class NodeNotUp(Exception):
    """A daemon that was started does not answer."""


def short_folder(prefix: str) -> Path:
    """Make a folder for ``LocalNodes``: in the usual place, or in ``/tmp`` where unix sockets below it had no room."""
    usual = Path(tempfile.gettempdir())
    room = MAX_UNIX_PATH_BYTES - len(os.fsencode(usual))
    return Path(tempfile.mkdtemp(prefix=prefix, dir=usual if room >= _SOCKET_PATH_BYTES else "/tmp"))  # noqa: S108


class LocalNodes:
    """The configuration files of daemons that know each other, and their processes.

    Attributes:
        names: Node ids, in the order given.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        deadlines: Mapping[str, float] | None = None,
        limits: Mapping[str, int] | None = None,
    ) -> None:
        self.names = tuple(names)
        self._folder = folder
        ports = iter(_free_ports(2 * len(names)))
        addresses = {name: (f"127.0.0.1:{next(ports)}", f"127.0.0.1:{next(ports)}") for name in names}
        for name in names:
            for kind in ("run", "state"):
                (folder / name / kind).mkdir(parents=True, exist_ok=True)
            self.config(name).write_text(_toml(folder / name, name, addresses, deadlines or {}, limits or {}))

    def child_name(self, name: str) -> str:
        """What the daemon of a node is called among its parent's children."""
        return f"{self._folder.name}-daemon-{name}"

    def config(self, name: str) -> Path:
        """The configuration file of a node's daemon."""
        return self._folder / name / "weightd.toml"

    def runtime_dir(self, name: str) -> Path:
        """Where hooks find the node's daemon."""
        return self._folder / name / "run"

    def socket(self, name: str) -> Path:
        """The node's control socket: what ``WEIGHTD_SOCKET`` holds for its ranks."""
        return self.runtime_dir(name) / "control.sock"

    def start(self, children: Children, name: str) -> Child:
        """Start (or start again) the daemon of a node; its child is called ``child_name(name)``."""
        argv = [sys.executable, "-m", "weightd.daemon.cli", "serve", "--config", str(self.config(name))]
        return children.start(self.child_name(name), argv, {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})

    def wait_until_up(self, children: Children, timeout_s: float = 20.0) -> None:
        """Return when every daemon answers.

        Raises:
            NodeNotUp: One ended, or ``timeout_s`` passed; with the end of its log.
        """
        end = time.monotonic() + timeout_s
        for name in self.names:
            child = children[self.child_name(name)]
            while not self._answers(name):
                if child.status is not None:
                    raise NodeNotUp(f"the daemon of node {name} ended with {child.status}:\n{child.log_tail()}")
                if time.monotonic() > end:
                    raise NodeNotUp(f"the daemon of node {name} is not up after {timeout_s} s:\n{child.log_tail()}")

    def status(self, name: str, timeout_s: float = 5.0) -> dict[str, Any]:
        """Return the status document of a node's daemon.

        Raises:
            DaemonAbsent: It does not answer within ``timeout_s``.
        """
        return ask_status(daemon_paths(self.socket(name)), timeout_s)

    def _answers(self, name: str) -> bool:
        try:
            self.status(name, _TRY_S)
        except DaemonAbsent:
            return False
        return True


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(s.getsockname()[1]) for s in held]
    for s in held:
        s.close()
    return ports


def _toml(
    folder: Path,
    node: str,
    addresses: Mapping[str, tuple[str, str]],
    deadlines: Mapping[str, float],
    limits: Mapping[str, int],
) -> str:
    control, bulk = addresses[node]
    lines = [
        f'node = "{node}"',
        f'runtime_dir = "{folder / "run"}"',
        f'state_dir = "{folder / "state"}"',
        f'control = "{control}"',
        f'bulk = "{bulk}"',
    ]
    for table, values in (("deadlines", deadlines), ("limits", limits)):
        lines += [f"[{table}]", *(f"{name} = {value}" for name, value in values.items())]
    for peer, (peer_control, peer_bulk) in addresses.items():
        if peer != node:
            lines += [f'[peers."{peer}"]', f'control = "{peer_control}"', f'bulk = "{peer_bulk}"']
    return "\n".join(lines) + "\n"
