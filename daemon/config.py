"""The daemon's configuration: one TOML file and the environment, checked before any socket opens.

Order of precedence: environment (``WEIGHTD_NODE``, ``WEIGHTD_RUNTIME_DIR``,
``WEIGHTD_STATE_DIR``), then the file (``--config`` or ``WEIGHTD_CONFIG``), then
the defaults.  Whatever cannot stand is a ``ConfigError`` that names the field
and its source, and ``weightd serve`` exits with 78.
"""

from __future__ import annotations

import ipaddress
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from weightd.core.errors import ConfigError
from weightd.core.session.deadlines import Deadlines
from weightd.core.units import NodeId

MAX_UNIX_PATH_BYTES = 107
"""Longest path of a unix socket on Linux (``sun_path`` holds 108 with its final zero byte)."""

_UNKNOWN_FIELD = re.compile(r"unknown field `(.+)`")
"""How msgspec names a key that a struct does not have."""

Positive = Annotated[int, Meta(gt=0)]


class Address(msgspec.Struct, frozen=True):
    """A TCP address; ``host`` is a numeric IP address, never looked up."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether nobody but this host can reach it."""
        return ipaddress.ip_address(self.host).is_loopback


class Peer(msgspec.Struct, frozen=True):
    """Another node's daemon.

    Attributes:
        control: Its control address.
        bulk: Its bulk address.
        public_key: Its CURVE public key (40 characters of Z85), where keys are used.
    """

    control: Address
    bulk: Address
    public_key: str | None = None


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds on what a daemon takes on.

    Attributes:
        bucket_bytes: Largest bucket; the unit of transfer, digest and retry.
        memory_budget_bytes: Landings of all runs together; None: half of the host's memory.
        bulk_streams: TCP streams per pair of nodes.
        hooks: Attached hooks of all runs.
        runs: Runs at a time.
        versions_kept: Rows of the version table in the status document.
    """

    bucket_bytes: Positive = 32 << 20
    memory_budget_bytes: Positive | None = None
    bulk_streams: Annotated[int, Meta(ge=1, le=64)] = 2
    hooks: Positive = 1024
    runs: Positive = 64
    versions_kept: Positive = 64


class _PeerFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    control: str
    bulk: str
    public_key: str | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    node: str | None = None
    runtime_dir: str | None = None
    state_dir: str | None = None
    control: str = "127.0.0.1:7700"
    bulk: str = "127.0.0.1:7701"
    secret_key_file: str | None = None
    allowed_uids: tuple[int, ...] | None = None
    socket_mode: str = "0600"
    log_level: str = "info"
    peers: dict[str, _PeerFile] = {}
    deadlines: Deadlines = Deadlines()
    limits: Limits = Limits()


class Config(msgspec.Struct, frozen=True):
    """A configuration that can stand.

    Attributes:
        node: This node's id.
        runtime_dir: Holds the sockets ``control.sock`` and ``fd.sock``.
        state_dir: Holds the journals.
        control: Where peers reach this daemon's control socket.
        bulk: Where peers fetch bytes.
        peers: Every other node, by id.
        secret_key_file: This daemon's CURVE key, or None: loopback only.
        allowed_uids: Users whose processes may attach; None: this daemon's own and root.
        socket_mode: Permissions of the unix sockets; 0660 lets a group of trainers attach.
        log_level: ``debug``, ``info``, ``warning`` or ``error``.
        deadlines: Limits in seconds.
        limits: Limits in bytes and counts.
    """

    node: NodeId
    runtime_dir: Path
    state_dir: Path
    control: Address
    bulk: Address
    peers: dict[NodeId, Peer]
    secret_key_file: Path | None = None
    allowed_uids: frozenset[int] | None = None
    socket_mode: int = 0o600
    log_level: str = "info"
    deadlines: Deadlines = Deadlines()
    limits: Limits = Limits()

    @property
    def control_socket(self) -> Path:
        """Unix socket where hooks attach."""
        return self.runtime_dir / "control.sock"

    @property
    def fd_socket(self) -> Path:
        """Unix socket where hooks pass descriptors."""
        return self.runtime_dir / "fd.sock"


def load_config(path: Path | None, environ: Mapping[str, str]) -> Config:
    """Read and check the configuration.

    Args:
        path: The TOML file; None: ``WEIGHTD_CONFIG`` of ``environ``, else no file.
        environ: The process's environment.

    Raises:
        ConfigError: The file cannot be read or parsed, holds an unknown or wrongly
            typed field, or a value that cannot stand.
    """
    if path is None and environ.get("WEIGHTD_CONFIG"):
        path = Path(environ["WEIGHTD_CONFIG"])
    source = str(path) if path else "defaults"
    file = _read(path) if path else _File()

    def setting(name: str, value: str | None, default: str | None) -> tuple[str, str]:
        variable = f"WEIGHTD_{name.upper()}"
        if environ.get(variable):
            return environ[variable], variable
        if value is None and default is None:
            raise ConfigError(name, "", f"must be set, in the file or as {variable}", source)
        return (value, source) if value is not None else (str(default), "defaults")

    node, node_source = setting("node", file.node, None)
    if not node.isprintable() or not 1 <= len(node) <= 64 or "/" in node or " " in node:
        raise ConfigError("node", node, "must be 1 to 64 printable characters without / and space", node_source)
    runtime_dir, runtime_source = setting("runtime_dir", file.runtime_dir, "/run/weightd")
    state_dir, _ = setting("state_dir", file.state_dir, "/var/lib/weightd")
    config = Config(
        node=NodeId(node),
        runtime_dir=Path(runtime_dir).absolute(),
        state_dir=Path(state_dir).absolute(),
        control=parse_address("control", file.control, source),
        bulk=parse_address("bulk", file.bulk, source),
        peers={NodeId(n): _peer(n, p, source) for n, p in file.peers.items()},
        secret_key_file=Path(file.secret_key_file) if file.secret_key_file else None,
        allowed_uids=frozenset(file.allowed_uids) if file.allowed_uids is not None else None,
        socket_mode=_mode(file.socket_mode, source),
        log_level=file.log_level,
        deadlines=file.deadlines,
        limits=file.limits,
    )
    _check(config, source, runtime_source)
    return config


def parse_address(field: str, text: str, source: str) -> Address:
    """Return ``host:port`` as an address; ``[::1]:7700`` for IPv6.

    Raises:
        ConfigError: No such form, a host that is no numeric address, or a port outside 0..65535.
    """
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(field, text, "must be ADDRESS:PORT with a numeric IP address", source) from None
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(field, text, "the port must be 1 to 65535", source)
    return Address(host, int(port))


def _mode(text: str, source: str) -> int:
    if len(text) not in (3, 4) or any(c not in "01234567" for c in text) or int(text, 8) & 0o117:
        raise ConfigError(
            "socket_mode", text, "must be octal permissions, none for others and no execution: 0600, 0660", source
        )
    return int(text, 8)


def _peer(name: str, peer: _PeerFile, source: str) -> Peer:
    key = peer.public_key
    if key is not None and len(key) != 40:
        raise ConfigError(f"peers.{name}.public_key", key, f"must be 40 characters of Z85, has {len(key)}", source)
    return Peer(
        parse_address(f"peers.{name}.control", peer.control, source),
        parse_address(f"peers.{name}.bulk", peer.bulk, source),
        key,
    )


def _read(path: Path) -> _File:
    try:
        raw: Any = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError("config", str(path), f"cannot be read: {e.strerror}", "command line or environment") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError("config", str(path), f"is not TOML: {e}", str(path)) from None
    try:
        return msgspec.convert(raw, _File, strict=True)
    except msgspec.ValidationError as e:
        what, _, where = str(e).partition(" - at ")
        field = where.strip("`").removeprefix("$").removeprefix(".")
        unknown = _UNKNOWN_FIELD.search(what)
        if unknown is not None:
            field, what = ".".join(filter(None, (field, unknown[1]))), "there is no such key"
        raise ConfigError(field or "file", _value_at(raw, field), what, str(path)) from None


def _value_at(table: Any, field: str) -> str:
    """Return the value that stands in a table under a dotted name, as text; empty where that is no single value."""
    for key in field.split("."):
        if not isinstance(table, dict):
            return ""
        table = table.get(key)
    return "" if table is None or isinstance(table, dict) else str(table)


def _check(config: Config, source: str, runtime_source: str) -> None:
    longest = len(str(config.control_socket).encode())
    if longest > MAX_UNIX_PATH_BYTES:
        why = f"its control.sock would be {longest} bytes long, a unix socket's path holds {MAX_UNIX_PATH_BYTES}"
        raise ConfigError("runtime_dir", str(config.runtime_dir), why, runtime_source)
    if config.log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError("log_level", config.log_level, "must be debug, info, warning or error", source)
    if config.node in config.peers:
        raise ConfigError(f"peers.{config.node}", str(config.peers[config.node].control), "is this node itself", source)
    if config.control == config.bulk:
        raise ConfigError("bulk", str(config.bulk), "is the control address, too", source)
    for field in msgspec.structs.fields(Deadlines):
        if getattr(config.deadlines, field.name) <= 0:
            value = str(getattr(config.deadlines, field.name))
            raise ConfigError(f"deadlines.{field.name}", value, "must be above 0", source)
    if config.deadlines.heartbeat_timeout_s <= config.deadlines.heartbeat_s:
        value = str(config.deadlines.heartbeat_timeout_s)
        raise ConfigError("deadlines.heartbeat_timeout_s", value, "must exceed deadlines.heartbeat_s", source)
    _check_keys(config, source)


def _check_keys(config: Config, source: str) -> None:
    if config.secret_key_file is None:
        here = {"control": config.control, "bulk": config.bulk}
        there = {f"peers.{n}.{f}": getattr(p, f) for n, p in config.peers.items() for f in ("control", "bulk")}
        for field, address in (here | there).items():
            if not address.loopback:
                why = "without secret_key_file only loopback addresses are served (weightd keygen makes keys)"
                raise ConfigError(field, str(address), why, source)
        return
    for name, peer in config.peers.items():
        if peer.public_key is None:
            raise ConfigError(f"peers.{name}.public_key", "", "must be set where secret_key_file is", source)
    if not config.secret_key_file.is_file():
        raise ConfigError("secret_key_file", str(config.secret_key_file), "is no file", source)
