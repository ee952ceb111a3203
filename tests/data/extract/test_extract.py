"""extract_tars: what GNU tar and tarfile extract, never outside its folder, and whole whatever is killed."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from labkit.data import extract as tar_files
from labkit.data.extract import WORK, extract_tars
from labkit.errors import ItemErrors
from tests.tars import Member, make_tar, member, numbered_files

quietly = partial(extract_tars, progress=False)


needs_filters = pytest.mark.skipif(not hasattr(tarfile, "data_filter"), reason="tarfile's filters: Python 3.11.4")


KINDS = {">": tarfile.SYMTYPE, "=": tarfile.LNKTYPE, ":": tarfile.REGTYPE}


def listed(text: str) -> list[Member]:
    """`a:data` is a file, `a/` a folder, `a>b` a symbolic link, `a=b` a hard link, and `a|3` a member of type `3`."""
    members = []
    for word in text.split():
        name, sign, rest = re.fullmatch(r"([^:>=|]*)([:>=|]?)(.*)", word).groups()
        kind = rest.encode() if sign == "|" else tarfile.DIRTYPE if word.endswith("/") else KINDS[sign or ":"]
        members.append(member(name, rest.encode() * (sign == ":"), kind, rest * (sign in KINDS)))
    return members


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


def data_of(root: Path) -> dict[str, bytes]:
    return {name: seen["data"] for name, seen in tree(root).items() if "data" in seen}


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


needs_tar = pytest.mark.skipif(shutil.which("tar") is None, reason="needs the tar command")


@needs_tar
@pytest.mark.parametrize("options", ["--format=gnu", "--format=posix", "--format=gnu -S", "--format=posix -S"])
def test_as_gnu_tar_extracts(varied, tmp_path, options):
    archive, theirs = tmp_path / "set.tar", tmp_path / "theirs"
    theirs.mkdir()
    subprocess.run(["tar", *options.split(), "-cf", archive, "-C", varied, "."], check=True)
    subprocess.run(["tar", "-xf", archive, "-C", theirs], check=True)
    [ours] = quietly(archive, tmp_path / "ours")
    assert ours == tmp_path / "ours" / "set"
    without_modes = [{name: seen | {"mode": 0} for name, seen in tree(root).items()} for root in (ours, theirs)]
    assert without_modes[0] == without_modes[1]
    assert len(without_modes[0]) > 10


@needs_filters
@pytest.mark.parametrize("kind", ["gz", "bz2", "xz"])
def test_compressed_as_tarfile_extracts(varied, tmp_path, kind):
    archive, theirs = tmp_path / f"set.tar.{kind}", tmp_path / "theirs"
    with tarfile.open(archive, f"w:{kind}") as tar:
        tar.add(varied, ".")
    with tarfile.open(archive) as tar:
        tar.extractall(theirs, filter="data")
    [ours] = quietly(archive, tmp_path / "ours")
    assert tree(ours) == tree(theirs)


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
    assert data_of(ours) == expected
    assert not [path for path in ours.rglob("*") if path.is_symlink()]


def test_of_two_members_with_one_name_the_last_counts(tmp_path):
    members = listed("a:old kept=a ./a:new too=a s>a s/ s/b:in")
    [ours] = quietly(make_tar(tmp_path / "set.tar", members), tmp_path)
    assert data_of(ours) == {"a": b"new", "kept": b"old", "too": b"new", "s/b": b"in"}
    assert look(ours / "a") == look(ours / "too")


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
    ("record", "said"), [("path", "has a zero byte in"), ("linkpath", r"is a link to 'x\\x00y', which is not a file")]
)
def test_a_zero_byte_in_a_name(tmp_path, record, said):
    bad = member("x", kind=tarfile.SYMTYPE if record == "linkpath" else tarfile.REGTYPE, pax_headers={record: "x\0y"})
    archive = make_tar(tmp_path / "bad.tar", [bad], format=tarfile.PAX_FORMAT)
    with pytest.raises(ItemErrors, match=said):
        quietly(archive, tmp_path / "root")


def test_a_cut_archive_is_refused_whole(tmp_path):
    archive = make_tar(tmp_path / "set.tar", numbered_files(5))
    os.truncate(archive, 3 * 1536 + 600)
    with pytest.raises(ItemErrors, match=r"set\.tar is cut or damaged .* last whole member is 'photo2.jpg'"):
        quietly(archive, tmp_path / "root")
    assert not (tmp_path / "root").exists()


def test_a_disk_that_fills_up_midway(tmp_path, monkeypatch):
    archive, real = make_tar(tmp_path / "set.tar", numbered_files(9)), tar_files._write_file

    def full(stream, info, half):
        if info.name == "photo5.jpg":
            half.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        real(stream, info, half)

    monkeypatch.setattr(tar_files, "_write_file", full)
    with pytest.raises(ItemErrors, match="No space left"):
        quietly(archive, tmp_path / "root")
    assert os.listdir(tmp_path / "root") == [WORK]
    kept = tmp_path / "root" / WORK / "set" / "tree" / "photo4.jpg"
    before = kept.stat()
    monkeypatch.undo()
    [ours] = quietly(archive, tmp_path / "root")
    assert os.path.samestat(before, (ours / kept.name).stat())
    assert tree(ours) == tree(quietly(archive, tmp_path / "fresh")[0])


def test_a_rerun_leaves_all_alone(tmp_path):
    archive = make_tar(tmp_path / "set.tar", [*listed("a/"), *numbered_files(3, "a/")])
    [ours] = quietly(archive, tmp_path / "root")
    before = tree(tmp_path / "root")
    archive_as_it_is = archive.stat()
    archive.write_bytes(b"?" * archive_as_it_is.st_size)  # it is not even read
    os.utime(archive, ns=(0, archive_as_it_is.st_mtime_ns))
    assert quietly([archive], tmp_path / "root") == [ours]
    assert tree(tmp_path / "root") == before


def test_a_folder_of_others_is_left_alone(tmp_path):
    archive = make_tar(tmp_path / "set.tar", numbered_files(2))
    thesis = tmp_path / "other" / "set" / "thesis.txt"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("important")
    with pytest.raises(ItemErrors, match=r"was not extracted from .*: remove it"):
        quietly(archive, tmp_path / "other")
    assert os.listdir(thesis.parent) == ["thesis.txt"]


def test_names_that_are_one_file_on_this_disk_are_an_error(tmp_path, monkeypatch):
    """As `a.jpg` and `A.jpg` are on a Mac."""
    archive = make_tar(tmp_path / "set.tar", listed("A.jpg:1 a.jpg:2"))
    assert data_of(quietly(archive, tmp_path / "one")[0]) == {"A.jpg": b"1", "a.jpg": b"2"}
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: exists(path) or path.name == "a.jpg")
    with pytest.raises(ItemErrors, match=r"1 of 2 files are in .*differ in case alone"):
        quietly(archive, tmp_path / "two")


def test_an_archive_that_changed_is_not_taken_for_done(tmp_path):
    archive = make_tar(tmp_path / "set.tar", numbered_files(2))
    [ours] = quietly(archive, tmp_path)
    os.utime(archive, (1, 1))
    with pytest.raises(ItemErrors, match="as it is now"):
        quietly(archive, tmp_path)
    make_tar(archive, numbered_files(3))
    shutil.rmtree(ours)
    quietly(archive, tmp_path)
    assert len(os.listdir(ours)) == 3


def test_what_was_begun_of_another_archive_is_thrown_away(tmp_path):
    work = tmp_path / "root" / WORK / "set"
    (work / "tree").mkdir(parents=True)
    (work / "record.json").write_text("another")
    (work / "half").write_text("half")
    (work / "tree" / "photo0.jpg").write_text("another")
    [ours] = quietly(make_tar(tmp_path / "set.tar", numbered_files(2)), tmp_path / "root")
    assert data_of(ours) == {info.name: data for info, data in numbered_files(2)}
    assert os.listdir(work) == ["record.json"]


@pytest.mark.parametrize("engine", ["threads", "local"])
def test_every_engine_extracts_the_same(tmp_path, engine):
    archives = [make_tar(tmp_path / f"n{n}.tar", numbered_files(20, f"n{n}_")) for n in range(5)]
    folders = quietly(archives, tmp_path / engine, engine=engine, num_workers=2)
    assert folders == [tmp_path / engine / f"n{n}" for n in range(5)]
    quietly(archives, tmp_path / "here", num_workers=1)
    assert contents(tmp_path / engine) == contents(tmp_path / "here")


@pytest.mark.parametrize(
    ("names", "options", "said"),
    [
        (["a/x.tar", "b/x.tar"], {}, "would share a folder"),
        (["a/x.tar", "a/x.tar.gz"], {}, "would share a folder"),
        (["a/x.zip"], {}, "x.zip gives no name"),
        (["a/..tar"], {}, "gives no name"),
        (["a/.extract.tar"], {}, "gives no name"),
        (["a/x.tar"], {"engine": "dask"}, "local, threads, ray"),
        (["a/x.tar"], {"num_workers": -1}, "num_workers must be an integer >= 0"),
    ],
)
def test_bad_arguments(tmp_path, names, options, said):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        make_tar(tmp_path / name, numbered_files(1))
    with pytest.raises(ValueError, match=said):
        quietly([tmp_path / name for name in names], tmp_path / "root", **options)
    assert not (tmp_path / "root").exists()


def test_no_such_archive(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.tar is not a file"):
        quietly(tmp_path / "missing.tar", tmp_path / "root")


def start(archives: list[Path], root: Path) -> subprocess.Popen:
    code = f"from labkit import extract_tars; extract_tars({list(map(str, archives))}, {str(root)!r}, progress=False)"
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_killed_again_and_again(tmp_path, suffix):
    mode = "w:gz" if suffix == ".tar.gz" else "w"
    archives = [make_tar(tmp_path / f"n{n}{suffix}", numbered_files(700, f"{n}/{n}_"), mode) for n in range(2)]
    expected, killed = contents(quietly(archives, tmp_path / "expected", num_workers=1)[0].parent), 0
    root = tmp_path / "root"
    for n_files in (1, 400, 1100):
        process = start(archives, root)
        while process.poll() is None and sum(len(names) for _, _, names in os.walk(root)) < n_files:
            time.sleep(0.005)
        process.kill()
        killed += process.wait() == -9
        for name in ("n0", "n1"):
            if (root / name).exists():
                assert len(list((root / name).rglob("*.jpg"))) == 700  # whole or not there
    assert killed >= 2
    assert start(archives, root).wait(60) == 0
    assert contents(root) == expected


def contents(root: Path) -> dict[str, object]:
    """Files, without the times of the records, which are those of their writing."""
    found = {name: seen for name, seen in tree(root).items() if "data" in seen}
    return {name: seen["data"] if name.startswith(WORK) else seen for name, seen in found.items()}


def test_two_processes_extract_the_same_archive(tmp_path):
    archive = make_tar(tmp_path / "set.tar", numbered_files(1500))
    both = [start([archive], tmp_path / "root") for _ in range(2)]
    assert [process.communicate(timeout=60)[1] for process in both] == ["", ""]
    assert len(os.listdir(tmp_path / "root" / "set")) == 1500
    assert os.listdir(tmp_path / "root" / WORK / "set") == ["record.json"]


def test_one_archive_shows_its_bytes(tmp_path, monkeypatch):
    bars, real = Mock(), tar_files.progress_bar
    bars.side_effect = lambda **options: real(**options | {"show": False})
    monkeypatch.setattr(tar_files, "progress_bar", bars)
    archives = [make_tar(tmp_path / f"{n}.tar", numbered_files(3)) for n in "abc"]
    extract_tars(archives[0], tmp_path / "one", num_workers=1)
    extract_tars(archives[1:], tmp_path / "two", num_workers=1)
    assert [call.kwargs["show"] for call in bars.call_args_list] == [True, False, False]
    assert bars.call_args_list[0].kwargs["total"] == 700 + 701 + 702
