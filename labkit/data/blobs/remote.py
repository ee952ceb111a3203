"""Images behind a network: over HTTP, and in object storage through fsspec."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from labkit.core.credentials import redacted, shown, tells
from labkit.core.names import is_image, names_a_file
from labkit.core.strings import PackedStrings
from labkit.data.blobs.base import PerProcess
from labkit.data.blobs.http_client import HttpClient
from labkit.data.stores.http_listing import address, listed_images

_VERSIONS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")  # as fsspec's kinds say it

_TOLD_APART = (FileNotFoundError, IsADirectoryError, ValueError, ImportError)  # by callers


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
            raise ValueError(f"{shown(url)!r} is no http:// or https:// address")
        if parts.path.endswith(".tar"):
            raise ValueError(f"{shown(url)} is a tar: TarStore reads it, by range requests")
        self._url = parts._replace(path=parts.path.rstrip("/") + "/")
        self._client = HttpClient(num_connections, retries, timeout_s)
        self._keys = PackedStrings(sorted(keys)) if keys is not None else None

    def __repr__(self) -> str:
        return f"HttpStore({shown(self._url.geturl())!r}, {len(self.keys())} images)"

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self) -> Sequence[str]:
        """Paths of all JPEG, PNG and WebP files, sorted; asked from the server once."""
        if self._keys is None:
            listed = self._from_manifest() or listed_images(self._client, self._url)
            if not listed:
                raise FileNotFoundError(f"{shown(self._url.geturl())} lists no images: pass keys=, or store a manifest")
            self._keys = PackedStrings(sorted(listed))
        return self._keys

    def read(self, key: str) -> bytes:
        """Contents of one file. Raises KeyError where the server has none."""
        answer = self._client.get(address(self._url, key)) if names_a_file(key) else None
        if (
            answer is None or answer.status != 200 or urlsplit(answer.url or "").path.endswith("/")
        ):  # a folder's listing
            raise KeyError(f"{key!r} is not a file under {shown(self._url.geturl())}")
        return answer.data

    def _from_manifest(self) -> list[str]:
        answer = self._client.get(address(self._url, "manifest.json"))
        try:
            keys = [row["key"] for row in json.loads(answer.data)["photos"]] if answer.status == 200 else []
        except (ValueError, KeyError, TypeError, RecursionError):  # some other program's manifest
            return []
        return keys if all(isinstance(key, str) for key in keys) else []


class HttpBlob:
    """One file at an address, read by range requests."""

    def __init__(self, url: str):
        self._url, self.name = url, shown(url)
        self._client = HttpClient()
        self._version = ""

    def stamp(self) -> tuple[int, str]:
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
        self._url, self._secrets = url.rstrip("/"), _secrets(storage_options)
        self._place = PerProcess(partial(_filesystem, self._url, storage_options))
        self._keys: PackedStrings | None = None

    def __repr__(self) -> str:
        return f"ObjectStore({shown(self._url)!r}, {len(self.keys())} images)"

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self) -> Sequence[str]:
        """Paths below the prefix of all JPEG, PNG and WebP objects, sorted."""
        if self._keys is None:
            keys = sorted(key for key in self._found() if is_image(key))
            if not keys:
                raise FileNotFoundError(f"{shown(self._url)} holds no image")
            self._keys = PackedStrings(keys)
        return self._keys

    def read(self, key: str) -> bytes:
        """Contents of one object. Raises KeyError for an unknown one."""
        try:
            if names_a_file(key):
                with _asking(f"{shown(self._url)}/{key}", self._secrets):
                    filesystem, root = self._place()
                    return filesystem.cat_file(f"{root}/{key}")
        except (FileNotFoundError, IsADirectoryError, ValueError):  # ValueError: NUL, broken UTF-8
            pass
        raise KeyError(f"{key!r} is not a file under {shown(self._url)}")

    def _found(self) -> Iterator[str]:
        with _asking(shown(self._url), self._secrets):
            filesystem, root = self._place()
            paths = filesystem.find(root)
        return (path.removeprefix(root).lstrip("/") for path in paths)


class ObjectBlob:
    """One file that fsspec reads, by ranges."""

    def __init__(self, url: str, **storage_options: Any):
        self.name, self._secrets, self._size = shown(url), _secrets(storage_options), 0
        self._place = PerProcess(partial(_filesystem, url, storage_options))

    def stamp(self) -> tuple[int, str]:
        with _asking(self.name, self._secrets):
            filesystem, path = self._place()
            filesystem.invalidate_cache(path)  # a listing from before the object was written anew
            about = filesystem.info(path)
        self._size = about["size"]
        return self._size, next((str(about[key]) for key in _VERSIONS if about.get(key)), "")

    def read_at(self, offset: int, size: int) -> bytes:
        if not self._size:  # of a copy in another process
            self.stamp()
        size = min(size, self._size - offset)
        if size <= 0:
            return b""
        with _asking(self.name, self._secrets):
            filesystem, path = self._place()
            data = filesystem.cat_file(path, start=offset, end=offset + size)
        return _whole(self.name, data, size)


@contextmanager
def _asking(name: str, secrets: tuple[str, ...]) -> Iterator[None]:
    """What a client raises as an OSError that names the object, and tells no secret: each has classes of its own."""
    try:
        yield
    except _TOLD_APART as error:
        if not tells(error, secrets):
            raise
        kind = next(kind for kind in _TOLD_APART if isinstance(error, kind))
        raise kind(redacted(str(error), secrets)) from None
    except PermissionError:
        raise PermissionError(f"{name} is refused: check the credentials, and what they allow") from None
    except Exception as error:
        cause = redacted(str(getattr(error, "strerror", None) or type(error).__name__), secrets)
        raise OSError(
            f"{name} gave no whole answer ({cause}): check the server and the network, then run again"
        ) from None  # the chained text may hold a whole address


def known_schemes() -> set[str]:
    """Schemes of addresses that a store can be opened for; some need a package."""
    import fsspec

    return {"http", "https", *fsspec.available_protocols()}


def _filesystem(url: str, storage_options: dict[str, Any]) -> tuple[Any, str]:
    import fsspec

    try:
        return fsspec.core.url_to_fs(url, **storage_options)
    except ImportError as error:
        scheme = url.partition("://")[0]
        raise ImportError(f'{scheme}:// needs a package ({error}); for S3: python -m pip install -e ".[s3]"') from error


def _secrets(storage_options: dict[str, Any]) -> tuple[str, ...]:
    """What options and environment keep secret."""
    named = [(name, value) for name, value in os.environ.items() if name.startswith("AWS_")]
    for name, value in storage_options.items():
        named += value.items() if isinstance(value, dict) else [(name, value)]
    return tuple(
        value for name, value in named if isinstance(value, str) and re.search("(?i)secret|token|pass", name) and value
    )
