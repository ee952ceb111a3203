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
