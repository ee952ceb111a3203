"""Stores: named bytes, the same from a folder, a tar, a server or a bucket, in any thread and process."""

import ast
import gc
import os
import pickle
import re
import socket
import tarfile
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote, unquote

import fsspec
import numpy as np
import pytest
from PIL import Image

import labkit as lk
from labkit import (
    BatchLoader,
    FolderStore,
    HttpStore,
    ImageDataset,
    LoaderConfig,
    ObjectStore,
    TarStore,
    course,
    make_loader,
    open_store,
)
from labkit.data.labels import labels_of
from labkit.data.shards_write import member_names, store_key
from labkit.data.stores import HasSizes, Store
from labkit.errors import TarError
from tests.children import in_children
from tests.image_files import KEYS, encoded, put_in_memory, read_all
from tests.paths import REPO
from tests.tars import make_tar

pytestmark = pytest.mark.usefixtures("own_home")


def image_keys(root: Path) -> list[str]:
    """The oracle: every JPEG, PNG and WebP file, the only images here, with no hidden part in its path."""
    found = [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
    kept_by_systems = {"@eaDir", "#recycle", "$RECYCLE.BIN", "__MACOSX"}
    shown = [path for path in found if not any(part[0] == "." or part in kept_by_systems for part in path.parts)]
    return sorted(path.as_posix() for path in shown if path.suffix.lower() in {".jpg", ".jpeg", ".png", ".webp"})


def image_contents(root: Path) -> list[bytes]:
    return [(root / key).read_bytes() for key in image_keys(root)]


# The promises of every store.

KINDS = ["folder", "tar", "http", "http tar", "memory", "memory/", "file", "s3", "s3 bucket", "s3 tar"]


def open_kind(request, kind: str) -> tuple[Store, Path]:
    """A store, and the folder whose images it has."""
    get = request.getfixturevalue
    folder, (options, bucket) = get("image_folder"), get("s3") if "s3" in kind else ({}, None)
    opened = {
        "folder": lambda: FolderStore(folder),
        "tar": lambda: TarStore(get("image_tar")),
        "http": lambda: HttpStore(get("served")),
        "http tar": lambda: TarStore(f"{get('served')}.tar"),
        "memory": lambda: ObjectStore(put_in_memory(folder)),
        "memory/": lambda: ObjectStore(put_in_memory(folder) + "/"),
        "file": lambda: ObjectStore(f"file://{folder}"),
        "s3": lambda: ObjectStore("s3://photos/set", **options),
        "s3 bucket": lambda: ObjectStore("s3://photos", **options),
        "s3 tar": lambda: TarStore("s3://tars/a.tar", **options),
    }[kind]
    return opened(), {"s3": bucket and bucket / "set", "s3 bucket": bucket}.get(kind, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_gives_the_images_of_its_folder(request, kind):
    store, folder = open_kind(request, kind)
    keys, contents = image_keys(folder), image_contents(folder)
    unused = pickle.loads(pickle.dumps(store))
    assert list(store.keys()) == keys
    assert list(map(store.read, keys)) == contents
    for again in (unused, pickle.loads(pickle.dumps(store))):
        assert list(again.keys()) == keys
        assert again.read(keys[-1]) == contents[-1]
    assert len(store) == len(keys) >= 10
    assert isinstance(store, Store)
    assert not isinstance({}, Store)  # which has keys, too
    assert isinstance(store, HasSizes)
    assert store.sizes().tolist() == list(map(len, contents))
    assert store.sizes().dtype == np.int64
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(store.read, keys)) == contents


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_key_is_named(request, kind):
    store, folder = open_kind(request, kind)
    local = [
        str(folder / "top.jpg"), "/etc/passwd", "deeper/..", "cat", ".", "./", "nul\0.jpg", "top.jpg/a.jpg", "top.jpg/",
        "TOP.jpg", "\udc00",
    ]  # fmt: skip
    for key in (
        "no.jpg", "", "cat/no.jpg", "cat/", "/top.jpg", "../top.jpg", "../set2/top.jpg", "cat/../top.jpg", "\ud800.jpg",
        *(local if kind in ("folder", "tar") else ["cat"] if kind != "http" else []),  # whose server lists `cat`
    ):  # fmt: skip
        with pytest.raises(KeyError) as failure:
            store.read(key)
        assert re.match(re.escape(repr(key)) + r" is (not a file (under|in)|outside) ", failure.value.args[0])
        assert failure.value.args[0].endswith(store.name)


def read_first(stores: list[Store]) -> list[list[bytes]]:
    return [[store.read(key) for key in store.keys()[:6]] for store in stores]


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_a_store_works_in_other_processes(request, start_method):
    """Used before, or for the first time there; what was open before a fork is left to the parent."""
    used = ["tar", "http", "http tar", "s3", "s3 tar"]
    stores, folders = map(list, zip(*(open_kind(request, kind) for kind in (*used, "tar", "http", "s3")), strict=True))
    expected = [image_contents(folder)[:6] for folder in folders]
    assert read_first(stores[: len(used)]) == expected[: len(used)]
    assert in_children(start_method, read_first, (stores,), (stores,)) == [expected] * 2
    assert read_first(stores) == expected


def read_and_collect(store: Store, key: str, inherited: weakref.ref) -> tuple[bytes, bool]:
    data = store.read(key)
    gc.collect()
    return data, inherited() is not None


def test_a_fork_collects_no_filesystem_of_its_parent(s3):
    """s3fs would close its connections, and the parent wait for its next answer, for seconds or forever."""
    options, bucket = s3
    store, data = ObjectStore("s3://photos/set", **options), (bucket / "set/dog/d.WebP").read_bytes()
    assert store.read("dog/d.WebP") == data
    inherited = weakref.ref(fsspec.filesystem("s3", **options))
    assert in_children("fork", read_and_collect, (store, "dog/d.WebP", inherited)) == [(data, True)]
    assert store.read("dog/d.WebP") == data


@pytest.mark.parametrize(("num_workers", "start_method"), [(1, "fork"), (2, "forkserver")])
def test_a_loader_reads_from_any_store(tmp_path, server, s3, num_workers, start_method):
    """Workers inherit the connections of a store that was used before, and must leave them alone."""
    images = {f"{'ab'[number % 2]}/{number}.png": encoded(Image.new("L", (5, 4), number), "PNG") for number in range(4)}
    server.files = {f"/set/{key}": data for key, data in images.items()}
    tar, options = make_tar(tmp_path / "set.tar", images), s3[0]
    fsspec.filesystem("s3", **options).pipe_file(f"tars/{start_method}.tar", tar.read_bytes())
    config = LoaderConfig(1, num_workers, start_method=start_method, pin_memory=False, persistent_workers=True)
    for store in (
        TarStore(tar), HttpStore(f"{server.url}/set", keys=images), TarStore(f"s3://tars/{start_method}.tar", **options)
    ):  # fmt: skip
        assert {key: store.read(key) for key in list(store.keys())} == images
        loader = make_loader(ImageDataset(store), config)
        for _ in range(2):
            seen = [(image.shape, image.unique().tolist(), label.item()) for image, label in loader]
            assert sorted(seen, key=str) == [((1, 3, 4, 5), [number], number % 2) for number in range(4)]
    assert server.connections == 1 + num_workers  # of the HttpStore: no worker takes its parent's


# Folders.


def test_a_folder_is_listed_once(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"")
    store = FolderStore(tmp_path)
    for _ in range(2):
        assert store.keys() == ["a.jpg"]
        assert store.paths() == [tmp_path / "a.jpg"]
        (tmp_path / "later.jpg").write_bytes(b"")


def test_a_missing_folder_and_one_without_images_are_told_apart(tmp_path):
    for root, said in (
        (tmp_path / "no", r"no is not a folder \(looked for in .*make_photos"),
        (tmp_path, r"holds no image .*\.jpg"),
    ):
        with pytest.raises(FileNotFoundError, match=said) as failure:
            FolderStore(root).keys()
        assert str(root) in str(failure.value)


def test_a_place_in_the_home_folder_may_begin_with_a_tilde(tmp_path, monkeypatch):
    """Nobody looks for, or makes, a folder of that name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path.parent)
    photos = lk.make_photos("~/photos", 2, progress=False)
    assert photos == tmp_path / "photos"
    keys = image_keys(photos)
    lk.write_shards("~/photos", "~/shards", num_workers=0, progress=False)
    lk.PixelStore.build(FolderStore("~/photos"), "~/pixels", short_side=32, progress=False)
    with tarfile.open(tmp_path / "photos.tar", "w") as archive:
        archive.add(photos, ".")
    for store in (FolderStore("~/photos"), lk.open_store("~/photos"), lk.TarStore("~/photos.tar")):
        assert list(store.keys()) == keys
    assert len(lk.PixelStore("~/pixels")) == len(list(lk.read_shards("~/shards"))) == len(keys)
    monkeypatch.setenv("LABKIT_HOME", "~/own")
    assert course.photo_root("imagenet").is_relative_to(tmp_path / "own")
    assert not (tmp_path.parent / "~").exists()


@pytest.mark.parametrize("below", ["dog", "dog/", "Größe", "caf%E9", "v1.0"])
def test_a_folder_of_a_server_is_a_store(image_folder, served, below):
    name = os.fsdecode(unquote(below, errors="surrogateescape").encode("utf-8", "surrogateescape"))
    for url in {below, below if "%" in below else quote(below)}:
        store = HttpStore(f"{served}/{url}")
        assert list(store.keys()) == image_keys(image_folder / name)
        assert read_all(store) == image_contents(image_folder / name)


# The store that fits a place.


def test_open_store_finds_the_kind(image_folder, served, s3, image_tar):
    options, bucket = s3
    for place, kind in (
        (str(image_folder), FolderStore), (image_folder, FolderStore), (str(image_tar), TarStore),
        (image_tar, TarStore), (served, HttpStore), (f"{served}.tar", TarStore), (f"file://{image_tar}", TarStore),
        (f"file://{image_folder}", ObjectStore), (put_in_memory(image_folder), ObjectStore),
    ):  # fmt: skip
        store = open_store(place)
        assert type(store) is kind
        assert list(store.keys()) == sorted(KEYS)
        assert store.read("dog/d.WebP") == (image_folder / "dog/d.WebP").read_bytes()
    assert list(open_store("s3://tars/a.tar", **options).keys()) == sorted(KEYS)
    assert list(open_store("s3://photos/set", **options).keys()) == image_keys(bucket / "set")


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tgz", "a.tar.zst", "A.TAR"])
def test_open_store_knows_tars_by_their_names(tmp_path, name):
    store = open_store(make_tar(tmp_path / name, {"a.jpg": b"photo"}))
    assert type(store) is TarStore
    assert store.mode == "index"
    assert list(store.keys()) == ["a.jpg"]


@pytest.mark.parametrize("place", ["no/such/place", "top.jpg", "gopher://photos", "C:/a", "no.tar"])
def test_open_store_says_what_it_cannot_read(image_folder, monkeypatch, place):
    monkeypatch.chdir(image_folder)
    with pytest.raises(ValueError, match=r"is not a folder of images or tars, .*: (it|fsspec) ") as failure:
        open_store(place)
    assert place in str(failure.value)


@pytest.mark.parametrize("place", ["a.tar", "http://127.0.0.1:1/a.tar"])
@pytest.mark.parametrize("opened", [TarStore, open_store])
def test_options_that_nobody_takes_are_an_error(place, opened):
    with pytest.raises(TypeError, match="mod: only object storage takes options"):
        opened(place, mod="tarfile")


# Buckets.


def test_objects_with_empty_parts_in_their_names_are_read_and_packed(s3):
    options, _ = s3
    filesystem = fsspec.filesystem("s3", **options)
    names = ["empty/train//cat/0.jpg", "empty/train/dog//1.jpg", "empty/train/dog/1.jpg", "empty/train///ant/2.jpg"]
    for number, name in enumerate(names):
        filesystem.pipe_file(f"tars/{name}", bytes([number]))
    filesystem.invalidate_cache()
    try:
        store = ObjectStore("s3://tars/empty/train", **options)
        expected = {name.removeprefix("empty/train/"): bytes([n]) for n, name in enumerate(names)}
        assert dict(zip(store.keys(), read_all(store), strict=True)) == expected
        labels = dict(zip(store.keys(), labels_of(store.keys())[1].tolist(), strict=True))
        assert labels == {"/cat/0.jpg": 1, "dog//1.jpg": 2, "dog/1.jpg": 2, "//ant/2.jpg": 0}
        members = member_names(store.keys())
        assert [store_key(member) for member in members] == list(store.keys())
        assert not [member for member in members if member.startswith("/") or "//" in member]
    finally:
        filesystem.rm("tars/empty", recursive=True)


@pytest.mark.parametrize("kind", ["pipe", "socket", "link to itself"])
def test_what_is_no_file_is_named_and_never_waited_for(tmp_path, kind, monkeypatch):
    """A pipe without a writer would be waited for forever."""
    (tmp_path / "set/cat").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "set/cat/1.jpg")
    odd = tmp_path / "set/cat/2.jpg"
    monkeypatch.chdir(odd.parent)  # a socket's path may have 107 characters
    with socket.socket(socket.AF_UNIX) as made:
        make = {"pipe": os.mkfifo, "socket": made.bind, "link to itself": lambda name: os.symlink(name, name)}
        make[kind](odd.name)
    store = FolderStore(tmp_path / "set")
    assert store.keys() == ["cat/1.jpg", "cat/2.jpg"]
    with pytest.raises(KeyError, match=r"'cat/2\.jpg' is not a file under"):
        store.read("cat/2.jpg")
    with pytest.raises(FileNotFoundError, match=r"'cat/2\.jpg' under .*(a link to nothing|not a file, but a pipe)"):
        store.sizes()
    loader = BatchLoader(store, size=8, on_error="skip", classes=["cat"], shuffle=False)
    assert [len(labels) for _, labels in loader] == [1]
    assert [skipped.key for skipped in loader.skipped] == ["cat/2.jpg"]


def test_places_without_objects_are_named(s3):
    options, _ = s3
    for store in (ObjectStore("s3://photos/no", **options), ObjectStore("memory://no/such")):
        with pytest.raises(FileNotFoundError, match=r"(photos/no|no/such) holds no image"):
            store.keys()
    for place, told in (
        ("no-such-bucket/set", ": there is no such bucket$"), ("no-such-bucket/a.tar", ""), ("tars/no.tar", "$"),
    ):  # fmt: skip
        with pytest.raises(FileNotFoundError, match=rf"s3://{place} does not exist{told}"):
            open_store(f"s3://{place}", **options).keys()
    with pytest.raises(TarError, match=r"s3://tars/packed\.tar is compressed \(gzip\)"):
        TarStore("s3://tars/packed.tar", **options).keys()


def test_the_index_of_an_object_is_kept_until_it_changes(s3, image_tar, tmp_path, own_home):
    options, _ = s3
    filesystem = fsspec.filesystem("s3", max_concurrency=1, **options)  # the one that the store has
    filesystem.pipe_file("tars/b.tar", image_tar.read_bytes())
    filesystem.ls("tars")  # a listing that s3fs will remember

    def listed() -> tuple[list[str], int]:
        """Keys, and which file has the index: one that is made anew is another."""
        keys = list(TarStore("s3://tars/b.tar", **options).keys())
        [index] = (path for path in own_home.rglob("*") if path.is_file())
        return keys, index.stat().st_ino

    first = listed()
    assert first[0] == sorted(KEYS)
    assert listed() == first
    elsewhere = fsspec.filesystem("s3", **options, skip_instance_cache=True)  # another process, say
    elsewhere.pipe_file("tars/b.tar", make_tar(tmp_path / "b.tar", {"other.jpg": b"other"}).read_bytes())
    changed = listed()
    assert changed[0] == ["other.jpg"]
    assert changed[1] != first[1]
    assert TarStore("s3://tars/b.tar", **options).read("other.jpg") == b"other"


# The page cache: a measurement of a disk has to begin with cold files.


def test_one_function_reads_stores():
    """Where a retry would go, and what holds the bytes is looked at: a second home would answer otherwise."""
    found = []
    for room in ("data", "loading", "watching", "peers"):
        for path in sorted((REPO / "labkit" / room).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                is_read = isinstance(node, ast.Attribute) and node.attr == "read"
                if is_read and ast.unparse(node.value).rpartition(".")[2].strip("_") == "store":
                    found.append(path.name)
    assert found == ["stores.py"]
