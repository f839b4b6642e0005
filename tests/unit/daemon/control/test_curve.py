"""Keys: made with the right mode, read with suspicion."""

import os
import stat
from pathlib import Path

import pytest
import zmq

from weightd.core.errors import ConfigError
from weightd.daemon.control.curve import CurveKeys, check_exposure, check_public_key, load_keys, write_key_file


def test_a_new_key_is_read_back_with_its_public_half(tmp_path: Path) -> None:
    public = write_key_file(tmp_path / "curve.key")

    keys = load_keys(tmp_path / "curve.key")

    assert public == keys.public
    assert keys.public.encode() == zmq.curve_public(keys.secret.encode())
    assert keys.secret not in repr(keys)


def test_a_key_file_is_for_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_key_file(tmp_path / "curve.key")
    finally:
        os.umask(before)

    assert 0o600 == stat.S_IMODE((tmp_path / "curve.key").stat().st_mode)


def test_a_key_that_is_there_is_never_overwritten(tmp_path: Path) -> None:
    public = write_key_file(tmp_path / "curve.key")

    with pytest.raises(ConfigError, match="File exists"):
        write_key_file(tmp_path / "curve.key")

    assert public == load_keys(tmp_path / "curve.key").public


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610])
def test_a_key_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    write_key_file(tmp_path / "curve.key")
    (tmp_path / "curve.key").chmod(mode)

    with pytest.raises(ConfigError, match=f"mode {mode:04o}"):
        load_keys(tmp_path / "curve.key")


def test_a_credential_of_systemd_is_read(tmp_path: Path) -> None:
    write_key_file(tmp_path / "curve.key")
    (tmp_path / "curve.key").chmod(0o400)

    load_keys(tmp_path / "curve.key")


@pytest.mark.parametrize("mode, read", [(0o440, True), (0o460, False), (0o444, False)])
def test_a_credential_may_show_the_mask_of_an_acl_as_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, read: bool
) -> None:
    write_key_file(tmp_path / "weightd.key")
    (tmp_path / "weightd.key").chmod(mode)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))

    if read:
        load_keys(tmp_path / "weightd.key")
    else:
        with pytest.raises(ConfigError, match=f"mode {mode:04o}"):
            load_keys(tmp_path / "weightd.key")


@pytest.mark.parametrize("content", [b"", b"x", b"x" * 39, b"x" * 41, b"~" * 40, b"\xff" * 40, b"x" * 100])
def test_a_file_without_a_key_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "curve.key"
    path.touch(0o600)
    path.write_bytes(content)

    with pytest.raises(ConfigError, match="holds no key"):
        load_keys(path)


def test_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_keys(tmp_path / "curve.key")


def test_public_keys_are_checked() -> None:
    public = zmq.curve_keypair()[0].decode()

    assert public == check_public_key(public, "peers.a.public_key")
    for wrong in ("", public[:-1], public + "x", "~" * 40, "ü" * 40):
        with pytest.raises(ConfigError, match="no public key"):
            check_public_key(wrong, "peers.a.public_key")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1"])
def test_loopback_needs_no_keys(host: str) -> None:
    check_exposure(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "fe80::1"])
def test_anything_else_does(host: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_exposure(host, None)

    assert 78 == refused.value.exit_code
    check_exposure(host, CurveKeys("public", "secret"))
