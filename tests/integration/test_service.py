"""The daemon as a process: how it starts, answers and ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.net]

WEIGHTD = [sys.executable, "-m", "weightd.daemon.cli"]
QUIET = {k: v for k, v in os.environ.items() if not k.startswith("WEIGHTD_")}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return int(s.getsockname()[1])


def configured(folder: Path, extra: str = "", **changed: str) -> Path:
    settings = {
        "node": "a",
        "runtime_dir": str(folder / "run"),
        "state_dir": str(folder / "state"),
        "control": f"127.0.0.1:{free_port()}",
        "bulk": f"127.0.0.1:{free_port()}",
    } | changed
    path = folder / "weightd.toml"
    path.write_text("".join(f'{k} = "{v}"\n' for k, v in settings.items()) + extra)
    return path


def started(config: Path) -> subprocess.Popen[bytes]:
    daemon = subprocess.Popen([*WEIGHTD, "serve", "--config", str(config)], stderr=subprocess.PIPE, env=QUIET)
    assert daemon.stderr is not None
    line = daemon.stderr.readline()
    assert json.loads(line)["what"] == "serving"
    return daemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = started(configured(tmp_path))
    yield process
    process.kill()
    process.communicate(timeout=10)


def run(*argv: str, timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*WEIGHTD, *argv], env=QUIET, timeout=timeout_s, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "changed, extra, said",
    [
        ({"node": ""}, "", "node"),
        ({}, "nodes = 3\n", "nodes = '3'"),
        ({"control": "10.0.0.1:7700"}, "", "loopback"),
        ({"runtime_dir": "/proc/nowhere"}, "", "cannot be made"),
        ({"secret_key_file": "/nowhere"}, "", "no file"),
    ],
)
def test_a_configuration_that_cannot_stand_ends_with_78(
    tmp_path: Path, changed: dict[str, str], extra: str, said: str
) -> None:
    ended = run("serve", "--config", str(configured(tmp_path, extra, **changed)))

    assert ended.returncode == 78
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_taken_address_ends_with_78_and_harms_nobody(tmp_path: Path, daemon: subprocess.Popen[bytes]) -> None:
    ended = run("serve", "--config", str(tmp_path / "weightd.toml"))

    assert ended.returncode == 78
    assert daemon.poll() is None
    assert run("status", "--socket", str(tmp_path / "run")).returncode == 0


def test_status_says_ok_as_text_and_as_a_document(tmp_path: Path, daemon: subprocess.Popen[bytes]) -> None:
    text = run("status", "--socket", str(tmp_path / "run"))
    document = json.loads(run("status", "--json", "--socket", str(tmp_path / "run" / "control.sock")).stdout)

    assert text.stdout.splitlines()[0] == "ok"
    assert (document["node"], document["pid"], document["runs"]) == ("a", daemon.pid, {})
    assert document["memcpy_bytes_per_s"] > 0


def test_without_a_daemon_status_ends_with_2(tmp_path: Path) -> None:
    ended = run("status", "--socket", str(tmp_path), "--timeout-s", "0.3")

    assert ended.returncode == 2
    assert "E_NO_DAEMON" in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_stops_in_order(tmp_path: Path, daemon: subprocess.Popen[bytes], number: signal.Signals) -> None:
    daemon.send_signal(number)

    assert daemon.wait(10) == 0
    assert not (tmp_path / "run" / "fd.sock").exists()


def test_it_comes_back_after_a_kill(tmp_path: Path, daemon: subprocess.Popen[bytes]) -> None:
    """Its sockets are still in the file system; nobody answers there, so they are taken over."""
    daemon.kill()
    daemon.wait(10)
    again = started(tmp_path / "weightd.toml")
    try:
        assert run("status", "--socket", str(tmp_path / "run")).returncode == 0
    finally:
        again.kill()
        again.communicate(timeout=10)


def watching(folder: Path, away_s: float) -> subprocess.Popen[str]:
    argv = ["status", "--watch", "--json", "--every-s", "0.2", "--timeout-s", "0.5", "--away-s", str(away_s)]
    return subprocess.Popen(
        [*WEIGHTD, *argv, "--socket", str(folder / "run")],
        env=QUIET | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_watch_goes_on_when_the_daemon_is_started_again(tmp_path: Path, daemon: subprocess.Popen[bytes]) -> None:
    watch = watching(tmp_path, 30.0)
    assert watch.stdout is not None
    assert watch.stderr is not None
    assert json.loads(watch.stdout.readline())["pid"] == daemon.pid
    daemon.kill()
    daemon.wait(10)
    assert "the daemon is away since" in watch.stderr.readline()

    again = started(tmp_path / "weightd.toml")
    try:
        pids = (json.loads(line)["pid"] for line in watch.stdout)
        assert again.pid == next(pid for pid in pids if pid != daemon.pid)
        watch.send_signal(signal.SIGINT)
        watch.communicate(timeout=10)
        assert watch.returncode == 0
    finally:
        watch.kill()
        again.kill()
        again.communicate(timeout=10)


def test_a_watch_ends_when_the_daemon_stays_away(tmp_path: Path, daemon: subprocess.Popen[bytes]) -> None:
    watch = watching(tmp_path, 1.0)
    assert watch.stdout is not None
    watch.stdout.readline()
    daemon.kill()
    said = watch.communicate(timeout=20)[1]

    assert watch.returncode == 2
    assert "E_NO_DAEMON" in said
