"""module:function, as a command line names a training."""

import re
import sys

import pytest

from labkit.errors import CannotDiagnose
from labkit.watching.diagnose import made_training, named_function

SCRIPT = """
import sys
from os.path import join

seen = list(sys.argv)
LOADER, number = [1, 2], 3

def make(): return LOADER, len
def as_list(): return [LOADER, len]
def wants(size): return LOADER, len
def three(): return LOADER, len, 3
def no_step(): return LOADER, 3
def no_loader(): return 3, len
def nothing(): return None
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A script in the current folder, which is not on the path yet; beside another one of its name."""
    name = "training_of_a_test"
    monkeypatch.setattr(sys, "path", [str(tmp_path / "elsewhere"), *(place for place in sys.path if place)])
    monkeypatch.setattr(sys, "argv", ["labkit"])
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / f"{name}.py").write_text("raise SystemExit('the wrong one')")
    (tmp_path / f"{name}.py").write_text(SCRIPT)
    (tmp_path / "empty_one.py").write_text("")
    (tmp_path / "lacking.py").write_text("import not_there_at_all")
    monkeypatch.chdir(tmp_path)
    yield name
    for loaded in (name, "empty_one"):
        sys.modules.pop(loaded, None)


def test_the_script_of_the_current_folder_comes_first_and_finds_its_arguments(script, tmp_path):
    assert made_training(f"{script}:make", ["--size", "3"]) == ([1, 2], len)
    assert sys.modules[script].seen == [script, "--size", "3"]
    assert sys.path[0] == str(tmp_path)
    assert made_training(f"{script}:as_list") == ([1, 2], len)
    assert sys.path.count(str(tmp_path)) == 1


def test_a_function_of_a_package():
    assert named_function("os.path:join") is sys.modules["os.path"].join


FORM = ": write module:function, such as train:make_training for train.py in this folder"
NO_MODULE = "there is no module {} here ({}) and none is installed"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        *((name, f"{name!r}{FORM}") for name in ("make", ":make", "train:", "train.py:make", "")),
        (".train:make", "'.train:make': name the module from the current folder, without a leading dot"),
        *((f"{name}:make", NO_MODULE.format(name, "{}")) for name in ("not_there", "labkit.no", "not_there.at_all")),
    ],
)
def test_names_that_name_nothing(name, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CannotDiagnose, match=f"^{re.escape(says.format(tmp_path))}$"):
        named_function(name)


def test_what_the_script_lacks_is_its_own_error(script):
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        named_function("lacking:make")


def test_no_such_function_and_which_there_are(script):
    own = "as_list, make, no_loader, no_step, nothing, three, wants"  # neither imported ones nor other values
    for name in ("other", "number", "make:as_list"):
        with pytest.raises(CannotDiagnose, match=f"^{script} has no function {name}; it has {own}$"):
            named_function(f"{script}:{name}")
    with pytest.raises(CannotDiagnose, match=r"it has none$"):
        named_function("empty_one:make")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("wants", "missing a required argument: 'size'; it must work without arguments"),
        ("three", " gave list, builtin_function_or_method, int: return loader, step, where step(batch) trains"),
        ("no_step", " gave list, int: return loader, step"),
        ("no_loader", " gave int, builtin_function_or_method: return loader, step"),
        ("nothing", " gave NoneType: return loader, step"),
    ],
)
def test_what_is_no_training(script, function, says):
    with pytest.raises(CannotDiagnose, match=f"^{script}:{function}.*{re.escape(says)}"):
        made_training(f"{script}:{function}")
