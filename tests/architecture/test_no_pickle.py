"""Nothing in the five folders pickles, evaluates text, or uses Python's own shared memory."""

import ast
from pathlib import Path

import pytest

MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing.shared_memory"}
# With the object they must be read from, or None for any: `model.eval()` is torch's, `torch.load` unpickles.
ATTRIBUTES = {
    "shared_memory": {"multiprocessing", "mp"},
    "load": {"torch"},
    "save": {"torch"},
    "recv_pyobj": None,
    "send_pyobj": None,
    "reduce_tensor": None,
    "rebuild_cuda_tensor": None,
}
BUILTINS = {"eval", "exec"}


def offences(source: str) -> list[str]:
    """Return what ``source`` uses of the above, as ``line: name``; comments and docstrings may name it."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                used = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names):
                used = [module, *(f"{module}.{alias.name}" for alias in names)]
            case ast.Call(func=ast.Name(id=name)) if name in BUILTINS:
                found.append(f"{node.lineno}: {name}")
                continue
            case ast.Attribute(attr=name) if name in ATTRIBUTES:
                owners = ATTRIBUTES[name]
                if owners is None or (isinstance(node.value, ast.Name) and node.value.id in owners):
                    found.append(f"{node.lineno}: {ast.unparse(node)}")
                continue
            case _:
                continue
        found += [f"{node.lineno}: {name}" for name in used if name in MODULES or name.split(".")[0] in MODULES]
        found += [f"{node.lineno}: {name}" for name in used if name in {"torch.load", "torch.save"}]
    return found


def test_the_folders_are_clean(root: Path, folders: tuple[str, ...]) -> None:
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    found = [f"{path.relative_to(root)}:{line}" for path in paths for line in offences(path.read_text())]

    assert len(paths) >= len(folders)
    assert [] == found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "import shelve",
        "import multiprocessing.shared_memory",
        "from multiprocessing import shared_memory",
        "from multiprocessing.shared_memory import SharedMemory",
        "import multiprocessing as mp\nmp.shared_memory.SharedMemory()",
        "import torch\ntorch.load('file')",
        "from torch import load",
        "socket.recv_pyobj()",
        "eval('1 + 1')",
        "exec('x = 1')",
    ],
)
def test_each_is_found(source: str) -> None:
    assert offences(source)


@pytest.mark.parametrize("source", ["'''No pickle.'''", "model.eval()", "json.load(file)", "codec.load(data)"])
def test_what_only_looks_like_one_is_not(source: str) -> None:
    assert [] == offences(source)
