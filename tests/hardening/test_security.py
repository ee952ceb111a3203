"""Hostile archives, names and files: nothing is written outside, unpickled, or given to a shell."""

import ast
import hashlib
import io
import json
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import Imagenette
from typer.testing import CliRunner

import labkit as lk
from labkit.core import atomic as files
from labkit.core.locks import file_lock
from labkit.core.mapping.engines import ItemErrors
from labkit.data.extract import files as tar_files, plan as tar_safety
from labkit.data.extract.extract import WORK, extract_tars
from labkit.data.extract.plan import UnsafeTarError, safe_path
from labkit.data.samples import imagenette as download
from labkit.data.shards.layout import store_key
from labkit.data.tar.convert import convert_tar
from labkit.data.tar.index import SUFFIX
from labkit.lab import cli
from labkit.lab.recording import FolderRecorder
from labkit.measure.frames import make_frame
from labkit.tuning.entry_point import made_training
from labkit.tuning.epochs import CannotDiagnose
from tests.memory_store import MemoryStore

PACKAGE = Path(lk.__file__).parent
# What a shell would run, an option parser take for an option, or a path parser split.
ODD_NAMES = (
    "a; touch owned", "$(touch owned)", "`touch owned`", "a' 'b", '"', "-rf", "--help", "a b", "a\nb", "&& touch owned",
    "C:\\evil", "..\\evil", "\\\\host\\share", "NUL", "ends in a dot.", "|touch owned", "{a,b}", "~", "%2e%2e",
)  # fmt: skip


def jpeg(color: int = 90) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (16, 12), (color, 10, 10)).save(buffer, "JPEG")
    return buffer.getvalue()


def make_tar(path: Path, contents: dict[str, bytes], mode: str = "w", **fields) -> Path:
    with tarfile.open(path, mode) as tar:
        for name, data in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for field, value in fields.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(data))
    return path


def all_files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


# Archives.


def test_odd_names_are_names_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    contents = {f"{name}/{name}.jpg": name.encode() for name in ODD_NAMES}
    [folder] = extract_tars(make_tar(tmp_path / "set.tar", contents), tmp_path / "out", verify=True, progress=False)
    assert all_files(folder) == sorted(contents)
    assert {name: (folder / name).read_bytes() for name in contents} == contents
    assert sorted(os.listdir(tmp_path)) == ["out", "set.tar"]


@pytest.mark.parametrize("swapped_after", [1, 2])
def test_a_folder_exchanged_for_a_link_meanwhile(tmp_path, monkeypatch, swapped_after):
    """Another process of the same user, between two members: `d` is a link to elsewhere from now on."""
    outside = tmp_path / "outside"
    outside.mkdir()
    archive = make_tar(tmp_path / "set.tar", {f"d/e/{n}.jpg": b"x" for n in range(2)} | {"f": b"x", "d/e/2.jpg": b"x"})
    write, calls = tar_files._write_file, []

    def swapping(stream, info, half):
        write(stream, info, half)
        calls.append(info.name)
        if len(calls) == swapped_after:
            tree = half.with_name("tree")
            (tree / "d").rename(tree / "old") if (tree / "d").exists() else None
            (tree / "d").symlink_to(outside)

    monkeypatch.setattr(tar_files, "_write_file", swapping)
    with pytest.raises(ItemErrors, match="is a link or a file where a folder was"):
        extract_tars(archive, tmp_path / "root", progress=False)
    assert len(calls) >= swapped_after
    assert all_files(outside) == []
    assert os.listdir(tmp_path / "root") == [WORK]


def test_a_link_in_what_a_killed_run_left(tmp_path):
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    archive = make_tar(tmp_path / "set.tar", {"d/a.jpg": b"x"})
    extract_tars(archive, root, progress=False)
    (root / "set").rename(root / WORK / "set" / "tree")  # as if the renaming had not come to pass
    (root / WORK / "set" / "tree" / "d" / "a.jpg").unlink()
    (root / WORK / "set" / "tree" / "d").rmdir()
    (root / WORK / "set" / "tree" / "d").symlink_to(outside)
    with pytest.raises(ItemErrors, match="is a link or a file where a folder was"):
        extract_tars(archive, root, progress=False)
    assert all_files(outside) == []


def test_what_is_half_extracted_is_private_and_the_umask_holds(tmp_path, monkeypatch):
    modes, write = [], tar_files._write_file

    def looking(stream, info, half):
        modes.append(half.parent.stat().st_mode & 0o777)
        write(stream, info, half)

    monkeypatch.setattr(tar_files, "_write_file", looking)
    archive = make_tar(tmp_path / "set.tar", {"a": b"x"}, mode="w")
    archive_of_all = make_tar(tmp_path / "all.tar", {"a": b"x"})
    before = os.umask(0o027)
    try:
        folders = extract_tars([archive, archive_of_all], tmp_path / "root", num_workers=1, progress=False)
    finally:
        os.umask(before)
    assert modes == [0o700, 0o700]
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o750, 0o750]
    assert [(folder / "a").stat().st_mode & 0o7777 for folder in folders] == [0o640, 0o640]


@pytest.mark.parametrize("target", ["", "a\0b"])
def test_a_link_without_a_usable_target(tmp_path, target):
    info = tarfile.TarInfo("x")
    info.type, info.pax_headers = tarfile.SYMTYPE, {"linkpath": target} if target else {}
    path = tmp_path / "bad.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info)
    with pytest.raises(ItemErrors, match="is a link with"):
        extract_tars(path, tmp_path / "root", progress=False)
    assert not (tmp_path / "root").exists()


def test_too_many_members(tmp_path, monkeypatch):
    monkeypatch.setattr(tar_safety, "MAX_MEMBERS", 3)
    extract_tars(make_tar(tmp_path / "three.tar", dict.fromkeys("abc", b"x")), tmp_path, progress=False)
    with pytest.raises(ItemErrors, match="one more than the 3"):
        extract_tars(make_tar(tmp_path / "four.tar", dict.fromkeys("abcd", b"x")), tmp_path, progress=False)


def test_links_under_names_that_can_be_guessed(tmp_path, monkeypatch):
    """Of locks, of convert's unfinished file, and, if it could be guessed, of every other unfinished one."""
    precious = tmp_path / "precious"
    precious.write_bytes(b"keep me")
    (tmp_path / "x.lock").symlink_to(tmp_path / "made elsewhere")
    with pytest.raises(OSError), file_lock(tmp_path / "x.lock"):
        pass
    packed = make_tar(tmp_path / "x.tar.gz", {"a.jpg": b"x"}, "w:gz")
    (tmp_path / ".plain.tar.partial").symlink_to(precious)
    convert_tar(packed, tmp_path / "plain.tar", progress=False)
    assert not (tmp_path / "plain.tar").is_symlink()
    monkeypatch.setattr(files.secrets, "token_hex", lambda n: "0")
    (tmp_path / f".{os.getpid()}-0.partial").symlink_to(precious)
    with pytest.raises(FileExistsError):
        files.write_atomic(tmp_path / "new", b"mine")
    assert precious.read_bytes() == b"keep me"
    assert not (tmp_path / "made elsewhere").exists()


@pytest.mark.parametrize("evil", ["../../evil", "{here}/evil", "imagenette2-160/../../evil"])
def test_a_download_that_would_write_outside(tmp_path, monkeypatch, evil):
    contents = {"imagenette2-160/train/a/b.JPEG": jpeg(), evil.format(here=tmp_path): b"x"}
    tgz = make_tar(tmp_path / "evil.tgz", contents, "w:gz")
    md5 = hashlib.md5(tgz.read_bytes()).hexdigest()
    monkeypatch.setitem(Imagenette._ARCHIVES, "160px", ("http://127.0.0.1:9/imagenette2-160.tgz", md5))
    monkeypatch.setattr(download, "_download", lambda url, archive: archive.write_bytes(tgz.read_bytes()))
    root = tmp_path / "a" / "b" / "sets"
    with pytest.raises(UnsafeTarError, match="evil"):
        download.download_imagenette(root)
    assert all_files(tmp_path) == ["a/b/sets/.imagenette2-160.partial/imagenette2-160.tgz", "evil.tgz"]


# Names from elsewhere.

HOSTILE_KEYS = ("../../up.jpg", "/abs.jpg", "a/../../b.jpg", "%2e%2e/c.jpg", "a/b..jpg", "..c/..d.jpg", "é/\nx.jpg")


def hostile_images() -> dict[str, bytes]:
    """Keys as no folder has them, but a server, or a tar, may."""
    return {key: jpeg(number) for number, key in enumerate(sorted(HOSTILE_KEYS))}


def test_a_tar_hides_what_leads_out(tmp_path):
    contents = hostile_images()
    store = lk.TarStore(make_tar(tmp_path / "hostile.tar", contents))
    assert list(store.keys()) == sorted(key for key in contents if not key.startswith(".") and "/." not in key)
    assert {key: store.read(key) for key in store.keys()}.items() <= contents.items()  # noqa: SIM118


def test_shards_of_hostile_keys_lead_nowhere(tmp_path):
    hostile = MemoryStore(hostile_images())
    root = lk.write_shards(hostile, tmp_path / "shards", engine="threads", progress=False)
    [shard] = root.glob("*.tar")
    with tarfile.open(shard) as tar:
        names = tar.getnames()
        images = {store_key(name): tar.extractfile(name).read() for name in names if name.endswith(".jpg")}
    assert [safe_path(name) for name in names] == names
    assert images == hostile.files
    assert len(list(lk.read_shards(root))) == len(images)
    extract_tars(shard, tmp_path / "out" / "deep", verify=True, progress=False)
    assert {path.name for path in tmp_path.iterdir()} == {"shards", "out"}


def test_pixels_of_hostile_keys_are_one_file(tmp_path):
    hostile = MemoryStore(hostile_images())
    store = lk.PixelStore.build(hostile, tmp_path / "made" / "x.pixels", progress=False)
    assert list(store.keys) == list(hostile.keys())
    assert all_files(tmp_path / "made") == ["x.pixels"]


@pytest.mark.parametrize("name", ["../x.tar", "/etc/passwd", "a/../../x.tar", "", 7])
def test_a_manifest_that_names_files_elsewhere(tmp_path, name):
    row = {"name": name, "n_samples": 1, "n_bytes": 1, "sha256": ""}
    (tmp_path / "manifest.json").write_text(
        json.dumps({"settings": {}, "classes": [], "n_samples": 1, "shards": [row]})
    )
    with pytest.raises(ValueError, match="not a file in its folder"):
        lk.read_shards(tmp_path)


def test_a_server_that_lists_keys_outside(tmp_path):
    (tmp_path / "www").mkdir()
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    (tmp_path / "www" / "manifest.json").write_text(json.dumps({"photos": [{"key": "../secret.jpg"}]}))
    with lk.serve_folder(tmp_path / "www") as url:
        store = lk.HttpStore(url)
        with pytest.raises(KeyError):
            store.read("../secret.jpg")


@pytest.mark.parametrize("name", ["../../evil", "/etc/evil", "a/b", "..", "a\0b", "x; touch owned"])
def test_frames_of_experiments_stay_in_their_folder(tmp_path, name):
    FolderRecorder(tmp_path / "results" / "frames").record_frame(
        make_frame([{"variant": "a", "n_images": 1}], experiment=name)
    )
    [path] = all_files(tmp_path)
    assert path.startswith("results/frames/")
    assert path.count("/") == 2


# Pickles.


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@pytest.fixture
def owned(tmp_path) -> Path:
    path = tmp_path / "owned"
    pickle.loads(pickle.dumps(Payload(path)))
    assert path.exists()  # the payload works
    path.unlink()
    return path


def test_no_member_of_a_shard_is_unpickled(tmp_path, owned):
    bad, buffer, saved = pickle.dumps(Payload(owned)), io.BytesIO(), io.BytesIO()
    np.save(buffer, np.array([Payload(owned)], dtype=object), allow_pickle=True)
    torch.save(Payload(owned), saved)
    suffixes = {"pyd": bad, "pkl": bad, "pickle": bad, "pth": saved.getvalue(), "npy": buffer.getvalue(), "mp": bad}
    contents = {"a.jpg": jpeg(), "a.cls": b"1"} | {f"a.{suffix}": data for suffix, data in suffixes.items()}
    shard = make_tar(tmp_path / "x.tar", contents)
    [(image, label)] = lk.read_shards(shard)
    assert (image.shape, label) == ((3, 12, 16), 1)
    [sample] = lk.read_shards(shard).samples()
    assert {suffix: bytes(sample[suffix]) for suffix in suffixes} == suffixes
    for suffix in suffixes:  # and where it stands for the image or the label
        bad_shard = make_tar(tmp_path / "y.tar", {"a.jpg": contents[f"a.{suffix}"], "a.cls": b"1"})
        with pytest.raises(lk.DecodeError):
            list(lk.read_shards(bad_shard))
    with pytest.raises(ValueError, match="label must be a 64-bit integer"):
        list(lk.read_shards(make_tar(tmp_path / "z.tar", {"a.jpg": jpeg(), "a.cls": bad})))
    assert not owned.exists()


def test_a_stored_index_is_not_unpickled(tmp_path, owned):
    tar = make_tar(tmp_path / "x.tar", {"a.jpg": jpeg()})
    keys = list(lk.TarStore(tar).keys())
    index = Path(f"{tar}{SUFFIX}")
    with np.load(index) as stored:
        arrays = dict(stored)
    for name in arrays:
        bad = arrays | {name: np.array([Payload(owned)], dtype=object)}
        np.savez(index, **bad)
        assert list(lk.TarStore(tar).keys()) == keys
    index.write_bytes(pickle.dumps(Payload(owned)))
    assert list(lk.TarStore(tar).keys()) == keys
    assert not owned.exists()


def test_nothing_else_on_a_disk_is_unpickled(tmp_path, owned):
    bad = tmp_path / "bad"
    bad.write_bytes(pickle.dumps(Payload(owned)))
    for read in (lk.PixelStore, lk.TarStore, lambda path: lk.decode(path.read_bytes(), key="bad")):
        with pytest.raises((ValueError, OSError)):
            getattr(read(bad), "keys", list)()
    for place in ("manifest.json", "metadata_cache.json"):
        (tmp_path / "set").mkdir(exist_ok=True)
        (tmp_path / "set" / place).write_bytes(bad.read_bytes())
    (tmp_path / "set" / "a.jpg").write_bytes(jpeg())
    with pytest.raises(ValueError, match="manifest"):
        lk.read_shards(tmp_path / "set")
    with pytest.warns(UserWarning, match="metadata_cache"):
        lk.collect_sizes(tmp_path / "set")
    assert not owned.exists()


# Calls that run what they read, and where labkit may: what it packed itself, and the reader's own cell.
_DANGEROUS = {
    "pickle.load", "pickle.loads", "cloudpickle.load", "cloudpickle.loads", "torch.load", "eval", "exec", "os.system",
    "os.popen", "marshal.loads", "yaml.load", "pd.read_pickle", "joblib.load", "shelve.open", "subprocess.getoutput",
}  # fmt: skip
_EXPLAINED = {
    "core/mapping/pools.py": {"pickle.loads"}, "pipeline/loader/loader.py": {"pickle.loads"}, "lab/magic.py": {"exec"},
    "peers/serve.py": {"pickle.loads"},
}  # fmt: skip


def test_no_source_runs_what_it_reads():
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name, keywords = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            if name in _DANGEROUS or keywords.get("shell", "False") != "False":
                found.setdefault(path.relative_to(PACKAGE).as_posix(), set()).add(name)
            assert name != "np.load" or keywords.get("allow_pickle") == "False", path
    assert found == _EXPLAINED


# Commands.


@pytest.mark.parametrize("shards", ["pipe:touch {}", "pipe:touch {} #http://x/y.tar", "{{pipe:touch {},b}}.tar"])
def test_a_list_of_shards_runs_no_command(tmp_path, owned, shards):
    for places in (shards.format(owned), [shards.format(owned)], [Path("pipe:touch x"), "a.tar"]):
        with pytest.raises((ValueError, FileNotFoundError), match=r"command, which labkit does not run|does not exist"):
            list(lk.read_shards(places))
    with pytest.raises(ValueError, match="command, which labkit does not run"):
        lk.read_shards(shards.format(owned))
    assert not owned.exists()


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_name_is_no_command(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set" / name).mkdir(parents=True)
    (tmp_path / "set" / name / "a.jpg").write_bytes(jpeg())
    packed = make_tar(tmp_path / f"{name}.tar.gz", {"a.jpg": jpeg()}, "w:gz")
    result = CliRunner().invoke(cli.app, ["convert", "--", packed.name, f"{name}.plain"])
    assert result.exit_code == 0, result.output
    for training in (name, f"{name}:make", f"os:{name}", f".{name}:make", "..:make", "/etc/passwd:make"):
        with pytest.raises(CannotDiagnose):
            made_training(training)
    assert sorted(os.listdir(tmp_path)) == sorted(["set", f"{name}.plain", packed.name])


def test_a_served_folder_may_have_any_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = tmp_path.joinpath("; touch owned", "$(touch owned)", "-rf")
    root.mkdir(parents=True)
    (root / "a.jpg").write_bytes(jpeg())
    with lk.serve_folder(root) as url:
        assert url.startswith("http://127.0.0.1:")
        assert lk.HttpStore(url).read("a.jpg") == jpeg()
    assert os.listdir(tmp_path) == ["; touch owned"]
