"""Images behind a network: over HTTP, and in object storage through fsspec."""

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from labkit.core import PackedStrings, PerProcess, is_file_key, is_image, strip_credentials
from labkit.data.blobs import HttpClient, known_secrets, open_filesystem, translated_errors
from labkit.data.stores.http_listing import listed_images, url_of_key


class HttpStore:
    """Image files under one address.

    Args:
        url: `http(s)://host/folder`. For a `.tar` at an address use `TarStore(url)`: it reads by range requests.
        keys: Paths below `url`. Default: what the folder's `manifest.json` lists (as `make_photos` writes it), else
            what the server's listing pages lead to.
        num_connections: Kept open in each process, for as many threads.
        retries: Tries after the first, with growing waits of at most ten seconds.
        timeout_s: Longest wait for a connection, and for the next byte.

    Raises:
        ValueError: not an http(s) address, or one of a tar.
        FileNotFoundError: nothing lists images there (on the first call of `keys()`).
        OSError: no whole answer after all tries, or one longer than `LABKIT_MAX_FILE_MB` (1024). No message holds a
            password or a signed query.

    A server that states too small a length, and sends as much, cannot be told from one with a shorter file: decoding
    finds it. Of a listing page nothing does; a manifest, or `keys=`, is the safer list.

    Taught in: notebooks/08_shard_formats.ipynb
    """

    def __init__(
        self,
        url: str,
        *,
        keys: Iterable[str] | None = None,
        num_connections: int = 8,
        retries: int = 5,
        timeout_s: float = 30.0,
    ):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"{strip_credentials(url)!r} is no http:// or https:// address")
        if parts.path.endswith(".tar"):
            raise ValueError(f"{strip_credentials(url)} is a tar: TarStore reads it, by range requests")
        self._url = parts._replace(path=parts.path.rstrip("/") + "/")
        self._client = HttpClient(num_connections, retries, timeout_s)
        self._keys = PackedStrings(sorted(keys)) if keys is not None else None

    def __repr__(self) -> str:
        return f"HttpStore({strip_credentials(self._url.geturl())!r}, {len(self.keys())} images)"

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self) -> Sequence[str]:
        """Paths of all JPEG, PNG and WebP files, sorted; asked from the server once."""
        if self._keys is None:
            listed = self._from_manifest() or listed_images(self._client, self._url)
            if not listed:
                raise FileNotFoundError(
                    f"{strip_credentials(self._url.geturl())} lists no images: pass keys=, or store a manifest"
                )
            self._keys = PackedStrings(sorted(listed))
        return self._keys

    def read(self, key: str) -> bytes:
        """Contents of one file. Raises KeyError where the server has none."""
        answer = self._client.get(url_of_key(self._url, key)) if is_file_key(key) else None
        if (
            answer is None or answer.status != 200 or urlsplit(answer.url or "").path.endswith("/")
        ):  # a folder's listing
            raise KeyError(f"{key!r} is not a file under {strip_credentials(self._url.geturl())}")
        return answer.data

    def _from_manifest(self) -> list[str]:
        answer = self._client.get(url_of_key(self._url, "manifest.json"))
        try:
            keys = [row["key"] for row in json.loads(answer.data)["photos"]] if answer.status == 200 else []
        except (ValueError, KeyError, TypeError, RecursionError):  # some other program's manifest
            return []
        return keys if all(isinstance(key, str) for key in keys) else []


class ObjectStore:
    """Image files under a prefix of an object store, or of anything else that fsspec reads.

    Args:
        url: Such as `s3://bucket/prefix` (extra `s3`) or `gs://bucket/prefix`.
        **storage_options: To fsspec, such as `endpoint_url=` for S3; else its configuration and the environment count.

    Raises:
        ImportError: the scheme's package is missing; names it.
        FileNotFoundError: no image under the prefix (on the first call of `keys()`).
        OSError: no whole answer; names the object. How often its client tries, and how long it waits, is the client's
            own: for S3 `config_kwargs={"read_timeout": 10, "retries": {"max_attempts": 2}}`.

    Taught in: notebooks/08_shard_formats.ipynb
    """

    def __init__(self, url: str, **storage_options: Any):
        self._url, self._secrets = url.rstrip("/"), known_secrets(storage_options)
        self._place = PerProcess(partial(open_filesystem, self._url, storage_options))
        self._keys: PackedStrings | None = None

    def __repr__(self) -> str:
        return f"ObjectStore({strip_credentials(self._url)!r}, {len(self.keys())} images)"

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self) -> Sequence[str]:
        """Paths below the prefix of all JPEG, PNG and WebP objects, sorted."""
        if self._keys is None:
            keys = sorted(key for key in self._found() if is_image(key))
            if not keys:
                raise FileNotFoundError(f"{strip_credentials(self._url)} holds no image")
            self._keys = PackedStrings(keys)
        return self._keys

    def read(self, key: str) -> bytes:
        """Contents of one object. Raises KeyError for an unknown one."""
        try:
            if is_file_key(key):
                with translated_errors(f"{strip_credentials(self._url)}/{key}", self._secrets):
                    filesystem, root = self._place()
                    return filesystem.cat_file(f"{root}/{key}")
        except (FileNotFoundError, IsADirectoryError, ValueError):  # ValueError: NUL, broken UTF-8
            pass
        raise KeyError(f"{key!r} is not a file under {strip_credentials(self._url)}")

    def _found(self) -> Iterator[str]:
        with translated_errors(strip_credentials(self._url), self._secrets):
            filesystem, root = self._place()
            paths = filesystem.find(root)
        return (path.removeprefix(root).lstrip("/") for path in paths)
