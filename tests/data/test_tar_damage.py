"""Every reader of tars gives every member, or names what is lost; and raises no false alarm."""

import bz2
import errno
import gzip
import io
import lzma
import os
import random
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

import labkit as lk
from labkit.data.extract import extract_tars
from labkit.data.tar import SUFFIX
from labkit.data.tar_stream import TarWarning, convert_tar
from labkit.errors import ItemErrors, TarError
from tests.image_files import encoded
from tests.tars import make_tar, member, numbered_files

N_SAMPLES = 24
SAMPLES = {
    name: data
    for number in range(N_SAMPLES)
    for name, data in (
        (f"{number:03}.cls", b"%d" % number),
        (f"{number:03}.png", encoded(Image.new("RGB", (number + 1, 8)), "PNG")),
    )
}
INDEXED = {"TarStore": lambda path: lk.TarStore(path).keys()}
STREAMED = {
    "read_shards": lambda path: list(lk.read_shards(path)),
    "undecoded": lambda path: list(lk.read_shards(path).samples()),
    "counted": lambda path: list(lk.read_shards(path, samples_per_rank=N_SAMPLES)),
    "extract_tars": lambda path: extract_tars(path, path.parent / "out", progress=False),
}
READERS = {**INDEXED, **STREAMED}
PACKERS = {"": bytes, ".gz": partial(gzip.compress, compresslevel=0), ".bz2": bz2.compress, ".xz": lzma.compress}
BLOCK = 512

every_reader = pytest.mark.parametrize("read", READERS.values(), ids=READERS)
every_stream = pytest.mark.parametrize("read", STREAMED.values(), ids=STREAMED)
needs_tar = pytest.mark.skipif(shutil.which("tar") is None, reason="needs the tar command")


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "set.tar"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    """A tar of all samples."""
    return make_tar(tmp_path_factory.mktemp("whole") / "set.tar", SAMPLES).read_bytes()


def offset_of(name: str, data: bytes) -> int:
    """Where a member's header lies."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return tar.getmember(name).offset


def text_of(error: BaseException) -> str:
    return str(error) + "".join(getattr(error, "failures", {}).values())


@contextmanager
def refusal(path: Path, *said: str):
    """The block refuses the tar, says all of this, and names the file."""
    with pytest.raises((TarError, ItemErrors)) as failure:
        yield
    text = text_of(failure.value)
    assert all(part in text for part in (str(path), *said)), text


# A tar that is cut, or whose headers are damaged.


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> tuple[bytes, dict[str, tarfile.TarInfo]]:
    """A tar with an ordinary file, a long-named one, a folder and a pax member between others, and where each lies."""
    path = tmp_path_factory.mktemp("plan") / "plan.tar"
    members = {"first.jpg": b"1" * 700, "long" * 100: b"2" * 700, "third.jpg": b"3" * 700}
    make_tar(path, members, format=tarfile.GNU_FORMAT)
    members = [member("folder", kind=tarfile.DIRTYPE), member("pax", b"4" * 700, pax_headers={"path": "pax.jpg"})]
    make_tar(path, [*members, member("last.jpg", b"5" * 700)], "a", format=tarfile.PAX_FORMAT)
    with tarfile.open(path) as tar:
        return path.read_bytes(), {info.name.split(".")[0][:6]: info for info in tar}


some_readers = pytest.mark.parametrize(
    ("read", "suffix"),
    [("TarStore", ""), ("extract_tars", ".gz"), ("undecoded", "")],
)


CUTS = [
    ("first", (0, 100), "is not a tar, or is cut or damaged"),
    ("first", (512, 512 + 699), "): no member is whole. Copy"),
    # In the header of the name, the name, the member's own header, its data: their first bytes and others.
    ("longlo", (1, 511, 512, 1000, 1024, 1030, 1536, 1536 + 699), "last whole member is 'first.jpg'"),
    ("third", (1, 512 + 1), f"last whole member is '{'long' * 100}'"),
    ("folder", (100,), "last whole member is 'third.jpg'"),
    ("pax", (100, 512, 520, 1024, 1100, 1536 + 10), "last whole member is 'folder'"),
    ("last", (511, 512 + 699), "last whole member is 'pax.jpg'"),
]


@some_readers
def test_a_cut_tar_names_the_last_whole_member(tmp_path, plan, read, suffix):
    whole, members = plan
    path = tmp_path / f"set.tar{suffix}"
    for place, said in ((members[where].offset + place, said) for where, places, said in CUTS for place in places):
        path.write_bytes(PACKERS[suffix](whole[:place]))
        with refusal(path, said):
            READERS[read](path)
        assert os.listdir(tmp_path) == [path.name]  # neither an index nor a file


@some_readers
def test_a_damaged_header_is_an_error(tmp_path, plan, read, suffix):
    whole, members = plan
    path = tmp_path / f"set.tar{suffix}"
    for where, last_whole in (("longlo", "first.jpg"), ("third", "long" * 100), ("pax", "folder")):
        start = members[where].offset
        damaged = whole[: start + 110] + b"x" + whole[start + 111 :]  # in the owner's number: the checksum finds it
        path.write_bytes(PACKERS[suffix](damaged))
        with refusal(
            path, f"last whole member is '{last_whole}'", f"damaged (the header at byte {start} cannot be read: "
        ):
            READERS[read](path)
        with tarfile.open(fileobj=io.BytesIO(damaged)) as tar:  # tarfile ends there, as if all were well
            assert len(tar.getnames()) < 6


@some_readers
@pytest.mark.parametrize(
    ("writer", "block"),
    [(tarfile.GNU_FORMAT, 2), (tarfile.PAX_FORMAT, 1)],
    ids=["GNU's second block", "pax"],
)
def test_zeros_over_a_long_name_are_an_error(tmp_path, read, suffix, writer, block):
    """`tarfile` takes them for the end of the name, and gives the member another."""
    path, members = tmp_path / f"set.tar{suffix}", {"0.jpg": b"0", "long" * 200 + ".jpg": b"1", "2.jpg": b"2"}
    whole = make_tar(tmp_path / "plain", members, format=writer).read_bytes()
    start = offset_of("long" * 200 + ".jpg", whole)
    at = start + block * BLOCK
    path.write_bytes(PACKERS[suffix](whole[:at] + bytes(BLOCK) + whole[at + BLOCK :]))
    os.remove(tmp_path / "plain")
    with refusal(path, f"the header at byte {start} cannot be read", "last whole member is '0.jpg'"):
        READERS[read](path)


@pytest.mark.filterwarnings("ignore::labkit.data.tar_stream.TarWarning")
@pytest.mark.parametrize("seed", range(3))
def test_random_damage_gives_one_kind_of_error(path, plan, seed):
    """Headers damaged so that their checksums fit give bytes, or a KeyError or TarError that names the tar."""
    whole, members = plan
    own, named = random.Random(seed), []
    starts = [at for info in members.values() for at in range(info.offset, info.offset_data, 512)]
    for _ in range(30):
        damaged, at = bytearray(whole), own.choice(starts)
        for _ in range(own.choice([1, 3])):
            field = own.choice([(0, 100), (124, 136), (124, 125), (156, 157), (345, 500), (0, 512)])
            damaged[at + own.randrange(*field)] = own.choice([0, 0o200, 0o377, 48, 55, own.randrange(256)])
        damaged[at + 156] = own.choice([damaged[at + 156], *b"0127LKSxgXV"])
        checksum = 8 * 32 + sum(damaged[at : at + 148]) + sum(damaged[at + 156 : at + 512])
        damaged[at + 148 : at + 156] = b"%06o\0 " % checksum
        path.write_bytes(damaged)
        try:
            store = lk.TarStore(path)
            for name in store.names():
                store.read(name)
        except (TarError, KeyError) as error:
            named.append(str(path) in str(error))
    assert named
    assert all(named)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is not a tar"),
        (b"<html>404 Not Found</html>" * 100, "is not a tar"),
        (gzip.compress(b"a tar"), r"is compressed \(gzip\).*python -m labkit convert"),
        (b"\x28\xb5\x2f\xfd and more", r"is compressed \(zstd\).*Convert it: zstd -d "),
    ],
    ids=range(4),  # the bytes of a gzip hold the time
)
def test_what_is_no_tar_is_told_whatever_is_asked_of_it(path, data, said):
    path.write_bytes(data)
    store = lk.TarStore(path)
    for use in (store.keys, store.names, store.sizes, lambda: store.read("first.jpg")):
        with pytest.raises(TarError, match=rf"{re.escape(str(path))} {said}"):
            use()
    assert not Path(f"{path}{SUFFIX}").exists()
    if "compressed" not in said:
        with refusal(path, "is not a tar, or is cut or damaged", "no member is whole"):
            READERS["undecoded"](path)


# The end: a mark of zeros, more of them up to the end of a record, and nothing else.


def test_a_tar_cut_where_nothing_is_lost_warns(path, plan):
    """Between members, in the padding behind the last, in the end mark: the members that are there are whole."""
    whole, members = plan
    data = members["last"].offset_data
    ends = dict.fromkeys((data + 700, data + 1000, data + 1024, data + 1124), "last.jpg")
    for length, last in {members["pax"].offset: "folder", data - 512: "pax.jpg", **ends}.items():
        path.write_bytes(whole[:length])
        for _ in range(2):  # of a stored index, too
            store = lk.TarStore(path)
            with pytest.warns(TarWarning, match=rf"set\.tar has no end mark: it may be cut after '{last}'"):
                store.names()
        assert last == "folder" or last in store.names()
        assert all(len(store.read(name)) == 700 for name in store.names())


@pytest.mark.parametrize("kind", ["", ".bz2"])
def test_without_an_end_mark_no_shard_and_no_compressed_tar_is_whole(tmp_path, kind):
    """Some decompressors take damage for the end of their file."""
    make_tar(tmp_path / "plain", numbered_files(5))
    path = tmp_path / f"set.tar{kind}"
    path.write_bytes(PACKERS[kind]((tmp_path / "plain").read_bytes()[: 5 * 3 * BLOCK]))
    with refusal(path, "no end mark): the last whole member is 'photo4.jpg'"):
        READERS["undecoded"](path)
    if kind:
        with refusal(path, "no end mark): the last whole member is 'photo4.jpg'"):
            READERS["extract_tars"](path)
    else:
        with pytest.warns(TarWarning, match=r"set\.tar has no end mark: it may be cut after 'photo4.jpg'"):
            [folder] = READERS["extract_tars"](path)
        assert len(os.listdir(folder)) == 5


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("length", [512, 5000, 2 * BLOCK + 2 * 10240])  # the last: `tar --concatenate` adds a record
def test_end_marks_of_any_length_do(path, plan, length):
    whole, members = plan
    path.write_bytes(whole[: members["last"].offset_data + 1024] + bytes(length))
    assert len(lk.TarStore(path).names()) == 5


GOES_ON = {
    "a hole over a header": (
        lambda whole, at: whole[:at] + bytes(BLOCK) + whole[at + BLOCK :],
        ("goes on at byte {next} after an end mark", "last whole member before it is '010.cls'"),
    ),
    "joined by cat": (
        lambda whole, at: whole * 2,
        ("at byte {length} ", "'023.png'", "`tar --ignore-zeros -xf`, or join them by `tar --concatenate`"),
    ),
}


@pytest.mark.parametrize(("case", "kind"), [(case, "") for case in GOES_ON] + [("a hole over a header", ".gz")])
@every_reader
def test_a_tar_that_goes_on_after_an_end_mark_is_an_error(tmp_path, whole, read, case, kind):
    """It names the place, and the remedy where several were joined."""
    if kind and read is READERS["TarStore"]:
        pytest.skip("reads no compressed tar")
    (damage, said), at = GOES_ON[case], offset_of("010.png", whole)
    path = tmp_path / f"set.tar{kind}"
    path.write_bytes(PACKERS[kind](damage(whole, at)))
    with refusal(path, *(text.format(next=at + BLOCK, length=len(whole)) for text in said)):
        read(path)


@every_reader
def test_a_second_half_of_zeros_warns(path, whole, read):
    at = offset_of("006.cls", whole)
    path.write_bytes(whole[:at] + bytes(len(whole) - at))
    said = rf"set\.tar ends with {len(whole) - at} zeros.* members after '005\.png' may be missing.*checksum"
    with pytest.warns(TarWarning, match=said):
        read(path)


def flip_trailer(packed: bytes) -> bytes:
    """In the trailers of gzip, bzip2 and xz."""
    return packed[:-5] + bytes([packed[-5] ^ 255]) + packed[-4:]


def change_label(packed: bytes) -> bytes:
    """Of an uncompressed block."""
    at = packed.index(b"17", packed.index(b"017.cls") + 100)
    return packed[:at] + b"18" + packed[at + 2 :]


@every_stream
@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        *((kind, flip_trailer, "is cut or damaged") for kind in (".gz", ".bz2", ".xz")),
        (".gz", change_label, "is cut or damaged (CRC check failed"),
        (".gz", lambda packed: packed + b"something else", "is cut or damaged"),
        (".gz", lambda packed: packed + bytes(4096), ""),
    ],
)
def test_what_a_compression_has_at_its_end_is_checked(tmp_path, whole, read, kind, change, said):
    """Behind a gzip stream zeros may follow, and nothing else."""
    record = 1 << 16  # so that the tar's end mark is read long before the trailer
    path = tmp_path / f"set.tar{kind}"
    path.write_bytes(change(PACKERS[kind](whole.ljust(-(-len(whole) // record) * record, b"\0"))))
    with refusal(path, said) if said else nullcontext():
        read(path)


# Members that are no files.


ODD = {
    "a hard link to '000.png'": {"kind": tarfile.LNKTYPE, "link": "000.png"},
    "a symbolic link to '000.png'": {"kind": tarfile.SYMTYPE, "link": "000.png"},
    "a device or a pipe": {"kind": tarfile.FIFOTYPE},
    "of unknown type b'Z'": {"kind": b"Z"},
}


@pytest.mark.parametrize("read", ["undecoded", "counted"])
@pytest.mark.parametrize("odd", ODD)
def test_a_member_of_a_sample_that_is_no_file_is_named(path, odd, read):
    files = [member(name, SAMPLES[name]) for name in ("000.cls", "000.png")]
    members = [member("001.cls", b"1"), member("001.png", **ODD[odd])]
    for lost in (members[1:], members):  # without its image, and without any of its members, the sample would be lost
        make_tar(path, files + lost)
        with refusal(path, "'001.png' is a link, a device or of unknown type", "--hard-dereference"):
            READERS[read](path)


def test_what_belongs_to_no_sample_is_left_out(path):
    members = [
        member("d", kind=tarfile.DIRTYPE), member("d.x", kind=tarfile.DIRTYPE), member("README", b"read me"),
        member("._000.png", b"of a Mac"), member("d/.hidden.cls", b"7"), member("new", kind=tarfile.SYMTYPE, link="d"),
        *(member(f"d/{name}", SAMPLES[name]) for name in ("000.cls", "000.png", "001.cls", "001.png")),
    ]  # fmt: skip
    make_tar(path, members)
    assert [label for _, label in lk.read_shards(path)] == [0, 1]
    assert [label for _, label in lk.read_shards(path, samples_per_rank=2)] == [0, 1]


@needs_tar
def test_sparse_and_contiguous_files_are_whole_or_the_remedy_is_named(tmp_path, path):
    """Of the sparse one, only four bytes are stored."""
    sparse = tmp_path / "000.png"
    with open(sparse, "wb") as file:
        file.seek(1 << 20)
        file.write(b"\x89PNG")
        file.truncate(3 << 20)
    subprocess.run(["tar", "-S", "--format=posix", "-C", tmp_path, "-cf", path, sparse.name], check=True)
    assert path.stat().st_size < 1 << 20
    make_tar(path, [member("000.cls", b"7", kind=tarfile.CONTTYPE), member("1.png", b"image")], "a")
    samples = list(lk.read_shards(path).samples())
    assert samples[0]["png"] == sparse.read_bytes()
    assert samples[0]["cls"] == b"7"
    store = lk.TarStore(path)
    with pytest.raises(TarError, match=r"set\.tar: '000\.png' is stored as a sparse file: unpack the tar by `tar -xf`"):
        store.read("000.png")
    assert store.read("1.png") == b"image"


def test_more_samples_than_the_manifest_says_are_an_error(tmp_path, whole):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(SAMPLES["000.png"])
    shards = lk.write_shards(lk.FolderStore(tmp_path / "photos"), tmp_path / "shards", classes=[], progress=False)
    [shard] = shards.glob("*.tar")
    shard.write_bytes(whole)
    with pytest.raises(ValueError, match=r"shard-000000\.tar has more samples than its manifest says"):
        list(lk.read_shards(shards, samples_per_rank=1))


# No false alarm: an error of the disk, the network or memory is told as what it is. The tar may well be whole.


def convert(path: Path) -> None:
    convert_tar(path, path.parent / "plain.tar", progress=False)


ALL = {**READERS, "convert": convert}
DISK_FAILS = partial(OSError, errno.EIO, "Input/output error")


def assert_no_damage_is_told(read: Callable[[Path], object], path: Path, said: str = "Input/output error") -> None:
    with pytest.raises((OSError, MemoryError, ItemErrors)) as failure:
        read(path)
    text = f"{type(failure.value).__name__}: {text_of(failure.value)}"
    assert said in text
    assert not re.search("damaged|download", text)
    assert str(path) in text or isinstance(failure.value, MemoryError)
    assert not isinstance(failure.value, OSError) or failure.value.errno == errno.EIO


@pytest.fixture
def failing(monkeypatch):
    """Makes every read of a file from some byte on raise an error."""

    def fail(path: Path, error: Callable[[], BaseException], begin: int) -> Path:
        real = open

        class Failing(io.FileIO):
            def read(self, size=-1):
                if self.tell() >= begin:
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

    return fail


@pytest.mark.parametrize(("error", "said"), [(DISK_FAILS, "Input/output error"), (MemoryError, "MemoryError")])
@pytest.mark.parametrize("share", [0, 0.5], ids=["at the begin", "in the middle"])
@pytest.mark.parametrize(
    ("read", "suffix"),
    [("TarStore", ""), ("undecoded", ".gz"), ("extract_tars", ".xz"), ("convert", ".bz2")],
)
def test_a_tar_that_cannot_be_read_on_is_no_damage(tmp_path, failing, read, suffix, share, error, said):
    path = tmp_path / f"set.tar{suffix}"
    plain = make_tar(tmp_path / "plain", [member(f"{n}.bin", random.Random(n).randbytes(2000)) for n in range(8)])
    path.write_bytes(PACKERS[suffix](plain.read_bytes()))
    assert_no_damage_is_told(ALL[read], failing(path, error, int(path.stat().st_size * share)), said)
    assert not (tmp_path / "plain.tar").exists()
