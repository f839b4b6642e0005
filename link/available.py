"""How much memory this process may still take.

A memfd has no limit of its own: the kernel would rather kill a process than
refuse its pages.  So a pool asks here before it reserves anything.
"""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


def available_nbytes(meminfo: Path = _MEMINFO, own_cgroup: Path = _OWN_CGROUP, cgroups: Path = _CGROUPS) -> int | None:
    """Return the bytes that host and control group still have, or None where neither says.

    A sandbox may hide these files; the check is then left out.
    """
    bounds = [b for b in (_of_host(meminfo), _of_cgroups(own_cgroup, cgroups)) if b is not None]
    return min(bounds, default=None)


def _of_host(meminfo: Path) -> int | None:
    """Return what the kernel takes for available without swapping."""
    for line in _read(meminfo).splitlines():
        key, _, value = line.partition(":")
        if key == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _of_cgroups(own_cgroup: Path, cgroups: Path) -> int | None:
    """Return the tightest room of this process's control group (version 2) and those above it."""
    path = next((row[3:] for row in _read(own_cgroup).splitlines() if row.startswith("0::")), None)
    if path is None:
        return None
    bounds = []
    folder = cgroups / path.strip().lstrip("/")
    for level in (folder, *folder.parents):
        limit, used = _read(level / "memory.max").strip(), _read(level / "memory.current").strip()
        if limit.isdigit() and used.isdigit():
            # Pages of files count as used, but are given back before anything is refused.
            bounds.append(max(0, int(limit) - int(used) + _file_pages(level)))
        if level == cgroups:
            break
    return min(bounds, default=None)


def _file_pages(level: Path) -> int:
    """Return the bytes of a control group's inactive file pages."""
    for line in _read(level / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == "inactive_file":
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii")
    except OSError:
        return ""
