"""One file behind a network: over HTTP, or in object storage through fsspec."""

import re
from functools import partial
from typing import Any

from labkit.core import PerProcess, strip_credentials
from labkit.data.blobs.fsspec_client import known_secrets, open_filesystem, translated_errors
from labkit.data.blobs.http_client import HttpClient

_VERSIONS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")  # as fsspec's kinds say it


class HttpBlob:
    """One file at an address, read by range requests."""

    def __init__(self, url: str):
        self._url, self.name = url, strip_credentials(url)
        self._client = HttpClient()
        self._version = ""

    def fingerprint(self) -> tuple[int, str]:
        answer = self._client.probe(self._url)
        if answer.status == 404:
            raise FileNotFoundError(f"{self.name} does not exist")
        if answer.status == 416:
            return 0, ""
        total = self._total(answer, 0)
        self._version = _version(answer)
        return total, self._version

    def read_at(self, offset: int, size: int) -> bytes:
        if not size:
            return b""
        answer = self._client.get(self._url, offset, offset + size)
        if answer.status == 416:
            return b""
        total = self._total(answer, offset)
        if self._version and _version(answer) != self._version:
            raise OSError(f"{self.name} changed on the server: open it again")
        return _whole(self.name, answer.data, min(size, total - offset))

    def _total(self, answer: Any, offset: int) -> int:
        said = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", ""))
        if answer.status != 206 or not said or int(said[1]) != offset:
            raise OSError(f"{self.name}: the server answers no range requests; download the file and open that")
        return int(said[2])


def _whole(name: str, data: bytes, size: int) -> bytes:
    """`data`, where they are as many bytes as wanted: a server may answer a part of a range, or more than it."""
    if len(data) != size:
        raise OSError(f"{name}: the server sent {len(data)} bytes, not the {size} that were asked for: run again")
    return data


def _version(answer: Any) -> str:
    return answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""


class ObjectBlob:
    """One file that fsspec reads, by ranges."""

    def __init__(self, url: str, **storage_options: Any):
        self.name, self._secrets, self._size = strip_credentials(url), known_secrets(storage_options), 0
        self._place = PerProcess(partial(open_filesystem, url, storage_options))

    def fingerprint(self) -> tuple[int, str]:
        with translated_errors(self.name, self._secrets):
            filesystem, path = self._place()
            filesystem.invalidate_cache(path)  # a listing from before the object was written anew
            about = filesystem.info(path)
        self._size = about["size"]
        return self._size, next((str(about[key]) for key in _VERSIONS if about.get(key)), "")

    def read_at(self, offset: int, size: int) -> bytes:
        if not self._size:  # of a copy in another process
            self.fingerprint()
        size = min(size, self._size - offset)
        if size <= 0:
            return b""
        with translated_errors(self.name, self._secrets):
            filesystem, path = self._place()
            data = filesystem.cat_file(path, start=offset, end=offset + size)
        return _whole(self.name, data, size)
