"""Bytes at an offset of a remote file: on an HTTP server, or in object storage."""

import re
from typing import Any

from labkit.core import strip_credentials
from labkit.data.blobs.fsspec_client import ObjectClient
from labkit.data.blobs.http_client import Answer, HttpClient

# Where fsspec's filesystems report a version.
_VERSION_KEYS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")


class HttpBlob:
    """One file at a URL, read with range requests, by a client of its own or a given one."""

    def __init__(self, url: str, client: HttpClient | None = None):
        self._url, self.name = url, strip_credentials(url)
        self._client = client or HttpClient()
        self._version = ""

    def allow_requests(self, n_at_once: int) -> None:
        self._client.allow_requests(n_at_once)

    def fingerprint(self) -> tuple[int, str]:
        answer = self._client.probe(self._url)
        if answer.status == 404:
            raise FileNotFoundError(f"{self.name} does not exist")
        if answer.status == 416:
            return 0, ""
        total = self._total_size(answer, 0)
        self._version = _version(answer)
        return total, self._version

    def read_at(self, offset: int, size: int) -> bytes:
        if not size:
            return b""
        answer = self._client.get(self._url, offset, offset + size)
        if answer.status == 416:
            return b""
        total = self._total_size(answer, offset)
        if self._version and _version(answer) != self._version:
            raise OSError(f"{self.name} changed on the server: open it again")
        return _require_size(self.name, answer.data, min(size, total - offset))

    def _total_size(self, answer: Answer, offset: int) -> int:
        content_range = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", ""))
        if answer.status != 206 or not content_range or int(content_range[1]) != offset:
            raise OSError(f"{self.name}: the server does not support range requests; download the file and open that")
        return int(content_range[2])


class ObjectBlob:
    """One file that fsspec reads, by ranges."""

    def __init__(self, url: str, **storage_options: Any):
        self._client = ObjectClient(url, storage_options)
        self.name = self._client.name
        self._size = 0

    def allow_requests(self, n_at_once: int) -> None:
        self._client.allow_requests(n_at_once)

    def fingerprint(self) -> tuple[int, str]:
        with self._client.open() as (filesystem, path):
            filesystem.invalidate_cache(path)  # a cached listing may be older than the object
            info = filesystem.info(path)
        self._size = info["size"]
        return self._size, next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")

    def read_at(self, offset: int, size: int) -> bytes:
        if not self._size:
            self.fingerprint()
        size = min(size, self._size - offset)
        if size <= 0:
            return b""
        with self._client.open() as (filesystem, path):
            data = filesystem.cat_file(path, start=offset, end=offset + size)
        return _require_size(self.name, data, size)


def _version(answer: Answer) -> str:
    return answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""


def _require_size(name: str, data: bytes, size: int) -> bytes:
    """`data` if it is `size` bytes long, else OSError: a server may send part of a range, or more than it."""
    if len(data) != size:
        raise OSError(f"{name}: the server sent {len(data)} bytes instead of the {size} requested: run again")
    return data
