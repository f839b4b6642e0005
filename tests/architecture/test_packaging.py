"""What is built holds what is in the tree: the wheel made through the sdist, the editable install, the pins."""

import importlib.util
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


@pytest.fixture(scope="module")
def built(module_twin: Path) -> Path:
    """A folder with the sdist and the wheel that was built from it, not from the tree."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", "."]
    result = subprocess.run(command, cwd=module_twin, capture_output=True, text=True, check=False)
    assert 0 == result.returncode, result.stdout + result.stderr
    return module_twin / "dist"


@pytest.fixture(scope="module")
def files(module_twin: Path, folders: tuple[str, ...]) -> set[str]:
    """Every file of the five folders, the package's own two and the unit files, as ``weightd/...``."""
    paths = (path.relative_to(module_twin) for folder in folders for path in (module_twin / folder).rglob("*"))
    units = {f"weightd/daemon/service/units/{path.name}" for path in (module_twin / "systemd").iterdir()}
    return (
        {f"weightd/{path}" for path in paths if (module_twin / path).is_file()}
        | units
        | {
            "weightd/__init__.py",
            "weightd/py.typed",
        }
    )


def test_every_folder_with_code_is_a_package(files: set[str]) -> None:
    holders = {str(Path(file).parent) for file in files if file.endswith(".py")}

    assert [] == sorted(holder for holder in holders if f"{holder}/__init__.py" not in files)


def test_wheel_built_through_the_sdist_holds_the_tree(built: Path, files: set[str]) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")}
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        scripts = archive.read(entry_points).decode()

    assert "weightd-0.1.0-py3-none-any.whl" == wheel.name
    assert sorted(files) == sorted(held)
    assert "weightd = weightd.daemon.cli:main" in scripts


def test_sdist_holds_real_files_only(built: Path, files: set[str]) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    held = {member.name.partition("/src/")[2] for member in members if member.isfile() and "/src/" in member.name}

    assert [] == [member.name for member in members if member.issym() or member.islnk()]
    assert sorted(files) == sorted(name for name in held if ".egg-info/" not in name)


def test_links_of_the_source_folder_are_the_five(root: Path, folders: tuple[str, ...]) -> None:
    links = {path.name: str(path.readlink()) for path in (root / "src" / "weightd").iterdir() if path.is_symlink()}

    assert {folder: f"../../{folder}" for folder in folders} == links


def test_unit_files_are_found_where_people_and_where_the_daemon_look(root: Path) -> None:
    assert "../../systemd" == str((root / "daemon" / "service" / "units").readlink())


def test_installed_here_is_this_tree(root: Path, folders: tuple[str, ...]) -> None:
    for folder in folders:
        spec = importlib.util.find_spec(f"weightd.{folder}")

        assert spec is not None
        assert spec.origin is not None
        assert root / folder / "__init__.py" == Path(spec.origin).resolve()


def test_importing_the_hooks_loads_no_event_loop() -> None:
    code = """
import sys, numpy, msgpack, msgspec, torch, zmq
before = set(sys.modules)
import weightd.trainer_hooks, weightd.rollout_hooks
print(*sorted({"anyio", "trio", "typer", "uvicorn", "starlette"} & (set(sys.modules) - before)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "" == result.stdout.strip()


def _pins(root: Path) -> dict[str, str]:
    lines = (root / "requirements" / "dev.txt").read_text().splitlines()
    rows = [line.partition("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, _, version in rows}


def test_pins_are_exact_and_name_no_place(root: Path) -> None:
    text = (root / "requirements" / "dev.txt").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]

    assert [] == [line for line in lines if line.count("==") != 1 or set(line) & set(" /@+;:")]
    assert not any(line.startswith("-") for line in lines)


def test_pins_satisfy_what_the_project_declares(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [Requirement(text) for text in (*project["dependencies"], *extras["daemon"], *extras["dev"])]
    pins = _pins(root)

    assert [] == [str(need) for need in declared if canonicalize_name(need.name) not in pins]
    assert [] == [str(need) for need in declared if pins[canonicalize_name(need.name)] not in need.specifier]
