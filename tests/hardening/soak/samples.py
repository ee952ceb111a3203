"""100,000 samples through shards, the pixel store and a loader: every one once, and each what its file holds."""

import sys
import tarfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.data import DataLoader

import labkit as lk
from tests.hardening.soak.load import measured, run_case
from tests.hardening.soak.pictures import encoded

_CLASSES = 10
_BLOCK = 8  # pixels: one of JPEG's blocks, so that its mean survives
_ROWS, _COLUMNS = 3, 4  # blocks; each is a digit of the sample's number
_LEVELS = np.array([40, 128, 216])
_PLACES = 3 ** np.arange(_ROWS * _COLUMNS)
_PER_SHARD = 2500


def key_of(number: int) -> str:
    return f"class{number % _CLASSES}/{number:07d}.jpg"


def picture(number: int) -> np.ndarray:
    """A number as twelve gray blocks: uint8 (24, 32, 3)."""
    blocks = _LEVELS[number // _PLACES % 3].reshape(_ROWS, _COLUMNS)
    return np.kron(blocks, np.ones((_BLOCK, _BLOCK)))[..., None].repeat(3, 2).astype(np.uint8)


def numbers_of(images: np.ndarray) -> np.ndarray:
    """The numbers that (N, 3, 24, 32) images show."""
    blocks = images.reshape(len(images), 3, _ROWS, _BLOCK, _COLUMNS, _BLOCK).mean((1, 3, 5))
    digits = np.abs(blocks.reshape(len(images), -1, 1) - _LEVELS).argmin(2)
    return digits @ _PLACES


def make(root: Path, count: int) -> None:
    """What the cases are about."""
    for number in range(_CLASSES):
        (root / "folder" / f"class{number}").mkdir(parents=True)
    for number in range(count):
        (root / "folder" / key_of(number)).write_bytes(encoded(picture(number)))


def shards_written(root: Path, count: int) -> dict[str, Any]:
    store = lk.FolderStore(root / "folder")
    options = {"max_count": _PER_SHARD, "seed": 0, "engine": "threads", "progress": False}
    _, costs = measured(lambda: lk.write_shards(store, root / "shards", **options))
    right = _members(root / "shards") == _files(root / "folder")
    size = sum(path.stat().st_size for path in (root / "shards").glob("*.tar"))
    return {**costs, "file_mb": size / 1e6, "is_right": right and len(_files(root / "folder")) == count}


def _files(folder: Path) -> dict[str, int]:
    return {path.stem: hash(path.read_bytes()) for path in folder.rglob("*.jpg")}


def _members(shards: Path) -> dict[str, int]:
    """By tarfile. A name that comes twice, or a label that is not its image's, is an error."""
    found: dict[str, int] = {}
    for path in sorted(shards.glob("*.tar")):
        with tarfile.open(path) as tar:
            data = {member.name: tar.extractfile(member).read() for member in tar}
        for name in filter(lambda name: name.endswith(".jpg"), data):
            stem = Path(name).stem
            if stem in found or int(data[name.replace(".jpg", ".cls")]) != int(stem) % _CLASSES:
                raise ValueError(f"{path} holds {name} twice, or with another's label")
            found[stem] = hash(data[name])
    return found


def _read(loader: Iterable[Any], root: Path, count: int, order: list[int] | None = None) -> dict[str, Any]:
    """Go through a loader of whole images: every sample once, with its label, and as Pillow has it."""
    parts, costs = measured(
        lambda: [(numbers_of(images.numpy()), labels.numpy(), images[0].numpy().copy()) for images, labels in loader]
    )
    numbers, labels = (np.concatenate(part) for part in zip(*[part[:2] for part in parts], strict=True))
    right = np.array_equal(np.sort(numbers), np.arange(count)) and np.array_equal(labels, numbers % _CLASSES)
    right = right and all(_is_as_pillow(first, root / "folder" / key_of(shown[0])) for shown, _, first in parts)
    return {**costs, "is_right": right and (order is None or numbers.tolist() == order)}


def _is_as_pillow(image: np.ndarray, path: Path) -> bool:
    expected = np.asarray(Image.open(path).convert("RGB")).transpose(2, 0, 1)
    return bool(np.abs(image.astype(int) - expected).mean() <= 2)


def _shards_read(root: Path, count: int, num_workers: int, shuffle: int = 0) -> dict[str, Any]:
    dataset = lk.read_shards(root / "shards", shuffle=shuffle, verify=True)
    return _read(DataLoader(dataset, 256, num_workers=num_workers), root, count)


def files_loaded(root: Path, count: int) -> dict[str, Any]:
    config = lk.LoaderConfig(256, num_workers=2, oversubscribe=True)
    return _read(lk.make_loader(lk.ImageDataset(lk.FolderStore(root / "folder")), config, shuffle=True), root, count)


def pixels_built(root: Path, count: int) -> dict[str, Any]:
    path = root / "all.pixels"
    store, costs = measured(lambda: lk.PixelStore.build(root / "folder", path, short_side=24, progress=False))
    right = list(store.keys) == sorted(map(key_of, range(count)))
    return {**costs, "file_mb": path.stat().st_size / 1e6, "is_right": right}


def pixels_read(root: Path, count: int) -> dict[str, Any]:
    store = lk.PixelStore(root / "all.pixels")
    return _read(DataLoader(store, 256), root, count, [int(Path(key).stem) for key in store.keys])


def pixels_verified(root: Path, count: int) -> dict[str, Any]:
    store = lk.PixelStore(root / "all.pixels")
    _, costs = measured(lambda: store.verify(progress=False))
    return {**costs, "is_right": len(store) == count}


CASES = {
    "make_loader over a folder, 2 workers": files_loaded,
    "write_shards": shards_written,
    "read_shards, 1 worker": partial(_shards_read, num_workers=1),
    "read_shards, 2 workers, shuffled": partial(_shards_read, num_workers=2, shuffle=1000),
    "PixelStore.build": pixels_built,
    "PixelStore, read": pixels_read,
    "PixelStore.verify": pixels_verified,
}


if __name__ == "__main__":
    run_case(CASES, sys.argv[1:])
