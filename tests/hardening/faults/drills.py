"""Reading while something goes wrong: of the disk, or of a server. Each drill runs in a process of its own.

It reads, once or while the fault happens, and again after it; between the two the source is put right. A read ends with
the right data, or with one of the errors that labkit documents, whose message names the file.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RIGHT, CLEAR = "right all the same", "clear error"


@dataclass(frozen=True)
class Reading:
    """What is read, and how.

    Args:
        read: Called with the place of the sources; gives `(key, digest)`, item by item.
        harmed: The source that a fault harms; a folder: one of its files.
        sources: Names of `make_sources`.
    """

    read: Callable[[str], Iterator[tuple[str, str]]]
    sources: tuple[str, ...]
    harmed: str


def _digest(data: Any) -> str:
    return hashlib.sha256(data if isinstance(data, bytes) else data.numpy().tobytes()).hexdigest()[:16]


def _store(store: Any) -> Iterator[tuple[str, str]]:
    """Decoded: what is shorter than it was, and says so, is found there and nowhere else."""
    from labkit import decode

    for key in store.keys():  # noqa: SIM118
        yield key, _digest(decode(store.read(key), key=key))


def read_folder(src: str) -> Iterator[tuple[str, str]]:
    from labkit import FolderStore

    return _store(FolderStore(f"{src}/photos"))


def read_images(src: str) -> Iterator[tuple[str, str]]:
    from labkit import FolderStore, ImageDataset

    dataset = ImageDataset(FolderStore(f"{src}/photos"))
    for number, key in enumerate(dataset.keys):
        yield key, _digest(dataset[number][0])


def read_batches(src: str) -> Iterator[tuple[str, str]]:
    """A BatchLoader's threads over the folder."""
    from labkit import BatchLoader, FolderStore

    yield from _batches(BatchLoader(FolderStore(f"{src}/photos"), size=16, batch_size=2, num_threads=2))


def _batches(loader: Any) -> Iterator[tuple[str, str]]:
    for number, (images, _) in enumerate(loader):
        yield str(number), _digest(images.contiguous())


def read_pixels(src: str) -> Iterator[tuple[str, str]]:
    from labkit import PixelStore

    pixels = PixelStore(f"{src}/photos.pixels")
    for number, key in enumerate(pixels.keys):
        yield key, _digest(pixels[number][0])


def read_pixel_batches(src: str) -> Iterator[tuple[str, str]]:
    from labkit import BatchLoader, PixelStore

    yield from _batches(BatchLoader(PixelStore(f"{src}/photos.pixels"), size=16, batch_size=2, num_threads=2))


def _read_tar(mode: str) -> Callable[[str], Iterator[tuple[str, str]]]:
    def read(src: str) -> Iterator[tuple[str, str]]:
        from labkit import TarStore

        return _store(TarStore(f"{src}/photos.tar", mode=mode))

    return read


def read_shard_folder(src: str) -> Iterator[tuple[str, str]]:
    from labkit import read_shards

    dataset = read_shards(f"{src}/shards", verify=True)
    for sample in dataset.samples():
        yield sample["__key__"], _digest(sample["jpg"])


READINGS = {
    "FolderStore": Reading(read_folder, ("photos",), "photos"),
    "ImageDataset": Reading(read_images, ("photos",), "photos"),
    "BatchLoader of a folder": Reading(read_batches, ("photos",), "photos"),
    "BatchLoader of pixels": Reading(read_pixel_batches, ("photos.pixels",), "photos.pixels"),
    "PixelStore": Reading(read_pixels, ("photos.pixels",), "photos.pixels"),
    "TarStore index": Reading(_read_tar("index"), ("photos.tar",), "photos.tar"),
    "TarStore tarfile": Reading(_read_tar("tarfile"), ("photos.tar",), "photos.tar"),
    "TarStore reopen": Reading(_read_tar("reopen"), ("photos.tar",), "photos.tar"),
    "read_shards": Reading(read_shard_folder, ("shards",), "shards/shard-000001.tar"),
}


def documented() -> tuple[type[Exception], ...]:
    """The errors that stores, data sets and loaders state."""
    from labkit import DecodeError, PixelError
    from labkit.data.tar.errors import TarError

    return DecodeError, PixelError, TarError, KeyError, OSError, ValueError


def judged(read: Callable[[], list], wanted: list, names: tuple[str, ...], allowed: list[list]) -> dict[str, Any]:
    """Read and say how it went: outcome, message, and what is wrong with either."""
    wrong: list[str] = []
    try:
        found = read()
    except documented() as error:
        message = f"{type(error).__name__}: {error}" + "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        if not any(name in message for name in names):
            wrong.append(f"names no file: {message[:200]}")
        return {"outcome": CLEAR, "message": message, "violations": wrong}
    except Exception as error:
        wrong.append(f"no documented error: {type(error).__name__}: {error}"[:300])
        return {"outcome": CLEAR, "message": wrong[0], "violations": wrong}
    if found != wanted and found not in allowed:
        wrong.append("wrong data, and no error")
    return {"outcome": RIGHT, "message": "", "violations": wrong}


def tell(result: dict[str, Any]) -> None:
    """To the harness, by the last line of stdout."""
    print("\n" + json.dumps(result), flush=True)


def drill_reading(reading: Reading, harm: str, at: int, work: Path) -> None:
    """Read until item `at`, harm the source, read on; put it right, read again."""
    import shutil

    from tests.hardening.faults.startup.sitecustomize import harm as spoil

    src = str(work / "src")
    wanted = list(reading.read(src))
    at %= len(wanted)
    victim = Path(src, reading.harmed)
    if victim.is_dir():
        files = sorted(victim.rglob("*.jpg"))
        victim = files[min(at + 1, len(files) - 1)]  # the next to be read
    saved = work.parent / "saved"

    def disturbed() -> list:
        found = []
        for number, item in enumerate(reading.read(src)):
            if number == at:
                shutil.copy2(victim, saved)
                if harm == "unreadable":
                    os.chmod(victim, 0)
                else:
                    spoil(harm, str(victim))
            found.append(item)
        return found

    result = judged(disturbed, wanted, (victim.name, "photos.pixels"), [])
    victim.unlink(missing_ok=True)
    shutil.copy2(saved, victim)
    if list(reading.read(src)) != wanted:
        result["violations"].append("not right after the source was")
    tell(result)
