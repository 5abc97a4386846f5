"""The walls between the rooms (DESIGN: rooms): who may import whom, and what the client must do without."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("shared", "client", "server", "models", "bench")
STDLIB = sys.stdlib_module_names
SHARED_MAY_IMPORT = {"numpy", "msgpack"}
HEAVY = {"torch", "transformers", "accelerate", "fastapi", "uvicorn", "onnx"}


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every module that a file imports, and whether it does so at import time."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        at_import = id(node) not in inside
        if isinstance(node, ast.Import):
            yield from ((name.name, at_import) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield (node.module or "", at_import)


def room_files(room: str) -> list[Path]:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    return files


def violations(room: str, forbidden: set[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in room_files(room)
        for module, _ in imports(path)
        if any(module == name or module.startswith(name + ".") for name in forbidden)
    ]


def test_shared_imports_only_the_standard_library_numpy_and_the_codec() -> None:
    wrong = [
        f"{path.name} imports {module}"
        for path in room_files("shared")
        for module, _ in imports(path)
        if module.split(".")[0] not in STDLIB | SHARED_MAY_IMPORT and not module.startswith("paceline.shared")
    ]
    assert wrong == []


def test_client_and_server_never_import_each_other() -> None:
    assert violations("client", {"paceline.server", "paceline.bench", *HEAVY}) == []
    assert violations("server", {"paceline.client", "paceline.bench", "onnxruntime"}) == []


def test_models_imports_no_other_room_before_a_command_needs_it() -> None:
    at_import = [
        f"{path.name} imports {module}"
        for path in room_files("models")
        for module, now in imports(path)
        if module.startswith(("paceline.client", "paceline.server", "paceline.bench")) and now
    ]
    assert at_import == []


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_loads_code_from_data(room: str) -> None:
    for path in room_files(room):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                assert name not in {"eval", "exec", "pickle.load", "pickle.loads", "yaml.load", "marshal.loads"}, path
                if name == "torch.load":
                    assert any(key.arg == "weights_only" for key in node.keywords), path
                if name in {"np.load", "numpy.load"}:
                    pickles = [key.value for key in node.keywords if key.arg == "allow_pickle"]
                    assert all(ast.unparse(value) == "False" for value in pickles), path
    assert violations(room, {"pickle", "marshal", "shelve", "dill", "cloudpickle"}) == []


def test_files_stay_within_their_rooms() -> None:
    longest = {
        str(path.relative_to(ROOT)): count
        for room in ROOMS
        for path in room_files(room)
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > 320
    }
    assert longest == {}


BLOCKED_PROGRAM = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Blocker())
import importlib, pkgutil, pathlib
import paceline.client
names = ["paceline.client", "paceline.shared.cli", "paceline.models.manifest", "paceline.models.catalogue"]
for module in pkgutil.walk_packages(paceline.client.__path__, "paceline.client."):
    names.append(module.name)
for name in names:
    importlib.import_module(name)
assert not {blocked!r} & {{name.split(".")[0] for name in sys.modules}}
print(len(names))
"""


def test_client_runs_without_torch_and_transformers() -> None:
    program = BLOCKED_PROGRAM.format(blocked=HEAVY | {"gguf", "safetensors"})
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5
