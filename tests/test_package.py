"""The package as a whole: its rooms and names, their examples and types, its errors, and what an import loads."""

import ast
import builtins
import doctest
import os
import re
import subprocess
import sys
import tarfile
from importlib.resources import files

import cloudpickle
import pytest
import torch

import labkit as lk
from labkit import course
from tests.pages import scripts
from tests.paths import REPO

PACKAGE = REPO / "labkit"


class TestNames:
    @pytest.mark.parametrize("module", [lk, course], ids=["lk", "course"])
    def test_every_name_is_there_and_no_other(self, module):
        assert set(module.__all__) <= set(dir(module))
        assert [name for name in module.__all__ if getattr(module, name) is None] == []
        with pytest.raises(AttributeError, match="nothing"):
            module.nothing  # noqa: B018

    def test_the_package_can_be_pickled_whatever_was_imported(self):
        """A room of a public function's name would hide the function, or make the package a thing no pickle knows."""
        assert callable(lk.watch)
        assert callable(lk.plan)
        assert cloudpickle.loads(cloudpickle.dumps(lambda: lk))() is lk


def examples_of(name):
    found = doctest.DocTestFinder().find(getattr(lk, name), name, module=False, globs={"lk": lk, "torch": torch})
    return [test for test in found if test.examples]


CALLABLE = [name for name in lk.__all__ if callable(getattr(lk, name))]
ON_A_SERVER = {"HttpStore", "ObjectStore"}


class TestExamples:
    @pytest.fixture(scope="class")
    @classmethod
    def place(cls, tmp_path_factory):
        """A folder with what the examples name; the current one."""
        folder, before = tmp_path_factory.mktemp("examples"), os.getcwd()
        os.chdir(folder)
        lk.make_photos("photos", 8, progress=False)
        lk.PixelStore.build("photos", "photos.pixels", progress=False)
        with tarfile.open("photos.tar", "w") as tar:
            tar.add("photos", "photos")
        yield folder
        os.chdir(before)

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("name", CALLABLE)
    def test_each_public_name_has_an_example_that_runs(self, place, name):
        found = examples_of(name)
        assert found or "::\n" in getattr(lk, name).__doc__
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        said = []
        for test in [] if name in ON_A_SERVER else found:
            runner.run(test, out=said.append)
        assert runner.summarize(verbose=False).failed == 0, "".join(said)


# What Python's own protocols ask for, a system's error with its number, and what torch says when simulated.
PASSED_ON = {
    "AssertionError", "AttributeError", "ConnectionError", "EOFError", "FileExistsError", "IndexError",
    "IsADirectoryError", "MemoryError", "NotImplementedError", "OSError", "PermissionError", "SystemExit",
}  # fmt: skip


def test_every_error_that_labkit_raises_is_under_one_root():
    strangers = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                name = getattr(node.exc.func, "id", "")
                if isinstance(getattr(builtins, name, None), type) and name not in PASSED_ON:
                    strangers.append(f"{path.relative_to(REPO)}:{node.lineno}: {name}")
    assert strangers == []


HEAVY = {"urllib3", "fsspec", "s3fs", "aiohttp", "requests", "botocore", "pandas", "matplotlib"}


def test_names_that_are_used_load_no_more_than_they_need():
    """Nothing that a training script does not use; what one name loads is there for those below it, too."""
    unwanted = {
        "lk": {"numpy", "torch", "PIL", "psutil"},
        "lk.FolderStore": {"torch", "PIL", "psutil", "cloudpickle", "tqdm"},
        "lk.HttpStore; lk.ObjectStore; lk.TarStore; lk.open_store": {"torch"},
        "lk.BatchLoader; lk.PixelStore": {"psutil", "torchvision", "ray"},
        "lk.Buckets": {"psutil"},
        "lk.read_shards; lk.write_shards": {"webdataset"},
    }
    lines = [f"{used}; print(*sys.modules)" for used in unwanted]
    program = "\n".join(["import logging, sys, labkit as lk", *lines, "print(*logging.root.manager.loggerDict)"])
    *loaded, loggers = subprocess.check_output([sys.executable, "-c", program], text=True).splitlines()
    for (used, others), modules in zip(unwanted.items(), loaded, strict=True):
        assert (HEAVY | others).intersection(modules.split()) == set(), used
    assert re.findall(r"\b(?:urllib3|fsspec|aiohttp|botocore)", loggers) == []


# A line of a script -> what mypy says about it.
MISTAKES = {
    "lk.LoaderConfig(batch=64)": 'Unexpected keyword argument "batch"',
    "lk.compare({'pil': [1, 2]}, baseline='pil')": '"list[int]"; expected "str": "Callable[[], Iterable[Any]]"',
    "lk.load_images('photos')": 'has no attribute "load_images"',
    "lk.usable_cores().upper()": '"int" has no attribute "upper"',
}
# As for any reader's script, which mypy does not ask to annotate its functions.
OF_SCRIPTS = """
[[tool.mypy.overrides]]
module = %s
disallow_untyped_defs = false
disallow_incomplete_defs = false
"""


@pytest.mark.exhaustive
class TestTypes:
    """What a type checker says of a reader's script: with labkit's types (`py.typed`), mistakes show before a run."""

    @pytest.fixture(scope="class")
    @classmethod
    def findings(cls, tmp_path_factory):
        """(script, line, message) of all that mypy says of the scripts. It shares its cache with the linter's run."""
        folder = tmp_path_factory.mktemp("scripts")
        texts = {f"right_{block.page}_{block.line}": block.text for block in scripts()}
        texts["wrong"] = "\n".join(["import labkit as lk", *MISTAKES])
        texts["names"] = "\n".join(["import labkit as lk", *(f"reveal_type(lk.{name})" for name in lk.__all__)])
        config = folder / "pyproject.toml"
        config.write_text((REPO / "pyproject.toml").read_text() + OF_SCRIPTS % list(texts))
        for name, text in texts.items():
            (folder / f"{name}.py").write_text(text)
        command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--no-pretty"]
        command += [str(folder / f"{name}.py") for name in texts]
        place = {**os.environ, "MYPYPATH": str(REPO)}
        ran = subprocess.run(command, cwd=REPO, env=place, capture_output=True, text=True)
        assert ran.returncode == 1, ran.stdout + ran.stderr
        found = re.findall(r"^(.*?)\.py:(\d+): \w+: (.*)$", ran.stdout, re.MULTILINE)
        return [(name.rpartition(os.sep)[2], int(line), message) for name, line, message in found]

    def test_scripts_of_the_readme_and_the_pages_are_right(self, findings):
        assert {block.page for block in scripts()} >= {"compare_and_plan", "start", "faster_loaders"}
        assert [finding for finding in findings if finding[0].startswith("right")] == []

    def test_each_mistake_is_found_at_its_line(self, findings):
        for number, (line, expected) in enumerate(MISTAKES.items(), 2):
            said = [message for script, where, message in findings if (script, where) == ("wrong", number)]
            assert expected in " ".join(said), line

    def test_every_public_name_has_a_type(self, findings):
        types = {lk.__all__[line - 2]: message for script, line, message in findings if script == "names"}
        assert set(types) == set(lk.__all__)
        assert [name for name, message in types.items() if message.endswith('"Any"')] == []
        assert (files("labkit") / "py.typed").is_file()
