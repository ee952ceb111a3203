"""Stores: every image under its key, nothing else, in any process; and the page cache under them."""

import multiprocessing
import os
import pickle
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest

from labkit import FolderStore, Store, evict, make_photos, open_store, resident_fraction
from labkit.core import IMAGE_SUFFIXES
from labkit.measure.processes import tree_usage

IMAGES = (
    "top.jpg",
    "cat/a.jpeg",
    "cat/B.JPG",
    "cat/deeper/still/c.png",
    "dog/d.WebP",
    "dog/two words.jpg",
    "dog/[1] *?.jpg",
    "dog/line\nbreak.jpg",
    "dog/..dots...jpg",
    "dog/back\\slash.jpg",
    "Größe/日本.jpg",
    "cat.jpg/inside a folder with a suffix.jpg",
)
OTHERS = ("notes.txt", "cat/.hidden.jpg", ".cache/e.jpg", "cat/jpg", "dog/d.jpg.partial", "dog/f.gif")


@pytest.fixture
def root(tmp_path) -> Path:
    for number, name in enumerate((*IMAGES, *OTHERS)):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([number]) * (number + 1))
    (tmp_path / "empty").mkdir()
    return tmp_path


def by_pathlib(root: Path) -> list[str]:
    """The oracle: every image file with no hidden part in its path."""
    found = [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
    shown = [path for path in found if not any(part.startswith(".") for part in path.parts)]
    return sorted(path.as_posix() for path in shown if path.suffix.lower() in IMAGE_SUFFIXES)


def test_keys_are_those_of_pathlib(root):
    # A file whose name begins with a dot is hidden, whatever follows.
    expected = sorted(set(IMAGES) - {"dog/..dots...jpg"})
    assert FolderStore(root).keys() == by_pathlib(root) == expected
    assert len(FolderStore(root)) == len(expected)


def test_read_gives_the_files_bytes(root):
    store = FolderStore(root)
    for key, path in zip(store.keys(), store.paths(), strict=True):
        assert store.read(key) == path.read_bytes() == (root / key).read_bytes()


def test_the_folder_is_listed_once(root):
    store = FolderStore(root)
    keys = list(store.keys())
    (root / "later.jpg").write_bytes(b"")
    assert store.keys() == keys


@pytest.mark.parametrize("key", ["no.jpg", "cat/no.jpg", "no/a.jpg", "top.jpg/a.jpg", "cat", "", "nul\0.jpg"])
def test_a_missing_key_is_named(root, key):
    with pytest.raises(KeyError) as failure:
        FolderStore(root).read(key)
    assert repr(key) in failure.value.args[0]


@pytest.mark.parametrize("key", ["../secret.jpg", "cat/../../secret.jpg", "cat/..", "ABSOLUTE"])
def test_keys_do_not_leave_the_folder(root, key):
    (root / "secret.jpg").write_bytes(b"secret")
    key = str(root / "secret.jpg") if key == "ABSOLUTE" else key
    with pytest.raises(KeyError) as failure:
        FolderStore(root / "dog").read(key)
    assert repr(key) in failure.value.args[0]


def test_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="make_photos") as failure:
        FolderStore(tmp_path / "no")
    assert str(tmp_path / "no") in str(failure.value)


def test_folder_without_images(root):
    with pytest.raises(FileNotFoundError, match=r"no image .*\.jpg") as failure:
        FolderStore(root / "empty").keys()
    assert str(root / "empty") in str(failure.value)


@pytest.mark.parametrize("listed", [False, True])
def test_pickling(root, listed):
    store = FolderStore(root)
    if listed:
        store.keys()
    again = pickle.loads(pickle.dumps(store))
    assert again.keys() == store.keys()
    assert again.read("top.jpg") == store.read("top.jpg")


def test_reading_in_a_spawned_process(root):
    store = FolderStore(root)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(store.read, store.keys()) == [path.read_bytes() for path in store.paths()]


def test_sizes(root):
    sizes = FolderStore(root).sizes()
    assert sizes.dtype == np.int64
    assert sizes.tolist() == [len(path.read_bytes()) for path in FolderStore(root).paths()]


def test_what_a_read_touches(root):
    """One file to open, and its bytes; the first read is as all others."""
    for first in (True, False):
        (extent,) = FolderStore(root).extents("cat/a.jpeg", first)
        assert extent == (str(root / "cat/a.jpeg"), 0, len((root / "cat/a.jpeg").read_bytes()), True)


@pytest.mark.parametrize("key", ["../secret.jpg", "/etc/passwd", "cat/../../secret.jpg"])
def test_no_extent_leaves_the_folder(root, key):
    with pytest.raises(KeyError, match="is outside"):
        list(FolderStore(root).extents(key, first=True))


def test_a_folder_store_is_a_store(root):
    assert isinstance(FolderStore(root), Store)
    assert not isinstance({}, Store)


def test_open_store(root):
    store = open_store(str(root))
    assert isinstance(store, FolderStore)
    assert store.keys() == FolderStore(root).keys()


@pytest.mark.parametrize("place", ["no/such/place", "top.jpg", "gopher://photos"])
def test_open_store_says_what_it_cannot_read(root, monkeypatch, place):
    monkeypatch.chdir(root)
    with pytest.raises(ValueError, match="is not a folder of images") as failure:
        open_store(place)
    assert place in str(failure.value)


def bytes_read_from_storage() -> int:
    return int(re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)[1])


@pytest.fixture
def disk(tmp_path) -> Path:
    """A folder whose files the kernel drops from its cache when asked by hand, and whose reads it counts."""
    probe = tmp_path / "probe"
    try:
        with open(probe, "wb") as file:
            file.write(os.urandom(100_000))
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before = bytes_read_from_storage()
        probe.read_bytes()
        read = bytes_read_from_storage() - before
    except (OSError, AttributeError) as error:
        pytest.skip(f"this system cannot evict files or count what is read from storage: {error}")
    if read < 100_000:
        pytest.skip(f"the kernel kept an evicted file of {tmp_path}: a tmpfs?")
    return tmp_path


@pytest.fixture
def evicted(disk) -> list[Path]:
    """Files of a few sizes, out of the page cache."""
    paths = [disk / f"{size}.bin" for size in (1, 4096, 1_000_001)]
    for path in paths:
        path.write_bytes(os.urandom(int(path.stem)))
    assert resident_fraction(paths) == 1
    assert evict(paths) == 1 + 4096 + 1_000_001
    return paths


def test_what_is_evicted_is_not_resident(evicted):
    assert resident_fraction(evicted) == 0


def test_what_is_read_is_resident(evicted):
    for path in evicted:
        path.read_bytes()
    assert resident_fraction(evicted) == 1
    evict(evicted[-1:])
    assert 0 < resident_fraction(evicted) < 0.1  # the two small files: 2 of 247 pages


def test_cold_reads_are_counted_warm_reads_are_not(evicted):
    before = tree_usage().read_bytes
    read = sum(len(path.read_bytes()) for path in evicted)
    cold = tree_usage().read_bytes - before
    assert cold >= read
    for path in evicted:
        path.read_bytes()
    assert tree_usage().read_bytes - before - cold < read


def test_empty_files_have_no_pages(tmp_path):
    (tmp_path / "empty").touch()
    assert resident_fraction([tmp_path / "empty"]) == 0
    assert resident_fraction([]) == 0


def test_stores_evict_what_they_read(disk):
    folder = make_photos(disk / "photos", 4)
    with tarfile.open(disk / "photos.tar", "w") as tar:
        tar.add(folder, arcname=".")
    for store, files in (
        (FolderStore(folder), FolderStore(folder).paths()),
        (open_store(disk / "photos.tar"), [disk / "photos.tar"]),
    ):
        assert all(map(store.read, store.keys()))
        assert resident_fraction(files) > 0.5
        assert store.evict() == sum(path.stat().st_size for path in files)
        assert resident_fraction(files) < 0.1
