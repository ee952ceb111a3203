"""convert: the very tar that was compressed, whole or not at all."""

import bz2
import gzip
import io
import lzma
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from labkit.data.tar.convert import convert_tar
from labkit.data.tar.errors import TarError
from labkit.lab.cli import app
from tests.tars import make_tar, member

COMPRESSORS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


def plain_tar(count: int = 5, size: int = 700) -> bytes:
    buffer = io.BytesIO()
    make_tar(None, [member(f"./a/{n}.jpg", os.urandom(size + n)) for n in range(count)], fileobj=buffer)
    return buffer.getvalue()


def compressed(path: Path, data: bytes) -> Path:
    path.write_bytes(COMPRESSORS[path.suffix[1:]](data))
    return path


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_the_plain_tar_is_what_was_compressed(tmp_path, kind):
    data = plain_tar()
    source, target = compressed(tmp_path / f"set.tar.{kind}", data), tmp_path / "new" / "set.tar"
    assert convert_tar(source, target, progress=False) == target
    assert target.read_bytes() == data
    assert os.listdir(target.parent) == ["set.tar"]
    with tarfile.open(source) as theirs, tarfile.open(target, "r:") as ours:
        assert [info.get_info() for info in ours] == [info.get_info() for info in theirs]


def test_several_streams_in_one_file(tmp_path):
    data = plain_tar(50)  # pigz and bgzip write such files
    (tmp_path / "set.tar.gz").write_bytes(gzip.compress(data[:10_000]) + gzip.compress(data[10_000:]))
    assert convert_tar(tmp_path / "set.tar.gz", tmp_path / "set.tar", progress=False).read_bytes() == data


def assert_refused(source: Path, said: str, error: type[OSError] = TarError) -> None:
    target = source.parent / "out" / "set.tar"
    with pytest.raises(error, match=said) as failure:
        convert_tar(source, target, progress=False)
    assert str(source) in str(failure.value)
    assert "partial" not in str(failure.value)
    assert not target.exists()
    assert not target.parent.exists() or os.listdir(target.parent) == []


def test_a_plain_tar_needs_no_conversion(tmp_path):
    (tmp_path / "set.tar").write_bytes(plain_tar())
    assert_refused(tmp_path / "set.tar", "is not compressed: use it as it is")


@pytest.mark.parametrize("kind", COMPRESSORS)
@pytest.mark.parametrize("cut", [30, 0.5, -1])
def test_cut_while_compressed(tmp_path, kind, cut):
    source = compressed(tmp_path / f"set.tar.{kind}", plain_tar())
    data = source.read_bytes()
    source.write_bytes(data[: int(cut * len(data)) if isinstance(cut, float) else cut])
    assert_refused(source, "cut or damaged .*copy or download it again")


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_damaged_while_compressed(tmp_path, kind):
    source = compressed(tmp_path / f"set.tar.{kind}", plain_tar())
    data = bytearray(source.read_bytes())
    data[len(data) // 2] ^= 255
    source.write_bytes(data)
    assert_refused(source, "cut or damaged")


@pytest.mark.parametrize("data", [b"a picture, say" * 100, b""])
def test_no_tar_inside(tmp_path, data):
    assert_refused(compressed(tmp_path / "set.gz", data), "is not a tar")


@pytest.mark.parametrize(("magic", "command"), [(b"\x28\xb5\x2f\xfd", "zstd -d"), (b"\x04\x22\x4d\x18", "lz4 -d")])
def test_what_python_cannot_unpack_names_the_command(tmp_path, monkeypatch, magic, command):
    monkeypatch.setitem(sys.modules, "compression", None)
    (tmp_path / "set.tar.x").write_bytes(magic + b"more")
    assert_refused(tmp_path / "set.tar.x", f"unpack it by `{command} ")


def test_zstd(tmp_path):
    zstd = pytest.importorskip("compression.zstd", reason="zstd comes with Python 3.14")
    data = plain_tar()
    (tmp_path / "set.tar.zst").write_bytes(zstd.compress(data))
    assert convert_tar(tmp_path / "set.tar.zst", tmp_path / "set.tar", progress=False).read_bytes() == data


def test_no_such_source(tmp_path):
    assert_refused(tmp_path / "set.tar.gz", "No such file", FileNotFoundError)


def test_nothing_is_overwritten(tmp_path):
    source, target = compressed(tmp_path / "set.tar.gz", plain_tar()), tmp_path / "set.tar"
    target.write_text("important")
    with pytest.raises(FileExistsError, match="remove it, or choose another name"):
        convert_tar(source, target, progress=False)
    assert target.read_text() == "important"
    assert sorted(os.listdir(tmp_path)) == ["set.tar", "set.tar.gz"]


def test_the_name_comes_last_and_at_once(tmp_path, monkeypatch):
    source = compressed(tmp_path / "set.tar.gz", plain_tar())

    def full(*paths):
        raise OSError("no room for a name")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no room"):
        convert_tar(source, tmp_path / "set.tar", progress=False)
    assert os.listdir(tmp_path) == ["set.tar.gz"]


def start(source: Path, target: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "labkit", "convert", str(source), str(target)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def test_killed_again_and_again(tmp_path):
    data = plain_tar(20, 400_000)
    source, target = compressed(tmp_path / "set.tar.bz2", data), tmp_path / "out" / "set.tar"

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
    assert start(source, target).wait(60) == 0
    assert target.read_bytes() == data
    assert os.listdir(target.parent) == ["set.tar"]


def test_two_at_once(tmp_path):
    data = plain_tar(5, 1_000_000)
    source, target = compressed(tmp_path / "set.tar.gz", data), tmp_path / "out" / "set.tar"
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
