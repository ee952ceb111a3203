"""The rooms of the package: who may import what, and where its tests lie."""

import ast
import subprocess
import sys
from pathlib import Path

import labkit as lk
from tests.paths import REPO

PACKAGE = REPO / "labkit"


def _modules() -> dict[str, Path]:
    return {".".join(path.relative_to(REPO).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}


def _imports(path: Path) -> list[tuple[str, int]]:
    tree = ast.parse(path.read_text())
    return [
        (node.module, node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "labkit"
    ]


def test_a_folder_is_entered_by_its_door():
    """What a folder's `__init__` does not hand on is the folder's own."""
    modules = _modules()
    trespasses = [
        f"{path.relative_to(REPO)}:{line} imports {target}: import it from {target.rpartition('.')[0]}"
        for name, path in modules.items()
        for target, line in _imports(path)
        if target in modules and not name.startswith(target.rpartition(".")[0] + ".")
    ]
    assert trespasses == []


def test_imports_run_only_to_the_left():
    done = subprocess.run([Path(sys.executable).with_name("lint-imports")], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_name_is_there_and_lists_itself():
    assert set(lk.__all__) <= set(dir(lk))
    assert [name for name in lk.__all__ if getattr(lk, name) is None] == []
