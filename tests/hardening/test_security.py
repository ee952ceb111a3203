"""Hostile archives, names and files: nothing is written outside its folder, unpickled, or passed to a shell."""

import ast
import io
import json
import os
import pickle
import tarfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import labkit as lk
from labkit.data import extract as tar_files
from labkit.data.shards_write import store_key
from labkit.data.tar_stream import convert_tar
from labkit.errors import CannotDiagnose
from labkit.util import files as atomic
from labkit.util.files import file_lock
from labkit.watching.diagnose import made_training
from tests.hardening.test_hostile import PNG
from tests.memory_store import MemoryStore
from tests.tars import make_tar

PACKAGE = Path(lk.__file__).parent
extract = partial(lk.extract_tars, progress=False)


# Archives.


def test_an_unfinished_extraction_is_private_and_the_umask_applies(tmp_path, monkeypatch):
    modes, write = [], tar_files._write_file

    def record_mode(stream, info, half):
        modes.append(half.parent.stat().st_mode & 0o777)
        write(stream, info, half)

    monkeypatch.setattr(tar_files, "_write_file", record_mode)
    archives = [make_tar(tmp_path / f"{name}.tar", {"a": b"x"}) for name in ("one", "two")]
    before = os.umask(0o027)
    try:
        folders = extract(archives, tmp_path / "root", num_workers=1)
    finally:
        os.umask(before)
    assert modes == [0o700, 0o700]
    for folder in folders:
        assert [path.stat().st_mode & 0o7777 for path in (folder, folder / "a")] == [0o750, 0o640]


def test_links_under_predictable_names(tmp_path, monkeypatch):
    """Of locks, of convert_tar's unfinished file, and of every other unfinished file once its random part is known."""
    precious = tmp_path / "precious"
    precious.write_bytes(b"keep me")
    (tmp_path / "x.lock").symlink_to(tmp_path / "made elsewhere")
    with pytest.raises(OSError), file_lock(tmp_path / "x.lock"):
        pass
    packed = make_tar(tmp_path / "x.tar.gz", {"a.jpg": b"x"}, "w:gz")
    (tmp_path / ".plain.tar.partial").symlink_to(precious)
    convert_tar(packed, tmp_path / "plain.tar", progress=False)
    assert not (tmp_path / "plain.tar").is_symlink()
    monkeypatch.setattr(atomic.secrets, "token_hex", lambda n: "0")
    (tmp_path / f".{os.getpid()}-0.partial").symlink_to(precious)
    with pytest.raises(FileExistsError):
        atomic.write_atomic(tmp_path / "new", b"mine")
    assert precious.read_bytes() == b"keep me"
    assert not (tmp_path / "made elsewhere").exists()


# Keys that no folder has, but a server or a tar may.

HOSTILE_KEYS = ("../../up.jpg", "/abs.jpg", "a/../../b.jpg", "%2e%2e/c.jpg", "a/b..jpg", "..c/..d.jpg", "é/\nx.jpg")
HOSTILE = MemoryStore({key: PNG + key.encode() for key in HOSTILE_KEYS})


def test_a_tar_hides_members_that_lead_out(tmp_path):
    store = lk.TarStore(make_tar(tmp_path / "hostile.tar", HOSTILE.files))
    hidden = {key for key in HOSTILE_KEYS if key.startswith(".") or "/." in key}
    assert {key: store.read(key) for key in list(store.keys())}.items() <= HOSTILE.files.items()
    assert set(store.keys()) == set(HOSTILE_KEYS) - hidden


def test_shards_and_pixels_of_hostile_keys_stay_in_their_folder(tmp_path):
    root = lk.write_shards(HOSTILE, tmp_path / "shards", classes=[], engine="threads", progress=False)
    [shard] = root.glob("*.tar")
    with tarfile.open(shard) as tar:
        names = tar.getnames()
        images = {store_key(name): tar.extractfile(name).read() for name in names if name.endswith(".jpg")}
    assert [tar_files.safe_path(name) for name in names] == names
    assert images == HOSTILE.files
    assert len(list(lk.read_shards(root))) == len(images)
    extract(shard, tmp_path / "out" / "deep")
    store = lk.PixelStore.build(HOSTILE, tmp_path / "made" / "x.pixels", classes=[], progress=False)
    assert list(store.keys) == list(HOSTILE.keys())
    assert os.listdir(tmp_path / "made") == ["x.pixels"]
    assert set(os.listdir(tmp_path)) == {"shards", "out", "made"}


@pytest.mark.parametrize("name", ["../x.tar", "/etc/passwd", "a/../../x.tar", "", 7])
def test_a_manifest_that_names_files_elsewhere(tmp_path, name):
    row = {"name": name, "n_samples": 1, "n_bytes": 1, "sha256": ""}
    manifest = {"settings": {}, "classes": [], "n_samples": 1, "shards": [row]}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="is not a manifest of shards"):
        lk.read_shards(tmp_path)


# Pickles.


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def owned(tmp_path):
    """The file that a payload makes, or a command; the test fails if it is there in the end."""
    path = tmp_path / "owned"
    pickle.loads(pickle.dumps(Payload(path)))
    path.unlink()  # FileNotFoundError if the payload did not work
    yield path
    assert not path.exists()


def test_no_member_of_a_shard_is_unpickled(tmp_path, owned):
    bad, buffer, saved = pickle.dumps(Payload(owned)), io.BytesIO(), io.BytesIO()
    np.save(buffer, np.array([Payload(owned)], dtype=object), allow_pickle=True)
    torch.save(Payload(owned), saved)
    files = {"pyd": bad, "pkl": bad, "pickle": bad, "pth": saved.getvalue(), "npy": buffer.getvalue(), "mp": bad}
    sample = {"a.jpg": PNG, "a.cls": b"1"}
    shard = make_tar(tmp_path / "x.tar", sample | {f"a.{suffix}": data for suffix, data in files.items()})
    [(image, label)] = lk.read_shards(shard)
    assert (image.shape, label) == ((3, 1, 1), 1)
    [found] = lk.read_shards(shard).samples()
    assert {suffix: bytes(found[suffix]) for suffix in files} == files
    for data in files.values():  # in place of the image or the label
        with pytest.raises(lk.DecodeError):
            list(lk.read_shards(make_tar(tmp_path / "y.tar", sample | {"a.jpg": data})))
    with pytest.raises(ValueError, match="label must be a 64-bit integer"):
        list(lk.read_shards(make_tar(tmp_path / "z.tar", sample | {"a.cls": bad})))


def test_nothing_else_on_a_disk_is_unpickled(tmp_path, owned):
    (tmp_path / "set").mkdir()
    bad = pickle.dumps(Payload(owned))
    for name, data in {"a.jpg": PNG, "bad": bad, "manifest.json": bad}.items():
        (tmp_path / "set" / name).write_bytes(data)
    for read in (lk.PixelStore, lambda path: lk.TarStore(path).keys(), lambda path: lk.decode(path.read_bytes())):
        with pytest.raises((ValueError, OSError)):
            read(tmp_path / "set" / "bad")
    with pytest.raises(ValueError, match="manifest"):
        lk.read_shards(tmp_path / "set")


# Calls that run what they read, and where labkit may make them: on its own pickles, and on the reader's cell.
_DANGEROUS = {
    "pickle.load", "pickle.loads", "cloudpickle.load", "cloudpickle.loads", "torch.load", "eval", "exec", "os.system",
    "os.popen", "marshal.loads", "yaml.load", "pd.read_pickle", "joblib.load", "shelve.open", "subprocess.getoutput",
}  # fmt: skip
_ALLOWED = {
    ("util/parallel.py", "pickle.loads"), ("loading/torch_loader.py", "pickle.loads"),
    ("app/magics.py", "exec"), ("watching/script.py", "exec"), ("peers/host.py", "pickle.loads"),
}  # fmt: skip


def test_no_source_runs_what_it_reads():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name, keywords = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
                if name in _DANGEROUS or keywords.get("shell", "False") != "False":
                    found.add((path.relative_to(PACKAGE).as_posix(), name))
                assert name != "np.load" or keywords.get("allow_pickle") == "False", path
    assert found == _ALLOWED


# Commands; tests/hardening/test_names.py has them as names of files.


@pytest.mark.parametrize("shards", ["pipe:touch {}", "pipe:touch {} #http://x/y.tar", "{{pipe:touch {},b}}.tar"])
def test_a_list_of_shards_runs_no_command(owned, shards):
    for places in (shards.format(owned), [shards.format(owned)], [Path("pipe:touch x"), "a.tar"]):
        with pytest.raises((ValueError, FileNotFoundError), match=r"command, which labkit does not run|does not exist"):
            list(lk.read_shards(places))
    with pytest.raises(ValueError, match="command, which labkit does not run"):
        lk.read_shards(shards.format(owned))


@pytest.mark.parametrize("name", ["a; touch owned", "$(touch owned)", "|touch owned", "--help", "a\nb", "/etc/passwd"])
def test_a_training_is_no_command(owned, monkeypatch, name):
    monkeypatch.chdir(owned.parent)
    for training in (name, f"{name}:make", f"os:{name}", f".{name}:make"):
        with pytest.raises(CannotDiagnose):
            made_training(training)
