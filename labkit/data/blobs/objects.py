"""Bytes at an offset of a file in object storage."""

from typing import Any

from labkit.data.blobs.base import require_size
from labkit.data.blobs.fsspec_client import ObjectClient

# Where fsspec's filesystems report a version.
_VERSION_KEYS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")


class ObjectBlob:
    """One file that fsspec reads, by ranges."""

    def __init__(self, url: str, **storage_options: Any):
        self._client = ObjectClient(url, storage_options)
        self.name = self._client.name
        self._size = 0

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
        return require_size(self.name, data, size)
