"""The unit files of an installation: its own program, its user, nothing else changed; each directive has its reason."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.golden_text import check_golden
from weightd.core.errors import ConfigError
from weightd.daemon.cli import main
from weightd.daemon.service import unit_files as made
from weightd.daemon.service.unit_files import UnitFile, obstacles, own_command, own_places, unit_files

SYSTEMD = Path(__file__).parents[4] / "systemd"
COMMAND = ("/opt/weightd/bin/weightd",)
EXPOSURE = 25
"""Highest exposure that systemd-analyze may find, in tenths."""


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(argv)
    printed = capsys.readouterr()
    assert isinstance(left.value.code, int)
    return left.value.code, printed.out, printed.err


def in_opt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "own_command", lambda: COMMAND)
    monkeypatch.setattr(made, "own_places", lambda command: ())


def unit(command: tuple[str, ...] = COMMAND, user: str = "weightd", places: tuple[Path, ...] = ()) -> str:
    return text_of("etc/systemd/system/weightd.service", unit_files(command, user, places))


def text_of(path: str, found: tuple[UnitFile, ...]) -> str:
    (text,) = [file.text for file in found if file.path == path]
    return text


def directives(text: str) -> set[str]:
    return set(re.findall(r"^([A-Z]\w+)=", text, re.MULTILINE))


def test_dry_run_prints_what_would_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    in_opt(monkeypatch)
    code, out, err = run(capsys, "install-units", "--dry-run")

    assert (0, "") == (code, err)
    check_golden("cli/install-units.dry-run", out.rstrip("\n"))
    assert [] == list(tmp_path.iterdir())


def test_files_are_written_below_the_prefix_and_replaced_by_the_next_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    in_opt(monkeypatch)
    run(capsys, "install-units", "--prefix", str(tmp_path), "--user", "wd")
    code, out, _ = run(capsys, "install-units", "--prefix", str(tmp_path))

    written = {str(path.relative_to(tmp_path)): path for path in tmp_path.rglob("*") if path.is_file()}
    assert code == 0
    assert "systemctl enable --now weightd" in out
    assert {file.path: file.text for file in unit_files(COMMAND, "weightd")} == {
        name: path.read_text() for name, path in written.items()
    }
    assert {0o644} == {path.stat().st_mode & 0o777 for path in written.values()}


def test_where_nothing_can_be_written_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_opt(monkeypatch)
    code, _, err = run(capsys, "install-units", "--prefix", "/proc/nowhere")

    assert 78 == code
    assert "E_CONFIG: --prefix = '/proc/nowhere/etc/systemd/system/weightd.service'" in err
    assert "cannot be written" in err


def test_another_user_runs_it() -> None:
    found = unit_files(COMMAND, "wd")

    assert "\nUser=wd\n" in text_of("etc/systemd/system/weightd.service", found)
    assert "\nu wd - " in text_of("etc/sysusers.d/weightd.conf", found)
    assert "RuntimeDirectory=weightd" in text_of("etc/systemd/system/weightd.service", found)


@pytest.mark.parametrize("name", ["", "Root", "a b", "a\nExecStart=/bin/sh", "1st", "%i"])
def test_a_name_that_no_user_has_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--user"):
        unit_files(COMMAND, name)


def test_odd_characters_of_a_path_reach_the_unit_as_they_are_read_back() -> None:
    assert '\nExecStart="/opt/my 100%% \\"w\\"/weightd" serve ' in unit(('/opt/my 100% "w"/weightd',))
    assert "\nExecStart=/usr/bin/python3 -m weightd.daemon.cli serve " in unit(
        ("/usr/bin/python3", "-m", "weightd.daemon.cli")
    )


def test_an_installation_in_a_home_is_seen_and_said() -> None:
    assert "\nProtectHome=yes\n" in unit(places=(Path("/opt/weightd/bin/weightd"),))
    assert "\nProtectHome=read-only\n" in unit(places=(Path("/home/alice/venv/bin/weightd"),))


def test_what_the_user_cannot_reach_is_said(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)

    found = obstacles([Path("/tmp/venv/bin/weightd"), Path("/usr/bin/env")], "wd")
    assert ["/tmp/venv/bin/weightd: PrivateTmp= of the unit"] == [text.partition(" hides")[0] for text in found]
    if not str(tmp_path).startswith(("/tmp", "/var/tmp")):
        (said,) = obstacles([closed / "weightd"], "wd")
        assert f"{closed}: mode 0700 may keep user wd from" in said


def test_this_installation_is_found() -> None:
    command = own_command()

    assert Path(command[0]).exists()
    assert all(place.exists() for place in own_places(command))


# ------------------------------------------------------------ reasons


@pytest.mark.parametrize("name", ["weightd.service", "gpu.conf"])
def test_every_directive_has_a_row_with_its_reason(name: str) -> None:
    text = (SYSTEMD / "README.md").read_text(encoding="utf-8")
    section = text.partition(f"## Directives of `{name}`")[2].partition("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| `")]
    explained = {name for row in rows for name in re.findall(r"`(\w+)=`", row.split("|")[1])}

    assert directives((SYSTEMD / name).read_text(encoding="utf-8")) == explained
    assert [] == [row for row in rows if len(row.split("|")[2].split()) < 2]


def test_a_stop_may_take_as_long_as_draining() -> None:
    from weightd.core.session.deadlines import Deadlines

    found = re.search(r"^TimeoutStopSec=(\d+)$", unit(), re.MULTILINE)
    assert found is not None
    assert Deadlines().drain_s + 15 < float(found[1])


def test_zeromq_may_list_the_interfaces() -> None:
    """Seen under systemd 252: without netlink libzmq aborts in its first bind ("Address family not supported")."""
    (families,) = re.findall(r"^RestrictAddressFamilies=(.*)$", unit(), re.MULTILINE)

    assert {"AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"} == set(families.split())


@pytest.mark.parametrize("directive", ["PrivateUsers", "DynamicUser", "RemoveIPC", "MemoryMax", "ProcSubset"])
def test_what_would_break_hooks_is_left_out(directive: str) -> None:
    assert directive not in directives(unit())


# ------------------------------------------------------------ systemd's own word


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"NOT RUN: needs {name}, which is not installed; the unit files were not checked by systemd")
    return found


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The files of this installation below a folder."""
    for file in unit_files(own_command(), "weightd"):
        target = tmp_path / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(file.text)
    return tmp_path


@pytest.mark.processes
@pytest.mark.parametrize("with_gpu", [False, True])
def test_systemd_finds_no_fault_and_little_exposure(installed: Path, with_gpu: bool) -> None:
    analyze = tool("systemd-analyze")
    path = installed / "etc/systemd/system/weightd.service"
    if with_gpu:
        example = path.with_name("weightd.service.d") / "gpu.conf.example"
        example.rename(example.with_suffix(""))
    verify = ran(analyze, "verify", "--recursive-errors=no", "--man=no", str(path))
    security = ran(analyze, "security", "--offline=true", f"--threshold={EXPOSURE}", str(path))

    assert (0, "") == (verify.returncode, verify.stderr.strip())
    assert 0 == security.returncode, security.stdout


@pytest.mark.processes
def test_a_misspelt_directive_would_be_found(installed: Path) -> None:
    path = installed / "etc/systemd/system/weightd.service"
    path.write_text(path.read_text().replace("WatchdogSec=", "WatchDogSecs="))

    assert 0 != ran(tool("systemd-analyze"), "verify", "--recursive-errors=no", "--man=no", str(path)).returncode


@pytest.mark.processes
def test_user_and_folders_are_made_with_their_modes(installed: Path) -> None:
    sysusers, tmpfiles = tool("systemd-sysusers"), tool("systemd-tmpfiles")
    (installed / "etc" / "credstore").mkdir()
    key = installed / "etc" / "credstore" / "weightd.key"
    key.touch(mode=0o644)
    users = ran(sysusers, "--root", str(installed))
    folders = ran(tmpfiles, "--create", "--root", str(installed))
    if "Operation not permitted" in users.stderr + folders.stderr:
        pytest.skip("NOT RUN: systemd-sysusers and systemd-tmpfiles need to be root to give files to root")

    assert (0, 0) == (users.returncode, folders.returncode), users.stderr + folders.stderr
    assert re.search(r"^weightd:.*:/:.*nologin$", (installed / "etc/passwd").read_text(), re.MULTILINE)
    assert re.search(r"^weightd:", (installed / "etc/group").read_text(), re.MULTILINE)
    modes = {name: (installed / name).stat().st_mode & 0o777 for name in ("etc/weightd", "etc/credstore")}
    assert {"etc/weightd": 0o755, "etc/credstore": 0o700} == modes
    assert 0o600 == key.stat().st_mode & 0o777


def ran(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=50, check=False)
