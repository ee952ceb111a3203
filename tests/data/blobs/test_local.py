"""Local files: bytes at offsets, by descriptors that are opened once and closed again."""

import gc
import os
import pickle
import random
from pathlib import Path

import pytest

from labkit.data.blobs.local import LocalBlob

DATA = random.Random(0).randbytes(100_000)


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "a.bin"
    path.write_bytes(DATA)
    return path


def test_reads_that_come_in_pieces(path, monkeypatch):
    """As from a network disk, or for more than 2 GB."""
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, size, offset: pread(descriptor, min(size, 700), offset))
    assert LocalBlob(path).read_at(100, 50_000) == DATA[100:50_100]
    assert LocalBlob(path).read_at(99_000, 5000) == DATA[99_000:]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_files_are_closed_with_their_blobs(path):
    before = descriptors()
    gc.disable()  # references must do: a collection may be long in coming
    try:
        for _ in range(50):
            blob = LocalBlob(path)
            blob.read_at(0, 1)
            again = pickle.loads(pickle.dumps(blob))
            again.read_at(0, 1)
        assert descriptors() <= before + 2
    finally:
        gc.enable()


def test_a_file_is_opened_once_and_lazily(path, monkeypatch):
    before = descriptors()
    blob = LocalBlob(path)
    blob.fingerprint()
    assert descriptors() == before
    for offset in range(10):
        blob.read_at(offset, 5)
    assert descriptors() == before + 1
