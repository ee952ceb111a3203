"""`lk.write_shards`: the store's bytes, the same bytes always, whole shards only, however it is interrupted."""

import hashlib
import io
import json
import os
import shutil
import tarfile
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds
from PIL import Image

import labkit as lk
from labkit.data.shards_write import store_key
from labkit.errors import ItemErrors
from tests.children import in_children
from tests.image_files import encoded
from tests.killing import killed_at_every_moment
from tests.memory_store import MemoryStore
from tests.paths import contents, times
from tests.shards import write
from tests.tars import add


def shards_of(root: Path) -> list[Path]:
    return sorted(root.glob("*.tar"))


def members_of(path: Path) -> list[tarfile.TarInfo]:
    with tarfile.open(path) as tar:
        return tar.getmembers()


def by_tarfile(root: Path) -> dict[str, bytes]:
    """The oracle: every member of every shard, by its name."""
    found = {}
    for path in shards_of(root):
        with tarfile.open(path, "r:") as tar:
            for info in tar:
                assert info.name not in found
                found[info.name] = tar.extractfile(info).read()
    return found


def files_of(root: Path) -> dict[str, bytes]:
    """The oracle: every photo under a folder, by its path."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*.jpg")}


@pytest.fixture(scope="module")
def photos(first_photos) -> Path:
    return first_photos(20)


@pytest.fixture(scope="module")
def written(photos, tmp_path_factory) -> Path:
    """Seven shards to look at, not to change."""
    return write(lk.FolderStore(photos), tmp_path_factory.mktemp("shards") / "set", max_count=3)


# What is in them


def test_members_are_the_stores_files_and_their_labels(photos, written):
    labels, members = lk.ImageDataset(lk.FolderStore(photos)), by_tarfile(written)
    images = {store_key(name): data for name, data in members.items() if not name.endswith(".cls")}
    assert images == files_of(photos)
    for number, key in enumerate(labels.keys):
        assert int(members[key.replace(".jpg", ".cls")]) == labels[number][1]
    assert json.loads((written / "manifest.json").read_text())["classes"] == labels.classes


def test_the_manifest_is_true_and_tars_do_not_tell_who_wrote_them_when(written):
    manifest = json.loads((written / "manifest.json").read_text())
    for row in manifest["shards"]:
        data, members = (written / row["name"]).read_bytes(), members_of(written / row["name"])
        assert (row["n_bytes"], row["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
        assert 2 * row["n_samples"] == len(members)
        headers = {(info.mtime, info.uid, info.gid, info.uname, info.gname, info.mode) for info in members}
        assert headers == {(0, 0, 0, "", "", 0o644)}
    assert manifest["n_samples"] == 20
    assert contents(written).keys() == {"manifest.json", *(row["name"] for row in manifest["shards"])}


def test_hugging_face_datasets_reads_them(written, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("socket.socket.connect", None)  # whatever asks the network, fails
    datasets = pytest.importorskip("datasets", reason='datasets is not installed: python -m pip install -e ".[test]"')

    files = [str(path) for path in shards_of(written)]
    rows = datasets.load_dataset("webdataset", data_files=files, split="train", streaming=True, cache_dir=str(tmp_path))
    rows = rows.cast_column("jpg", datasets.Image(decode=False))
    found = {row["__key__"]: (row["jpg"]["bytes"], row["cls"]) for row in rows}
    expected = {each["__key__"]: (each["jpg"], int(each["cls"])) for each in lk.read_shards(written).samples()}
    assert len(expected) == 20
    assert found == expected


def tar_size(members: list[tarfile.TarInfo]) -> int:
    """The oracle: what `tarfile` makes of files of these sizes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info in members:
            add(tar, info.name, bytes(info.size))
    return len(buffer.getvalue())


def with_sizes(sizes) -> MemoryStore:
    return MemoryStore({f"all/{number:04d}{'ü' * (number % 3)}.jpg": bytes(size) for number, size in enumerate(sizes)})


@pytest.mark.parametrize("max_bytes", [1, 20_480, 50_000])
def test_shards_are_as_full_as_their_size_allows(tmp_path, max_bytes):
    store = with_sizes(np.random.default_rng(0).integers(0, 30_000, 60).tolist())
    paths = shards_of(write(store, tmp_path / "set", max_bytes=max_bytes))
    members = [members_of(path) for path in paths]
    for path, own in zip(paths, members, strict=True):
        assert path.stat().st_size == tar_size(own)
        assert path.stat().st_size <= max_bytes or len(own) == 2
    for own, following in pairwise(members):
        assert tar_size(own + following[:2]) > max_bytes


KEYS = [
    "a.jpg", "a.png", "a.JPG", "a.jpg.jpg", "a%2Ejpg.jpg", "a%2Ejpg%2Ejpg.jpg", "b.c.jpg", "b.d.jpg", "v1.0/b.c.jpg",
    "v1.0/plain.webp", "__meta__/e.jpg", "%5F_meta__/e.jpg", "__not meta.jpg", "line\nbreak/f\n.g.jpg", "50%.jpg",
    "Größe/日本.jpeg", "dog/two words.jpg", "Upper.PNG", ".jpg", "broken\udcff.jpg",
    "x" * 200 + "/" + "y" * 150 + ".jpg",
]  # fmt: skip


def test_every_key_is_one_sample_to_webdataset(tmp_path):
    """That its name leads back to the key: tests/hardening/test_names.py."""
    store = MemoryStore({key: key.encode(errors="surrogateescape") for key in KEYS})
    root = write(store, tmp_path / "set", max_count=4, classes=[])
    samples = list(wds.WebDataset([str(path) for path in shards_of(root)], shardshuffle=False))
    others = {"__key__", "__url__", "__local_path__", "cls"}
    assert all(len(sample) == 1 + len(others) for sample in samples)
    images = [data for sample in samples for part, data in sample.items() if part not in others]
    assert sorted(images) == sorted(store.files.values())


# The same bytes


def test_any_engine_and_store_gives_the_same_bytes(photos, written, tmp_path):
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        tar.add(photos, ".")
    options = {"max_count": 3, "engine": "local", "num_workers": 2}
    assert contents(write(lk.TarStore(tmp_path / "photos.tar"), tmp_path / "set", **options)) == contents(written)


def test_a_seed_shuffles_once(photos, written, tmp_path):
    one, again, other = (
        write(lk.FolderStore(photos), tmp_path / str(number), max_count=3, seed=seed)
        for number, seed in enumerate((1, 1, 2))
    )
    assert by_tarfile(one) == by_tarfile(other) == by_tarfile(written)
    orders = [list(by_tarfile(root)) for root in (written, one, other)]
    assert len({tuple(order) for order in orders}) == 3
    assert contents(again) == contents(one)


# Interrupted, and run again


def names(*shards: int) -> set[str]:
    return {f"shard-{number:06d}.tar" for number in shards}


def test_a_rerun_makes_only_what_is_not_as_it_was(photos, written, tmp_path):
    root = write(lk.FolderStore(photos), tmp_path / "set", max_count=3)
    before = times(root)
    write(lk.FolderStore(photos), root, max_count=3)
    assert times(root) == before
    lost, short, flipped = (root / name for name in sorted(names(1, 3, 4)))
    lost.unlink()
    os.truncate(short, 5000)
    data = bytearray(flipped.read_bytes())
    data[5000] ^= 1
    flipped.write_bytes(data)
    write(lk.FolderStore(photos), root, max_count=3)
    assert contents(root) == contents(written)
    kept = {name for name, stamp in times(root).items() if stamp == before[name]}
    assert kept == before.keys() - names(1, 3, 4)


class Failing(lk.FolderStore):
    """Some of its files cannot be read."""

    def __init__(self, root: Path, *failing: int):
        super().__init__(root)
        self.failing = [self.keys()[number] for number in failing]

    def read(self, key: str) -> bytes:
        if key in self.failing:
            raise OSError(f"{key}: the disk is worn out")
        return super().read(key)


def test_what_fails_is_named_and_a_rerun_writes_it_and_what_was_changed(photos, written, tmp_path):
    store, root = Failing(photos, 4, 19), tmp_path / "set"
    with pytest.raises(ItemErrors, match="worn out") as failure:
        write(store, root, max_count=3)
    assert list(failure.value.failures) == sorted(names(1, 6))
    assert store.failing[0] in str(failure.value)
    expected = contents(written)
    assert {path.name: path.read_bytes() for path in root.iterdir() if path.is_file()} == {
        name: expected[name] for name in names(0, 2, 3, 4, 5)
    }
    with pytest.raises(FileNotFoundError, match="run write_shards to its end"):
        lk.read_shards(root)
    (root / "shard-000000.tar").write_bytes(expected["shard-000000.tar"][::-1])
    before = times(root)
    write(lk.FolderStore(photos), root, max_count=3)
    assert contents(root) == expected
    assert {name for name, stamp in times(root).items() if stamp == before.get(name)} == names(2, 3, 4, 5)


@pytest.mark.exhaustive
def test_after_any_kill_shards_are_whole_and_a_rerun_writes_the_rest(first_photos, tmp_path):
    root, n_whole = tmp_path / "set", set()
    write_all = partial(write, lk.FolderStore(first_photos(4)), max_count=2, num_workers=1)
    expected = contents(write_all(tmp_path / "expected"))
    for _ in killed_at_every_moment(partial(write_all, root)):
        whole = {name: data for name, data in contents(root).items() if name.endswith(".tar")}
        assert whole.items() <= expected.items()
        n_whole.add(len(whole))
        assert contents(write_all(root)) == expected
        shutil.rmtree(root)
    assert n_whole == {0, 1, 2}


@pytest.mark.exhaustive
def test_two_processes_may_write_the_same_set(photos, tmp_path):
    write_some = partial(write, lk.FolderStore(photos), max_count=2)
    in_children("fork", write_some, *[(tmp_path / "set",)] * 2)
    assert contents(tmp_path / "set") == contents(write_some(tmp_path / "expected"))


@pytest.mark.parametrize("at", ["settings.json", "shard-000001.json"])
def test_another_process_may_finish_the_same_set_meanwhile(photos, written, tmp_path, monkeypatch, at):
    root, replace = tmp_path / "set", Path.replace

    def finish_first(self, target):
        if Path(target).name == at and not (root / "manifest.json").exists():
            for path in written.iterdir():
                shutil.copy(path, root)
            shutil.rmtree(root / "unfinished")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", finish_first)
    write(lk.FolderStore(photos), root, max_count=3, num_workers=1)
    assert contents(root) == contents(written)


# Refused


def assert_refused(root: Path, said: str, store, error: type = ValueError, **options) -> None:
    """With the folder's name, and nothing is changed in it."""
    before = contents(root)
    with pytest.raises(error, match=said) as failure:
        write(store, root, **options)
    assert str(root) in str(failure.value)
    assert contents(root) == before


@pytest.mark.parametrize(
    ("n_photos", "options", "said"),
    [
        (20, {"max_count": 4}, "max_count 3, not 4"), (20, {"max_count": 3, "seed": 0}, "seed None, not 0"),
        (19, {"max_count": 3}, r"holds other shards .names and sizes differ.*: choose another folder"),
    ],
)  # fmt: skip
def test_other_settings_and_other_images_are_not_mixed_in(first_photos, written, n_photos, options, said):
    assert_refused(written, said, lk.FolderStore(first_photos(n_photos)), **options)


def test_images_that_changed_are_not_mixed_in(tmp_path):
    root = write(MemoryStore({"all/a.jpg": b"one", "all/b.jpg": b"two"}), tmp_path / "set", max_count=1)
    (root / "shard-000001.tar").unlink()
    changed = MemoryStore({"all/a.jpg": b"one", "all/b.jpg": b"TWO"})
    assert_refused(root, r"shard-000001\.tar was made of other images", changed, ItemErrors, max_count=1)


def test_a_store_that_changes_while_it_is_written_is_told(tmp_path):
    store = with_sizes([10, 20])
    store.sizes = lambda: np.array([10, 21])
    with pytest.raises(ItemErrors, match=r"all/0001ü.jpg has 20 bytes where 21 were counted"):
        write(store, tmp_path / "set")


def test_a_foreign_folder_is_left_alone_and_a_photo_set_is_no_shards(photo_set, tmp_path):
    (tmp_path / "thesis.txt").write_text("important")
    assert_refused(tmp_path, "choose a new folder, or an empty one", lk.FolderStore(photo_set))
    assert_refused(photo_set, "not a manifest of shards", lk.FolderStore(photo_set))


class Listing(MemoryStore):
    """A store of one's own, which says which names there are."""

    def __init__(self, names):
        super().__init__({name: encoded(Image.new("RGB", (8, 8)), "PNG") for name in names})
        self.names = names

    def keys(self):
        return self.names


@pytest.mark.parametrize(("names", "said"), [
    (["a/1.png", "b/2.png", "a/1.png"], r"2 images of 3 have the name of another, such as 'a/1\.png'"),
    (["a/1", "b/2.png"], r"1 image of 2 has a name without a suffix of an image, such as 'a/1'"),
    (["a/1.gif", "a/2", "b/2.png"], r"2 images of 3 have a name without a suffix of an image, such as 'a/1\.gif'"),
])  # fmt: skip
def test_what_read_shards_would_refuse_is_not_begun(tmp_path, names, said):
    store, root = Listing(names), tmp_path / "set"
    with pytest.raises(ValueError, match=said + r".*read_shards would refuse the shard: .*, or .* by keys="):
        write(store, root)
    assert not root.exists()
    write(store, root, keys=["b/2.png"])  # as the error says
    assert [label for _, label in lk.read_shards(root)] == [0]


def test_images_too_large_to_be_read_are_refused(tmp_path, monkeypatch):
    store, root = Listing(["a/1.png"]), tmp_path / "set"
    monkeypatch.setenv("LABKIT_MAX_FILE_MB", "0.00001")
    with pytest.raises(ValueError, match=r"1 image of 1 has more than 10 bytes, such as .* set LABKIT_MAX_FILE_MB"):
        write(store, root)
    assert not root.exists()
    monkeypatch.setenv("LABKIT_MAX_FILE_MB", "1")
    assert len(list(lk.read_shards(write(store, root)))) == 1
