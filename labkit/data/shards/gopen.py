"""Open a path or URL for one pass from beginning to end; importing this teaches WebDataset the scheme `s3://`.

WebDataset opens URLs by `gopen`, whose table has no entry for `s3`. The one added here reads through fsspec: endpoint
and credentials come from fsspec's configuration or the environment (`AWS_ENDPOINT_URL`, `AWS_PROFILE`, ...). Spawned
workers do not inherit the table: in WebDataset's own pipelines, use `DataLoader(..., worker_init_fn=gopen.register)`.
`labkit.read_shards` does not need that.

Those pipelines also run what follows `pipe:` in a list of shards, and unpickle members with such suffixes, unless the
variable `WDS_SECURE` is 1. `labkit.read_shards` never does either.
"""

import io
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from webdataset.gopen import gopen_schemes

from labkit.data.blobs import Blob, LocalBlob, open_blob

CHUNK_BYTES = 4 << 20  # about forty photos: decoding them takes longer than fetching the next chunk
_LOCAL_BUFFER_BYTES = 1 << 20


def open_url(place: str | os.PathLike, **storage_options: Any) -> io.BufferedReader:
    """A file, from its first byte on. Remote ones are fetched one chunk ahead, with retries.

    Args:
        place: A path, `http(s)://`, `s3://`, or any other scheme that fsspec reads.
        **storage_options: Passed to fsspec.

    Raises:
        FileNotFoundError: no such file.
        OSError: no whole answer after all tries; names the URL without credentials.
        ImportError: the scheme's package is missing; names it.
    """
    blob = open_blob(place, **storage_options)
    if isinstance(blob, LocalBlob):
        return io.BufferedReader(io.FileIO(blob.name), _LOCAL_BUFFER_BYTES)
    return io.BufferedReader(ReadAhead(blob))


def register(*_: Any) -> None:
    """Let WebDataset's `gopen` open `s3://`, unless it does already. Arguments are ignored."""
    gopen_schemes.setdefault("s3", _gopen_s3)


def _gopen_s3(url: str, mode: str = "rb", bufsize: int = -1, **storage_options: Any) -> BinaryIO:
    if mode == "rb":
        return open_url(url, **storage_options)
    import fsspec

    return fsspec.open(url, mode, **storage_options).open()


class ReadAhead(io.RawIOBase):
    """A blob read in order: a thread fetches the next chunk while one is used."""

    def __init__(self, blob: Blob, chunk_bytes: int = CHUNK_BYTES):
        self._thread = ThreadPoolExecutor(1)
        size = blob.fingerprint()[0]
        self._requests = (
            self._thread.submit(blob.read_at, offset, min(chunk_bytes, size - offset))
            for offset in range(0, size, chunk_bytes)
        )
        self._chunk, self._next = memoryview(b""), next(self._requests, None)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._chunk and self._next is not None:
            self._chunk = memoryview(self._next.result())
            self._next = next(self._requests, None)
        n_bytes = min(len(buffer), len(self._chunk))
        buffer[:n_bytes] = self._chunk[:n_bytes]
        self._chunk = self._chunk[n_bytes:]
        return n_bytes

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        super().close()


register()
