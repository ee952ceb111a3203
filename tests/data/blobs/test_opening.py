"""Blobs of every kind: the same bytes, and a fingerprint that changes with them."""

import os
import random
import uuid
from pathlib import Path

import fsspec
import pytest

from labkit import TarStore, open_store
from labkit.data.blobs.base import Blob
from labkit.data.blobs.opening import is_url, open_blob

DATA = random.Random(0).randbytes(100_000)


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "a.bin"
    path.write_bytes(DATA)
    return path


def put_data_in_memory(path: Path) -> Blob:
    url = f"memory://{uuid.uuid4()}/a.bin"
    fsspec.filesystem("memory").pipe_file(url, DATA)
    return open_blob(url)


KINDS = {"path": open_blob, "file://": lambda path: open_blob(f"file://{path}"), "memory://": put_data_in_memory}


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_at_offsets(path, kind):
    blob, own = KINDS[kind](path), random.Random(1)
    for _ in range(50):
        offset, size = own.randrange(len(DATA)), own.choice([0, 1, 512, 5000, 200_000])
        assert blob.read_at(offset, size) == DATA[offset : offset + size]
    assert blob.read_at(len(DATA) - 1, 10) == DATA[-1:]
    assert blob.fingerprint()[0] == len(DATA)
    assert blob.fingerprint() == KINDS[kind](path).fingerprint() or kind == "memory://"


def test_the_fingerprint_changes_with_the_contents(path):
    for blob in (open_blob(path), open_blob(f"file://{path}")):
        before = blob.fingerprint()
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000_000))
        assert blob.fingerprint()[0] == before[0]
        assert blob.fingerprint()[1] != before[1]


def test_the_fingerprint_of_an_object_in_memory_changes(path):
    blob = put_data_in_memory(path)
    before = blob.fingerprint()
    assert before[1]
    filesystem, place = blob._client._filesystem()
    filesystem.pipe_file(place, DATA[::-1])
    assert blob.fingerprint() != before


@pytest.mark.parametrize("place", ["no.bin", "file:///no/no.bin", "memory://no/no.bin"])
def test_missing_files(place):
    with pytest.raises(FileNotFoundError, match=r"no\.bin"):
        open_blob(place).fingerprint()


@pytest.mark.parametrize("place", ["a.tar", "http://127.0.0.1:1/a.tar"])
@pytest.mark.parametrize("opened", [TarStore, open_store])
def test_options_that_nobody_takes_are_an_error(place, opened):
    with pytest.raises(TypeError, match="mod: only object storage takes options"):
        opened(place, mod="tarfile")


@pytest.mark.parametrize(
    ("place", "expected"),
    [("http://a/b", True), ("s3://a", True), ("file:///a", True), ("a/b", False), ("C:/a", False), (Path("a"), False)],
)
def test_what_is_a_url(place, expected):
    assert is_url(place) is expected
