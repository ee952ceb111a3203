"""TarStore: in each mode the same keys, bytes and errors, in any process and thread."""

import os
import pickle
import random
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from labkit import FolderStore, ImageDataset, LoaderConfig, TarStore, make_loader, open_store
from labkit.data import tar as tar_index
from labkit.data.stores import Store
from labkit.data.tar import SUFFIX, build_index
from labkit.errors import TarError
from tests.children import in_children
from tests.tars import make_tar

KEYS = ["cat/B.JPG", "cat/a.jpeg", "dog/c.png", "dog/two words.webp", "top.jpg", "Größe/日本.jpg"]
OTHERS = ["list.txt", "cat/.hidden.jpg", ".cache/e.jpg", "dog/depth.npy"]


def read_all(store: Store) -> list[bytes]:
    return list(map(store.read, store.keys()))


@pytest.fixture
def folder(tmp_path) -> Path:
    root = tmp_path / "photos"
    for number, name in enumerate((*KEYS, *OTHERS)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(random.Random(number).randbytes(100 * number))
    return root


@pytest.fixture(params=["dotted", "bare", "both"])
def tar(request, folder) -> Path:
    """The folder as a tar: with `./`, as `tar -cf x.tar .` writes it, without, and with both by turns."""
    path = folder.parent / "photos.tar"
    with tarfile.open(path, "w") as tar:
        for number, file in enumerate(sorted(folder.rglob("*"), reverse=True)):
            dotted = request.param == "dotted" or (request.param == "both" and number % 2)
            tar.add(file, ("./" if dotted else "") + file.relative_to(folder).as_posix(), recursive=False)
    return path


def test_a_tar_gives_what_its_folder_gives(folder, tar):
    store, oracle = TarStore(tar), FolderStore(folder)
    assert list(store.keys()) == oracle.keys() == sorted(KEYS)
    assert read_all(store) == read_all(oracle)
    assert store.sizes().tolist() == oracle.sizes().tolist()
    assert store.sizes().dtype == np.int64
    assert len(store) == len(KEYS)
    assert isinstance(store, Store)
    assert store.names() == sorted(KEYS + OTHERS)
    for name in OTHERS:
        assert store.read(name) == store.read(f"./{name}") == (folder / name).read_bytes()
    assert repr(store) == "TarStore('photos.tar', 6 images)"


def test_offsets_are_those_of_the_data(folder, tar):
    store, whole = TarStore(tar), tar.read_bytes()
    for key in KEYS:
        (extent,) = store.extents(key, first=False)
        assert whole[extent.offset : extent.offset + extent.size] == (folder / key).read_bytes()


def test_unknown_keys(tar):
    store = TarStore(tar)
    for key in (
        "no.jpg", "cat", "cat/", "top.jpg/", "", ".", "./", "TOP.jpg", "../photos/top.jpg", "/top.jpg",
        "nul\0", "\udc00",
    ):  # fmt: skip
        with pytest.raises(KeyError) as failure:
            store.read(key)
        assert failure.value.args == (f"{key!r} is not a file in {tar}",)
    with pytest.raises(KeyError):
        list(store.extents("no.jpg", first=True))


def test_opening_reads_nothing(tar, monkeypatch):
    """A loader's workers open their own."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", None)
        patch.setattr("builtins.open", None)
        store = TarStore(tar)
    assert len(store) == 6


# A tar that changes.


@pytest.mark.parametrize("left", [0.02, 0.5, 0.9])
def test_a_tar_cut_after_its_headers_were_read(tmp_path, left):
    data = random.Random(0).randbytes(300_000)
    store = TarStore(make_tar(tmp_path / "a.tar", {"large.jpg": data}))
    assert store.read("large.jpg") == data
    os.truncate(tmp_path / "a.tar", int(300_000 * left))
    with pytest.raises(TarError, match=r"a\.tar was cut after its headers were read: 'large\.jpg' lacks its end"):
        store.read("large.jpg")


def replace_tar(tar: Path) -> None:
    """By renaming, as a careful writer does."""
    make_tar(tar.parent / "new", {"other.jpg": b"other", "top.jpg": b"fresh"}).replace(tar)


def test_a_new_tar_of_the_same_name_does_not_disturb(tar):
    """An open store keeps the old one."""
    store = TarStore(tar)
    before = store.read("top.jpg")
    replace_tar(tar)
    assert store.read("top.jpg") == before
    assert TarStore(tar).read("top.jpg") == b"fresh"
    assert list(TarStore(tar).keys()) == ["other.jpg", "top.jpg"]


# Processes and threads.


def read_each(stores: list[TarStore]) -> list[list[bytes]]:
    return list(map(read_all, stores))


@pytest.mark.parametrize(
    ("tar", "start_method"), [("dotted", "fork"), ("dotted", "spawn"), ("both", "fork")], indirect=["tar"]
)
def test_in_another_process(folder, tar, start_method):
    stores = [TarStore(tar) for _ in range(2)]
    read_each(stores[::2])  # the others are used for the first time there
    expected = read_all(FolderStore(folder))
    assert in_children(start_method, read_each, (stores,)) == [[expected] * len(stores)]


def test_a_forked_worker_keeps_the_tar_that_its_keys_are_of(folder, tar):
    """Nothing is read through again for it, nor is a new tar read at the old one's offsets."""
    store, expected = TarStore(tar), read_all(FolderStore(folder))
    read_all(store)
    replace_tar(tar)
    Path(str(tar) + SUFFIX).unlink()
    assert in_children("fork", read_all, (store,)) == [expected]


def read_often(store: TarStore, expected: dict[str, bytes], seed: int) -> int:
    own = random.Random(seed)
    return sum(store.read(key) != expected[key] for key in own.choices(list(expected), k=300))


def test_forks_do_not_disturb_each_other(folder, tar):
    """All read at once through what was one open file before the fork."""
    store, expected = TarStore(tar), {key: (folder / key).read_bytes() for key in KEYS}
    assert read_often(store, expected, 0) == 0
    assert in_children("fork", read_often, *((store, expected, seed) for seed in range(4))) == [0] * 4


def test_threads(folder, tar):
    store, expected = TarStore(tar), {key: (folder / key).read_bytes() for key in KEYS}
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(lambda seed: read_often(store, expected, seed), range(5))) == 0


@pytest.mark.parametrize("listed", [False, True])
def test_pickles(folder, tar, listed):
    store = TarStore(tar)
    if listed:
        read_all(store)
    again = pickle.loads(pickle.dumps(store))
    assert read_all(again) == read_all(FolderStore(folder))
    assert again.keys() == store.keys()


def test_open_files_do_not_add_up(tar, n_open_files):
    before = n_open_files()
    stores = [TarStore(tar) for _ in range(5)]
    for store in stores * 3:
        read_all(store)
    assert n_open_files() == before + 5
    del stores, store
    assert n_open_files() == before


def test_failed_openings_leave_no_files_open(tmp_path, tar, n_open_files):
    """Damage is found again by another pass: neither may keep its file."""
    damaged = bytearray(tar.read_bytes())
    with tarfile.open(tar) as whole:
        damaged[whole.getmembers()[2].offset + 110] ^= 1
    (tmp_path / "bad.tar").write_bytes(damaged)
    before = n_open_files()
    for _ in range(5):
        with pytest.raises(TarError):
            TarStore(tmp_path / "bad.tar").keys()
    assert n_open_files() == before


@pytest.fixture
def pixels(tmp_path) -> Path:
    """Twelve PNGs, two folders, as a tar beside the folder."""
    for number in range(12):
        path = tmp_path / "pixels" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (8, 9, 3), np.uint8)).save(path)
    with tarfile.open(tmp_path / "pixels.tar", "w") as tar:
        tar.add(tmp_path / "pixels", ".")
    return tmp_path / "pixels.tar"


@pytest.mark.parametrize(
    ("num_workers", "start_method"),
    [(0, None), (2, "fork"), (2, "spawn")],
)
def test_in_a_loader(pixels, num_workers, start_method):
    config = LoaderConfig(batch_size=4, num_workers=num_workers, start_method=start_method, pin_memory=False, seed=3)
    dataset = ImageDataset(TarStore(pixels))
    expected = ImageDataset(FolderStore(pixels.with_suffix("")))
    images, labels = zip(*make_loader(dataset, config), strict=True)
    wanted = sorted((image.numpy().tobytes(), label) for image, label in expected)
    got = zip(torch.cat(images), torch.cat(labels), strict=True)
    assert sorted((image.numpy().tobytes(), label.item()) for image, label in got) == wanted


def test_a_store_made_in_a_thread_while_workers_start(folder, tar, monkeypatch):
    """Workers fork while another thread holds the index half read."""
    is_reading = threading.Event()

    def build_slowly(blob):
        is_reading.set()
        time.sleep(0.5)
        return build_index(blob)

    monkeypatch.setattr(tar_index, "build_index", build_slowly)
    store = TarStore(tar)
    thread = threading.Thread(target=store.keys)
    thread.start()
    is_reading.wait(30)
    assert in_children("fork", read_all, (store,)) == [read_all(FolderStore(folder))]
    thread.join()


# What a disk has to touch.


def test_extents_by_index(tar):
    store = TarStore(tar)
    for number, key in enumerate(store.keys()):
        (extent,) = store.extents(key, first=number == 0)
        assert extent[2:] == (store.sizes()[number], number == 0)
        assert list(store.extents(f"./{key}", first=False)) == [extent._replace(opens=False)]


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tgz", "a.tar.zst", "A.TAR"])
def test_open_store_knows_tars_by_their_names(tmp_path, tar, name):
    tar.rename(tmp_path / name)
    store = open_store(tmp_path / name)
    assert isinstance(store, TarStore)
    assert store.mode == "index"
    assert len(store) == 6
