"""Drills that read while a file is harmed. Each runs in its own process.

A drill reads everything while the fault happens, and again after the source was put right. Reading must end with the
right data, or with an error that labkit documents and whose message names the file.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import labkit as lk
from labkit import course
from labkit.errors import TarError
from tests.hardening.faults.judge import CLEAR, RIGHT
from tests.hardening.faults.startup.sitecustomize import harm
from tests.hardening.faults.trial import Place

Items = Iterator[tuple[str, str]]  # key, digest
Result = dict[str, Any]  # outcome, message, violations


@dataclass(frozen=True)
class Reading:
    """What is read, and how.

    Args:
        read: Called with the folder of the sources; yields the items.
        source: The name, of `make_sources`, that is read.
        harmed: The file that a fault harms, or a folder for one of its files; default: the source.
    """

    read: Callable[[str], Items]
    source: str
    harmed: str = ""


def digest(data: Any) -> str:
    return hashlib.sha256(data if isinstance(data, bytes) else data.numpy().tobytes()).hexdigest()[:16]


def read_store(store: Any) -> Items:
    """Read and decode: only a decoder finds a file that is shorter than it was."""
    for key in store.keys():  # noqa: SIM118
        yield key, digest(lk.decode(store.read(key), key=key))


def read_batches(source: Any) -> Items:
    """Read by the threads of a BatchLoader."""
    for number, (images, _) in enumerate(lk.BatchLoader(source, size=16, batch_size=2, num_threads=2)):
        yield str(number), digest(images.contiguous())


def _read_dataset(dataset: Any) -> Items:
    for number, key in enumerate(dataset.keys):
        yield key, digest(dataset[number][0])


def _read_samples(src: str) -> Items:
    for sample in lk.read_shards(f"{src}/shards", verify=True).samples():
        yield sample["__key__"], digest(sample["jpg"])


def _photos(src: str) -> lk.FolderStore:
    return lk.FolderStore(f"{src}/photos")


def _pixels(src: str) -> lk.PixelStore:
    return lk.PixelStore(f"{src}/photos.pixels")


READINGS = {
    "FolderStore": Reading(lambda src: read_store(_photos(src)), "photos"),
    "ImageDataset": Reading(lambda src: _read_dataset(lk.ImageDataset(_photos(src))), "photos"),
    "BatchLoader of a folder": Reading(lambda src: read_batches(_photos(src)), "photos"),
    "BatchLoader of pixels": Reading(lambda src: read_batches(_pixels(src)), "photos.pixels"),
    "PixelStore": Reading(lambda src: _read_dataset(_pixels(src)), "photos.pixels"),
    "TarStore index": Reading(lambda src: read_store(lk.TarStore(f"{src}/photos.tar")), "photos.tar"),
    "read_shards": Reading(_read_samples, "shards", "shards/shard-000001.tar"),
}
_DOCUMENTED = (lk.DecodeError, course.PixelError, TarError, KeyError, OSError, ValueError)


def describe(error: Exception) -> str:
    """Return type, message and notes of an error."""
    return f"{type(error).__name__}: {error}" + "".join(f" ({note})" for note in getattr(error, "__notes__", ()))


def judge_reading(read: Callable[[], list], expected: list, names: tuple[str, ...]) -> Result:
    """Read, and return outcome, message and violations."""
    try:
        found = read()
    except Exception as error:
        message, violations = describe(error), []
        if not isinstance(error, _DOCUMENTED):
            violations = [f"no documented error: {message[:300]}"]
        elif not any(name in message for name in names):
            violations = [f"names no file: {message[:200]}"]
        return {"outcome": CLEAR, "message": message, "violations": violations}
    violations = [] if found == expected else ["wrong data, and no error"]
    return {"outcome": RIGHT, "message": "", "violations": violations}


def drill_reading(reading: Reading, how: str, at: int, place: Place) -> Result:
    """Read until item `at`, harm the source, read on; put it right and read again."""
    src, saved = str(place.work / "src"), place.root / "saved"
    expected = list(reading.read(src))
    at %= len(expected)
    victim = Path(src, reading.harmed or reading.source)
    if victim.is_dir():
        files = sorted(victim.rglob("*.jpg"))
        victim = files[min(at + 1, len(files) - 1)]  # the next to be read

    def read_disturbed() -> list:
        found = []
        for number, item in enumerate(reading.read(src)):
            if number == at:
                shutil.copy2(victim, saved)
                if how == "unreadable":
                    os.chmod(victim, 0)
                else:
                    harm(how, str(victim))
            found.append(item)
        return found

    result = judge_reading(read_disturbed, expected, (victim.name, "photos.pixels"))
    victim.unlink(missing_ok=True)
    shutil.copy2(saved, victim)
    if list(reading.read(src)) != expected:
        result["violations"].append("not right after the source was")
    return result
