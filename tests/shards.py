"""Shards of numbered pictures, what is read of them as any worker of any rank, and writers that can be killed."""

import io
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
from PIL import Image

import labkit as lk
from tests.memory_store import MemoryStore


def write(store, root: Path, **options) -> Path:
    return lk.write_shards(store, root, **{"engine": "threads", "progress": False, **options})


def picture(number: int) -> bytes:
    """Its color is its number."""
    buffer = io.BytesIO()
    Image.new("RGB", (2, 2), (number % 256, number // 256, 0)).save(buffer, "PNG")
    return buffer.getvalue()


PICTURE = picture(0)


def numbered(root: Path, n_samples: int, n_shards: int) -> Path:
    store = MemoryStore({f"all/{number:05d}.png": picture(number) for number in range(n_samples)})
    return write(store, root, max_count=-(-n_samples // n_shards))


def numbers(loader) -> list[int]:
    """Which samples came, in their order, of a data set or a loader without batches."""
    return [int(image[0, 0, 0]) + 256 * int(image[1, 0, 0]) for image, _ in loader]


def numbers_of(batches) -> list[int]:
    """The same of a loader with batches."""
    return [number for images, labels in batches for number in numbers(zip(images, labels, strict=True))]


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


WRITE = """
import sys, labkit
if __name__ == "__main__":
    store, root, engine = labkit.FolderStore(sys.argv[1]), sys.argv[2], sys.argv[3]
    print("begins", flush=True)
    labkit.write_shards(store, root, max_count=2, engine=engine, num_workers=2, progress=False)
    print("ends", flush=True)
"""


def start_writer(photos: Path, root: Path, engine: str) -> subprocess.Popen:
    """A process that writes shards of two images each, just about to begin."""
    command = [sys.executable, "-c", WRITE, str(photos), str(root), engine]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout.readline() == "begins\n"
    return process


def kill_writer(process: subprocess.Popen) -> None:
    """Kill it and its workers, and wait until they are dead."""
    workers = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    while any(map(is_alive, workers)):
        time.sleep(0.001)


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
