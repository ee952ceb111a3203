"""An error of the system or of memory is told as what it is, with the file's name: the tar may well be whole."""

import bz2
import errno
import gzip
import io
import lzma
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import labkit as lk
from labkit.data.tar_stream import convert_tar
from labkit.errors import ItemErrors
from tests.tars import make_tar, member

PACKERS = {"": bytes, ".gz": lambda data: gzip.compress(data, 0), ".bz2": bz2.compress, ".xz": lzma.compress}
STORES = {
    "TarStore": lambda path: lk.TarStore(path).keys(),
}
STREAMS = {
    "read_shards": lambda path: list(lk.read_shards(path).samples()),
    "counted": lambda path: list(lk.read_shards(path, samples_per_rank=1).samples()),
    "extract_tars": lambda path: lk.extract_tars(path, path.parent / "out", progress=False),
}


def convert(path: Path) -> None:
    convert_tar(path, path.parent / "plain.tar", progress=False)


def refusal(read, path: Path) -> str:
    with pytest.raises((OSError, MemoryError, ItemErrors)) as failure:
        read(path)
    text = "".join([str(failure.value), *getattr(failure.value, "failures", {}).values()])
    assert str(path) in text
    assert "damaged" not in text
    assert "download" not in text
    assert not isinstance(failure.value, OSError) or failure.value.errno == errno.EIO
    return text


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="a file whose first byte cannot be read")
@pytest.mark.parametrize("read", {**STORES, **STREAMS, "convert": convert}.values(), ids=[*STORES, *STREAMS, "convert"])
def test_a_file_that_the_disk_does_not_give(tmp_path, read):
    path = tmp_path / "set.tar"
    path.symlink_to("/proc/self/mem")
    assert "Input/output error" in refusal(read, path)


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """Makes a tar, and every read of it beyond its middle raise an error."""

    def make(suffix: str, error: Callable[[], BaseException]) -> Path:
        path = tmp_path / f"set.tar{suffix}"
        plain = make_tar(tmp_path / "plain", [member(f"{n}.bin", os.urandom(200_000)) for n in range(8)]).read_bytes()
        path.write_bytes(PACKERS[suffix](plain))
        (tmp_path / "plain").unlink()
        middle, real = path.stat().st_size // 2, open

        class Failing(io.FileIO):
            def read(self, size=-1):
                if self.tell() > middle:
                    raise error()
                return super().read(size)

            def readinto(self, buffer):
                data = self.read(len(buffer))
                buffer[: len(data)] = data
                return len(data)

        def open_failing(file, mode="r", buffering=-1, **options):
            if file not in (path, str(path)):
                return real(file, mode, buffering, **options)
            return Failing(file, mode) if buffering == 0 else io.BufferedReader(Failing(file, mode))

        monkeypatch.setattr("builtins.open", open_failing)
        monkeypatch.setattr("io.FileIO", Failing)
        return path

    return make


ERRORS = [partial(OSError, errno.EIO, "Input/output error")]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("read", STREAMS.values(), ids=STREAMS)
def test_an_error_in_the_middle_of_a_tar(failing, read, suffix, error):
    text = refusal(read, failing(suffix, error))
    assert "Input/output error" in text or "memory" in text


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
def test_an_error_while_a_tar_is_converted(failing, suffix, error, tmp_path):
    text = refusal(convert, failing(suffix, error))
    assert "Input/output error" in text or "memory" in text
    assert not (tmp_path / "plain.tar").exists()


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_while_the_headers_are_listed(failing, error):
    text = refusal(STORES["TarStore"], failing("", error))
    assert "Input/output error" in text or "memory" in text


@pytest.mark.parametrize("error", ERRORS)
def test_too_little_memory_for_a_long_header_and_an_error_of_the_disk_there(tmp_path, monkeypatch, error):
    """A header that `tarfile` reads."""
    path = make_tar(tmp_path / "set.tar", {"0.bin": b"first", "long" * 50: b"second"})

    def fail(*arguments):
        raise error()

    monkeypatch.setattr("tarfile.TarInfo._proc_pax", fail)
    monkeypatch.setattr("tarfile.TarInfo._proc_gnulong", fail)
    for read in (STORES["TarStore"], STREAMS["extract_tars"]):
        refusal(read, path)


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_while_one_image_is_read(tmp_path, monkeypatch, error):
    path = make_tar(tmp_path / "set.tar", {"0.bin": b"first", "1.bin": b"second"})
    store = lk.TarStore(path)
    assert store.read("0.bin") == b"first"

    def fail(*arguments):
        raise error()

    monkeypatch.setattr(os, "pread", fail)
    refusal(lambda path: store.read("1.bin"), path)
