"""The page cache: what is evicted is gone, what is read is back."""

import os
import re
import tarfile
from pathlib import Path

import pytest

from labkit import FolderStore, make_photos, open_store
from labkit.course import evict
from labkit.data.blobs import resident_fraction
from labkit.measure.usage import tree_usage


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


def read_from_storage(paths: list[Path]) -> int:
    """Bytes that reading these files takes from the disk, as lk.compare counts them."""
    before = tree_usage().read_bytes
    for path in paths:
        path.read_bytes()
    return tree_usage().read_bytes - before


def test_what_is_evicted_is_gone_and_what_is_read_is_back(disk):
    paths, n_bytes = [disk / f"{size}.bin" for size in (1, 4096, 1_000_001)], 1 + 4096 + 1_000_001
    for path in paths:
        path.write_bytes(os.urandom(int(path.stem)))
    assert resident_fraction(paths) == 1
    assert evict(paths) == n_bytes
    assert resident_fraction(paths) == 0
    assert read_from_storage(paths) >= n_bytes
    assert resident_fraction(paths) == 1
    assert read_from_storage(paths) < n_bytes
    evict(paths[-1:])
    assert 0 < resident_fraction(paths) < 0.1  # the two small files: 2 of 247 pages


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
