"""What CONTRIBUTING says of the house is so."""

import ast
import builtins
import re

import cloudpickle
import pytest

import labkit as lk
from labkit import course
from tests.paths import REPO

PACKAGE = REPO / "labkit"


CONTRIBUTING = (REPO / ".github" / "CONTRIBUTING.md").read_text()
_EXAMPLES = {"labkit/a/b.py", "tests/a/test_b.py", "tests/data/stores/test_", "notebooks/NN_name.ipynb"}


def test_contributing_names_what_is_there():
    """Its paths exist, its picture has every room, and its linters are those of `.ci/run`."""
    paths = set(re.findall(r"(?:labkit|tests|notebooks|data_scripts|\.github|\.ci)/[\w./]*", CONTRIBUTING)) - _EXAMPLES
    assert len(paths) > 20
    assert [path for path in sorted(paths) if not (REPO / path).exists()] == []
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert set(re.findall(r"\w+", re.search(r"^    app -> .*$", CONTRIBUTING, re.MULTILINE)[0])) == rooms
    linters = re.search(r"    (ruff check .*)", CONTRIBUTING)[1].split(" && ")
    assert set(linters) <= set((REPO / ".ci" / "run").read_text().splitlines())


def test_every_name_is_there_and_lists_itself():
    assert set(lk.__all__) <= set(dir(lk))
    assert [name for name in lk.__all__ if getattr(lk, name) is None] == []


def test_every_name_of_the_course_is_there():
    assert set(course.__all__) <= set(dir(course))
    assert [name for name in course.__all__ if getattr(course, name) is None] == []
    with pytest.raises(AttributeError, match=r"'labkit\.course' has no attribute 'nothing'"):
        course.nothing  # noqa: B018


def test_the_package_can_be_pickled_whatever_was_imported():
    """A room of a public function's name would hide the function, or make the package a thing that no pickle knows."""

    assert callable(lk.watch)
    assert callable(lk.plan)
    assert cloudpickle.loads(cloudpickle.dumps(lambda: lk))() is lk


# What Python's own protocols ask for, a system's error with its number, and what simulated torch says as torch does.
_PASSED_ON = {
    "AssertionError", "AttributeError", "ConnectionError", "EOFError", "FileExistsError", "IndexError",
    "IsADirectoryError", "MemoryError", "NotImplementedError", "OSError", "PermissionError", "SystemExit",
}  # fmt: skip


def test_every_error_that_labkit_raises_is_under_one_root():
    strangers = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
                name = node.exc.func.id
                is_error = isinstance(getattr(builtins, name, None), type)
                if is_error and name not in _PASSED_ON:
                    strangers.append(f"{path.relative_to(REPO)}:{node.lineno}: {name}")
    assert strangers == []


@pytest.mark.parametrize("wrong", [
    lambda: lk.decode(b"text"), lambda: lk.decode(b"", "no such decoder"), lambda: lk.FolderStore("no such folder"),
    lambda: lk.TarStore("no such.tar").keys(), lambda: lk.read_shards("no*such.tar"),
    lambda: lk.PixelStore("no such.pixels"), lambda: lk.BatchLoader(3), lambda: lk.open_store("nothing"),
    lambda: lk.compare({}, baseline="a"), lambda: lk.plan(), lambda: lk.collect_sizes("no such folder"),
])  # fmt: skip
def test_wrong_input_raises_an_error_of_labkit(wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(lk.LabkitError):
        wrong()
