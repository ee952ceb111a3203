"""A million names: in a folder, beside size caches, and in a tar; each held against os.scandir, PIL or tarfile."""

import os
import pickle
import sys
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from labkit.data.datasets import ImageDataset
from labkit.data.sizes.collect import collect_sizes
from labkit.data.stores.base import FolderStore
from labkit.data.tar.index import SUFFIX
from labkit.data.tar.store import TarStore
from tests.hardening.soak.load import measured, run_case
from tests.tars import member

_FOLDERS = 10
_LINKS = 50_000  # to one file: ext4 allows 65,000
_READS = 20_000


def name_of(number: int) -> str:
    return f"{number % _FOLDERS:02d}/{number:07d}.jpg"


def stated_size(number: Any) -> tuple[Any, Any]:
    """Width and height that the cache of an image states: others than its own, to tell where a size comes from."""
    return 1024 + number % 997, 1024 + number % 991


def own_size(number: Any) -> tuple[Any, Any]:
    """Width and height of an image."""
    return 8 + number // _LINKS, 16 + number // _LINKS


def make_folder(root: Path, count: int) -> Path:
    """`count` images, hard links to a few JPEGs of different sizes, and a latent cache beside each."""
    for number in range(_FOLDERS):
        (root / f"{number:02d}").mkdir(parents=True, exist_ok=True)
    for number in range(count):
        origin = root.parent / f"origin-{number // _LINKS}.jpg"
        if number % _LINKS == 0:
            Image.new("RGB", own_size(number)).save(origin)
            origin.with_suffix(".npz").touch()
        path = f"{root}/{name_of(number)}"
        width, height = stated_size(number)
        os.link(origin, path)
        os.link(origin.with_suffix(".npz"), f"{path[:-4]}_{width:04d}x{height:04d}_sdxl.npz")
    return root


def make_tar(path: Path, count: int) -> Path:
    """`count` members in an order that is not theirs by name; each holds its own number."""
    with open(path, "wb") as file:
        for number in np.random.default_rng(0).permutation(count).tolist():
            info, data = member(name_of(number), str(number).encode())
            file.write(info.tobuf(tarfile.USTAR_FORMAT) + data.ljust(tarfile.BLOCKSIZE, b"\0"))
        file.write(bytes(tarfile.RECORDSIZE))
    return path


def _sorted_names(root: Path) -> list[str]:
    """By os.scandir: the oracle of every listing."""
    folders = sorted(entry.name for entry in os.scandir(root))
    entries = ((folder, entry.name) for folder in folders for entry in os.scandir(root / folder))
    return sorted(f"{folder}/{name}" for folder, name in entries if name.endswith(".jpg"))


def _collect(root: Path, count: int, source: str, size_of: Callable, **options: Any) -> dict[str, Any]:
    frame, costs = measured(lambda: collect_sizes(root / "folder", progress=False, **options))
    width, height = size_of(frame["path"].str[-11:-4].astype(int))
    right = (frame["width"] == width) & (frame["height"] == height) & (frame["source"] == source)
    named = len(frame) == count and frame["path"].tolist() == _sorted_names(root / "folder")
    return {**costs, "is_right": bool(right.all() and named)}


def folder_keys(root: Path, count: int) -> dict[str, Any]:
    store = FolderStore(root / "folder")
    keys, costs = measured(store.keys)
    return {**costs, "is_right": len(keys) == count and list(keys) == _sorted_names(root / "folder")}


def folder_pickled(root: Path, count: int) -> dict[str, Any]:
    """What a spawned worker is sent and makes of it."""
    dataset = ImageDataset(FolderStore(root / "folder"))
    other, costs = measured(lambda: pickle.loads(pickle.dumps(dataset)))
    right = len(other) == count and list(other.keys) == list(dataset.keys)
    return {**costs, "file_mb": len(pickle.dumps(dataset)) / 1e6, "is_right": right}


def tar_index_built(root: Path, count: int) -> dict[str, Any]:
    path = root / "all.tar"
    Path(f"{path}{SUFFIX}").unlink(missing_ok=True)
    store = TarStore(path)
    keys, costs = measured(store.keys)
    names, offsets, sizes = zip(*sorted(_iter_by_tarfile(path)), strict=True)
    right = list(keys) == list(names) and len(keys) == count
    right = right and (store.offsets() == offsets).all() and (store.sizes() == sizes).all()
    return {**costs, "file_mb": os.path.getsize(f"{path}{SUFFIX}") / 1e6, "is_right": bool(right)}


def _iter_by_tarfile(path: Path) -> Iterator[tuple[str, int, int]]:
    with tarfile.open(path) as tar:
        while info := tar.next():
            yield info.name, info.offset_data, info.size
            tar.members.clear()


def tar_index_loaded(root: Path, count: int) -> dict[str, Any]:
    keys, costs = measured(TarStore(root / "all.tar").keys)
    right = len(keys) == count and all(keys[row] == name_of(int(keys[row][-11:-4])) for row in range(0, count, 101))
    return {**costs, "is_right": right}


def tar_random_reads(root: Path, count: int) -> dict[str, Any]:
    store = TarStore(root / "all.tar")
    store.keys()
    numbers = np.random.default_rng(1).integers(0, count, min(_READS, count)).tolist()
    found, costs = measured(lambda: [store.read(name_of(number)) for number in numbers])
    return {**costs, "is_right": [int(data) for data in found] == numbers}


def tar_dataset(root: Path, count: int) -> dict[str, Any]:
    dataset, costs = measured(lambda: ImageDataset(TarStore(root / "all.tar")))
    labels = [dataset.labels[row].item() for row in range(0, count, 101)]
    return {**costs, "is_right": labels == [int(dataset.keys[row][:2]) for row in range(0, count, 101)]}


CASES = {
    "collect_sizes, names of caches": partial(_collect, source="cache", size_of=stated_size),
    "collect_sizes, headers": partial(_collect, source="header", size_of=own_size, caches=False),
    "FolderStore.keys": folder_keys,
    "ImageDataset of a folder, pickled": folder_pickled,
    "tar index, built": tar_index_built,
    "tar index, loaded": tar_index_loaded,
    "tar index, random reads": tar_random_reads,
    "ImageDataset of a tar": tar_dataset,
}


def make(root: Path, count: int) -> None:
    """What the cases are about."""
    make_folder(root / "folder", count)
    make_tar(root / "all.tar", count)


if __name__ == "__main__":
    run_case(CASES, sys.argv[1:])
