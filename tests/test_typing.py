"""What a type checker says of a reader's script: with labkit's types (`py.typed`), mistakes show before a run."""

import os
import re
import subprocess
import sys
from importlib.resources import files

import pytest

import labkit as lk
from tests.pages import scripts
from tests.paths import REPO

# A line of a script -> what mypy says about it.
MISTAKES = {
    "lk.LoaderConfig(batch=64)": 'Unexpected keyword argument "batch"',
    "lk.LoaderConfig(batch_size='64')": 'has incompatible type "str"; expected "int"',
    "lk.compare({'pil': [1, 2]}, baseline='pil')": '"list[int]"; expected "str": "Callable[[], Iterable[Any]]"',
    "lk.compare({})": 'Missing named argument "baseline"',
    "lk.load_images('photos')": 'has no attribute "load_images"',
    "lk.usable_cores().upper()": '"int" has no attribute "upper"',
    "lk.diagnose([], print).advice": '"Diagnosis" has no attribute "advice"',
    "cores: str = lk.usable_cores()": 'expression has type "int", variable has type "str"',
}

# As for any reader's script, which mypy does not ask to annotate its functions.
_OF_SCRIPTS = """
[[tool.mypy.overrides]]
module = %s
disallow_untyped_defs = false
disallow_incomplete_defs = false
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def findings(tmp_path_factory) -> list[tuple[str, int, str]]:
    """(script, line, message) of all that mypy says of the scripts. It shares its cache with the linter's run."""
    folder = tmp_path_factory.mktemp("scripts")
    texts = {f"right_{block.page}_{block.line}": block.text for block in scripts()}
    texts["wrong"] = "\n".join(["import labkit as lk", *MISTAKES])
    texts["names"] = "\n".join(["import labkit as lk", *(f"reveal_type(lk.{name})" for name in lk.__all__)])
    config = folder / "pyproject.toml"
    config.write_text((REPO / "pyproject.toml").read_text() + _OF_SCRIPTS % list(texts))
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    paths = [str(folder / f"{name}.py") for name in texts]
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--no-pretty", *paths]
    ran = subprocess.run(command, cwd=REPO, env={**os.environ, "MYPYPATH": str(REPO)}, capture_output=True, text=True)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    found = re.findall(r"^(.*?)\.py:(\d+): \w+: (.*)$", ran.stdout, re.MULTILINE)
    return [(name.rpartition(os.sep)[2], int(line), message) for name, line, message in found]


def test_scripts_of_the_readme_and_the_pages_are_right(findings):
    assert {block.page for block in scripts()} >= {"README", "comparing", "waiting", "training"}
    assert [finding for finding in findings if finding[0].startswith("right")] == []


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_found_at_its_line(findings, line):
    number = 2 + list(MISTAKES).index(line)
    said = [message for script, where, message in findings if (script, where) == ("wrong", number)]
    assert MISTAKES[line] in " ".join(said), said


def test_every_public_name_has_a_type(findings):
    types = {lk.__all__[line - 2]: message for script, line, message in findings if script == "names"}
    assert set(types) == set(lk.__all__)
    assert [name for name, message in types.items() if message.endswith('"Any"')] == []


def test_the_package_says_that_it_has_types():
    assert (files("labkit") / "py.typed").is_file()
