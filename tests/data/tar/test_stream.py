"""TarStream: members and data in order; what is cut or damaged is an error that names the last whole member.

convert: the very tar that was compressed, whole or not at all.
"""

import bz2
import gzip
import io
import lzma
import os
import subprocess
import sys
import tarfile
import time
import zlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from labkit.app.cli import app
from labkit.data.tar_stream import TarStream, TarWarning, convert_tar
from labkit.errors import TarError
from tests.tars import make_tar, member, numbered_files

FILE_BYTES = 3 * 512  # of a numbered file: its header and two blocks


def tar_bytes(members) -> bytes:
    buffer = io.BytesIO()
    make_tar(None, members, fileobj=buffer)
    return buffer.getvalue()


WHOLE = tar_bytes(numbered_files(5))


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


def test_members_and_data_in_order(opened):
    assert list(opened(WHOLE).items()) == [(info.name, data) for info, data in numbered_files(5)]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (WHOLE[: 3 * FILE_BYTES + 600], "is cut or damaged .*last whole member is 'photo2.jpg'"),
        (WHOLE[: 3 * FILE_BYTES + 100], "is cut or damaged .*last whole member is 'photo2.jpg'"),
        (WHOLE[:900], "is cut or damaged .*no member is whole"),
        (WHOLE[: 2 * FILE_BYTES] + b"q" + WHOLE[2 * FILE_BYTES + 1 :], "header at byte 3072.* member is 'photo1.jpg'"),
        # A size beyond the end: `tarfile` would go on skipping long after it.
        (member("x", kind=b"Z", size=1 << 50)[0].tobuf(tarfile.GNU_FORMAT) + b"data", "is cut or damaged"),
        (b"", "is not a tar, or is cut or damaged .*: no member is whole"),
        (b"no tar, but long enough to be one" * 100, "is not a tar, or is cut or damaged .*: no member is whole"),
    ],
)
def test_what_is_not_a_whole_tar(opened, data, said):
    with pytest.raises(TarError, match=rf"set\.tar {said}" if said.startswith("is ") else said):
        opened(data)


def test_a_cut_gzip_names_its_last_whole_member(tmp_path):
    members = [member(f"{n}.bin", os.urandom(1000)) for n in range(100)]
    archive = make_tar(tmp_path / "set.tar.gz", members, "w:gz")
    data = archive.read_bytes()[:50_000]
    archive.write_bytes(data)
    n_whole = len(zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(data)) // FILE_BYTES
    with pytest.raises(TarError, match=r"cut or damaged .*ended before") as failure, TarStream(archive) as stream:
        list(stream)
    assert f"member is '{n_whole - 1}.bin'" in str(failure.value)


def test_without_an_end_mark(opened, request):
    if request.node.callspec.id != "gzip":  # a compressed one needs it in any case
        with pytest.warns(TarWarning, match=r"set\.tar has no end mark: it may be cut after 'photo4.jpg'"):
            assert len(opened(WHOLE[: 5 * FILE_BYTES])) == 5
    with pytest.raises(TarError, match=r"no end mark\): the last whole member is 'photo4.jpg'"):
        opened(WHOLE[: 5 * FILE_BYTES], needs_end_mark=True)


class FailingFile(io.BytesIO):
    """A file on a network that goes away."""

    def readinto(self, buffer):
        if self.tell():
            raise ConnectionError("the network is gone")
        return super().readinto(buffer)


def test_a_failing_network_is_not_damage():
    with pytest.raises(ConnectionError, match="the network is gone") as failure:
        read_all(io.BufferedReader(FailingFile(WHOLE), 4096), name="far.tar")
    assert "far.tar" in failure.value.__notes__[0]


# convert.

COMPRESSORS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


def plain_tar(count: int = 5, size: int = 700) -> bytes:
    return tar_bytes(member(f"./a/{n}.jpg", os.urandom(size + n)) for n in range(count))


def several_streams(data: bytes) -> bytes:
    """As pigz and bgzip write them."""
    return gzip.compress(data[:2000]) + gzip.compress(data[2000:])


@pytest.mark.parametrize("compress", [*COMPRESSORS.values(), several_streams])
def test_the_plain_tar_is_what_was_compressed(tmp_path, compress):
    data = plain_tar()
    source, target = tmp_path / "set.tar.any", tmp_path / "new" / "set.tar"
    source.write_bytes(compress(data))
    assert convert_tar(source, target, progress=False) == target
    assert target.read_bytes() == data
    assert os.listdir(target.parent) == ["set.tar"]


def assert_refused(source: Path, said: str, error: type[OSError] = TarError) -> None:
    target = source.parent / "out" / "set.tar"
    with pytest.raises(error, match=said) as failure:
        convert_tar(source, target, progress=False)
    assert str(source) in str(failure.value)
    assert "partial" not in str(failure.value)
    assert not target.exists()
    assert not target.parent.exists() or os.listdir(target.parent) == []


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_what_is_cut_or_damaged_is_not_converted(tmp_path, kind):
    source, plain = tmp_path / f"set.tar.{kind}", plain_tar()
    data = COMPRESSORS[kind](plain)
    for cut in (30, len(data) // 2, len(data) - 1):
        source.write_bytes(data[:cut])
        assert_refused(source, "cut or damaged .*copy or download it again")
    source.write_bytes(data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 255]) + data[len(data) // 2 + 1 :])
    assert_refused(source, "cut or damaged")
    source.write_bytes(COMPRESSORS[kind](plain[:4000]))  # cut before it was compressed
    assert_refused(source, r"last whole member is './a/1.jpg'")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (plain_tar(1), "is not compressed: use it as it is"),
        (gzip.compress(b"a picture, say" * 100), "is not a tar"),
        (gzip.compress(b""), "is not a tar"),
        (b"\x28\xb5\x2f\xfd more", "unpack it by `zstd -d "),
        (None, "No such file"),
    ],
    ids=range(5),  # the bytes of a gzip hold the time
)
def test_what_cannot_be_converted(tmp_path, monkeypatch, data, said):
    monkeypatch.setitem(sys.modules, "compression", None)
    if data is not None:
        (tmp_path / "set.tar.x").write_bytes(data)
    assert_refused(tmp_path / "set.tar.x", said, FileNotFoundError if data is None else TarError)


def test_nothing_is_overwritten_and_the_name_comes_last(tmp_path, monkeypatch):
    source, target = tmp_path / "set.tar.gz", tmp_path / "set.tar"
    source.write_bytes(gzip.compress(plain_tar()))
    target.write_text("important")
    with pytest.raises(FileExistsError, match="remove it, or choose another name"):
        convert_tar(source, target, progress=False)
    assert target.read_text() == "important"
    assert sorted(os.listdir(tmp_path)) == ["set.tar", "set.tar.gz"]
    target.unlink()

    def full(*paths):
        raise OSError("no room for a name")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no room"):
        convert_tar(source, target, progress=False)
    assert os.listdir(tmp_path) == ["set.tar.gz"]


def start(source: Path, target: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "labkit", "convert", str(source), str(target)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


@pytest.mark.exhaustive
def test_killed_again_and_again_then_two_at_once(tmp_path):
    data = plain_tar(20, 400_000)
    source, target = tmp_path / "set.tar.bz2", tmp_path / "out" / "set.tar"
    source.write_bytes(bz2.compress(data))

    def written() -> int:
        sizes = [path.stat().st_size for path in target.parent.glob(f".{process.pid}-*.partial")]
        return max(sizes, default=-1)

    for megabytes in (0, 2, 6):
        process = start(source, target)
        while process.poll() is None and written() < megabytes * 1e6:
            time.sleep(0.002)
        process.kill()
        assert process.wait() == -9
        assert not target.exists()
        assert written() >= 0
    both = [start(source, target) for _ in range(2)]
    said = sorted(process.communicate(timeout=60)[1] for process in both)
    assert sorted(process.returncode for process in both) == [0, 2]
    assert said == ["", f"labkit: {target} exists: remove it, or choose another name\n"]
    assert target.read_bytes() == data
    assert os.listdir(target.parent) == ["set.tar"]


def test_the_command_fails_in_one_line(tmp_path):
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "missing.tar.gz"), str(tmp_path / "set.tar")])
    assert result.exit_code == 2
    assert "missing.tar.gz" in result.stderr
    assert result.stderr.count("\n") == 1
