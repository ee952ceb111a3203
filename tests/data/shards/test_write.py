"""Writing shards: the store's bytes, the same bytes always, whole shards only, in whichever way it was interrupted."""

import hashlib
import io
import json
import os
import tarfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds

import labkit as lk
from labkit import FolderStore, ImageDataset, TarStore, read_shards, write_shards
from labkit.data.shards_write import MANIFEST, UNFINISHED, member_names, store_key
from labkit.errors import ItemErrors
from labkit.util.files import atomic_path
from tests import killed_shards
from tests.memory_store import MemoryStore
from tests.paths import contents, run_script
from tests.tars import add


def write(store, root: Path, **options) -> Path:
    return write_shards(store, root, **{"engine": "threads", "progress": False, **options})


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
    return write(FolderStore(photos), tmp_path_factory.mktemp("shards") / "set", max_count=3)


def test_members_are_the_stores_files_and_their_labels(photos, written):
    labels, members = ImageDataset(FolderStore(photos)), by_tarfile(written)
    images = {store_key(name): data for name, data in members.items() if not name.endswith(".cls")}
    assert images == files_of(photos)
    for number, key in enumerate(labels.keys):
        assert int(members[key.replace(".jpg", ".cls")]) == labels[number][1]
    assert json.loads((written / MANIFEST).read_text())["classes"] == labels.classes


def test_the_manifest_is_true_and_tars_do_not_tell_who_wrote_them_when(written):
    manifest = json.loads((written / MANIFEST).read_text())
    for row in manifest["shards"]:
        data, members = (written / row["name"]).read_bytes(), members_of(written / row["name"])
        assert (row["n_bytes"], row["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
        assert 2 * row["n_samples"] == len(members)
        headers = {(info.mtime, info.uid, info.gid, info.uname, info.gname, info.mode) for info in members}
        assert headers == {(0, 0, 0, "", "", 0o644)}
    assert manifest["n_samples"] == 20
    assert contents(written).keys() == {MANIFEST, *(row["name"] for row in manifest["shards"])}


def test_webdataset_reads_them(photos, written):
    files = [str(path) for path in shards_of(written)]
    samples = list(wds.WebDataset(files, shardshuffle=False))
    assert {f"{sample['__key__']}.jpg": sample["jpg"] for sample in samples} == files_of(photos)
    labels = [sample["cls"] for sample in wds.WebDataset(files, shardshuffle=False).decode()]
    assert labels == [label for _, label in ImageDataset(FolderStore(photos))]


def test_hugging_face_datasets_reads_them(photos, written, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("socket.socket.connect", None)  # whatever asks the network, fails
    datasets = pytest.importorskip("datasets", reason='datasets is not installed: python -m pip install -e ".[test]"')

    files = [str(path) for path in shards_of(written)]
    rows = datasets.load_dataset("webdataset", data_files=files, split="train", streaming=True, cache_dir=str(tmp_path))
    rows = rows.cast_column("jpg", datasets.Image(decode=False))
    found = {row["__key__"]: (row["jpg"]["bytes"], row["cls"]) for row in rows}
    expected = {sample["__key__"]: (sample["jpg"], int(sample["cls"])) for sample in read_shards(written).samples()}
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


@pytest.mark.parametrize("max_bytes", [1, 20_000, 20_480, 50_000, 123_456])
def test_shards_are_as_full_as_their_size_allows(tmp_path, max_bytes):
    store = with_sizes(np.random.default_rng(0).integers(0, 30_000, 60).tolist())
    root = write(store, tmp_path / "set", max_bytes=max_bytes)
    members = [members_of(path) for path in shards_of(root)]
    for path, own in zip(shards_of(root), members, strict=True):
        assert path.stat().st_size == tar_size(own)
        assert path.stat().st_size <= max_bytes or len(own) == 2
    for own, following in pairwise(members):
        assert tar_size(own + following[:2]) > max_bytes


@pytest.mark.parametrize(("max_count", "expected"), [(1, [1] * 10), (3, [3, 3, 3, 1]), (5, [5, 5]), (99, [10])])
def test_shards_hold_no_more_than_max_count(tmp_path, max_count, expected):
    root = write(with_sizes([10] * 10), tmp_path / "set", max_count=max_count)
    assert [len(members_of(path)) // 2 for path in shards_of(root)] == expected


KEYS = [
    "a.jpg", "a.png", "a.JPG", "a.jpg.jpg", "a%2Ejpg.jpg", "a%2Ejpg%2Ejpg.jpg", "b.c.jpg", "b.d.jpg", "v1.0/b.c.jpg",
    "v1.0/plain.webp", "__meta__/e.jpg", "%5F_meta__/e.jpg", "__not meta.jpg", "line\nbreak/f\n.g.jpg", "50%.jpg",
    "Größe/日本.jpeg", "dog/two words.jpg", "Upper.PNG", ".jpg", "broken\udcff.jpg",
    "x" * 200 + "/" + "y" * 150 + ".jpg",
]  # fmt: skip


def test_every_key_has_a_name_of_its_own_that_leads_back_and_one_sample(tmp_path):
    store = MemoryStore({key: key.encode(errors="surrogateescape") for key in KEYS})
    root = write(store, tmp_path / "set", max_count=4, classes=[])
    images = {store_key(name): data for name, data in by_tarfile(root).items() if not name.endswith(".cls")}
    assert images == store.files
    samples = list(wds.WebDataset([str(path) for path in shards_of(root)], shardshuffle=False))
    assert len(samples) == len(KEYS)
    others = {"__key__", "__url__", "__local_path__", "cls"}
    images = [data for sample in samples for part, data in sample.items() if part not in others]
    assert sorted(images) == sorted(store.files.values())
    assert all(len(sample) == 5 for sample in samples)
    assert member_names(["dog/a.jpg", "cat/a.jpg"]) == ["dog/a.jpg", "cat/a.jpg"]


@pytest.mark.parametrize(
    "options", [{"engine": "local", "num_workers": 2}, {"engine": "local", "num_workers": 1}, {"num_workers": 3}]
)
def test_same_bytes_for_any_engine_and_store(photos, written, tmp_path, options):
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        tar.add(photos, ".")
    for number, store in enumerate((FolderStore(photos), TarStore(tmp_path / "photos.tar"))):
        assert contents(write(store, tmp_path / f"{number}", max_count=3, **options)) == contents(written)


def test_a_seed_shuffles_once(photos, written, tmp_path):
    one, other = (write(FolderStore(photos), tmp_path / str(seed), max_count=3, seed=seed) for seed in (1, 2))
    assert by_tarfile(one) == by_tarfile(other) == by_tarfile(written)
    orders = [list(by_tarfile(root)) for root in (written, one, other)]
    assert len({tuple(order) for order in orders}) == 3
    assert contents(write(FolderStore(photos), tmp_path / "again", max_count=3, seed=1)) == contents(one)


def times(root: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in root.iterdir()}


def test_a_rerun_makes_only_what_is_not_as_it_was(photos, written, tmp_path):
    root = write(FolderStore(photos), tmp_path / "set", max_count=3)
    before = times(root)
    write(FolderStore(photos), root, max_count=3)
    assert times(root) == before
    lost, short, flipped = (root / f"shard-{number:06d}.tar" for number in (1, 3, 4))
    lost.unlink()
    os.truncate(short, 5000)
    data = bytearray(flipped.read_bytes())
    data[5000] ^= 1
    flipped.write_bytes(data)
    write(FolderStore(photos), root, max_count=3)
    assert contents(root) == contents(written)
    assert {name for name, stamp in times(root).items() if stamp == before.get(name)} == before.keys() - {
        lost.name, short.name, flipped.name,
    }  # fmt: skip


class Failing(FolderStore):
    """Some of its files cannot be read."""

    def __init__(self, root: Path, *failing: int):
        super().__init__(root)
        self.failing = [self.keys()[number] for number in failing]

    def read(self, key: str) -> bytes:
        if key in self.failing:
            raise OSError(f"{key}: the disk is worn out")
        return super().read(key)


def test_what_fails_is_named_and_a_rerun_writes_that_and_what_was_changed_since(photos, written, tmp_path):
    store, root = Failing(photos, 4, 19), tmp_path / "set"
    with pytest.raises(ItemErrors, match="worn out") as failure:
        write(store, root, max_count=3)
    assert list(failure.value.failures) == ["shard-000001.tar", "shard-000006.tar"]
    assert store.failing[0] in str(failure.value)
    expected = contents(written)
    assert {name: data for name, data in contents(root).items() if not name.startswith(UNFINISHED)} == {
        f"shard-{number:06d}.tar": expected[f"shard-{number:06d}.tar"] for number in (0, 2, 3, 4, 5)
    }
    with pytest.raises(FileNotFoundError, match="run write_shards to its end"):
        read_shards(root)
    (root / "shard-000000.tar").write_bytes(expected["shard-000000.tar"][::-1])
    before = times(root)
    write(FolderStore(photos), root, max_count=3)
    assert contents(root) == expected
    kept = {name for name, stamp in times(root).items() if stamp == before.get(name)}
    assert kept == {f"shard-{number:06d}.tar" for number in (2, 3, 4, 5)}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("engine", "moment"), [("threads", 0), ("threads", 4), ("local", 1)])
def test_killed_while_writing(photos, tmp_path, engine, moment):
    root = tmp_path / "set"
    process = killed_shards.start(photos, root, engine)
    deadline = time.monotonic() + 60
    while not root.exists() or len(shards_of(root)) < moment:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    killed_shards.kill(process)
    expected = write(FolderStore(photos), tmp_path / "expected", max_count=2)
    left = contents(root)
    assert all(contents(expected)[name] == data for name, data in left.items() if name.endswith(".tar"))
    assert contents(killed_shards.finish(photos, root)) == contents(expected)


def test_half_shards_of_the_dead_are_removed_those_of_the_living_are_not(photos, tmp_path):
    root = write(FolderStore(photos), tmp_path / "set", max_count=3)
    (root / ".1-0123abcd.partial").write_bytes(b"half")  # process 1 lives, and does not write it
    with atomic_path(root / "other") as living:
        write(FolderStore(photos), root, max_count=3)
        assert list(root.glob(".*")) == [living]


@pytest.mark.exhaustive
def test_two_processes_writing_the_same_set(photos, tmp_path):
    both = [killed_shards.start(photos, tmp_path / "set", "threads") for _ in range(2)]
    assert [process.communicate(timeout=60)[0] for process in both] == ["ends\n"] * 2
    assert contents(tmp_path / "set") == contents(write(FolderStore(photos), tmp_path / "expected", max_count=2))


def assert_refused(root: Path, said: str, store, **options) -> None:
    before = contents(root)
    with pytest.raises(ValueError, match=said) as failure:
        write(store, root, **options)
    assert str(root) in str(failure.value)
    assert contents(root) == before


@pytest.mark.parametrize(
    ("n_photos", "options", "said"),
    [
        (20, {"max_count": 4}, "max_count 3, not 4"), (20, {"max_count": 3, "seed": 0}, "seed None, not 0"),
        (19, {"max_count": 3}, "holds other shards"),
    ],
)  # fmt: skip
def test_other_settings_and_other_images_are_not_mixed_in(first_photos, written, n_photos, options, said):
    assert_refused(written, said, FolderStore(first_photos(n_photos)), **options)


def test_another_set_is_not_mixed_in_with_an_unfinished_one(photos, tmp_path):
    with pytest.raises(ItemErrors):
        write(Failing(photos, 4), tmp_path / "set", max_count=3)
    assert_refused(tmp_path / "set", "max_count 3, not 4", FolderStore(photos), max_count=4)


def test_images_that_changed_are_not_mixed_in(tmp_path):
    root = write(MemoryStore({"all/a.jpg": b"one", "all/b.jpg": b"two"}), tmp_path / "set", max_count=1)
    (root / "shard-000001.tar").unlink()
    before = contents(root)
    with pytest.raises(ItemErrors, match="was made of other images") as failure:
        write(MemoryStore({"all/a.jpg": b"one", "all/b.jpg": b"TWO"}), root, max_count=1)
    assert "shard-000001.tar" in str(failure.value)
    assert contents(root) == before


def test_a_store_that_changes_while_it_is_written(tmp_path):
    store = with_sizes([10, 20])
    store.sizes = lambda: np.array([10, 21])
    with pytest.raises(ItemErrors, match=r"all/0001ü.jpg has 20 bytes where 21 were counted"):
        write(store, tmp_path / "set")


def test_a_foreign_folder_is_left_alone(photo_set, tmp_path):
    (tmp_path / "thesis.txt").write_text("important")
    assert_refused(tmp_path, "choose a new folder", FolderStore(photo_set))
    assert_refused(photo_set, "not a manifest of shards", FolderStore(photo_set))


@pytest.mark.parametrize("name", ["max_count", "max_bytes"])
def test_bad_limits(photos, tmp_path, name):
    with pytest.raises(ValueError, match=f"{name} must be an integer >= 1, got 0"):
        write(FolderStore(photos), tmp_path / "set", **{name: 0})
    assert not (tmp_path / "set").exists()


def test_the_script_writes_shards(photos, written, tmp_path):
    result = run_script("make_shards", photos, tmp_path / "set", "--max-count", 3, "--engine", "threads")
    assert result.exit_code == 0
    assert result.stdout.endswith("7 shards\n")
    assert contents(tmp_path / "set") == contents(written)


def test_one_more_image_is_told_as_such_and_nobody_is_told_to_remove_images(tmp_path):
    photos = lk.make_photos(tmp_path / "photos", 4, progress=False)
    lk.write_shards(lk.FolderStore(photos), tmp_path / "shards", progress=False)
    first = next(photos.rglob("*.jpg"))
    first.with_name("zz.jpg").write_bytes(first.read_bytes())
    with pytest.raises(ValueError, match=r"holds other shards .names and sizes differ.*: choose another folder"):
        lk.write_shards(lk.FolderStore(photos), tmp_path / "shards", progress=False)
    with pytest.raises(ValueError, match="choose a new folder, or an empty one"):
        lk.write_shards(lk.FolderStore(photos), first.parent, progress=False)


def test_shards_of_any_case_are_read(tmp_path):
    lk.make_photos(tmp_path / "photos", 4, progress=False)
    root = lk.write_shards(lk.FolderStore(tmp_path / "photos"), tmp_path / "shards", progress=False)
    shard = next(Path(root).glob("*.tar")).rename(tmp_path / "A.TAR")
    assert len(list(lk.read_shards(shard))) == 4
