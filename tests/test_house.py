"""The rooms of the package: who may import what, and what CONTRIBUTING says of them."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import labkit as lk
from tests.paths import REPO

PACKAGE = REPO / "labkit"


def _modules() -> dict[str, Path]:
    return {".".join(path.relative_to(REPO).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}


def test_folders_are_imported_from_their_init():
    """Modules outside a folder use only what its `__init__` hands on."""
    modules = _modules()
    violations = [
        f"{path.relative_to(REPO)}:{node.lineno} imports {node.module}: import it from its folder"
        for name, path in modules.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module in modules
        if not name.startswith(node.module.rpartition(".")[0] + ".")
    ]
    assert violations == []


def test_imports_run_one_way():
    path = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([path], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


CONTRIBUTING = (REPO / ".github" / "CONTRIBUTING.md").read_text()
_EXAMPLES = {"labkit/a/b.py", "tests/a/test_b.py", "tests/data/stores/test_", "notebooks/NN_name.ipynb"}


def test_contributing_names_what_is_there():
    """Its paths exist, its picture has every room, and its linters are those of `.ci/run`."""
    paths = set(re.findall(r"(?:labkit|tests|notebooks|data_scripts|\.github|\.ci)/[\w./]*", CONTRIBUTING)) - _EXAMPLES
    assert len(paths) > 20
    assert [path for path in sorted(paths) if not (REPO / path).exists()] == []
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert set(re.findall(r"\b(\w+)/(?= {2,})", CONTRIBUTING)) == rooms
    linters = re.search(r"    (ruff check .*)", CONTRIBUTING)[1].split(" && ")
    assert set(linters) <= set((REPO / ".ci" / "run").read_text().splitlines())


def test_every_name_is_there_and_lists_itself():
    assert set(lk.__all__) <= set(dir(lk))
    assert [name for name in lk.__all__ if getattr(lk, name) is None] == []
