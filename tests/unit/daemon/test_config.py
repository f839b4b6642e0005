"""The configuration is checked as a whole before any socket opens."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightd.core.errors import ConfigError
from weightd.daemon.config import Address, load_config

MINIMAL = 'node = "a"\n'


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "weightd.toml"
    path.write_text(text)
    return path


def refused(tmp_path: Path, text: str, **environ: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), environ)
    assert caught.value.exit_code == 78
    return caught.value


def test_a_node_id_is_all_that_must_be_said(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL), {})

    assert config.node == "a"
    assert config.control_socket == Path("/run/weightd/control.sock")
    assert config.control == Address("127.0.0.1", 7700)
    assert config.deadlines.attach_s == 300


def test_the_environment_goes_before_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)

    config = load_config(None, {"WEIGHTD_CONFIG": str(path), "WEIGHTD_NODE": "b", "WEIGHTD_RUNTIME_DIR": "/x"})

    assert config.node == "b"
    assert config.fd_socket == Path("/x/fd.sock")


def test_peers_deadlines_and_limits_are_read(tmp_path: Path) -> None:
    text = """
    node = "a"
    [peers.b]
    control = "127.0.0.1:7710"
    bulk = "[::1]:7711"
    [deadlines]
    attach_s = 5.0
    [limits]
    bucket_bytes = 1048576
    """
    config = load_config(write(tmp_path, text), {})

    assert {str(n): (str(p.control), str(p.bulk)) for n, p in config.peers.items()} == {
        "b": ("127.0.0.1:7710", "[::1]:7711")
    }
    assert config.deadlines.attach_s == 5
    assert config.limits.bucket_bytes == 1 << 20


@pytest.mark.parametrize(
    "text, field, why",
    [
        ("", "node", "must be set"),
        ('node = "a b"', "node", "printable"),
        (MINIMAL + "nodes = 3", "nodes", "there is no such key"),
        (MINIMAL + "[deadlines]\natach_s = 3", "deadlines.atach_s", "there is no such key"),
        (MINIMAL + 'control = "localhost:1"', "control", "numeric IP"),
        (MINIMAL + 'control = "127.0.0.1:0"', "control", "1 to 65535"),
        (MINIMAL + 'bulk = "127.0.0.1:7700"', "bulk", "control address"),
        (MINIMAL + 'control = "10.0.0.1:7700"', "control", "loopback"),
        (MINIMAL + 'control = "0.0.0.0:7700"', "control", "loopback"),
        (MINIMAL + '[peers.a]\ncontrol="127.0.0.1:1"\nbulk="127.0.0.1:2"', "peers.a", "itself"),
        (MINIMAL + '[peers.b]\ncontrol="10.0.0.2:1"\nbulk="127.0.0.1:2"', "peers.b.control", "loopback"),
        (MINIMAL + '[peers.b]\ncontrol="127.0.0.1:1"\nbulk="10.0.0.2:2"', "peers.b.bulk", "loopback"),
        (MINIMAL + 'socket_mode = "0666"', "socket_mode", "none for others"),
        (MINIMAL + 'socket_mode = "0700"', "socket_mode", "no execution"),
        (MINIMAL + 'socket_mode = "rw"', "socket_mode", "octal"),
        (MINIMAL + "[deadlines]\nattach_s = 0.0", "deadlines.attach_s", "above 0"),
        (MINIMAL + "[deadlines]\nattach_s = 'x'", "deadlines.attach_s", "Expected"),
        (MINIMAL + "[deadlines]\nheartbeat_timeout_s = 1.0", "deadlines.heartbeat_timeout_s", "exceed"),
        (MINIMAL + "[limits]\nbucket_bytes = 0", "limits.bucket_bytes", ">= 1"),
        (MINIMAL + 'log_level = "loud"', "log_level", "debug"),
        (MINIMAL + 'secret_key_file = "/nowhere/key"', "secret_key_file", "no file"),
        (MINIMAL + f'runtime_dir = "/{"x" * 120}"', "runtime_dir", "107"),
        ("node = ", "config", "TOML"),
    ],
)
def test_what_cannot_stand_is_named_with_its_field(tmp_path: Path, text: str, field: str, why: str) -> None:
    error = refused(tmp_path, text)

    assert error.field == field
    assert why in error.why


def test_with_keys_every_peer_needs_one(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("x")
    text = MINIMAL + f'secret_key_file = "{key}"\n[peers.b]\ncontrol="10.0.0.2:1"\nbulk="10.0.0.2:2"'

    assert refused(tmp_path, text).field == "peers.b.public_key"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.toml", {})
