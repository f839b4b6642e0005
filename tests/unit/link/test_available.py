"""How much memory is left, from files as the kernel writes them."""

from pathlib import Path

import pytest

from weightd.link.available import available_nbytes

MEMINFO = "MemTotal:       24000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\n"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "cgroup").write_text("1:name=systemd:/old\n0::/system.slice/weightd.service\n")
    (tmp_path / "cgroups/system.slice/weightd.service").mkdir(parents=True)
    return tmp_path


def limit(files: Path, group: str, maximum: str, current: str, stat: str = "") -> None:
    folder = files / "cgroups" / group
    (folder / "memory.max").write_text(f"{maximum}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(stat)


def available(files: Path) -> int | None:
    return available_nbytes(files / "meminfo", files / "cgroup", files / "cgroups")


def test_the_host_alone(files: Path) -> None:
    assert 8_000_000 * 1024 == available(files)


def test_the_tightest_group_counts(files: Path) -> None:
    limit(files, "system.slice/weightd.service", "max", "100")
    limit(files, "system.slice", "5000", "3000", "anon 2900\ninactive_file 100\n")

    assert 2100 == available(files)


def test_a_group_above_its_limit_has_nothing_left(files: Path) -> None:
    limit(files, "system.slice", "5000", "6000")

    assert 0 == available(files)


def test_where_nothing_is_said_nothing_is_known(tmp_path: Path) -> None:
    assert available(tmp_path) is None


def test_this_host_has_some() -> None:
    found = available_nbytes()

    assert found is None or found > 0
