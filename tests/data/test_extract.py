"""Tars unpacked: what GNU tar and tarfile extract, never outside its folder, and whole whatever is killed.

extract_tars makes folders; convert makes the plain tar of a compressed one.
"""

import bz2
import gzip
import lzma
import multiprocessing
import os
import re
import shutil
import subprocess
import tarfile
from functools import partial
from pathlib import Path

import pytest

from labkit.data.extract import WORK, extract_tars
from labkit.data.tar_stream import convert_tar
from labkit.errors import ItemErrors, TarError
from tests.children import in_children
from tests.full_disk import full_disk
from tests.hardening.inputs import tar_bytes
from tests.killing import killed_at_every_moment
from tests.paths import contents
from tests.tars import listed, make_tar, member, numbered_files

quietly = partial(extract_tars, progress=False)
convert = partial(convert_tar, progress=False)

PACKERS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
needs_tar = pytest.mark.skipif(shutil.which("tar") is None, reason="needs the tar command")


def tree(root: Path) -> dict[str, dict]:
    """Everything under `root`, itself included: its kind, permissions, time and contents."""
    return {path.relative_to(root).as_posix(): look(path) for path in [root, *root.rglob("*")]}


def look(path: Path) -> dict:
    if path.is_symlink():
        return {"link": os.readlink(path)}
    if path.is_dir():
        return {}
    status = path.stat()
    # Times as tarfile has them: it keeps floats.
    return {"data": path.read_bytes(), "mode": status.st_mode, "time": status.st_mtime_ns // 10**6}


def without_records(root: Path) -> dict[str, dict]:
    """All but the records, which hold the times of their writing."""
    return {name: seen for name, seen in tree(root).items() if not name.startswith(WORK)}


# What comes out.


@pytest.fixture(scope="module")
def varied(tmp_path_factory) -> Path:
    """A folder with something of everything that GNU tar packs, but for symbolic links."""
    root = tmp_path_factory.mktemp("varied") / "in"
    deep = root / "deep" / ("long" * 40) / ("name" * 30)
    deep.mkdir(parents=True)
    (root / "empty folder").mkdir()
    (root / "a.jpg").write_bytes(b"a" * 1024)  # two blocks, without a rest
    (root / "empty.jpg").touch()
    (deep / "ünï ☃.png").write_bytes(b"deep" * 5000)
    long = root / "/".join(["n" * 250] * 7)  # nearly two thousand characters
    long.parent.mkdir(parents=True)
    long.write_bytes(b"long")
    (root / "run.sh").write_bytes(b"#!")
    (root / "run.sh").chmod(0o755)
    Path(os.fsdecode(os.fsencode(root) + b"/broken-\xff.jpg")).write_bytes(b"name")
    os.link(root / "a.jpg", root / "deep" / "same.jpg")
    with open(root / "sparse.bin", "wb") as file:
        file.write(b"begin")
        file.seek(1 << 20)
        file.write(b"end")
    for number, path in enumerate(sorted(root.rglob("*"), reverse=True)):
        time_ns = 1_500_000_000_123_456_789 + number * 1_000_000_007
        os.utime(path, ns=(time_ns, time_ns), follow_symlinks=False)
    return root


@needs_tar
@pytest.mark.parametrize(
    ("options", "suffix"),
    [
        (["--format=gnu"], ""),
        (["--format=posix"], ".gz"),
        (["--format=gnu", "-S"], ".xz"),
        (["--format=posix", "-S"], ".bz2"),
    ],
)
def test_what_comes_out_is_what_gnu_tar_extracts(varied, tmp_path, options, suffix):
    """But of permissions only those to execute are kept."""
    archive, plain, theirs = tmp_path / f"set.tar{suffix}", tmp_path / "plain.tar", tmp_path / "theirs"
    theirs.mkdir()
    subprocess.run(["tar", *options, "-cf", plain, "-C", varied, "."], check=True)
    subprocess.run(["tar", "-xf", plain, "-C", theirs], check=True)
    archive.write_bytes(PACKERS[suffix](plain.read_bytes()))
    [ours] = quietly(archive, tmp_path / "ours")
    assert ours == tmp_path / "ours" / "set"
    seen, expected = tree(ours), tree(theirs)
    for found in (seen, expected):
        modes = {name: about.pop("mode", 0) & 0o100 for name, about in found.items()}
        assert [name for name, mode in modes.items() if mode] == ["run.sh"]
    assert seen == expected
    assert len(seen) > 10


@needs_tar
def test_symbolic_links_become_files_with_the_data_of_their_targets(tmp_path):
    """In the order of a folder, in which a link may come before its target."""
    source, archive = tmp_path / "in", tmp_path / "set.tar"
    (source / "d" / "e").mkdir(parents=True)
    (source / "z.jpg").write_bytes(b"z")
    (source / "d" / "e" / "y.jpg").write_bytes(b"y")
    links = {"a.jpg": "z.jpg", "d/up.jpg": "../z.jpg", "d/e/b.jpg": "./y.jpg", "chain.jpg": "d/../d/up.jpg"}
    for name, target in links.items():
        (source / name).symlink_to(target)
    os.link(source / "a.jpg", source / "hard to soft.jpg", follow_symlinks=False)
    subprocess.run(["tar", "--sort=name", "-cf", archive, "-C", source, "."], check=True)
    [ours] = quietly(archive, tmp_path / "out")
    expected = {path.relative_to(source).as_posix(): path.read_bytes() for path in source.rglob("*.jpg")}
    assert len(expected) == 7
    assert contents(ours) == expected
    assert not [path for path in ours.rglob("*") if path.is_symlink()]


def test_of_two_members_with_one_name_the_last_counts(tmp_path):
    members = listed("a:old kept=a ./a:new too=a s>a s/ s/b:in")
    [ours] = quietly(make_tar(tmp_path / "set.tar", members), tmp_path)
    assert contents(ours) == {"a": b"new", "kept": b"old", "too": b"new", "s/b": b"in"}
    assert look(ours / "a") == look(ours / "too")


def test_each_archive_has_a_folder_of_its_own(tmp_path):
    archives = [make_tar(tmp_path / f"n{n}.tar", numbered_files(20, f"n{n}_")) for n in range(5)]
    folders = quietly(archives, tmp_path / "out", num_workers=2)
    assert folders == [tmp_path / "out" / f"n{n}" for n in range(5)]
    for archive, folder in zip(archives, folders, strict=True):
        with tarfile.open(archive) as tar:
            assert contents(folder) == {info.name: tar.extractfile(info).read() for info in tar}


# What is refused, whole.

UNSAFE = {
    "is an absolute name": ["/{outside}/x", "x=/{outside}/secret"],
    r"has `\.\.` in its name": [
        "../outside/x", "a/../../outside/x", "a/../x", "../outside/x/", "x=../outside/secret",
    ],
    "is a link to .*, which is not a file in the archive": [
        "x>/{outside}", "x>../outside", "a/x>../../outside", "a/b/x>../outside x=a/b/x", "x>missing", "d/ x>d", "x>",
        "d/e/ d/e/a>../.. x>d/e/a/../outside", "d/e/ d/l>e x>d/l/f", "d/e/ d/l>e x>d//l/f", "d/e/ d/l>e x>d/./l/f",
        "x>y y>x", "x>x",
    ],
    "is a hard link to .*, which is not a file before it": ["x=y", "x=y y", "y/ x=y"],
    "is a device, a pipe or of unknown type": ["x|3", "x|4", "x|6", "x|Z"],
    "has no name": [".", "./>a"],
}  # fmt: skip


@pytest.mark.parametrize(("said", "text"), [(said, text) for said, texts in UNSAFE.items() for text in texts])
def test_an_unsafe_archive_is_refused_whole(tmp_path, said, text):
    outside, root = tmp_path / "root" / "outside", tmp_path / "root"
    outside.mkdir(parents=True)
    (outside / "secret").write_bytes(b"secret")
    bad = listed(text.format(outside=str(outside).lstrip("/")))
    archive = make_tar(tmp_path / "bad.tar", [member("first", b"good"), *bad])
    before = tree(outside)
    with pytest.raises(ItemErrors) as failure:
        quietly([archive, make_tar(tmp_path / "good.tar", numbered_files(3))], root, num_workers=1)
    [(key, error)] = failure.value.failures.items()
    assert key == str(archive)
    named = re.match(rf"UnsafeTarError: {archive}: member '(.*?)' {said}", error)[1]
    assert named.rstrip("/") in {info.name.rstrip("/") for info, _ in bad}
    assert failure.value.results == [None, root / "good"]
    assert tree(outside) == before
    assert sorted(os.listdir(root)) == [WORK, "good", "outside"]
    assert os.listdir(root / WORK) == ["good"]
    assert len(os.listdir(root / "good")) == 3


@pytest.mark.parametrize(
    ("record", "value", "kind", "said"),
    [
        ("path", "x\0y", tarfile.REGTYPE, "has a zero byte in"),
        ("path", "x" * 5000, tarfile.REGTYPE, r"is longer than a path can be \(4096 bytes\)"),
        ("path", "a/" * 1_500 + "x", tarfile.REGTYPE, "lies 1501 folders deep, where 500 are allowed"),
        ("linkpath", "x\0y", tarfile.SYMTYPE, r"is a link to 'x\\x00y', which is not a file"),
    ],
    ids=["a zero byte", "long", "deep", "a zero byte in a link"],
)
def test_a_name_that_no_system_takes_is_refused(tmp_path, record, value, kind, said):
    bad = member("x", kind=kind, pax_headers={record: value})
    archive = make_tar(tmp_path / "bad.tar", [bad], format=tarfile.PAX_FORMAT)
    with pytest.raises(ItemErrors, match=said):
        quietly(archive, tmp_path / "root")
    assert not (tmp_path / "root" / "bad").exists()


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a/x.tar", "b/x.tar.gz"], "would share a folder"),
        (["a/x.zip"], "x.zip gives no name"),
        (["a/.extract.tar"], "gives no name"),
    ],
)
def test_archives_without_a_name_of_their_own_are_an_error(tmp_path, names, said):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        make_tar(tmp_path / name, numbered_files(1))
    with pytest.raises(ValueError, match=said):
        quietly([tmp_path / name for name in names], tmp_path / "root")
    with pytest.raises(FileNotFoundError, match=r"missing\.tar is not a file"):
        quietly(tmp_path / "missing.tar", tmp_path / "root")
    assert not (tmp_path / "root").exists()


# Runs that are cut short, repeated, or in each other's way.


def test_a_disk_that_fills_up_is_named_and_nothing_of_the_archive_stays(tmp_path):
    members = [*numbered_files(5), member("large.jpg", bytes(100_000)), member("last.jpg", b"last")]
    archive = make_tar(tmp_path / "set.tar", members)
    with full_disk(50_000), pytest.raises(ItemErrors, match="File too large"):
        quietly(archive, tmp_path / "root")
    assert os.listdir(tmp_path / "root") == [WORK]
    assert os.listdir(tmp_path / "root" / WORK) == []
    [ours] = quietly(archive, tmp_path / "root")
    assert contents(ours) == {info.name: data for info, data in members}


def test_a_rerun_leaves_all_alone(tmp_path):
    archive = make_tar(tmp_path / "set.tar", [*listed("a/"), *numbered_files(3, "a/")])
    [ours] = quietly(archive, tmp_path / "root")
    before = tree(tmp_path / "root")
    archive_as_it_is = archive.stat()
    archive.write_bytes(b"?" * archive_as_it_is.st_size)  # it is not even read
    os.utime(archive, ns=(0, archive_as_it_is.st_mtime_ns))
    assert quietly([archive], tmp_path / "root") == [ours]
    assert tree(tmp_path / "root") == before


def test_names_that_are_one_file_on_this_disk_are_an_error(tmp_path, monkeypatch):
    """As `a.jpg` and `A.jpg` are on a Mac."""
    archive = make_tar(tmp_path / "set.tar", listed("A.jpg:1 a.jpg:2"))
    assert contents(quietly(archive, tmp_path / "one")[0]) == {"A.jpg": b"1", "a.jpg": b"2"}
    opened = os.open
    monkeypatch.setattr(os, "open", lambda path, *args, **options: opened(f"{path}".lower(), *args, **options))
    with pytest.raises(ItemErrors, match=r"1 of 2 files are in .*differ in case alone"):
        quietly(archive, tmp_path / "two")


def test_a_folder_of_others_or_of_an_older_archive_is_left_alone(tmp_path):
    archive = make_tar(tmp_path / "set.tar", numbered_files(2))
    thesis = tmp_path / "other" / "set" / "thesis.txt"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("important")
    [ours] = quietly(archive, tmp_path)
    os.utime(archive, (1, 1))
    for root in (thesis.parents[1], tmp_path):
        with pytest.raises(ItemErrors, match=r"was not extracted from .* as it is now: "):
            quietly(archive, root)
    assert os.listdir(thesis.parent) == ["thesis.txt"]
    make_tar(archive, numbered_files(3))
    shutil.rmtree(ours)
    quietly(archive, tmp_path)
    assert len(os.listdir(ours)) == 3


def test_what_a_killed_run_left_is_thrown_away(tmp_path):
    work = tmp_path / "root" / WORK / "set"
    (work / "tree").mkdir(parents=True)
    (work / "record.json").write_text("another")
    (work / "tree" / "photo0.jpg").write_text("another")
    [ours] = quietly(make_tar(tmp_path / "set.tar", numbered_files(2)), tmp_path / "root")
    assert contents(ours) == {info.name: data for info, data in numbered_files(2)}
    assert os.listdir(work) == ["record.json"]


def extract_together(start, archive: Path, root: Path) -> list[Path]:
    start.wait(30)
    return quietly(archive, root)


def test_processes_may_extract_the_same_archive_at_once(tmp_path):
    archive, root = make_tar(tmp_path / "set.tar", numbered_files(300)), tmp_path / "root"
    start = multiprocessing.get_context("fork").Barrier(3)
    assert in_children("fork", extract_together, *[(start, archive, root)] * 3) == [[root / "set"]] * 3
    assert contents(root / "set") == {info.name: data for info, data in numbered_files(300)}
    assert os.listdir(root / WORK / "set") == ["record.json"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_after_any_kill_folders_are_whole_and_a_rerun_ends_with_all(tmp_path, suffix):
    mode, root = "w:gz" if suffix == ".tar.gz" else "w", tmp_path / "root"
    archives = [make_tar(tmp_path / f"n{n}{suffix}", numbered_files(2, f"{n}/{n}_"), mode) for n in range(2)]
    extract = partial(quietly, archives, num_workers=1)
    expected, appeared = without_records(extract(tmp_path / "expected")[0].parent), set()
    for _ in killed_at_every_moment(partial(extract, root)):
        there = [name for name in ("n0", "n1") if (root / name).exists()]
        assert all(len(list((root / name).rglob("*.jpg"))) == 2 for name in there)
        appeared.add(len(there))
        extract(root)
        assert without_records(root) == expected
        shutil.rmtree(root)
    assert appeared == {0, 1, 2}


# convert.


def plain_tar(folder: Path, count: int = 5, size: int = 700) -> bytes:
    members = [member(f"./a/{n}.jpg", b"x" + os.urandom(size + n - 1)) for n in range(count)]
    data = make_tar(folder / "plain", members).read_bytes()
    (folder / "plain").unlink()
    return data


def several_streams(data: bytes) -> bytes:
    """As pigz and bgzip write them."""
    return gzip.compress(data[:2000]) + gzip.compress(data[2000:])


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress, several_streams])
def test_the_plain_tar_is_what_was_compressed(tmp_path, compress):
    data = plain_tar(tmp_path)
    source, target = tmp_path / "set.tar.any", tmp_path / "new" / "set.tar"
    source.write_bytes(compress(data))
    assert convert(source, target) == target
    assert target.read_bytes() == data
    assert os.listdir(target.parent) == ["set.tar"]


def assert_refused(source: Path, said: str, error: type[OSError] = TarError) -> None:
    target = source.parent / "out" / "set.tar"
    with pytest.raises(error, match=said) as failure:
        convert(source, target)
    assert str(source) in str(failure.value)
    assert "partial" not in str(failure.value)
    assert not target.exists()
    assert not target.parent.exists() or os.listdir(target.parent) == []


@pytest.mark.parametrize("kind", [".gz", ".bz2", ".xz"])
def test_what_is_cut_or_damaged_is_not_converted(tmp_path, kind):
    source, plain = tmp_path / f"set.tar{kind}", plain_tar(tmp_path)
    data = PACKERS[kind](plain)
    middle = len(data) // 2
    for length in (30, middle, len(data) - 1):
        source.write_bytes(data[:length])
        assert_refused(source, "cut or damaged .*copy or download it again")
    source.write_bytes(data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :])
    assert_refused(source, "cut or damaged")
    source.write_bytes(PACKERS[kind](plain[:4000]))  # cut before it was compressed
    assert_refused(source, r"last whole member is './a/1.jpg'")
    source.write_bytes(PACKERS[kind](plain[:3072] + bytes(512) + plain[3584:]))
    assert_refused(source, r"goes on at byte 3584 .* is './a/1.jpg'")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (tar_bytes(member("a.jpg", b"1")), "is a tar that is not compressed: use it as it is"),
        (b"./a.jpg".ljust(2048, b"\0"), "is not a tar"),
        (gzip.compress(b"a picture, say" * 100), "is not a tar"),
        (gzip.compress(b""), "is not a tar"),
        (b"\x28\xb5\x2f\xfd more", "unpack it by `zstd -d "),
        (None, "does not exist .looked for in .*: check the path"),
    ],
    ids=range(6),  # the bytes of a gzip hold the time
)
def test_what_cannot_be_converted_is_told(tmp_path, data, said):
    if data is not None:
        (tmp_path / "set.tar.x").write_bytes(data)
    assert_refused(tmp_path / "set.tar.x", said, FileNotFoundError if data is None else TarError)


def test_nothing_is_overwritten_and_no_half_tar_stays(tmp_path):
    source, target = tmp_path / "set.tar.gz", tmp_path / "set.tar"
    source.write_bytes(gzip.compress(plain_tar(tmp_path, 9, 20_000)))
    target.write_text("important")
    with pytest.raises(FileExistsError, match=r"set\.tar exists: .*choose another name"):
        convert(source, target)
    assert target.read_text() == "important"
    assert sorted(os.listdir(tmp_path)) == ["set.tar", "set.tar.gz"]
    target.unlink()
    with full_disk(100_000), pytest.raises(OSError, match="File too large") as failure:
        convert(source, target)
    assert failure.value.filename == str(target)
    assert os.listdir(tmp_path) == ["set.tar.gz"]


def refusal_of_convert(source: Path, target: Path) -> str:
    try:
        convert(source, target)
    except FileExistsError as error:
        return str(error)
    return ""


@pytest.mark.exhaustive
def test_killed_at_any_moment_or_run_twice_at_once_the_tar_is_whole(tmp_path):
    data = plain_tar(tmp_path, 3, 30_000)
    source, target = tmp_path / "set.tar.gz", tmp_path / "out" / "set.tar"
    source.write_bytes(gzip.compress(data))
    was_there = []
    for _ in killed_at_every_moment(partial(convert, source, target)):
        was_there.append(target.exists())
        assert not was_there[-1] or target.read_bytes() == data
        target.unlink(missing_ok=True)
    assert was_there == sorted(was_there)  # first it is not there, then it is
    assert set(was_there) == {False, True}
    target.unlink()
    said = sorted(in_children("fork", refusal_of_convert, *[(source, target)] * 2))
    assert said[0] == ""
    assert re.fullmatch(f"{target} exists: .*choose another name.*", said[1])
    assert target.read_bytes() == data
    assert os.listdir(target.parent) == ["set.tar"]
