"""Bytes at an offset of a file on an HTTP server."""

import re

from labkit.core import strip_credentials
from labkit.data.blobs.base import require_size
from labkit.data.blobs.http_client import Answer, HttpClient


class HttpBlob:
    """One file at a URL, read with range requests."""

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
        return require_size(self.name, answer.data, min(size, total - offset))

    def _total_size(self, answer: Answer, offset: int) -> int:
        content_range = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", ""))
        if answer.status != 206 or not content_range or int(content_range[1]) != offset:
            raise OSError(f"{self.name}: the server does not support range requests; download the file and open that")
        return int(content_range[2])


def _version(answer: Answer) -> str:
    return answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
