"""What `labkit.watching` refers to by text is there: nothing else would tell when a module gets another name."""

import ast
import pkgutil
import re

import pytest

from tests.paths import REPO

SOURCES = sorted((REPO / "labkit/watching").glob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_each_name_in_a_string_exists(path):
    texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    names = {name for text in texts if isinstance(text, str) for name in re.findall(r"\blabkit(?:\.\w+)+", text)}
    for name in names:
        pkgutil.resolve_name(name)  # a module, or what one holds


def test_names_are_found():
    text = "".join(path.read_text() for path in SOURCES)
    assert "labkit.loading.batch_loader" in text


def changed_methods():
    """Of labkit's own, what `hooks` changes: each module with the class and method that stand beside it."""
    tree = ast.parse((REPO / "labkit/watching/hooks.py").read_text())
    tables = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    for module, value in (
        (key, value) for table in tables for key, value in zip(table.keys, table.values, strict=True)
    ):
        if isinstance(module, ast.Constant) and str(module.value).startswith("labkit."):
            names = [node.value for node in ast.walk(value) if isinstance(node, ast.Constant)]
            yield module.value, ".".join(names)


def test_each_method_that_is_changed_exists():
    changed = list(changed_methods())
    assert ("labkit.loading.batch_loader", "BatchLoader.__iter__") in changed
    for module, name in changed:
        assert callable(pkgutil.resolve_name(f"{module}:{name}"))
