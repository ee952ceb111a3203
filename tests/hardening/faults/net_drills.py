"""Reading from a server that misbehaves: HTTP and S3, by every client that labkit has."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tests.hardening.faults.bad_server import BUCKET, tell as tell_server
from tests.hardening.faults.drills import _batches, _digest, _store, judged, tell
from tests.hardening.faults.record import LATE

_S3 = {
    "key": "k", "secret": "s",
    "config_kwargs": {"read_timeout": 0.5, "connect_timeout": 0.5, "retries": {"max_attempts": 1}},
}  # fmt: skip
Reader = Callable[[int], Iterator[tuple[str, str]]]


def _options(port: int) -> dict[str, Any]:
    return {**_S3, "endpoint_url": f"http://127.0.0.1:{port}"}


def http_store(port: int) -> Iterator[tuple[str, str]]:
    from labkit import HttpStore

    return _store(HttpStore(f"http://127.0.0.1:{port}/photos", retries=2, timeout_s=0.5))


def http_tar(port: int) -> Iterator[tuple[str, str]]:
    from labkit import TarStore

    return _store(TarStore(f"http://127.0.0.1:{port}/photos.tar"))


def http_shards(port: int) -> Iterator[tuple[str, str]]:
    from labkit import read_shards

    return _samples(read_shards(f"http://127.0.0.1:{port}/shards"))


def http_batches(port: int) -> Iterator[tuple[str, str]]:
    from labkit import BatchLoader, HttpStore

    store = HttpStore(f"http://127.0.0.1:{port}/photos", retries=2, timeout_s=0.5)
    return _batches(BatchLoader(store, size=16, batch_size=2, num_threads=2))


def s3_store(port: int) -> Iterator[tuple[str, str]]:
    from labkit import ObjectStore

    return _store(ObjectStore(f"s3://{BUCKET}/photos", **_options(port)))


def s3_tar(port: int) -> Iterator[tuple[str, str]]:
    from labkit import TarStore

    return _store(TarStore(f"s3://{BUCKET}/photos.tar", **_options(port)))


def s3_shards(port: int) -> Iterator[tuple[str, str]]:
    from labkit import read_shards

    return _samples(read_shards(f"s3://{BUCKET}/shards", storage_options=_options(port)))


def _samples(dataset: Any) -> Iterator[tuple[str, str]]:
    for number, (image, label) in enumerate(dataset):
        yield f"{number} {label}", _digest(image)


CLIENTS: dict[str, Reader] = {
    "HttpStore": http_store,
    "TarStore over HTTP": http_tar,
    "read_shards over HTTP": http_shards,
    "BatchLoader over HTTP": http_batches,
    "ObjectStore on S3": s3_store,
    "TarStore on S3": s3_tar,
    "read_shards on S3": s3_shards,
}


def few_seconds() -> None:
    """Clients that take no options give up soon, too; and S3's, whose waits between tries are fsspec's own."""
    from labkit.data.blobs import http
    from labkit.data.blobs.http_client import HttpClient
    from labkit.data.shards import gopen

    http.HttpClient = lambda *given: HttpClient(*given) if given else HttpClient(8, 2, 0.5)
    gopen._CHUNK_BYTES = 16 << 10  # so that small shards take several requests
    gopen.ReadAhead.__init__.__defaults__ = (16 << 10,)
    try:
        import s3fs
    except ImportError:
        return
    s3fs.S3FileSystem.retries = 2


def drill_server(client: str, kind: str, skip: int, times: int, port: int) -> None:
    """Read all, while the server spoils `times` of its answers (-1: all) after the first `skip`; then once more."""
    few_seconds()
    read = CLIENTS[client]
    tell_server(port)
    wanted = list(read(port))
    tell_server(port, kind, skip, times)
    names = (f"127.0.0.1:{port}", BUCKET, ".jpg", ".tar")
    result = judged(lambda: list(read(port)), wanted, names, [])
    if not tell_server(port):
        result["outcome"] = LATE
    if list(partial(read, port)()) != wanted:
        result["violations"].append("not right after the server was")
    tell(result)
