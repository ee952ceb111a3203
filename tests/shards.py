"""Shards of numbered pictures, and what is read of them as any worker of any rank."""

from pathlib import Path

import numpy as np
from PIL import Image

import labkit as lk
from tests.image_files import encoded
from tests.memory_store import MemoryStore


def write(store, root: Path, **options) -> Path:
    return lk.write_shards(store, root, **{"engine": "threads", "progress": False, **options})


def picture(number: int) -> bytes:
    """Its color is its number."""
    return encoded(Image.new("RGB", (2, 2), (number % 256, number // 256, 0)), "PNG")


PICTURE = picture(0)


def numbered(root: Path, n_samples: int, n_shards: int) -> Path:
    store = MemoryStore({f"all/{number:05d}.png": picture(number) for number in range(n_samples)})
    return write(store, root, max_count=-(-n_samples // n_shards))


def noisy(count: int) -> MemoryStore:
    """JPEGs of noise, some 40 KB each, in two classes."""
    draw = np.random.default_rng(0).integers
    images = (Image.fromarray(draw(0, 256, (160, 160, 3), np.uint8)) for _ in range(count))
    return MemoryStore({f"{'ab'[number % 2]}/{number:02}.jpg": encoded(image) for number, image in enumerate(images)})


def numbers(loader) -> list[int]:
    """Which samples came, in their order, of a data set or a loader without batches."""
    return [int(image[0, 0, 0]) + 256 * int(image[1, 0, 0]) for image, _ in loader]


def at(monkeypatch, rank: int, world_size: int, worker: int | None = None, num_workers: int = 1) -> None:
    """Be a rank, as torchrun's variables say it; and a worker of it, as WebDataset's do, without a process for it."""
    about = {"RANK": rank, "WORLD_SIZE": world_size}
    if worker is not None:
        about |= {"WORKER": worker, "NUM_WORKERS": num_workers}
    for name, value in about.items():
        monkeypatch.setenv(name, str(value))


def samples(dataset) -> list[tuple[str, bytes, bytes]]:
    """Key, label and image of each sample, in their order, undecoded."""
    return [(sample["__key__"], sample["cls"], sample["jpg"]) for sample in dataset.samples()]
