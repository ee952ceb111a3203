"""Every reader of tars reads to the end of its source, and gives or names every member."""

import bz2
import gzip
import io
import lzma
import os
import shutil
import subprocess
import tarfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import labkit as lk
from labkit import course
from labkit.app.cli import app
from labkit.data.tar_stream import TarWarning
from labkit.errors import ItemErrors, TarError
from tests.hardening.inputs import sparse_member
from tests.tars import make_tar, member

N_SAMPLES = 100
HEADER = 512


def picture(number: int) -> bytes:
    buffer = io.BytesIO()
    noise = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
    Image.fromarray(noise).save(buffer, "PNG")
    return buffer.getvalue()


SAMPLES = {
    name: data
    for number in range(N_SAMPLES)
    for name, data in ((f"{number:03}.cls", b"%d" % number), (f"{number:03}.png", picture(number)))
}
TARS = {
    "TarStore": lambda path: lk.TarStore(path).keys(),
}
STREAMS = {
    "read_shards": lambda path: list(lk.read_shards(path)),
    "undecoded": lambda path: list(lk.read_shards(path).samples()),
    "counted": lambda path: list(lk.read_shards(path, samples_per_rank=N_SAMPLES)),
    "extract_tars": lambda path: lk.extract_tars(path, path.parent / "out", progress=False),
}
PACKERS = {"gz": partial(gzip.compress, compresslevel=0), "bz2": bz2.compress, "xz": lzma.compress}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    return make_tar(tmp_path_factory.mktemp("whole") / "set.tar", SAMPLES).read_bytes()


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "set.tar"


def offset_of(name: str, data: bytes) -> int:
    """Where a member's header lies."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return tar.getmember(name).offset


@contextmanager
def refusal(path: Path, *said: str):
    """The block refuses the tar, says all of this, and names the file."""
    with pytest.raises((TarError, ItemErrors)) as failure:
        yield
    text = str(failure.value) + "".join(getattr(failure.value, "failures", {}).values())
    assert all(part in text for part in (str(path), *said)), text


# What lies behind the end mark.


@pytest.mark.parametrize("read", {**TARS, **STREAMS}.values(), ids={**TARS, **STREAMS})
def test_a_hole_over_one_header_is_an_error_that_names_its_place(path, whole, read):
    at = offset_of("010.png", whole)
    path.write_bytes(whole[:at] + bytes(HEADER) + whole[at + HEADER :])
    with refusal(path, f"goes on at byte {at + HEADER} after an end mark", "member before it is '010.cls'"):
        read(path)


@pytest.mark.parametrize("read", {**TARS, **STREAMS}.values(), ids={**TARS, **STREAMS})
def test_tars_joined_by_cat_are_an_error_that_names_the_remedy(path, whole, read):
    path.write_bytes(whole * 2)
    with refusal(path, f"at byte {len(whole)} ", "'099.png'", "`tar --ignore-zeros -xf`, or join them by `tar --con"):
        read(path)


@pytest.mark.parametrize("read", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("kind", PACKERS)
def test_a_hole_in_what_was_compressed_is_an_error(tmp_path, whole, kind, read):
    at = offset_of("099.png", whole)
    path = tmp_path / f"set.tar.{kind}"
    path.write_bytes(PACKERS[kind](whole[:at] + bytes(HEADER) + whole[at + HEADER :]))
    with refusal(path, f"goes on at byte {at + HEADER}", "'099.cls'"):
        read(path)


def test_a_hole_before_the_first_member_is_an_error(path, whole):
    path.write_bytes(bytes(HEADER) + whole[HEADER:])
    with refusal(path, f"goes on at byte {HEADER} ", "no member is before it"):
        lk.TarStore(path).keys()


def test_a_hole_in_a_shard_on_a_server_is_an_error(path, whole):
    at = offset_of("050.cls", whole)
    path.write_bytes(whole[:at] + bytes(HEADER) + whole[at + HEADER :])
    with course.serve_folder(path.parent) as url:
        for read in (
            lambda place: list(lk.read_shards(place)),
            lambda place: list(lk.read_shards(place, reads_in_flight=2)),
            lambda place: list(lk.read_shards(place, cache=lk.ShardCache(path.parent / "cache", 10**9))),
            lambda place: lk.TarStore(place).keys(),
        ):
            with refusal(Path("set.tar"), f"goes on at byte {at + HEADER} ", "'049.png'"):
                read(url + "set.tar")


def test_convert_refuses_a_tar_with_a_hole(path, whole, tmp_path):
    at = offset_of("010.png", whole)
    (tmp_path / "set.tar.gz").write_bytes(gzip.compress(whole[:at] + bytes(HEADER) + whole[at + HEADER :]))
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "set.tar.gz"), str(path)])
    assert result.exit_code == 2
    assert f"goes on at byte {at + HEADER}" in result.stderr
    assert not path.exists()


# More zeros than an end mark has.


@pytest.mark.parametrize("read", {**TARS, **STREAMS}.values(), ids={**TARS, **STREAMS})
def test_a_second_half_of_zeros_warns(path, whole, read):
    at = offset_of("050.cls", whole)
    path.write_bytes(whole[:at] + bytes(len(whole) - at))
    said = rf"set\.tar ends with {len(whole) - at} zeros.* members after '049\.png' may be missing.*checksum"
    with pytest.warns(TarWarning, match=said):
        read(path)


def test_every_store_warns_of_a_tar_that_may_lack_its_end(path, whole):
    """An index that was stored by another store says it again."""
    at = offset_of("050.cls", whole)
    for data, said in ((whole[:at], "no end mark"), (whole[:at] + bytes(len(whole) - at), "ends with")):
        path.write_bytes(data)
        for _ in range(2):
            with pytest.warns(TarWarning, match=rf"set\.tar .*{said}.* after '049\.png'"):
                assert len(lk.TarStore(path).keys()) == 50


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs the tar command")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("blocking_factor", [1, 2, 20, 40])
def test_records_of_gnu_tar_are_no_reason_to_warn(tmp_path, path, blocking_factor):
    folder = tmp_path / "set"
    folder.mkdir()
    for name in ("000.cls", "000.png", "001.cls", "001.png"):
        (folder / name).write_bytes(SAMPLES[name])
    options = ["--sort=name", f"--blocking-factor={blocking_factor}"]
    subprocess.run(["tar", *options, "-C", folder, "-cf", path, "."], check=True)
    assert len(lk.TarStore(path).keys()) == 2
    assert [label for _, label in lk.read_shards(path)] == [0, 1]
    [extracted] = lk.extract_tars(path, tmp_path / "out", progress=False)
    assert sorted(os.listdir(extracted)) == sorted(os.listdir(folder))


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs the tar command")
@pytest.mark.filterwarnings("error")
def test_tars_joined_by_the_remedy_are_read_without_a_warning(tmp_path, path):
    for number in range(3):
        names = (f"{number:03}.cls", f"{number:03}.png")
        make_tar(tmp_path / f"{number}.tar", {name: SAMPLES[name] for name in names})
    shutil.copy(tmp_path / "0.tar", path)
    for other in ("1.tar", "2.tar"):  # GNU tar 1.34 leaves an end mark between two that it adds at once
        subprocess.run(["tar", "--concatenate", "-f", path, tmp_path / other], check=True)
    assert [label for _, label in lk.read_shards(path)] == [0, 1, 2]
    assert len(lk.TarStore(path).keys()) == 3


# What a compression checks at its end.


@pytest.mark.parametrize("read", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("kind", PACKERS)
def test_a_checksum_at_the_end_of_a_compression_is_checked(tmp_path, whole, kind, read):
    record = 1 << 16  # so that the tar's end mark is read long before the trailer
    packed = bytearray(PACKERS[kind](whole.ljust(-(-len(whole) // record) * record, b"\0")))
    packed[-5] ^= 255  # in the trailers of all three
    path = tmp_path / f"set.tar.{kind}"
    path.write_bytes(packed)
    with refusal(path, "is cut or damaged"):
        read(path)


@pytest.mark.parametrize("read", STREAMS.values(), ids=STREAMS)
def test_a_wrong_label_that_only_gzip_s_checksum_shows_is_an_error(tmp_path, whole, read):
    packed = bytearray(PACKERS["gz"](whole))
    packed[packed.index(b"42", packed.index(b"042.cls") + 100)] += 1
    path = tmp_path / "set.tar.gz"
    path.write_bytes(packed)
    with refusal(path, "is cut or damaged (CRC check failed"):
        read(path)


@pytest.mark.parametrize("read", STREAMS.values(), ids=STREAMS)
def test_behind_a_gzip_stream_zeros_may_follow_and_nothing_else(tmp_path, whole, read):
    path = tmp_path / "set.tar.gz"
    path.write_bytes(PACKERS["gz"](whole) + bytes(4096))
    read(path)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    path.write_bytes(PACKERS["gz"](whole) + b"something else")
    with refusal(path, "is cut or damaged"):
        read(path)


# Members that are no files.


ODD = {
    "a hard link to '000.png'": {"kind": tarfile.LNKTYPE, "link": "000.png"},
    "a symbolic link to '000.png'": {"kind": tarfile.SYMTYPE, "link": "000.png"},
    "a device or a pipe": {"kind": tarfile.FIFOTYPE},
    "of unknown type b'Z'": {"kind": b"Z"},
}


@pytest.mark.parametrize("read", [STREAMS["read_shards"], STREAMS["undecoded"], STREAMS["counted"]])
@pytest.mark.parametrize("said", ODD)
def test_a_member_of_a_sample_that_is_no_file_is_named(path, said, read):
    files = [member(name, SAMPLES[name]) for name in ("000.cls", "000.png")]
    odd = [member("001.cls", b"1"), member("001.png", **ODD[said])]
    for members in (odd[1:], odd):  # without its image, and without any of its members, the sample would be lost
        make_tar(path, files + members)
        with refusal(path, "'001.png' is a link, a device or of unknown type", "--hard-dereference"):
            read(path)


def test_what_belongs_to_no_sample_is_left_out(path):
    members = [
        member("d", kind=tarfile.DIRTYPE), member("d.x", kind=tarfile.DIRTYPE), member("README", b"read me"),
        member("._000.png", b"of a Mac"), member("d/.hidden.cls", b"7"), member("new", kind=tarfile.SYMTYPE, link="d"),
        *(member(f"d/{name}", SAMPLES[name]) for name in ("000.cls", "000.png", "001.cls", "001.png")),
    ]  # fmt: skip
    make_tar(path, members)
    assert [label for _, label in lk.read_shards(path)] == [0, 1]
    assert [label for _, label in lk.read_shards(path, samples_per_rank=2)] == [0, 1]


def test_contiguous_and_sparse_files_are_given_whole(path):
    """Of the sparse one, only four bytes are stored."""
    data = bytes(600) + b"\x89PNG" + bytes(1000)
    make_tar(path, [member("000.cls", b"7", kind=tarfile.CONTTYPE), sparse_member("000.png", 1604, 600, 4, b"\x89PNG")])
    [sample] = lk.read_shards(path).samples()
    assert (sample["cls"], sample["png"]) == (b"7", data)


def test_more_samples_than_the_manifest_says_are_an_error(tmp_path, whole):
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "a.png").write_bytes(SAMPLES["000.png"])
    shards = lk.write_shards(lk.FolderStore(folder), tmp_path / "shards", progress=False)
    [shard] = shards.glob("*.tar")
    shard.write_bytes(whole)
    with pytest.raises(ValueError, match=r"shard-000000\.tar has more samples than its manifest says"):
        list(lk.read_shards(shards, samples_per_rank=1))


# Names deeper than those of files.


def test_the_longest_name_of_a_file_is_extracted(path):
    name = "/".join(["n" * 255] * 8)
    make_tar(path, {name: b"data"})
    [folder] = lk.extract_tars(path, path.parent / "out", progress=False)
    assert (folder / name).read_bytes() == b"data"
