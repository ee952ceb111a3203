"""Tests that measure run alone, and only they."""

import re
import subprocess
import sys

import pytest

from tests.paths import REPO

pytest.importorskip("xdist")
pytest.importorskip("fcntl", reason="this system has no file locks")

ROOT = REPO
CONFTEST = """
from tests.conftest import pytest_configure
"""
FILE = """
import pathlib, time, pytest
HERE, NAME, OTHER = pathlib.Path(__file__).parent, {name!r}, {other!r}
MARKS = ["alone", "cuda", "cuda", "alone"]

def seen_as(kind):
    own, seen, end = HERE / f"{{NAME}} {{kind}}.in", set(), time.monotonic() + 0.2
    own.touch()
    while time.monotonic() < end:
        seen.update(path.name for path in HERE.glob("*.in"))
        time.sleep(0.01)
    own.unlink()
    return seen

def test_two_meet():
    (HERE / NAME).touch()
    end = time.monotonic() + 60
    while not (HERE / OTHER).exists():
        assert time.monotonic() < end
        time.sleep(0.01)

@pytest.mark.parametrize("number", [pytest.param(n, marks=getattr(pytest.mark, mark)) for n, mark in enumerate(MARKS)])
def test_nobody_else(number):
    assert seen_as("alone") == {{f"{{NAME}} alone.in"}}

@pytest.mark.parametrize("number", range(3))
def test_nobody_alone(number):
    assert not [name for name in seen_as("shared") if "alone" in name]
"""


@pytest.mark.exhaustive
def test_turns(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name, other in ["ab", "ba"]:
        (tmp_path / f"test_{name}.py").write_text(FILE.format(name=name, other=other))
    options = ["-q", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={tmp_path}", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-n", "2", "--dist", "loadfile", "."],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert re.search(r"^16 passed", ran.stdout, re.MULTILINE), ran.stdout + ran.stderr
