"""A folder of images: each under its key, nothing else."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from labkit import FolderStore
from labkit.data.stores import Store
from labkit.util.files import IMAGE_SUFFIXES
from tests.image_files import KEYS


def by_pathlib(root: Path) -> list[str]:
    """The oracle: every image file with no hidden part in its path."""
    found = [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
    kept_by_systems = {"@eaDir", "#recycle", "$RECYCLE.BIN", "__MACOSX"}
    shown = [path for path in found if not any(part[0] == "." or part in kept_by_systems for part in path.parts)]
    return sorted(path.as_posix() for path in shown if path.suffix.lower() in IMAGE_SUFFIXES)


def test_a_folder_gives_what_pathlib_finds(image_folder):
    store = FolderStore(image_folder)
    assert store.keys() == by_pathlib(image_folder) == sorted(KEYS)
    assert store.paths() == [image_folder / key for key in store.keys()]  # noqa: SIM118
    contents = [path.read_bytes() for path in store.paths()]
    assert list(map(store.read, store.keys())) == contents
    assert store.sizes().tolist() == list(map(len, contents))
    assert store.sizes().dtype == np.int64
    assert len(store) == len(KEYS)
    assert isinstance(store, Store)
    assert not isinstance({}, Store)


def test_the_folder_is_listed_once(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"")
    store = FolderStore(tmp_path)
    assert store.keys() == ["a.jpg"]
    (tmp_path / "later.jpg").write_bytes(b"")
    assert store.keys() == ["a.jpg"]


@pytest.mark.parametrize("key", ["no.jpg", "cat/no.jpg", "no/a.jpg", "top.jpg/a.jpg", "cat", "", "nul\0.jpg"])
def test_a_missing_key_is_named(image_folder, key):
    with pytest.raises(KeyError) as failure:
        FolderStore(image_folder).read(key)
    assert repr(key) in failure.value.args[0]


@pytest.mark.parametrize("key", ["../top.jpg", "deeper/../../top.jpg", "deeper/..", "/etc/passwd", "ABSOLUTE"])
def test_keys_do_not_leave_the_folder(image_folder, key):
    key = str(image_folder / "top.jpg") if key == "ABSOLUTE" else key
    with pytest.raises(KeyError) as failure:
        FolderStore(image_folder / "cat").read(key)
    assert repr(key) in failure.value.args[0]
    with pytest.raises(KeyError, match="is outside"):
        list(FolderStore(image_folder / "cat").extents(key, first=True))


def test_missing_folders_and_images(tmp_path):
    for root, said in (
        (tmp_path / "no", r"no is not a folder \(looked for in .*make_photos"),
        (tmp_path, r"holds no image .*\.jpg"),
    ):
        with pytest.raises(FileNotFoundError, match=said) as failure:
            FolderStore(root).keys()
        assert str(root) in str(failure.value)


@pytest.mark.parametrize("listed", [False, True])
def test_pickling(image_folder, listed):
    store = FolderStore(image_folder)
    if listed:
        store.keys()
    again = pickle.loads(pickle.dumps(store))
    assert again.keys() == store.keys()
    assert again.read("top.jpg") == store.read("top.jpg")


def test_what_a_read_touches(image_folder):
    """One file to open, and its bytes; the first read is as all others."""
    for first in (True, False):
        (extent,) = FolderStore(image_folder).extents("cat/a.jpeg", first)
        assert extent == (str(image_folder / "cat/a.jpeg"), 0, len((image_folder / "cat/a.jpeg").read_bytes()), True)
