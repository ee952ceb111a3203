"""labkit without its extras: what runs with torch alone, and what the rest says is missing."""

import re
import sys

import pytest

import labkit as lk
from labkit import course
from labkit.app.cli import COMMANDS
from labkit.errors import MissingLibraryError
from tests.hardening.base import REPO, check, run

# Every process of a test hides what is installed, but for torch with what it needs: NumPy, it does without.
HIDING = """
import sys
from importlib.machinery import PathFinder

SHOWN = {"torch", "torchgen", "functorch", "filelock", "typing_extensions", "sympy", "mpmath", "networkx", "jinja2",
         "markupsafe", "fsspec", "setuptools", "_distutils_hack", "triton", "nvidia", "cuda"} - %r


class Shown(PathFinder):
    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target)
        places = [spec.origin or "", *(spec.submodule_search_locations or ())] if spec else []
        is_hidden = name not in SHOWN and path is None and any("site-packages" in place for place in places)
        return None if is_hidden else spec


sys.meta_path[sys.meta_path.index(PathFinder)] = Shown
"""
BASE = {"list", "doctor", "watch", "diff"}
ARGUMENTS = {"diagnose": ["train:make"], "convert": ["--to", "tiles", "photos", "tiles"], "site": ["pages"]}
NAMES = """
import labkit as lk
for name in lk.__all__:
    try:
        getattr(lk, name)
    except lk.LabkitError as error:
        print(name, isinstance(error, ImportError), error, sep="|")
"""


@pytest.fixture
def hidden(tmp_path):
    """`hidden(*names)`: variables of an environment without libraries, nor those of torch's that are named."""

    def hide(*names):
        folder = tmp_path / "-".join(["hiding", *names])
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(HIDING % set(names))
        return {"PYTHONPATH": f"{folder}:{REPO}"}

    return hide


@pytest.mark.exhaustive
def test_watching_needs_torch_alone(tmp_path, hidden):
    assert "'numpy'" in run(tmp_path, "-c", "import numpy", **hidden("sympy")).stderr
    check(tmp_path, **hidden())


def test_a_name_whose_library_is_missing_names_its_extra(tmp_path, hidden):
    done = run(tmp_path, "-c", NAMES, **hidden())
    told = {line.partition("|")[0]: line for line in done.stdout.splitlines()}
    assert {"BatchLoader", "compare", "diagnose", "plot_speedup"} <= set(told), done.stderr
    assert {"watch", "plan", "LabkitError", "usable_cores"} & set(told) == set()
    assert set(told) <= set(lk.__all__)
    for name, line in told.items():
        extra = "lab" if name in ("plot_speedup", "plot_stalls", "make_photos") else "loaders"
        assert f"|True|lk.{name} needs " in line
        assert f", of the extra '{extra}': python -m pip install " in line


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - BASE))
def test_a_command_whose_library_is_missing_names_its_extra(tmp_path, hidden, command):
    done = run(tmp_path, "-m", "labkit", command, *ARGUMENTS.get(command, []), **hidden())
    assert done.returncode == 2, done.stderr
    install = rf"python -m pip install -e \"{re.escape(str(REPO))}\[\w+\]\""
    said = rf"labkit: labkit {command} needs [\w, ]+(, of the extra '(\w+)')?: {install}\n"
    assert re.fullmatch(said, done.stderr), done.stderr


@pytest.mark.parametrize("command", ["watch train.py", "doctor"])
def test_without_torch_one_sentence_says_so(tmp_path, hidden, command):
    (tmp_path / "train.py").touch()
    done = run(tmp_path, "-m", "labkit", *command.split(), **hidden("torch"))
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"labkit: labkit \w+ needs PyTorch, which .* does not have: start labkit by .*\n", done.stderr)


@pytest.mark.parametrize(
    ("library", "what", "call"),
    [
        ("skimage", "lk.make_photos", lambda folder: lk.make_photos(folder, 2, progress=False)),
        ("skimage", "course.make_depth", lambda folder: course.make_depth(folder, 1, progress=False)),
        ("kornia", "lk.make_augment(library='kornia')", lambda folder: lk.make_augment("light", "kornia")),
        (
            "albumentations", "lk.make_augment(library='albumentations')",
            lambda folder: lk.make_augment("light", "albumentations"),
        ),
    ],
)  # fmt: skip
def test_a_library_that_is_imported_late_names_its_extra_as_well(tmp_path, monkeypatch, library, what, call):
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingLibraryError, match=rf"{re.escape(what)} needs {library}.*, of the extra 'lab': "):
        call(tmp_path / "made")
