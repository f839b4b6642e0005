"""Build the sdist and, through it, the wheel into dist/; import every module of it in a clean environment.

Two rounds: with the base dependencies alone, everything but the daemon must import (hooks are installed beside
trainers and engines that have no need of the daemon's); with the extra ``daemon``, the rest.  Other packages are
held at the pinned versions, and what the packages do not declare is not there.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What an adapter may need to be imported at all: named by an extra, or there because the user runs it.
FOREIGN = ("deepspeed", "diffusers", "megatron", "nixl", "sglang", "vllm")

IMPORT_ALL = """
import importlib, sys
foreign, *names = sys.argv[1:]
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in foreign.split(","):
            raise
        print(f"  {name}: NOT IMPORTED, needs {error.name}")
    else:
        print(f"  {name}")
assert "site-packages" in sys.modules["weightd"].__file__, sys.modules["weightd"].__file__
"""


def main() -> None:
    """Build, install, import, list; the exit status says whether all of it worked."""
    wheel = build()
    modules = modules_of(wheel)
    with tempfile.TemporaryDirectory(prefix="weightd-wheel-") as folder:
        venv = Path(folder, "venv")
        run(sys.executable, "-m", "venv", str(venv))
        install(venv, str(wheel))
        import_all(venv, [name for name in modules if not name.startswith("weightd.daemon")], "base dependencies")
        install(venv, f"{wheel}[daemon]")
        import_all(venv, [name for name in modules if name.startswith("weightd.daemon")], "extra daemon")
    print(f"{wheel.name}: {len(modules)} modules in the wheel, as many as in the tree")


def build() -> Path:
    """Build into an empty dist/ and return the wheel."""
    for leaving in (ROOT / "build", ROOT / "dist", *ROOT.glob("src/*.egg-info")):
        shutil.rmtree(leaving, ignore_errors=True)
    run(sys.executable, "-m", "build", "--quiet", "--no-isolation", "--outdir", str(ROOT / "dist"), str(ROOT))
    (wheel,) = (ROOT / "dist").glob("*.whl")
    return wheel


def modules_of(wheel: Path) -> list[str]:
    """Return the names of all modules in ``wheel``, once it holds exactly those of the tree."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.endswith(".py")}
    paths = [Path(top, name) for top, _, names in os.walk(ROOT / "src", followlinks=True) for name in names]
    tree = {str(path.relative_to(ROOT / "src")) for path in paths if path.suffix == ".py"}
    if held != tree:
        sys.exit(f"{wheel.name}: missing {sorted(tree - held)}, not in the tree {sorted(held - tree)}")
    names = (name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in held)
    return sorted(name for name in names if not name.endswith(".__main__"))


def install(venv: Path, requirement: str) -> None:
    """Install ``requirement`` into ``venv``, nothing beyond what it declares, at the pinned versions."""
    pins = ROOT / "requirements" / "dev.txt"
    run(str(venv / "bin" / "pip"), "install", "--quiet", "--constraint", str(pins), requirement)


def import_all(venv: Path, names: list[str], what: str) -> None:
    """Import ``names`` in a process that cannot see the tree."""
    print(f"imported with {what}:", flush=True)
    run(str(venv / "bin" / "python"), "-I", "-c", IMPORT_ALL, ",".join(FOREIGN), *names, cwd=venv)


def run(*command: str, cwd: Path = ROOT) -> None:
    """Run ``command``; a failure ends this program with it."""
    subprocess.run(command, cwd=cwd, check=True)


if __name__ == "__main__":
    main()
