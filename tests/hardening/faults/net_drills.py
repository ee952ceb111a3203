"""Drills that read from a misbehaving server, over HTTP and S3, with every client that labkit has."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import labkit as lk
from labkit.data import shard_cache
from labkit.data.blobs import HttpClient
from tests.hardening.faults.bad_server import BUCKET, configure
from tests.hardening.faults.drills import Items, Result, digest, judge_reading, read_batches, read_store
from tests.hardening.faults.judge import LATE
from tests.hardening.faults.trial import Place


def _options(port: int) -> dict[str, Any]:
    timeouts = {"read_timeout": 0.5, "connect_timeout": 0.5, "retries": {"max_attempts": 1}}
    return {"key": "k", "secret": "s", "config_kwargs": timeouts, "endpoint_url": f"http://127.0.0.1:{port}"}


def _http_store(port: int) -> lk.HttpStore:
    return lk.HttpStore(f"http://127.0.0.1:{port}/photos", retries=2, timeout_s=0.5)


def _read_shards(url: str, **options: Any) -> Items:
    for number, (image, label) in enumerate(lk.read_shards(url, **options)):
        yield f"{number} {label}", digest(image)


CLIENTS: dict[str, Callable[[int], Items]] = {
    "HttpStore": lambda port: read_store(_http_store(port)),
    "TarStore over HTTP": lambda port: read_store(lk.TarStore(f"http://127.0.0.1:{port}/photos.tar")),
    "read_shards over HTTP": lambda port: _read_shards(f"http://127.0.0.1:{port}/shards"),
    "BatchLoader over HTTP": lambda port: read_batches(_http_store(port)),
    "ObjectStore on S3": lambda port: read_store(lk.ObjectStore(f"s3://{BUCKET}/photos", **_options(port))),
    "TarStore on S3": lambda port: read_store(lk.TarStore(f"s3://{BUCKET}/photos.tar", **_options(port))),
    "read_shards on S3": lambda port: _read_shards(f"s3://{BUCKET}/shards", storage_options=_options(port)),
}


def _give_up_soon() -> None:
    """Shorten what clients without options of their own wait, and what s3fs waits between tries."""
    HttpClient.__init__.__defaults__ = (8, 2, 0.5)
    shard_cache.CHUNK_BYTES = 16 << 10  # small shards, too, take several requests
    with suppress(ImportError):
        import s3fs

        s3fs.S3FileSystem.retries = 2


def drill_server(client: str, kind: str, times: int, at: int, place: Place) -> Result:
    """Read all while the server spoils `times` answers (-1: all) after the first `at`; then read again."""
    _give_up_soon()
    read, port = CLIENTS[client], place.port
    configure(port)
    expected = list(read(port))
    configure(port, kind, at, times)
    result = judge_reading(lambda: list(read(port)), expected, (f"127.0.0.1:{port}", BUCKET, ".jpg", ".tar"))
    if not configure(port):
        result["outcome"] = LATE
    if list(read(port)) != expected:
        result["violations"].append("not right after the server was")
    return result
