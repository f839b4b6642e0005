"""The keys of a daemon: one secret in a file, the peers' public keys in the configuration.

Keys are CURVE25519, written as ZeroMQ does: 40 characters of Z85.  A key file holds
the secret alone; the public key is computed from it, so the two cannot disagree.
"""

from __future__ import annotations

import ipaddress
import os
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import zmq
from zmq.utils import z85

from weightd.core.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

KEY_CHARACTERS = 40
"""A key of 32 bytes in Z85, which writes 4 bytes as 5 characters."""

PEER_DOMAIN = "weightd.peers"
"""ZAP domain of the links between daemons; a handler that answers for any domain would answer for none."""


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A daemon's own pair, each as 40 characters of Z85; the secret is not in its text."""

    public: str
    secret: str = field(repr=False)


def write_key_file(path: Path) -> str:
    """Make a new secret, keep it in a file that only its owner can read, and return the public key.

    Args:
        path: A file that is not there yet.

    Raises:
        ConfigError: The file is there, or cannot be written.
    """
    public, secret = zmq.curve_keypair()
    try:
        # The mode is given at creation: no moment passes in which others could open the file.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError("key file", str(path), error.strerror or str(error)) from error
    with os.fdopen(fd, "wb") as file:
        file.write(secret + b"\n")
        file.flush()
        os.fsync(fd)
    return public.decode()


def load_keys(path: Path) -> CurveKeys:
    """Return the pair of a key file.

    Raises:
        ConfigError: It cannot be read, others may read it, or it holds no key.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            content = file.read(KEY_CHARACTERS + 2)
    except OSError as error:
        raise ConfigError("secret_key_file", str(path), error.strerror or str(error)) from error
    if status.st_mode & _refused_bits(path):
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError("secret_key_file", str(path), f"others may read or change it (mode {mode:04o}); chmod 600")
    secret = content.strip()
    try:
        _check_key(secret)
        public = zmq.curve_public(secret)
    except (ValueError, KeyError, zmq.ZMQError) as error:
        raise ConfigError("secret_key_file", str(path), "holds no key; make one with `weightd keygen`") from error
    return CurveKeys(public.decode(), secret.decode())


def _refused_bits(path: Path) -> int:
    """Return the permissions that a key file must not have.

    A credential that systemd hands over may show its group as a reader: on tmpfs it lets the service's user in by an
    ACL, whose mask stands in the place of the group's bits; the folder lets nobody else in.
    """
    everybody = stat.S_IRWXG | stat.S_IRWXO
    credentials = os.environ.get("CREDENTIALS_DIRECTORY")
    return everybody & ~stat.S_IRGRP if credentials and str(path.parent) == credentials else everybody


def check_public_key(text: str, setting: str) -> str:
    """Return a public key of the configuration, if it is one.

    Raises:
        ConfigError: It is not 40 characters of Z85.
    """
    try:
        _check_key(text.encode("ascii"))
    except (ValueError, KeyError) as error:
        raise ConfigError(setting, text, f"is no public key: {KEY_CHARACTERS} characters of Z85") from error
    return text


def check_exposure(host: str, keys: CurveKeys | None, setting: str = "control") -> None:
    """Refuse to listen where others can connect, unless keys say who they are.

    Args:
        host: Numeric address that is going to be listened on.
        keys: The daemon's own, or None.
        setting: Name for the error.

    Raises:
        ConfigError: No keys, and the address is not a loopback one.
    """
    if keys is None and not ipaddress.ip_address(host).is_loopback:
        why = "is reachable from other hosts, and no secret_key_file is set: anybody could send"
        raise ConfigError(setting, host, why)


def _check_key(text: bytes) -> None:
    """Raise ValueError or KeyError unless ``text`` is a key in Z85."""
    if len(text) != KEY_CHARACTERS or len(z85.decode(text)) != 32:
        raise ValueError("a key has 40 characters")
