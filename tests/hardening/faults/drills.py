"""Drills that read, each in a fork: a file is harmed meanwhile, or a server misbehaves.

Reading must end with the right data, or with an error that labkit documents and whose message names the file; and once
the fault is gone, with the right data.
"""

import hashlib
import json
import multiprocessing
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import labkit as lk
from labkit.data import shard_cache
from labkit.data.blobs import HttpClient
from labkit.errors import LabkitError
from labkit.util.files import write_atomic
from tests.hardening.faults.commands import CLEAR, LATE, NO_END, RIGHT, Place, Verdict
from tests.hardening.faults.server import BUCKET, KINDS

Items = Iterator[tuple[str, str]]  # key, digest

_LIMIT_S = 200.0


def run_drill(place: Place, draw: random.Random, drill: Callable[[Place, int], Verdict]) -> Verdict:
    """Run a drill in a fork, at a drawn moment. The drill judges what it reads; this judges how its process ended."""
    place.make()
    at, verdict = draw.randrange(12), place.root / "verdict.json"
    verdict.unlink(missing_ok=True)

    def work() -> None:
        os.setsid()
        with open(place.root / "said", "wb") as said:
            os.dup2(said.fileno(), 2)
        environment = place.environment()
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(place.work)
        tempfile.tempdir = None
        found = drill(place, at)
        verdict.write_text(json.dumps([found.outcome, f"number {at}", found.message, found.violations]))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(_LIMIT_S)
    code = process.exitcode
    process.kill()
    process.join()
    wrong = place.leftovers(process.pid)
    if code == 0:
        found = Verdict(*json.loads(verdict.read_text()))
        found.violations += wrong
        return found
    said = (place.root / "said").read_text(errors="replace").strip()[-300:]
    return Verdict(NO_END, f"number {at}", said, [f"the process ended with {code}: {said}", *wrong])


def digest(data: Any) -> str:
    return hashlib.sha256(data if isinstance(data, bytes) else data.contiguous().numpy().tobytes()).hexdigest()[:16]


def read_store(store: Any) -> Items:
    """Read and decode: only a decoder finds a file that is shorter than it was."""
    for key in store.keys():  # noqa: SIM118
        yield key, digest(lk.decode(store.read(key), key=key))


def read_batches(source: Any) -> Items:
    for number, (images, _) in enumerate(lk.BatchLoader(source, size=16, batch_size=2, num_threads=2)):
        yield str(number), digest(images)


def read_dataset(dataset: Any) -> Items:
    for number, key in enumerate(dataset.keys):
        yield key, digest(dataset[number][0])


def read_samples(path: str) -> Items:
    for sample in lk.read_shards(path, verify=True).samples():
        yield sample["__key__"], digest(sample["jpg"])


def read_images(url: str, **options: Any) -> Items:
    for number, (image, label) in enumerate(lk.read_shards(url, **options)):
        yield f"{number} {label}", digest(image)


# How to read a source, and which file of it is harmed; of a folder, the photo that is read next.
READINGS: dict[str, tuple[Callable[[str], Items], str]] = {
    "FolderStore": (lambda src: read_store(lk.FolderStore(f"{src}/photos")), "photos"),
    "ImageDataset": (lambda src: read_dataset(lk.ImageDataset(f"{src}/photos")), "photos"),
    "BatchLoader of a folder": (lambda src: read_batches(lk.FolderStore(f"{src}/photos")), "photos"),
    "BatchLoader of pixels": (lambda src: read_batches(lk.PixelStore(f"{src}/photos.pixels")), "photos.pixels"),
    "PixelStore": (lambda src: read_dataset(lk.PixelStore(f"{src}/photos.pixels")), "photos.pixels"),
    "TarStore": (lambda src: read_store(lk.TarStore(f"{src}/photos.tar")), "photos.tar"),
    "read_shards": (lambda src: read_samples(f"{src}/shards"), "shards/shard-000001.tar"),
}


HARMS: dict[str, Callable[[Path], object]] = {
    "remove": Path.unlink, "truncate": lambda path: os.truncate(path, path.stat().st_size // 2),
    "replace": lambda path: write_atomic(path, b"another file of this name"),
}  # fmt: skip


def judge_reading(read: Callable[[], list], expected: list, names: tuple[str, ...]) -> Verdict:
    try:
        found = read()
    except Exception as error:
        message, wrong = describe(error), []
        if not isinstance(error, (LabkitError, KeyError, OSError, ValueError)):
            wrong = [f"no documented error: {message[:300]}"]
        elif not any(name in message for name in names):
            wrong = [f"names no file: {message[:200]}"]
        return Verdict(CLEAR, message=message, violations=wrong)
    return Verdict(RIGHT, violations=[] if found == expected else ["wrong data, and no error"])


def describe(error: Exception) -> str:
    """Type, message and notes of an error."""
    return f"{type(error).__name__}: {error}" + "".join(f" ({note})" for note in getattr(error, "__notes__", ()))


def drill_reading(name: str, how: str, place: Place, at: int) -> Verdict:
    """Read until item `at`, harm the source, read on; put it right and read again."""
    (read, harmed), src, saved = READINGS[name], str(place.work / "src"), place.root / "saved"
    expected = list(read(src))
    at %= len(expected)
    victim = Path(src, harmed)
    if victim.is_dir():
        files = sorted(victim.rglob("*.jpg"))
        victim = files[min(at + 1, len(files) - 1)]
    shutil.copy2(victim, saved)

    def read_disturbed() -> list:
        found = []
        for number, item in enumerate(read(src)):
            if number == at:
                HARMS[how](victim)
            found.append(item)
        return found

    verdict = judge_reading(read_disturbed, expected, (victim.name, "photos.pixels"))
    victim.unlink(missing_ok=True)
    shutil.copy2(saved, victim)
    if list(read(src)) != expected:
        verdict.violations.append("not right after the source was")
    return verdict


def _options(port: int) -> dict[str, Any]:
    timeouts = {"read_timeout": 0.5, "connect_timeout": 0.5, "retries": {"max_attempts": 1}}
    return {"key": "k", "secret": "s", "config_kwargs": timeouts, "endpoint_url": f"http://127.0.0.1:{port}"}


def _http_store(port: int) -> lk.HttpStore:
    return lk.HttpStore(f"http://127.0.0.1:{port}/photos", retries=2, timeout_s=0.5)


CLIENTS: dict[str, Callable[[int], Items]] = {
    "HttpStore": lambda port: read_store(_http_store(port)),
    "TarStore over HTTP": lambda port: read_store(lk.TarStore(f"http://127.0.0.1:{port}/photos.tar")),
    "read_shards over HTTP": lambda port: read_images(f"http://127.0.0.1:{port}/shards"),
    "BatchLoader over HTTP": lambda port: read_batches(_http_store(port)),
    "ObjectStore on S3": lambda port: read_store(lk.ObjectStore(f"s3://{BUCKET}/photos", **_options(port))),
    "TarStore on S3": lambda port: read_store(lk.TarStore(f"s3://{BUCKET}/photos.tar", **_options(port))),
    "read_shards on S3": lambda port: read_images(f"s3://{BUCKET}/shards", storage_options=_options(port)),
}


def drill_server(client: str, kind: str, times: int, place: Place, at: int) -> Verdict:
    """Read all while the server spoils `times` answers (-1: all) after the first `at`; then read again."""
    HttpClient.__init__.__defaults__ = (8, 2, 0.5)  # clients without options of their own give up soon
    shard_cache.CHUNK_BYTES = 16 << 10  # small shards, too, take several requests
    with suppress(ImportError):
        import s3fs

        s3fs.S3FileSystem.retries = 2
    read, server = partial(CLIENTS[client], place.server.port), place.server
    server.spoil()
    expected = list(read())
    # No client can tell that a shorter listing page, with a matching length, is not the whole page.
    server.spoil(kind, max(at, 5) if kind == "short" and "HTTP" in client.upper() else at, times)
    verdict = judge_reading(lambda: list(read()), expected, (f"127.0.0.1:{server.port}", BUCKET, ".jpg", ".tar"))
    if not server.spoil():
        verdict.outcome = LATE
    if list(read()) != expected:
        verdict.violations.append("not right after the server was")
    return verdict


DRILLS: list[tuple[str, str, Callable[[Place, int], Verdict]]] = [
    *((name, f"source {how}", partial(drill_reading, name, how)) for name, how in product(READINGS, HARMS)),
    *(
        (client, f"server {kind}, {often}", partial(drill_server, client, kind, times))
        for client, kind, (often, times) in product(CLIENTS, KINDS, {"once": 1, "always": -1}.items())
    ),
]
