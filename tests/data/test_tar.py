"""TarStore: what `tarfile` and GNU tar find in a tar, by an index that is stored, renewed and never just believed."""

import gc
import io
import json
import multiprocessing
import os
import pickle
import random
import re
import subprocess
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from labkit import TarStore
from labkit.data.blobs import LocalBlob
from labkit.data.tar import SUFFIX, read_index
from labkit.errors import TarError
from tests.children import in_children
from tests.full_disk import full_disk
from tests.image_files import read_all
from tests.tars import add, listed, make_tar, member

pytestmark = pytest.mark.usefixtures("own_home")
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
BLOCK = 512
BROKEN = os.fsdecode(b"caf\xe9/\xff.jpg")  # no UTF-8


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


def contents(place: Path | str) -> dict[str, bytes | None]:
    """What TarStore reads; None for a link that leads nowhere, if the error says so."""
    store, found = TarStore(place), {}
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


# Members of every kind.

# Around what the fields hold: 100 bytes in `name`, 155 in ustar's `prefix`, 512 in a block of GNU's long names.
NAMES = [
    *(f"{length}".ljust(length, "x") for length in (1, 99, 100, 101, 155, 255, 256, 511, 512, 513)),
    *(f"{'d' * first}/{'n' * second}" for first in (1, 99, 100, 154, 155) for second in (1, 99, 100)),
    "x" + "é" * 50, "x" + "é" * 49 + "y", "日本/" + "語" * 40 + ".jpg", "a/b.jpg", "two words", BROKEN,
    ".a", "..b", "c/./d",
]  # fmt: skip


MEMBERS = {
    # A hard link leads to what is before it, a symbolic one to the last of its name, wherever that is.
    "links": listed(
        "early=a forward>d/late a:first hard1=a a:second hard2=./a hard3=hard1 d/late:late d/up>../a d/beside>late "
        "d/e/chain>.././up hard-to-soft=d/beside soft-to-hard>hard1 absolute>/a outside>../a d/ to-a-folder>d "
        "dangling>no no-hard=no no-soft>no-hard self>self loop1>loop2 loop2>loop1 into-loop=loop2 "
        "replaced>a replaced:by-a-file a-file:replaced-by-a-link a-file>d/late "
        + "".join(f"chain{number}>chain{number + 1} " for number in range(20))
        + "chain20:end"
    ),
    # In two spellings, too; the last two are as `tar -cf x.tar a a` writes them where a has two links.
    "one name": listed(
        "a:0 ./b:1 b:2 a:3 ./a:4 b:5 .//c:6 ././d:7 file-first:data file-first/ folder-first/ folder-first:8 "
        "twice:9 twice=twice"
    ),
    "no files": [
        *listed("folder/ device|3 disk|4 pipe|6 empty:"),
        member("old folder/", kind=tarfile.AREGTYPE),
        member("contiguous", b"7", kind=tarfile.CONTTYPE),
        member("oldest", b"0", kind=tarfile.AREGTYPE),
        member("unknown", b"unknown types count as files", kind=b"Z"),
        member("named like a folder/", b"but a file"),
    ],
}


@pytest.mark.parametrize(
    ("case", "count", "dangling"),
    [
        ("links", 45, "early absolute outside to-a-folder dangling no-hard no-soft self loop1 loop2 into-loop"),
        ("one name", 6, ""),
        ("no files", 5, ""),
    ],
)
def test_members_are_what_tarfile_finds(path, case, count, dangling):
    found = agreed(make_tar(path, MEMBERS[case]))
    assert len(found) == count
    assert [name for name, data in found.items() if data is None] == dangling.split()


def test_pax_headers_of_a_member_and_of_all_that_follow_are_applied(path):
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        add(tar, "before.jpg", b"1")
        tar.fileobj.write(tarfile.TarInfo.create_pax_global_header({"comment": "from here on", "size": "2"}))
        tar.offset = tar.fileobj.tell()
        add(tar, "named otherwise.jpg", b"222", pax_headers={"path": "ä/named by pax.jpg"})
        add(tar, "after.jpg", b"333")
        add(tar, "broken utf-8.jpg", b"444", pax_headers={"path": BROKEN})
    assert agreed(path) == {"before.jpg": b"1", "ä/named by pax.jpg": b"22", "after.jpg": b"33", BROKEN: b"44"}


@pytest.mark.parametrize("kind", ["gnu", "pax"])
def test_a_member_may_be_larger_than_octal_digits_hold(path, kind):
    """8 GiB and more: base-256 in GNU's format, a pax record in the other. The file has a hole there."""
    large, after = member("large.jpg", size=9 << 30)[0], member("after.jpg", size=5)[0]
    with open(path, "wb") as file:
        file.write(large.tobuf(FORMATS[kind]))
        start = file.tell()
        file.seek(large.size, os.SEEK_CUR)
        file.write(after.tobuf(FORMATS[kind]) + b"after".ljust(BLOCK, b"\0") + bytes(2 * BLOCK))
    store = TarStore(path)
    assert list(store.keys()) == ["after.jpg", "large.jpg"]
    assert store.sizes().tolist() == [5, large.size]
    index = read_index(LocalBlob(path))
    assert index.offsets[index.row("large.jpg")] == start
    assert store.read("after.jpg") == b"after"


def test_headers_of_ordinary_files_need_no_tarfile(path, monkeypatch):
    """Of all names and sizes that ustar holds; the largest is a hole. `tarfile` reads the first header to open it."""
    full = os.fsdecode(b"\xff" * 155 + b"/" + b"\xff" * 100)  # sums to more than 16 bits hold
    sizes = {"a": 0, "x" * 100: 511, "d" * 155 + "/" + "y" * 100: 512, "d/z": 513, full: 1, "last": (8 << 30) - 1}
    with open(path, "wb") as file:
        for name, size in sizes.items():
            info, _ = member(name, kind=tarfile.AREGTYPE if name == "d/z" else tarfile.REGTYPE, size=size)
            file.write(info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape"))
            file.seek(-(-size // BLOCK) * BLOCK, os.SEEK_CUR)
        file.write(bytes(2 * BLOCK))
    with tarfile.open(path, "r:") as tar:
        expected = {info.name: (info.offset_data, info.size) for info in tar}
    calls, fromtarfile = [], tarfile.TarInfo.fromtarfile
    monkeypatch.setattr(tarfile.TarInfo, "fromtarfile", lambda tar: calls.append(tar.offset) or fromtarfile(tar))
    index = read_index(LocalBlob(path))
    places = zip(index.names, zip(index.offsets.tolist(), index.sizes.tolist(), strict=True), strict=True)
    assert dict(places) == expected
    assert list(expected) == list(sizes)
    assert calls == [0]


def test_a_tar_of_nothing_holds_no_image(path):
    path.write_bytes(bytes(BLOCK * 20))
    assert list(TarStore(path).names()) == []
    with pytest.raises(FileNotFoundError, match=r"a\.tar holds no image"):
        TarStore(path).keys()


@pytest.mark.parametrize("seed", range(20))
def test_random_tars_are_what_tarfile_reads(path, seed):
    """On a disk, and behind a client that fetches a megabyte at a time."""
    own = random.Random(seed)
    hard, soft, folder, pipe = tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE
    kinds = [tarfile.REGTYPE] * 6 + [tarfile.AREGTYPE, tarfile.CONTTYPE, folder, pipe, b"Z"]
    names = own.sample(NAMES, 12) + [
        own.choice(["", "", "./"]) + "/".join(own.choice("abcä") * own.choice([1, 1, 2, 60]) for _ in range(depth))
        for depth in own.choices([1, 2, 3], k=20)
    ]
    with tarfile.open(path, "w", format=own.choice(list(FORMATS.values()))) as tar:
        for number in range(80):
            (name, other), with_data = own.choices(names, k=2), own.random() < 0.6
            kind = own.choice(kinds if with_data else [hard, soft])
            up = own.choice(["", "../" * name.removeprefix("./").count("/")]) if kind == soft else ""
            data = some_bytes((seed, number)) if kind not in (folder, pipe) and with_data else b""
            with suppress(ValueError):  # too long for ustar
                add(tar, name, data, kind, link="" if with_data else up + other)
    assert contents(f"file://{path}") == agreed(path) != {}


# Names that the format holds, and all that come after it.
NAMES_IN_TREE = {
    "v7": ["a.jpg", "d/b.jpg", "d/e/ä 日本.jpg", "-dash.jpg", "line\nbreak.jpg", BROKEN, "empty.png", "x" * 90],
    "ustar": ["a" * 100, "b" * 99, f"{'c' * 90}/{'d' * 90}.jpg", f"{'é' * 40}/{'f' * 60}.jpg"],
    "gnu": [f"{'h' * 200}/{'i' * 200}/{'j' * 200}.jpg", "g" * 250, "/".join(["k" * 250] * 3)],
}


@pytest.mark.parametrize("kind", ["v7", "oldgnu", "gnu", "ustar", "posix"])
@pytest.mark.parametrize("dotted", [True, False])
def test_what_gnu_tar_writes_is_read(tmp_path, path, kind, dotted):
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
    options = [f"--format={kind}", *([] if dotted else [r"--transform=s,^\./,,"])]
    subprocess.run(["tar", "-C", root, *options, "-cf", path, "."], check=True, capture_output=True)
    files = [path for path in root.rglob("*") if path.is_file() or path.is_symlink()]
    expected = {path.relative_to(root).as_posix(): path.read_bytes() if path.exists() else None for path in files}
    assert agreed(path) == expected
    assert len(expected) == {"v7": 11, "ustar": 15}.get(kind, 20)


# Keys and places.

KEYS = ["cat/B.JPG", "cat/a.jpeg", "dog/c.png", "dog/two words.webp", "top.jpg", "Größe/日本.jpg"]
OTHERS = ["list.txt", "cat/.hidden.jpg", ".cache/e.jpg", "dog/depth.npy"]
FILES = {name: random.Random(name).randbytes(100 * number) for number, name in enumerate((*KEYS, *OTHERS))}


@pytest.mark.parametrize("dots", [["./"], [""], ["", "./"]])
def test_keys_are_the_images_however_they_are_spelled(path, dots):
    """With `./`, as `tar -cf x.tar .` writes it, without, and with both by turns."""
    members = [(dots[number % len(dots)] + name, data) for number, (name, data) in enumerate(FILES.items())]
    store = TarStore(make_tar(path, dict(reversed(members))))
    assert list(store.keys()) == sorted(KEYS)
    assert store.names() == sorted(FILES)
    assert repr(store) == "TarStore('a.tar', 6 images)"
    for name, data in FILES.items():
        assert store.read(name) == store.read(f"./{name}") == data


def test_places_without_a_file_are_an_error_before_anything_is_read(tmp_path):
    for place, error in ((tmp_path / "no.tar", FileNotFoundError), (tmp_path, IsADirectoryError)):
        with pytest.raises(error, match=re.escape(str(place))):
            TarStore(place)


# The index's own file.


@pytest.fixture
def photos(tmp_path) -> Path:
    """A tar of ten members, alone in its folder."""
    (tmp_path / "photos").mkdir()
    return make_tar(tmp_path / "photos" / "photos.tar", {f"d/{n}.jpg": some_bytes(n, 1000 + n) for n in range(10)})


@pytest.fixture
def stored(photos) -> Path:
    """Where its index is stored."""
    return Path(f"{photos}{SUFFIX}")


def spoil_headers(tar: Path) -> None:
    """From now on it can only be read by an index: its size, its time and its data are as they were."""
    with tarfile.open(tar) as members:
        offsets = [info.offset for info in members]
    status = tar.stat()
    with open(tar, "r+b") as file:
        for offset in offsets:
            file.seek(offset)
            file.write(b"x" * BLOCK)
    os.utime(tar, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_the_index_is_stored_beside_the_tar_and_used(photos, stored):
    before = agreed(photos)
    assert set(photos.parent.iterdir()) == {photos, stored}
    spoil_headers(photos)
    assert contents(photos) == before
    stored.unlink()
    with pytest.raises(TarError):
        contents(photos)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_another_size_or_time_makes_a_new_index(photos, scheme):
    before, status = contents(f"{scheme}{photos}"), photos.stat()
    make_tar(photos, {name.replace("d", "e"): data[::-1] for name, data in before.items()})
    os.utime(photos, ns=(0, status.st_mtime_ns + 1_000_000_000))
    assert photos.stat().st_size == status.st_size
    assert contents(f"{scheme}{photos}") == contents_by_tarfile(photos)
    status = photos.stat()
    make_tar(photos, {"later.jpg": bytes(20_000)}, "a")
    os.utime(photos, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert contents(f"{scheme}{photos}") == contents_by_tarfile(photos)


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


def test_a_damaged_index_is_made_anew(photos, stored):
    expected = contents(photos)
    whole, own = stored.read_bytes(), random.Random(0)
    for damage, data in damaged_indexes(whole).items():
        stored.write_bytes(data)
        assert contents(photos) == expected, damage
        assert stored.read_bytes() == whole, damage
    for _ in range(120):  # or means the same
        at = own.randrange(len(whole))
        stored.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << own.randrange(8)]) + whole[at + 1 :])
        assert contents(photos) == expected, at


def test_where_none_can_be_stored_the_index_goes_home_or_stays_in_memory(photos, stored, own_home):
    stored.mkdir()  # in its way, for root, too
    own_home.write_text("a file, in which no folder can be made")
    expected = agreed(photos)
    own_home.unlink()
    with full_disk(1000):
        assert contents(photos) == expected
    assert [path for path in (*photos.parent.rglob("*"), *own_home.rglob("*")) if path.is_file()] == [photos]
    assert contents(photos) == expected
    spoil_headers(photos)
    assert contents(photos) == expected
    stored.rmdir()
    assert contents(photos) == expected
    assert not stored.exists()


def test_at_home_tars_of_one_name_do_not_mix(tmp_path, monkeypatch):
    """The same relative path, size and time, in two folders, whose names are no UTF-8."""
    for names in (("one", "two"), ("two", "one")):
        folder = tmp_path / os.fsdecode(names[0].encode() + b"\xff")
        (folder / f"a.tar{SUFFIX}").mkdir(parents=True)
        monkeypatch.chdir(folder)
        make_tar(Path("a.tar"), {f"{name}.jpg": name.encode() for name in names})
        os.utime("a.tar", (0, 0))
        assert contents(Path("a.tar")) == {"one.jpg": b"one", "two.jpg": b"two"}


def test_a_tar_that_changes_while_it_is_indexed_is_refused(photos, stored, monkeypatch):
    read_header = tarfile.TarInfo.fromtarfile

    def read_as_it_grows(tar):
        os.utime(photos, ns=(0, photos.stat().st_mtime_ns + 1))
        return read_header(tar)

    monkeypatch.setattr(tarfile.TarInfo, "fromtarfile", read_as_it_grows)
    with pytest.raises(TarError, match=r"photos\.tar changed while it was read"):
        TarStore(photos).keys()
    assert not stored.exists()


def index_together(start, path: Path) -> dict[str, bytes]:
    start.wait(30)
    return contents(path)


def test_processes_may_index_a_tar_at_once(photos, stored):
    expected = contents_by_tarfile(photos)
    for _ in range(2):
        stored.unlink(missing_ok=True)
        start = multiprocessing.get_context("fork").Barrier(4)
        assert in_children("fork", index_together, *[(start, photos)] * 4) == [expected] * 4
        assert set(photos.parent.iterdir()) == {photos, stored}


# A tar that is open, in any thread and process.


@pytest.fixture
def tar(path) -> Path:
    return make_tar(path, FILES)


def test_a_tar_cut_after_its_headers_were_read_is_an_error(path):
    data = random.Random(0).randbytes(300_000)
    store = TarStore(make_tar(path, {"large.jpg": data}))
    assert store.read("large.jpg") == data
    os.truncate(path, 150_000)
    with pytest.raises(TarError, match=r"a\.tar was cut after its headers were read: 'large\.jpg' lacks its end"):
        store.read("large.jpg")


def test_an_open_store_keeps_its_tar_when_another_takes_its_name(tar):
    """A forked worker, too: nothing is read through again for it, nor is a new tar read at the old one's offsets."""
    store, expected = TarStore(tar), [FILES[key] for key in sorted(KEYS)]
    assert read_all(store) == expected
    make_tar(tar.parent / "new", {"other.jpg": b"other", "top.jpg": b"fresh"}).replace(tar)
    Path(f"{tar}{SUFFIX}").unlink()
    assert read_all(store) == expected
    assert in_children("fork", read_all, (store,)) == [expected]
    assert contents(tar) == {"other.jpg": b"other", "top.jpg": b"fresh"}


def test_reads_may_come_in_pieces(tar, monkeypatch):
    """As from a network disk, or for more than 2 GB."""
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, size, offset: pread(descriptor, min(size, 70), offset))
    assert contents(tar) == FILES


def n_wrong(store: TarStore, seed: int) -> int:
    own = random.Random(seed)
    return sum(store.read(key) != FILES[key] for key in own.choices(list(FILES), k=300))


def test_forks_and_threads_do_not_disturb_each_other(tar):
    """All read at once through what was one open file before the fork."""
    store, fresh = TarStore(tar), TarStore(tar)
    assert n_wrong(store, 0) == 0
    assert in_children("fork", n_wrong, *((store, seed) for seed in range(4))) == [0] * 4
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(lambda seed: n_wrong(fresh, seed), range(8))) == 0


def test_a_fork_may_begin_while_a_thread_reads_the_index(server, tar):
    """The worker does not wait for a lock that a thread of its parent holds."""
    is_reading, may_go_on = threading.Event(), threading.Event()

    def answer_late(handler):
        is_reading.set()
        may_go_on.wait(60)
        handler.answer(handler.whole())

    server.files["/a.tar"], server.script["/a.tar"] = tar.read_bytes(), [answer_late]
    store = TarStore(f"{server.url}/a.tar")
    with ThreadPoolExecutor(1) as pool:
        keys = pool.submit(store.keys)
        assert is_reading.wait(30)
        assert in_children("fork", read_all, (store,)) == [[FILES[key] for key in sorted(KEYS)]]
        may_go_on.set()
        assert list(keys.result()) == sorted(KEYS)


def test_open_files_do_not_add_up(tar, n_open_files):
    """Each store opens its tar once, when it first reads a member, and closes it with itself; copies, too."""
    before = n_open_files()
    gc.disable()  # references must do: a collection may be long in coming
    try:
        stores = [TarStore(tar) for _ in range(5)]
        assert all(map(len, stores))
        assert n_open_files() == before
        for store in stores * 3:
            read_all(store)
        assert n_open_files() == before + 5
        for _ in range(20):
            read_all(pickle.loads(pickle.dumps(stores[0])))
        del stores, store
        assert n_open_files() == before
    finally:
        gc.enable()


def test_failed_openings_leave_no_files_open(tar, n_open_files):
    """Damage is found again by another pass: neither may keep its file."""
    damaged = bytearray(tar.read_bytes())
    with tarfile.open(tar) as whole:
        damaged[whole.getmembers()[2].offset + 110] ^= 1
    tar.write_bytes(damaged)
    before = n_open_files()
    for _ in range(5):
        with pytest.raises(TarError):
            TarStore(tar).keys()
    assert n_open_files() == before
