"""Each public name has an example, and the examples run."""

import doctest
import os
import tarfile

import pytest
import torch

import labkit as lk

_NEEDS_A_SERVER = {"HttpStore", "ObjectStore"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with what the examples name."""
    folder, before = tmp_path_factory.mktemp("examples"), os.getcwd()
    os.chdir(folder)
    lk.make_photos("photos", 8, progress=False)
    lk.PixelStore.build("photos", "photos.pixels", progress=False)
    with tarfile.open("photos.tar", "w") as tar:
        tar.add("photos", "photos")
    yield folder
    os.chdir(before)


def _examples(name):
    finder = doctest.DocTestFinder(recurse=True)
    found = finder.find(getattr(lk, name), name, module=False, globs={"lk": lk, "torch": torch})
    return [test for test in found if test.examples]


NAMES = [name for name in lk.__all__ if callable(getattr(lk, name))]


@pytest.mark.parametrize("name", NAMES)
def test_each_public_name_has_an_example(name):
    assert _examples(name) or "::\n" in getattr(lk, name).__doc__


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in NAMES if name not in _NEEDS_A_SERVER and _examples(name)])
def test_examples_run(place, name):
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    said = []
    for test in _examples(name):
        runner.run(test, out=said.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)
