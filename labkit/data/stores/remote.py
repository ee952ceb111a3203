"""Image files on an HTTP server, or in object storage."""

import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from labkit.core import PackedStrings, images_among, is_file_key, strip_credentials
from labkit.data.blobs import HttpClient, ObjectClient
from labkit.data.stores.base import ListedStore
from labkit.data.stores.http_listing import key_url, list_files


class HttpStore(ListedStore):
    """Image files under one URL.

    Args:
        url: `http(s)://host/folder`. For a `.tar` at a URL use `TarStore(url)`: it reads with range requests.
        keys: Paths below `url`. Default: what the folder's `manifest.json` lists (as `make_photos` writes it), else
            what the server's listing pages link to.
        ignore: Suffixes of files to leave out of what is listed, as for `FolderStore`.
        num_connections: Connections kept open in each process; use as many as there are threads. `reads_in_flight` of
            `BatchLoader` makes it as many.
        retries: Attempts after the first, with growing waits of at most ten seconds.
        timeout_s: Longest wait for a connection, and for the next byte.

    Raises:
        ValueError: not an HTTP URL, or the URL of a tar; or the listing pages link to images that labkit does not
            decode and `ignore` does not name (on the first call of `keys()`).
        FileNotFoundError: the server lists no images (on the first call of `keys()`).
        OSError: no complete answer after all attempts, or one longer than `LABKIT_MAX_FILE_MB` (1024). No message holds
            a password or a signed query.

    A server that states too small a length, and sends as much, cannot be told from one with a shorter file; decoding
    such an image fails. A listing page that is cut short goes unnoticed: a manifest, or `keys=`, is safer.

    Taught in: notebooks/08_shard_formats.ipynb
    """

    _if_empty = "lists no images: pass keys=, or store a manifest"

    def __init__(
        self,
        url: str,
        *,
        keys: Iterable[str] | None = None,
        ignore: str | Iterable[str] = (),
        num_connections: int = 8,
        retries: int = 5,
        timeout_s: float = 30.0,
    ):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"not an HTTP URL: {strip_credentials(url)!r}")
        if parts.path.endswith(".tar"):
            raise ValueError(f"{strip_credentials(url)} is a tar: open it with TarStore")
        self._url = parts._replace(path=parts.path.rstrip("/") + "/")
        super().__init__(strip_credentials(self._url.geturl()), ignore)
        self._client = HttpClient(num_connections, retries, timeout_s)
        if keys is not None:
            self._keys = PackedStrings(sorted(keys))

    def allow_requests(self, n_at_once: int) -> None:
        """Keep at least so many connections open in each process. Call it before the first read."""
        self._client.allow_requests(n_at_once)

    def read(self, key: str) -> bytes:
        """Contents of one file. Raises KeyError if the server has none."""
        if is_file_key(key):
            answer = self._client.get(key_url(self._url, key))
            is_listing = urlsplit(answer.url).path.endswith("/")  # a folder, to which the server redirected
            if answer.status == 200 and not is_listing:
                return answer.data
        raise KeyError(f"{key!r} is not a file under {self.name}")

    def _list_keys(self) -> list[str]:
        if listed := self._read_manifest():
            return [key for key in listed if not key.lower().endswith(self._ignore)]
        return list(images_among(list_files(self._client, self._url), self._ignore, self.name))

    def _read_manifest(self) -> list[str]:
        answer = self._client.get(key_url(self._url, "manifest.json"))
        try:
            keys = [row["key"] for row in json.loads(answer.data)["photos"]] if answer.status == 200 else []
        except (ValueError, KeyError, TypeError, RecursionError):  # some other program's manifest
            return []
        return keys if all(isinstance(key, str) for key in keys) else []


class ObjectStore(ListedStore):
    """Image files under a prefix of an object store, or of anything else that fsspec reads.

    Args:
        url: Such as `s3://bucket/prefix` (extra `s3`) or `gs://bucket/prefix`.
        ignore: Suffixes of files to leave out, as for `FolderStore`.
        **storage_options: Passed to fsspec, such as `endpoint_url=` for S3. Default: its configuration and the
            environment.

    Raises:
        ImportError: the scheme's package is missing; names it.
        FileNotFoundError: no image under the prefix (on the first call of `keys()`).
        ValueError: images that labkit does not decode and `ignore` does not name (on the first call of `keys()`).
        OSError: no complete answer; names the object. Its client decides how often to retry and how long to wait: for
            S3 set `config_kwargs={"read_timeout": 10, "retries": {"max_attempts": 2}}`.

    Taught in: notebooks/08_shard_formats.ipynb
    """

    def __init__(self, url: str, *, ignore: str | Iterable[str] = (), **storage_options: Any):
        self._client = ObjectClient(url.rstrip("/"), storage_options)
        super().__init__(self._client.name, ignore)

    def allow_requests(self, n_at_once: int) -> None:
        """Let S3's client keep so many connections, if `config_kwargs` does not say. Call it before the first read."""
        self._client.allow_requests(n_at_once)

    def read(self, key: str) -> bytes:
        """Contents of one object. Raises KeyError for an unknown one."""
        try:
            if is_file_key(key):
                with self._client.open(key) as (filesystem, path):
                    return filesystem.cat_file(path)
        except (FileNotFoundError, IsADirectoryError, ValueError):  # ValueError: NUL, broken UTF-8
            pass
        raise KeyError(f"{key!r} is not a file under {self.name}")

    def _list_keys(self) -> list[str]:
        with self._client.open() as (filesystem, root):
            paths = filesystem.find(root)
        return list(images_among((path.removeprefix(root).lstrip("/") for path in paths), self._ignore, self.name))
