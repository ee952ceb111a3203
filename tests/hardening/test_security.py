"""Hostile archives, names, pickles and commands: nothing is written elsewhere, unpickled, or passed to a shell."""

import io
import json
import os
import pickle
import re
import tarfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import labkit as lk
from labkit.data.extract import extract_tars, safe_path
from labkit.data.shards_write import store_key
from labkit.data.tar_stream import convert_tar
from labkit.errors import CannotDiagnose
from labkit.util.files import file_lock, write_atomic
from labkit.watching.diagnose import made_training
from tests.hardening.inputs import image_bytes
from tests.memory_store import MemoryStore
from tests.tars import make_tar

PNG = image_bytes((1, 1))
PACKAGE = Path(lk.__file__).parent
extract = partial(extract_tars, engine="threads", progress=False)


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_an_unfinished_extraction_is_private_and_a_finished_one_is_not(tmp_path, monkeypatch):
    modes, rename = [], Path.rename
    monkeypatch.setattr(Path, "rename", lambda path, to: modes.append(mode_of(path.parent)) or rename(path, to))
    before = os.umask(0o027)
    try:
        extract(make_tar(tmp_path / "one.tar", {"a": b"x"}), tmp_path / "root")
    finally:
        os.umask(before)
    assert modes == [0o700]
    assert [mode_of(tmp_path / "root" / name) for name in ("one", "one/a")] == [0o750, 0o640]


def test_no_link_under_a_name_that_can_be_guessed_is_followed(tmp_path, monkeypatch):
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
    monkeypatch.setattr("secrets.token_hex", lambda n: "0")
    (tmp_path / f".{os.getpid()}-0.partial").symlink_to(precious)
    with pytest.raises(FileExistsError):
        write_atomic(tmp_path / "new", b"mine")
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
    shard = root / "shard-000000.tar"
    with tarfile.open(shard) as tar:
        names = tar.getnames()
        images = {store_key(name): tar.extractfile(name).read() for name in names if name.endswith(".jpg")}
    assert [safe_path(name) for name in names] == names
    assert images == HOSTILE.files
    assert len(list(lk.read_shards(root))) == len(images)
    extract(shard, tmp_path / "out" / "deep")
    store = lk.PixelStore.build(HOSTILE, tmp_path / "made" / "x.pixels", classes=[], progress=False)
    assert list(store.keys) == list(HOSTILE.keys())
    assert os.listdir(tmp_path / "made") == ["x.pixels"]
    assert set(os.listdir(tmp_path)) == {"shards", "out", "made"}


@pytest.mark.parametrize("name", ["../x.tar", "/etc/passwd", "a/../../x.tar", "", 7])
def test_a_manifest_that_names_files_elsewhere_is_refused(tmp_path, name):
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
    bad, array, saved = pickle.dumps(Payload(owned)), io.BytesIO(), io.BytesIO()
    np.save(array, np.array([Payload(owned)], dtype=object), allow_pickle=True)
    torch.save(Payload(owned), saved)
    files = {"pyd": bad, "pkl": bad, "pickle": bad, "pth": saved.getvalue(), "npy": array.getvalue(), "mp": bad}
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
    for name in ("bad", "manifest.json"):
        (tmp_path / name).write_bytes(pickle.dumps(Payload(owned)))
    for read in (lk.PixelStore, lambda path: lk.TarStore(path).keys(), lambda path: lk.decode(path.read_bytes())):
        with pytest.raises((ValueError, OSError)):
            read(tmp_path / "bad")
    with pytest.raises(ValueError, match="manifest"):
        lk.read_shards(tmp_path)


def test_no_source_unpickles_by_a_call_that_ruff_does_not_know():
    for path in PACKAGE.rglob("*.py"):
        calls = re.findall(r"\b(?:np|cloudpickle|joblib)\.loads?\(.*", path.read_text())
        assert [call for call in calls if "allow_pickle=False" not in call] == [], path


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
