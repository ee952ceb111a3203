"""TarStream: members and data in order; what is cut or damaged is an error that names the last whole member."""

import gzip
import io
import os
import tarfile
import zlib

import pytest

from labkit.data.tar.errors import TarError, TarWarning
from labkit.data.tar.stream import TarStream
from tests.tars import make_tar, member, numbered_files

FILE_BYTES = 3 * 512  # of a numbered file: its header and two blocks


def read_all(source, **options) -> dict[str, bytes]:
    with TarStream(source, **options) as stream:
        return {info.name: b"".join(stream.blocks(info)) for info in stream}


@pytest.fixture(params=["seekable", "gzip", "streamed"])
def opened(request, tmp_path):
    """Reads a tar of some bytes: from its path, compressed, or as a stream of which nothing else is known."""

    def read(data: bytes, **options) -> dict[str, bytes]:
        path = tmp_path / "set.tar"
        path.write_bytes(gzip.compress(data) if request.param == "gzip" else data)
        if request.param == "streamed":
            return read_all(io.BufferedReader(io.BytesIO(data)), name=str(path), **options)
        return read_all(path, **options)

    return read


@pytest.fixture
def whole(tmp_path) -> bytes:
    return make_tar(tmp_path / "whole.tar", numbered_files(5)).read_bytes()


def test_members_and_data_in_order(opened, whole):
    assert list(opened(whole).items()) == [(info.name, data) for info, data in numbered_files(5)]


@pytest.mark.parametrize("cut", [3 * FILE_BYTES + 600, 3 * FILE_BYTES + 100, 900])
def test_a_cut_archive_names_its_last_whole_member(opened, whole, cut):
    said = "last whole member is 'photo2.jpg'" if cut > 900 else "no member is whole"
    with pytest.raises(TarError, match=rf"set\.tar is cut or damaged .*{said}"):
        opened(whole[:cut])


def test_a_cut_gzip_names_its_last_whole_member(tmp_path):
    members = [member(f"{n}.bin", os.urandom(1000)) for n in range(100)]
    archive = make_tar(tmp_path / "set.tar.gz", members, "w:gz")
    data = archive.read_bytes()[:50_000]
    archive.write_bytes(data)
    n_whole = len(zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(data)) // FILE_BYTES
    with pytest.raises(TarError, match=r"cut or damaged .*ended before") as failure, TarStream(archive) as stream:
        list(stream)
    assert f"member is '{n_whole - 1}.bin'" in str(failure.value)


def test_a_damaged_header_is_not_the_end(opened, whole):
    damaged = bytearray(whole)
    damaged[2 * FILE_BYTES + 7] ^= 1
    with pytest.raises(TarError, match=r"header at byte 3072.* last whole member is 'photo1.jpg'"):
        opened(damaged)


def test_a_size_beyond_the_end_is_not_waited_for(opened):
    """`tarfile` would go on skipping long after the end."""
    info = tarfile.TarInfo("x")
    info.type, info.size = b"Z", 1 << 50
    with pytest.raises(TarError, match="cut or damaged"):
        opened(info.tobuf(tarfile.GNU_FORMAT) + b"data")


def test_without_an_end_mark(opened, whole):
    with pytest.warns(TarWarning, match=r"set\.tar has no end mark: it may be cut after 'photo4.jpg'"):
        assert len(opened(whole[: 5 * FILE_BYTES])) == 5
    with pytest.raises(TarError, match=r"no end mark\): the last whole member is 'photo4.jpg'"):
        opened(whole[: 5 * FILE_BYTES], needs_end_mark=True)


@pytest.mark.parametrize("data", [b"", b"no tar, but long enough to be one" * 100])
def test_what_is_not_a_tar(opened, data):
    with pytest.raises(TarError, match=r"set\.tar is not a tar, or is cut or damaged .*: no member is whole"):
        opened(data)


class FailingFile(io.BytesIO):
    """A file on a network that goes away."""

    def readinto(self, buffer):
        if self.tell():
            raise ConnectionError("the network is gone")
        return super().readinto(buffer)


def test_a_failing_network_is_not_damage(whole):
    with pytest.raises(ConnectionError, match="the network is gone") as failure:
        read_all(io.BufferedReader(FailingFile(whole), 4096), name="far.tar")
    assert "far.tar" in failure.value.__notes__[0]
