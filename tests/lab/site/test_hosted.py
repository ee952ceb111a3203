"""How a page says to run its notebook on a hosted GPU, with an address of the project and without."""

import re
from email.message import Message
from importlib.metadata import PackageNotFoundError

import pytest

from labkit.core import DISTRIBUTION
from labkit.lab.site import hosted
from tests.paths import REPO


@pytest.fixture
def urls(monkeypatch):
    """Sets the `[project.urls]` of the installed package."""

    def set_urls(*entries):
        about = Message()
        for entry in entries:
            about["Project-URL"] = entry
        monkeypatch.setattr(hosted, "metadata", lambda name: about)

    return set_urls


@pytest.mark.parametrize(
    ("entries", "address"),
    [
        ([], None),
        (["Homepage, https://example.org"], None),
        (["Homepage, https://example.org", "Repository, https://github.com/x/y"], "https://github.com/x/y"),
        (["repository, https://github.com/x/y.git"], "https://github.com/x/y"),
        (["Repository, https://github.com/x/y/"], "https://github.com/x/y"),
    ],
)
def test_the_address_comes_from_the_metadata(urls, entries, address):
    urls(*entries)
    assert hosted.repository() == address


def test_without_metadata_there_is_no_address(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(hosted, "metadata", missing)
    assert hosted.repository() is None


def test_with_an_address_the_note_opens_the_notebook_there():
    note = hosted.hosted_note("02_read_image", "https://github.com/x/y")
    assert "https://colab.research.google.com/github/x/y/blob/main/notebooks/02_read_image.ipynb" in note
    assert f'!pip install "{DISTRIBUTION}[fast] @ git+https://github.com/x/y"' in note
    assert "wheel" not in note


@pytest.mark.parametrize("address", [None, "https://example.org/x/y", "https://github.com/x"])
def test_without_one_that_colab_opens_the_note_says_how_to_upload(address):
    note = hosted.hosted_note("02_read_image", address)
    assert "python -m pip wheel --no-deps ." in note
    assert "!pip install labkit_images-*.whl" in note
    assert "labkit tour --only 02 --scale gpu" in note
    assert "colab.research.google.com/github" not in note


def test_the_notebooks_themselves_have_no_install_cell():
    for path in (REPO / "notebooks").glob("*.ipynb"):
        assert not re.search(r"[!%]pip\b", path.read_text()), path
