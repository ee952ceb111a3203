"""Blobs of every kind: the same bytes, and a fingerprint that changes with them; descriptors are closed again."""

import gc
import io
import os
import pickle
import random
import uuid
from pathlib import Path

import fsspec
import pytest

from labkit import TarStore, open_store
from labkit.data.blobs import Blob, LocalBlob, is_url, open_blob, open_buffered

DATA = random.Random(0).randbytes(100_000)


@pytest.fixture
def path(tmp_path) -> Path:
    (tmp_path / "a.bin").write_bytes(DATA)
    return tmp_path / "a.bin"


def put_data_in_memory(path: Path) -> Blob:
    url = f"memory://{uuid.uuid4()}/a.bin"
    fsspec.filesystem("memory").pipe_file(url, DATA)
    return open_blob(url)


def rewrite(path: Path, blob: Blob) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000_000))
    if blob.name.startswith("memory://"):
        fsspec.filesystem("memory").pipe_file(blob.name, DATA[::-1])


KINDS = {"path": open_blob, "file://": lambda path: open_blob(f"file://{path}"), "memory://": put_data_in_memory}


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_at_offsets_and_a_fingerprint_that_changes(path, kind):
    blob, own = KINDS[kind](path), random.Random(1)
    for _ in range(50):
        offset, size = own.randrange(len(DATA)), own.choice([0, 1, 512, 5000, 200_000])
        assert blob.read_at(offset, size) == DATA[offset : offset + size]
    assert blob.read_at(len(DATA) - 1, 10) == DATA[-1:]
    before = blob.fingerprint()
    assert before == open_blob(blob.name).fingerprint()
    assert before[1]
    rewrite(path, blob)
    assert blob.fingerprint()[0] == before[0] == len(DATA)
    assert blob.fingerprint()[1] != before[1]


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


def test_reads_that_come_in_pieces(path, monkeypatch):
    """As from a network disk, or for more than 2 GB."""
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, size, offset: pread(descriptor, min(size, 700), offset))
    assert LocalBlob(path).read_at(100, 50_000) == DATA[100:50_100]
    assert LocalBlob(path).read_at(99_000, 5000) == DATA[99_000:]


def test_files_are_closed_with_their_blobs(path, n_open_files):
    before = n_open_files()
    gc.disable()  # references must do: a collection may be long in coming
    try:
        for _ in range(50):
            blob = LocalBlob(path)
            blob.read_at(0, 1)
            again = pickle.loads(pickle.dumps(blob))
            again.read_at(0, 1)
        assert n_open_files() <= before + 2
    finally:
        gc.enable()


def test_a_file_is_opened_once_and_lazily(path, n_open_files):
    before = n_open_files()
    blob = LocalBlob(path)
    blob.fingerprint()
    assert n_open_files() == before
    for offset in range(10):
        blob.read_at(offset, 5)
    assert n_open_files() == before + 1


class Memory:
    """A blob in memory that lists what is asked of it."""

    def __init__(self):
        self.asked: list[tuple[int, int]] = []

    def fingerprint(self) -> tuple[int, str]:
        return len(DATA), "1"

    def read_at(self, offset: int, size: int) -> bytes:
        self.asked.append((offset, size))
        return DATA[offset : offset + size]


def test_a_remote_file_is_a_file():
    file, oracle, own = open_buffered(Memory()), io.BytesIO(DATA), random.Random(2)
    for _ in range(300):
        if own.random() < 0.5:
            place = own.choice([(own.randrange(120_000), 0), (-own.randrange(len(DATA)), 2)])
            assert file.seek(*place) == oracle.seek(*place)
        size = own.choice([0, 1, 512, 9000, -1])
        assert file.read(size) == oracle.read(size)
        assert file.tell() == oracle.tell()
    assert file.seek(10) + 5 == file.seek(5, io.SEEK_CUR) == 15


def test_a_remote_file_asks_for_much_at_a_time():
    blob = Memory()
    file = open_buffered(blob)
    for offset in range(0, len(DATA), 512):
        file.seek(offset)
        file.read(512)
    assert blob.asked == [(0, len(DATA))]
