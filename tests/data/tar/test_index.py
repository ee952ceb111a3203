"""The index of a tar: every kind of member as `tarfile` and GNU tar have it; damage is said, never skipped."""

import bz2
import gzip
import io
import json
import lzma
import multiprocessing
import os
import pickle
import random
import re
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from labkit import TarStore
from labkit.data import tar as tar_index
from labkit.data.blobs import LocalBlob
from labkit.data.tar import SUFFIX, build_index
from labkit.data.tar_stream import TarWarning, plain_name
from labkit.errors import TarError
from tests.children import in_children
from tests.tars import add, make_tar, member

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
HARD, SOFT, FOLDER = tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE
BLOCK = 512


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "a.tar"


def contents_by_tarfile(path: Path) -> dict[str, bytes | None]:
    """The oracle: bytes by plain name, of several members with one name the last; None where a link leads nowhere."""
    found = {}
    with tarfile.open(path, "r:") as tar:
        for info in tar.getmembers():
            name = re.sub(r"^(\./+)+", "", info.name)
            found.pop(name, None)
            if not (info.isdir() or info.isdev()):
                found[name] = None
                with suppress(KeyError, RecursionError):  # a dangling link, a loop
                    file = tar.extractfile(info)
                    found[name] = file and file.read()
    return found


def contents(path: Path) -> dict[str, bytes | None]:
    """What TarStore reads; None for a link that leads nowhere, if the error says so."""
    store, found = TarStore(path), {}
    for name in store.names():
        try:
            found[name] = store.read(name)
        except KeyError as error:
            if not error.args[0].startswith(f"{name!r} is a link to a file that is not in "):
                raise
            found[name] = None
    return found


def agreed(path: Path) -> dict[str, bytes | None]:
    """What both the oracle and TarStore read."""
    expected = contents_by_tarfile(path)
    assert contents(path) == expected
    return expected


def some_bytes(seed: object, size: int | None = None) -> bytes:
    own = random.Random(repr(seed))
    return own.randbytes(own.choice([0, 1, 511, 512, 513, 3000]) if size is None else size)


# Around what the fields hold: 100 bytes in `name`, 155 in ustar's `prefix`, 512 in a block of GNU's long names.
BROKEN = os.fsdecode(b"caf\xe9/\xff.jpg")  # no UTF-8
NAMES = [
    *(f"{length}".ljust(length, "x") for length in (1, 99, 100, 101, 155, 255, 256, 511, 512, 513)),
    *(f"{'d' * first}/{'n' * second}" for first in (1, 99, 100, 154, 155) for second in (1, 99, 100)),
    "x" + "é" * 50, "x" + "é" * 49 + "y", "日本/" + "語" * 40 + ".jpg", "a/b.jpg", "two words", BROKEN,
]  # fmt: skip


@pytest.mark.parametrize(("kind", "count"), [("ustar", 22), ("gnu", len(NAMES)), ("pax", len(NAMES))])
def test_names_of_all_lengths(path, kind, count):
    written = {}
    with tarfile.open(path, "w", format=FORMATS[kind]) as tar:
        for name in NAMES:
            with suppress(ValueError):  # too long for ustar
                add(tar, name, some_bytes(name))
                written[name] = some_bytes(name)
    assert len(written) == count
    assert agreed(path) == written


def test_pax_headers_of_a_member_and_of_all_that_follow(path):
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        add(tar, "before.jpg", b"1")
        tar.fileobj.write(tarfile.TarInfo.create_pax_global_header({"comment": "from here on", "size": "2"}))
        tar.offset = tar.fileobj.tell()
        add(tar, "named otherwise.jpg", b"222", pax_headers={"path": "ä/named by pax.jpg"})
        add(tar, "after.jpg", b"333")
        add(tar, "broken utf-8.jpg", b"444", pax_headers={"path": BROKEN})
    assert agreed(path) == {"before.jpg": b"1", "ä/named by pax.jpg": b"22", "after.jpg": b"33", BROKEN: b"44"}


@pytest.mark.parametrize("kind", ["gnu", "pax"])
def test_a_member_larger_than_octal_digits_hold(path, kind):
    """8 GiB and more: base-256 in GNU's format, a pax record in the other. The file has a hole there."""
    large, after = member("large.jpg", size=9 << 30)[0], member("after.jpg", size=5)[0]
    with open(path, "wb") as file:
        file.write(large.tobuf(FORMATS[kind]))
        start = file.tell()
        file.seek(large.size, os.SEEK_CUR)
        file.write(after.tobuf(FORMATS[kind]) + b"after".ljust(BLOCK, b"\0") + bytes(2 * BLOCK))
    index = build_index(LocalBlob(path))
    assert list(index.names) == ["after.jpg", "large.jpg"]
    assert index.sizes.tolist() == [5, large.size]
    assert index.offsets.tolist() == [start + large.size + len(after.tobuf(FORMATS[kind])), start]
    assert TarStore(path).read("after.jpg") == b"after"


def test_headers_of_ordinary_files_need_no_tarfile(path, monkeypatch):
    """Of all names and sizes that ustar holds; the largest is a hole. `tarfile` reads the first header to open it."""
    largest = (8 << 30) - 1
    full = os.fsdecode(b"\xff" * 155 + b"/" + b"\xff" * 100)  # sums to more than 16 bits hold
    members = {"a": 0, "x" * 100: 511, "d" * 155 + "/" + "y" * 100: 512, "d/z": 513, full: 1, "last": largest}
    with open(path, "wb") as file:
        for name, size in members.items():
            info, _ = member(name, kind=tarfile.AREGTYPE if name == "d/z" else tarfile.REGTYPE, size=size)
            file.write(info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape"))
            file.seek(-(-size // BLOCK) * BLOCK, os.SEEK_CUR)
        file.write(bytes(2 * BLOCK))
    with tarfile.open(path, "r:") as tar:
        expected = {info.name: (info.offset_data, info.size) for info in tar}
    assert list(expected) == list(members)
    calls, fromtarfile = [], tarfile.TarInfo.fromtarfile
    monkeypatch.setattr(tarfile.TarInfo, "fromtarfile", lambda tar: calls.append(tar.offset) or fromtarfile(tar))
    index = build_index(LocalBlob(path))
    found = zip(index.offsets.tolist(), index.sizes.tolist(), strict=True)
    assert dict(zip(index.names, found, strict=True)) == expected
    assert calls == [0]


def test_links(path):
    members = [
        ("early.jpg", HARD, "a.jpg"),  # before its target: tarfile finds none
        ("forward.jpg", SOFT, "d/late.jpg"),  # a symbolic link may
        ("a.jpg", b"first"), ("hard to first.jpg", HARD, "a.jpg"),
        ("a.jpg", b"second"), ("hard to second.jpg", HARD, "./a.jpg"), ("hard to hard.jpg", HARD, "hard to first.jpg"),
        ("d/late.jpg", b"late"), ("d/up.jpg", SOFT, "../a.jpg"), ("d/beside.jpg", SOFT, "late.jpg"),
        ("d/e/chain.jpg", SOFT, ".././up.jpg"), ("hard to soft.jpg", HARD, "d/beside.jpg"),
        ("soft to hard.jpg", SOFT, "hard to first.jpg"), ("absolute.jpg", SOFT, "/a.jpg"),
        ("outside.jpg", SOFT, "../a.jpg"), ("d", FOLDER, ""), ("to a folder.jpg", SOFT, "d"),
        ("dangling.jpg", SOFT, "no.jpg"), ("hard dangling.jpg", HARD, "no.jpg"),
        ("soft to dangling.jpg", SOFT, "hard dangling.jpg"), ("self.jpg", SOFT, "self.jpg"),
        ("loop1.jpg", SOFT, "loop2.jpg"), ("loop2.jpg", SOFT, "loop1.jpg"), ("into loop.jpg", HARD, "loop2.jpg"),
        ("replaced.jpg", SOFT, "a.jpg"), ("replaced.jpg", b"by a file"),
        ("a file.jpg", b"replaced by a link"), ("a file.jpg", SOFT, "d/late.jpg"),
        *((f"chain{number}.jpg", SOFT, f"chain{number + 1}.jpg") for number in range(20)),
        ("chain20.jpg", b"end of the chain"),
    ]  # fmt: skip
    make_tar(path, [member(name, *(about if len(about) == 1 else (b"", *about))) for name, *about in members])
    expected = agreed(path)
    assert expected["hard to first.jpg"] == b"first"
    assert expected["chain0.jpg"] == b"end of the chain"
    assert [name for name, data in expected.items() if data is None] == [
        "early.jpg", "absolute.jpg", "outside.jpg", "to a folder.jpg", "dangling.jpg", "hard dangling.jpg",
        "soft to dangling.jpg", "self.jpg", "loop1.jpg", "loop2.jpg", "into loop.jpg",
    ]  # fmt: skip


def test_of_members_with_one_name_the_last_counts(path):
    """In two spellings, too."""
    names = ["a.jpg", "./b.jpg", "b.jpg", "a.jpg", "./a.jpg", "b.jpg", ".//c.jpg", "././d"]
    members = [member(name, bytes([number])) for number, name in enumerate(names)]
    members += [member("a file first", b"file"), member("a file first", kind=FOLDER)]
    members += [member("a folder first", kind=FOLDER), member("a folder first", b"file")]
    # As `tar -cf x.tar a a` with two links to a.
    members += [member("twice.jpg", b"data"), member("twice.jpg", kind=HARD, link="twice.jpg")]
    last = {"a.jpg": b"\4", "b.jpg": b"\5", "c.jpg": b"\6", "d": b"\7", "a folder first": b"file", "twice.jpg": b"data"}
    assert agreed(make_tar(path, members)) == last


def test_members_without_data_are_no_files(path):
    members = [
        member(f"{kind}.jpg", kind=kind) for kind in (FOLDER, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)
    ]
    members += [
        member("old folder.jpg/", kind=tarfile.AREGTYPE),
        member("contiguous.jpg", b"7", kind=tarfile.CONTTYPE),
        member("oldest.jpg", b"0", kind=tarfile.AREGTYPE),
        member("unknown.jpg", b"unknown types count as files", kind=b"Z"),
        member("named like a folder.jpg/", b"but a file"),
        member("empty.jpg"),
    ]
    expected = agreed(make_tar(path, members))
    assert len(expected) == 5
    assert expected["empty.jpg"] == b""


@pytest.mark.parametrize("blocks", [1, 2, 20, 21])
def test_a_tar_of_nothing(path, blocks):
    path.write_bytes(bytes(BLOCK * blocks))
    assert len(build_index(LocalBlob(path))) == 0
    with pytest.raises(FileNotFoundError, match=r"a\.tar holds no image"):
        TarStore(path).keys()


@pytest.mark.parametrize("seed", range(20))
def test_random_tars(path, seed):
    own = random.Random(seed)
    kinds = [tarfile.REGTYPE] * 6 + [tarfile.AREGTYPE, tarfile.CONTTYPE, FOLDER, tarfile.FIFOTYPE, b"Z"]
    names = [
        own.choice(["", "", "./"]) + "/".join(own.choice("abcä") * own.choice([1, 1, 2, 60]) for _ in range(depth))
        for depth in own.choices([1, 2, 3], k=25)
    ]
    with tarfile.open(path, "w", format=own.choice(list(FORMATS.values()))) as tar:
        for number in range(60):
            (name, other), with_data = own.choices(names, k=2), own.random() < 0.6
            kind = own.choice(kinds if with_data else [HARD, SOFT])
            up = own.choice(["", "../" * name.removeprefix("./").count("/")]) if kind == SOFT else ""
            data = some_bytes((seed, number)) if kind not in (FOLDER, tarfile.FIFOTYPE) and with_data else b""
            with suppress(ValueError):  # too long for ustar
                add(tar, name, data, kind, link="" if with_data else up + other)
    assert agreed(path)


# What GNU tar writes.


def gnu_tar(path: Path, root: Path, *options: str) -> None:
    subprocess.run(["tar", "-C", root, *options, "-cf", path, "."], check=True, capture_output=True)


def contents_of_folder(root: Path) -> dict[str, bytes | None]:
    paths = [path for path in root.rglob("*") if path.is_file() or path.is_symlink()]
    return {path.relative_to(root).as_posix(): path.read_bytes() if path.exists() else None for path in paths}


NAMES_IN_TREE = {
    "v7": ["a.jpg", "d/b.jpg", "d/e/ä 日本.jpg", "-dash.jpg", "line\nbreak.jpg", BROKEN, "empty.png", "x" * 90],
    "ustar": ["a" * 100, "b" * 99, f"{'c' * 90}/{'d' * 90}.jpg", f"{'é' * 40}/{'f' * 60}.jpg"],
    "gnu": [f"{'h' * 200}/{'i' * 200}/{'j' * 200}.jpg", "g" * 250, "/".join(["k" * 250] * 3)],
}
"""Names that the format holds, and all that come after it."""


@pytest.mark.parametrize("kind", ["v7", "oldgnu", "gnu", "ustar", "posix"])
@pytest.mark.parametrize("dotted", [True, False])
def test_what_gnu_tar_writes(tmp_path, path, kind, dotted):
    root, formats = tmp_path / "tree", {"v7": ["v7"], "ustar": ["v7", "ustar"]}.get(kind, NAMES_IN_TREE)
    for name in (name for held in formats for name in NAMES_IN_TREE[held]):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"" if name.startswith("empty") else some_bytes(name, 2000))
    os.link(root / "d/b.jpg", root / "d/hard.jpg")
    os.symlink("../a.jpg", root / "d/soft.jpg")
    os.symlink("nowhere", root / "dangling.jpg")
    if kind != "v7":  # the oldest format knows no others
        os.mkfifo(root / "fifo.jpg")
    if "gnu" in formats:  # ustar holds no links to long names
        os.link(root / NAMES_IN_TREE["gnu"][-1], root / "hard to a long name.jpg")
        os.symlink("./" + NAMES_IN_TREE["gnu"][0], root / "soft to a long name.jpg")
    gnu_tar(path, root, f"--format={kind}", *([] if dotted else [r"--transform=s,^\./,,"]))
    expected = contents_of_folder(root)
    assert agreed(path) == expected
    assert len(expected) == {"v7": 11, "ustar": 15}.get(kind, 20)


# Look-up.


def test_names_that_are_not_there(path):
    make_tar(path, dict.fromkeys(("b.jpg", "ä.jpg", BROKEN), b"data"))
    for unknown in ("\ud800.jpg", "", "a.jpg", "b.jpg ", "c.jpg", "\U0010ffff"):  # before, between and after these
        with pytest.raises(KeyError) as caught:
            build_index(LocalBlob(path)).row(unknown)
        assert caught.value.args == (unknown,)


# The index's own file.


@pytest.fixture
def photos(tmp_path) -> Path:
    """A tar of ten members."""
    return make_tar(tmp_path / "photos.tar", {f"d/{n}.jpg": some_bytes(n, 1000 + n) for n in range(10)})


@pytest.fixture
def stored(photos) -> Path:
    """Where its index is stored."""
    return Path(f"{photos}{SUFFIX}")


@pytest.fixture
def builds(monkeypatch) -> list[str]:
    """Names of the tars that were read through."""
    names = []
    monkeypatch.setattr(tar_index, "build_index", lambda blob: names.append(blob.name) or build_index(blob))
    return names


def test_the_index_is_stored_beside_the_tar_and_used(photos, stored, builds):
    before = contents(photos)
    assert set(photos.parent.iterdir()) == {photos, stored}
    assert contents(photos) == before
    assert builds == [str(photos)]


def test_another_size_or_time_makes_a_new_index(photos, builds):
    contents(photos)
    os.utime(photos, ns=(0, photos.stat().st_mtime_ns + 1))
    contents(photos)
    assert len(builds) == 2
    status = photos.stat()
    with tarfile.open(photos, "a") as tar:
        add(tar, "later.jpg", bytes(20_000))
    os.utime(photos, ns=(status.st_atime_ns, status.st_mtime_ns))
    for _ in range(2):
        assert "later.jpg" in contents(photos)
        assert len(builds) == 3


def damaged_indexes(whole: bytes) -> dict[str, bytes]:
    arrays = dict(np.load(io.BytesIO(whole)))
    about = json.loads(arrays["about"].tobytes())

    def saved(**changes) -> bytes:
        buffer = io.BytesIO()
        np.savez(buffer, **{**arrays, **changes})
        return buffer.getvalue()

    def says(*about) -> bytes:
        return saved(about=np.frombuffer(json.dumps(about).encode(), np.uint8))

    return {
        "empty": b"",
        "half": whole[: len(whole) // 2],
        "without its last byte": whole[:-1],
        "zeros": bytes(len(whole)),
        "text": b"<html>404</html>",
        "a pickle": pickle.dumps([1]),
        "pickles inside": saved(offsets=np.array([{}] * 10, object)),
        "other arrays": saved(about=np.zeros(3)),
        "another version": says(about[0] + 1, *about[1:]),
        "another stamp": says(about[0], 1, "2", ""),
        "nothing about it": says(),
        "fewer offsets": saved(offsets=arrays["offsets"][1:]),
        "a number for offsets": saved(offsets=np.int64(1)),
        "fewer names": saved(ends=arrays["ends"][:-1]),
        "names backwards": saved(ends=arrays["ends"][::-1].copy()),
    }


def test_a_damaged_index_is_made_anew(photos, stored, builds):
    expected = contents(photos)
    whole = stored.read_bytes()
    for number, (damage, data) in enumerate(damaged_indexes(whole).items()):
        stored.write_bytes(data)
        assert contents(photos) == expected, damage
        assert len(builds) == 2 + number, damage
        assert stored.read_bytes() == whole, damage


@pytest.mark.parametrize("seed", range(5))
def test_an_index_with_flipped_bits_is_made_anew_or_means_the_same(photos, stored, seed):
    expected = contents(photos)
    whole, own = stored.read_bytes(), random.Random(seed)
    for _ in range(40):
        damaged = bytearray(whole)
        damaged[own.randrange(len(whole))] ^= 1 << own.randrange(8)
        stored.write_bytes(damaged)
        assert contents(photos) == expected


@pytest.fixture
def writable(monkeypatch, own_home) -> list[Path]:
    """Folders in which an index can be stored: at first labkit's own. Root can write after `chmod`, too."""
    folders, write_atomic = [own_home], tar_index.write_atomic

    def write(path: Path, data: bytes) -> None:
        if not any(folder in path.parents for folder in folders):
            raise PermissionError(f"read-only: {path}")
        write_atomic(path, data)

    monkeypatch.setattr(tar_index, "write_atomic", write)
    return folders


def test_in_a_read_only_folder_the_index_goes_home(photos, builds, writable, own_home):
    expected = contents_by_tarfile(photos)
    assert contents(photos) == contents(photos) == expected
    assert len(builds) == 1
    assert [path.name for path in photos.parent.iterdir() if path.is_file()] == ["photos.tar"]
    (at_home,) = own_home.rglob("*" + SUFFIX)
    at_home.unlink()
    writable.clear()
    assert contents(photos) == expected  # from an index in memory
    assert len(builds) == 2
    assert list(own_home.rglob("*" + SUFFIX)) == []


def test_at_home_tars_of_one_name_do_not_mix(tmp_path, builds, writable, monkeypatch):
    """The same relative path, size and time, in two folders."""
    for names in (("one", "two"), ("two", "one")):
        (tmp_path / names[0]).mkdir()
        monkeypatch.chdir(tmp_path / names[0])
        make_tar(Path("a.tar"), {f"{name}.jpg": name.encode() for name in names})
        os.utime("a.tar", (0, 0))
        assert contents(Path("a.tar")) == {"one.jpg": b"one", "two.jpg": b"two"}
    assert len(builds) == 2


def test_folders_that_are_no_utf8(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9\xff")
    folder.mkdir()
    assert contents(make_tar(folder / "a.tar", {"a.jpg": b"a"})) == {"a.jpg": b"a"}


def test_a_tar_that_grows_meanwhile_is_refused(photos, stored, monkeypatch):
    def slow(blob):
        index = build_index(blob)
        os.utime(photos, ns=(0, photos.stat().st_mtime_ns + 1))
        return index

    monkeypatch.setattr(tar_index, "build_index", slow)
    with pytest.raises(TarError, match=r"photos\.tar changed while it was read"):
        TarStore(photos).keys()
    assert not stored.exists()


def build(path: Path, start) -> dict[str, bytes]:
    start.wait(30)
    return contents(path)


def test_processes_that_build_at_once(photos, stored):
    expected = contents_by_tarfile(photos)
    for _ in range(5):
        stored.unlink(missing_ok=True)
        start = multiprocessing.get_context("fork").Barrier(5)
        assert in_children("fork", build, *[(photos, start)] * 5) == [expected] * 5
        assert set(photos.parent.iterdir()) == {photos, stored}


KILLED = """
import pathlib, sys
import labkit as lk
print("ready", flush=True)
while True:
    lk.TarStore(sys.argv[1]).keys()
    pathlib.Path(sys.argv[2]).unlink()
"""


def test_a_kill_leaves_no_half_index(photos, stored):
    """Killed at a random moment while it writes the index again and again."""
    expected = contents(photos)
    whole = stored.read_bytes()
    with subprocess.Popen([sys.executable, "-c", KILLED, photos, stored], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        time.sleep(random.Random(0).random() / 10)
        process.kill()
    assert not stored.exists() or stored.read_bytes() == whole
    assert contents(photos) == expected


# Damage.


def refusal(path: Path) -> str:
    """What TarStore says of a file that it does not read, whatever is asked of it; it names it, and stores no index."""
    store, said = TarStore(path), set()
    for use in (store.keys, store.names, lambda: store.read("first.jpg")):
        with pytest.raises(TarError) as failure:
            use()
        said.add(str(failure.value))
    assert not Path(f"{path}{SUFFIX}").exists()
    (text,) = said
    assert str(path) in text
    return text


@pytest.fixture
def plan(tmp_path) -> tuple[bytes, dict[str, tarfile.TarInfo]]:
    """A tar with an ordinary, a long-named and a pax member between others, and where each of them lies."""
    path, members = tmp_path / "plan.tar", {"first.jpg": b"1" * 700, "long" * 100: b"2" * 700, "third.jpg": b"3" * 700}
    make_tar(path, members, format=tarfile.GNU_FORMAT)
    members = [member("pax", b"4" * 700, pax_headers={"path": "pax.jpg"}), member("last.jpg", b"5" * 700)]
    make_tar(path, members, "a", format=tarfile.PAX_FORMAT)
    with tarfile.open(path) as tar:
        return path.read_bytes(), {info.name.split(".")[0][:5]: info for info in tar}


@pytest.mark.parametrize(
    ("where", "places", "said"),
    [
        ("first", (100,), "not a tar"),
        ("first", (512, 512 + 699), "): no member is whole. Copy"),
        # In the header of the name, the name, the member's own header, its data: their first bytes and others.
        ("longl", (1, 511, 512, 1000, 1024, 1030, 1536, 1536 + 699), "last whole member is 'first.jpg'"),
        ("third", (1, 512 + 1), f"last whole member is '{'long' * 100}'"),
        ("pax", (100, 512, 520, 1024, 1100, 1536 + 10), "last whole member is 'third.jpg'"),
        ("last", (511, 512 + 699), "last whole member is 'pax.jpg'"),
    ],
)
def test_a_cut_tar_names_the_last_whole_member(path, plan, where, places, said):
    whole, members = plan
    for place in places:
        path.write_bytes(whole[: members[where].offset + place])
        assert said in refusal(path)


def test_a_tar_cut_where_nothing_is_lost_warns(path, plan):
    """Between members, in the padding behind the last, in the end mark: the members that are there are whole."""
    whole, members = plan
    data = members["last"].offset_data
    for length in (data - 512, data + 700, data + 1000, data + 1024, data + 1124):
        path.write_bytes(whole[:length])
        last = "last.jpg" if length > data else "pax.jpg"
        with pytest.warns(TarWarning, match=rf"a\.tar has no end mark: it may be cut after '{last}'"):
            found = contents(path)
        assert last in found
        assert all(len(data) == 700 for data in found.values())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("length", [512, 1024, 5000])
def test_end_marks_of_any_length_do(path, plan, length):
    whole, members = plan
    path.write_bytes(whole[: members["last"].offset_data + 1024 + length])
    assert len(contents(path)) == 5


@pytest.mark.parametrize(
    ("where", "last_whole"), [("longl", "first.jpg"), ("third", "long" * 100), ("pax", "third.jpg")]
)
def test_a_damaged_header_is_an_error(path, plan, where, last_whole):
    whole, members = plan
    at = members[where].offset + 110  # in the owner's number: the checksum finds it
    path.write_bytes(whole[:at] + b"x" + whole[at + 1 :])
    said = refusal(path)
    assert f"last whole member is '{last_whole}'" in said
    assert f"damaged (the header at byte {members[where].offset} cannot be read: " in said
    with tarfile.open(path) as tar:  # tarfile ends there, as if all were well
        assert len(tar.getnames()) < 5


def test_a_tar_that_ends_with_a_folder_s_header(path):
    whole = make_tar(path, [member("a.jpg", b"a"), member("d", kind=FOLDER)]).read_bytes()[: 3 * BLOCK]
    path.write_bytes(whole)
    with pytest.warns(TarWarning, match="no end mark: it may be cut after 'd'"):
        assert contents(path) == {"a.jpg": b"a"}
    Path(f"{path}{SUFFIX}").unlink()
    path.write_bytes(whole + b"X" * 100)
    assert "truncated header): the last whole member is 'd'" in refusal(path)


@pytest.mark.filterwarnings("ignore::labkit.data.tar_stream.TarWarning")
@pytest.mark.parametrize("seed", range(8))
def test_random_damage_gives_one_kind_of_error(path, plan, seed):
    """Headers damaged so that their checksums fit: only bytes, KeyError and TarError may come of them."""
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
            contents(path)
        except TarError as error:
            named.append(str(path) in str(error))
    assert named
    assert all(named)


# What is no tar.


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is not a tar"),
        (b"<html>404 Not Found</html>", "is not a tar"),
        (b"<html>404 Not Found</html>" * 100, "is not a tar"),
        (b"\xff\xd8\xff\xe0" + bytes(range(256)) * 9, "is not a tar"),
        (gzip.compress(b"a tar"), r"is compressed \(gzip\).*python -m labkit convert"),
        (bz2.compress(b"a tar"), r"is compressed \(bzip2\).*python -m labkit convert"),
        (lzma.compress(b"a tar"), r"is compressed \(xz\).*python -m labkit convert"),
        (b"\x28\xb5\x2f\xfd and more", r"is compressed \(zstd\).*python -m labkit convert"),
    ],
    ids=range(8),  # the bytes of a gzip hold the time
)
def test_what_is_no_tar(path, data, said):
    path.write_bytes(data)
    assert re.search(rf"a\.tar {said}", refusal(path))


def test_the_remedy_for_a_compressed_tar_works(tmp_path, photos):
    """The command is run as the message has it; the name wants quotes."""
    path = tmp_path / "it's packed.tar.gz"
    path.write_bytes(gzip.compress(photos.read_bytes()))
    command = refusal(path).partition("Convert it: python ")[2]
    subprocess.run(f"{sys.executable} {command}", shell=True, check=True, capture_output=True)  # noqa: S602 - quoting is what is tested
    assert contents(Path(f"{path}.tar")) == contents_by_tarfile(photos)


def test_places_without_a_file(tmp_path):
    for place, error in ((tmp_path / "no.tar", FileNotFoundError), (tmp_path, IsADirectoryError)):
        with pytest.raises(error, match=re.escape(str(place))):
            TarStore(place)


@pytest.mark.parametrize(
    ("name", "plain"), [("./a", "a"), ("a", "a"), ("././/a/./b", "a/./b"), (".a", ".a"), ("..", "..")]
)
def test_plain_names(name, plain):
    assert plain_name(name) == plain
