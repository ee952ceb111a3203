"""Blobs: files that are read at any offset, on a disk, on an HTTP server or in object storage; and the page cache.

urllib3 reads HTTP, fsspec every other scheme; both are imported on first use. fsspec's own HTTP filesystem takes no
less of a core (0.4 ms a request of 10 kB, as urllib3) and does not retry, bound the memory of an answer, or tell that
the file has changed between two requests.
"""

import io
import logging
import os
import re
import stat
import weakref
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote, urlsplit, urlunsplit

from labkit.errors import (
    ArgumentError,
    FolderError,
    MissingFileError,
    MissingLibraryError,
    StorageError,
    WrongTypeError,
)
from labkit.util.machine import install_command
from labkit.util.process import Lazy, PerProcess
from labkit.util.redact import redact, strip_credentials

if TYPE_CHECKING:
    import urllib3

MISSING = (404, 410)  # statuses of HTTP

_MAX_WAIT_S = 10  # between two attempts, whatever the server asks for
_TRANSIENT_STATUSES = frozenset({408, 425, 429, *range(500, 600)}) - {501}  # a method that the server lacks
_BOTOCORE_CONNECTIONS = 10  # botocore.endpoint.MAX_POOL_CONNECTIONS
_VERSION_KEYS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")  # of fsspec's info


class Blob(Protocol):
    """One file that is read at offsets. `name` is safe to show: it holds no credentials."""

    name: str

    def fingerprint(self) -> tuple[int, str]:
        """Size in bytes, and a version that changes with the contents. Raises FileNotFoundError."""

    def read_at(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`; fewer only at the end of the file."""


def open_blob(place: str | os.PathLike, **storage_options: Any) -> Blob:
    """The blob at a path or URL. Options are for fsspec.

    >>> open_blob("photos.tar").read_at(257, 5)
    b'ustar'
    """
    if not is_url(place):
        return LocalBlob(Path(place))
    url = os.fspath(place)
    return HttpBlob(url) if is_http_url(url) else ObjectBlob(url, **storage_options)


def is_url(place: str | os.PathLike) -> bool:
    """Whether a place is a URL rather than a path; `file://` counts as a URL."""
    return "://" in os.fspath(place)


def is_http_url(place: str | os.PathLike) -> bool:
    """Whether a place is an HTTP or HTTPS URL."""
    return os.fspath(place).startswith(("http://", "https://"))


def refuse_storage_options(place: str | os.PathLike, storage_options: dict[str, Any]) -> None:
    """Raise TypeError for options, such as misspelled ones, of a place that takes none."""
    if storage_options and (is_http_url(place) or not is_url(place)):
        raise WrongTypeError(f"unexpected {', '.join(storage_options)}: only object storage takes options")


def allow_requests(source: Any, n_at_once: int) -> None:
    """Let a blob or a store answer `n_at_once` requests at a time, if it has a method that bounds them."""
    if hasattr(source, "allow_requests"):
        source.allow_requests(n_at_once)


class LocalBlob:
    """A file on a disk, opened on first use. It is read with `pread`, so threads and forks can share it."""

    def __init__(self, path: str | os.PathLike):
        self.name = os.fspath(path)
        self._file = Lazy(partial(_OpenFile, self.name))

    def fingerprint(self) -> tuple[int, str]:
        try:
            status = os.stat(self.name)
        except FileNotFoundError:
            raise MissingFileError(
                f"{self.name} does not exist (looked for in {os.getcwd()}): check the path"
            ) from None
        if stat.S_ISDIR(status.st_mode):
            raise FolderError(f"{self.name} is a folder, not a tar: lk.FolderStore reads folders of images")
        return status.st_size, str(status.st_mtime_ns)

    def read_at(self, offset: int, size: int) -> bytes:
        descriptor, data = self._file().descriptor, b""
        # One call reads at most 2 GB, and a network disk may return less than asked.
        while len(data) < size and (more := os.pread(descriptor, size - len(data), offset + len(data))):
            data += more
        return data


class _OpenFile:
    """A file descriptor that is closed when nothing refers to it any more."""

    def __init__(self, path: str):
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)


class BlobFile(io.RawIOBase):
    """A remote blob as a seekable file."""

    def __init__(self, blob: Blob):
        self._blob, self._size, self._position = blob, blob.fingerprint()[0], 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self._size - self._position))
        data = self._blob.read_at(self._position, size) if size else b""
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


# HTTP.


class HttpClient:
    """HTTP GET by a pool of connections in each process.

    Args:
        num_connections: Connections kept open; use as many as there are threads.
        retries: Attempts after the first, on refused connections, truncated or stalled bodies and statuses 408, 425,
            429 and 5xx but 501.
        timeout_s: Longest wait for a connection, and for the next byte.
    """

    def __init__(self, num_connections: int = 8, retries: int = 5, timeout_s: float = 30.0):
        self._num_connections, self._retries, self._timeout_s = num_connections, retries, timeout_s
        self._pool = PerProcess(partial(_open_pool, num_connections, retries, timeout_s))

    def allow_requests(self, n_at_once: int) -> None:
        """Keep at least `n_at_once` connections. Those that are open by now are given up."""
        if n_at_once > self._num_connections:
            self._num_connections = n_at_once
            self._pool = PerProcess(partial(_open_pool, n_at_once, self._retries, self._timeout_s))

    def get(
        self, url: str, offset: int = 0, size: int | None = None, *, with_body: bool = True
    ) -> "urllib3.BaseHTTPResponse":
        """The answer for `url`, or for `size` bytes from `offset`: `status`, `headers`, `data` and `geturl()`.

        404, 410 and 416 are answers, too. `data` are as they are stored: what a server compresses unasked stays
        compressed. Without a body, a server that sends the whole file in place of a range is not waited for.

        Raises:
            OSError: no complete answer after all attempts, or another error status; names the URL without credentials.
        """
        import urllib3

        name, parts = strip_credentials(url), urlsplit(url)
        credentials, _, place = parts.netloc.rpartition("@")
        headers = {"Accept-Encoding": "identity"}  # a range counts the stored bytes, not compressed ones
        if credentials:  # percent-encoding undone
            headers["Authorization"] = f"Basic {b64encode(unquote(credentials).encode()).decode()}"
        if size is not None:
            headers["Range"] = f"bytes={offset}-{offset + size - 1}"
        plain_url = urlunsplit((parts.scheme, place, parts.path, parts.query, ""))
        try:
            answer = self._pool().request(
                "GET", plain_url, headers=headers, preload_content=with_body, decode_content=False
            )
        except urllib3.exceptions.HTTPError as error:
            cause = getattr(error, "reason", None) or error
            raise StorageError(
                f"{name} gave no complete answer in {self._retries + 1} tries "
                f"({type(cause).__name__}): check the server and the network, then run again"
            ) from None  # the chained text would hold the whole URL
        if answer.status == 200 and not with_body:
            answer.close()  # ends the connection, and so the body
        elif not with_body:
            answer.drain_conn()
        if answer.status in (401, 403):
            raise StorageError(f"{name}: access denied ({answer.status}); check the credentials in the URL")
        if answer.status not in (200, 206, 416, *MISSING):
            raise StorageError(f"{name} answered {answer.status} {answer.reason}")
        return answer


def _open_pool(num_connections: int, retries: int, timeout_s: float) -> "urllib3.PoolManager":
    import urllib3

    class Retry(urllib3.Retry):
        """Waits by its own rule where a server asks for a wait that is neither a number nor a date."""

        def parse_retry_after(self, retry_after: str) -> float:
            try:
                return super().parse_retry_after(retry_after)
            except urllib3.exceptions.InvalidHeader:
                return 0

    for name in ("urllib3.connectionpool", "urllib3.poolmanager", "urllib3.util.retry"):
        logging.getLogger(name).addFilter(_strip_queries)
    retry = Retry(
        retries,
        status_forcelist=_TRANSIENT_STATUSES,
        allowed_methods={"GET"},
        backoff_factor=0.1,
        backoff_jitter=0.1,
        backoff_max=_MAX_WAIT_S,
        retry_after_max=_MAX_WAIT_S,
    )
    return urllib3.PoolManager(maxsize=num_connections, block=True, timeout=timeout_s, retries=retry)


def _strip_queries(record: logging.LogRecord) -> bool:
    """urllib3 logs URLs when it retries or is redirected; their queries may hold a signature."""
    record.msg, record.args = re.sub(r"\?[^\s'\"]*", "?...", record.getMessage()), ()
    return True


class HttpBlob:
    """One file at a URL, read with range requests, by a client of its own or a given one."""

    def __init__(self, url: str, client: HttpClient | None = None):
        self._url, self.name = url, strip_credentials(url)
        self._client, self._version = client or HttpClient(), ""

    def allow_requests(self, n_at_once: int) -> None:
        self._client.allow_requests(n_at_once)

    def fingerprint(self) -> tuple[int, str]:
        size, self._version, _ = self._get(0, 1, with_body=False)
        return size, self._version

    def read_at(self, offset: int, size: int) -> bytes:
        if not size:
            return b""
        file_size, version, data = self._get(offset, size)
        if offset >= file_size:
            return b""
        if self._version and version != self._version:
            raise StorageError(f"{self.name} changed on the server: open it again")
        return _require_size(self.name, data, min(size, file_size - offset))

    def _get(self, offset: int, size: int, *, with_body: bool = True) -> tuple[int, str, bytes]:
        """The size of the whole file, its version, and some bytes. Where there are none, the size is 0."""
        answer = self._client.get(self._url, offset, size, with_body=with_body)
        if answer.status in MISSING:
            raise MissingFileError(
                f"{self.name} does not exist ({answer.status}): was it moved, or is the URL misspelled?"
            )
        if answer.status == 416:
            return 0, "", b""
        content_range = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", ""))
        if answer.status != 206 or not content_range or int(content_range[1]) != offset:
            raise StorageError(
                f"{self.name}: the server does not support range requests; download the file and open that"
            )
        version = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        return int(content_range[2]), version, answer.data if with_body else b""


def _require_size(name: str, data: bytes, size: int) -> bytes:
    """`data` if it is `size` bytes long, else OSError: a server may send part of a range, or more than it."""
    if len(data) != size:
        raise StorageError(f"{name}: the server sent {len(data)} bytes instead of the {size} requested: run again")
    return data


# Object storage.


class ObjectClient:
    """fsspec's filesystem for one URL, opened on first use in each process. `name` is the URL without credentials."""

    def __init__(self, url: str, storage_options: dict[str, Any]):
        self.name, self._url = strip_credentials(url), url
        self._is_s3 = url.startswith(("s3://", "s3a://"))
        # With more, s3fs asks for the size of each object, by a request of its own, before it reads it.
        self._options = {**({"max_concurrency": 1} if self._is_s3 else {}), **storage_options}
        self._filesystem = PerProcess(partial(_open_filesystem, url, self._options))
        self._n_at_once = _BOTOCORE_CONNECTIONS

    def allow_requests(self, n_at_once: int) -> None:
        """Let S3's client keep at least `n_at_once` connections, unless its options say how many.

        Other clients bound them otherwise, if at all: gcsfs by aiohttp's 100.
        """
        if n_at_once > self._n_at_once and self._is_s3:
            self._n_at_once = n_at_once
            settings = {"max_pool_connections": n_at_once, **self._options.get("config_kwargs", {})}
            options = {**self._options, "config_kwargs": settings}
            self._filesystem = PerProcess(partial(_open_filesystem, self._url, options))

    @contextmanager
    def open(self, key: str = "") -> Iterator[tuple[Any, str]]:
        """The filesystem, and the path in it of the URL, or of `key` below it.

        Every client has error classes of its own: inside the block they become OSError, which names the object and
        reveals no secret. Errors that callers distinguish keep their class.
        """
        name = f"{self.name}/{key}" if key else self.name
        try:
            filesystem, path = self._filesystem()
            yield filesystem, f"{path}/{key}" if key else path
        except (IsADirectoryError, ImportError):
            raise
        except FileNotFoundError as error:
            no_bucket = ": there is no such bucket" if "specified bucket" in str(error) else ""  # as S3 words it
            raise MissingFileError(f"{name} does not exist{no_bucket}") from None
        except ValueError as error:
            raise ArgumentError(redact(str(error))) from None
        except PermissionError as error:
            said = redact(str(error).removesuffix("."))
            raise PermissionError(
                f"{name}: access denied ({said}); check the credentials and what they allow"
            ) from None
        except Exception as error:
            if "unexpected keyword argument" in str(error):
                remedy = "check its options, which are keywords, as in lk.open_store(url, anon=True)"
                raise ArgumentError(f"{name} cannot be opened: {redact(str(error))}; {remedy}") from None
            if type(error).__name__ == "NoCredentialsError":
                remedy = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or pass anon=True for a public bucket"
                raise PermissionError(f"{name}: there are no credentials; {remedy}") from None
            cause = redact(str(getattr(error, "strerror", None) or type(error).__name__))
            raise StorageError(
                f"{name}{self._endpoint()} gave no complete answer ({cause}): check the server and the network, then "
                "run again"
            ) from None  # the chained text may hold a whole URL

    def _endpoint(self) -> str:
        """The service that requests go to, if it is named: a variable that was set long ago is easily forgotten."""
        variables = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")  # as botocore looks for them
        places = [self._options.get("endpoint_url"), *map(os.environ.get, variables)]
        place = next(filter(None, places), None) if self._is_s3 else None
        return f" at {strip_credentials(place)}" if place else ""


def _open_filesystem(url: str, storage_options: dict[str, Any]) -> tuple[Any, str]:
    import fsspec

    try:
        found = fsspec.core.url_to_fs(url, **storage_options)
    except ImportError as error:
        scheme = url.partition("://")[0]
        raise MissingLibraryError(f"{scheme}:// needs a package ({error}); for S3: {install_command('s3')}") from error
    if not _caches:
        os.register_at_fork(before=_keep_for_child, after_in_parent=_inherited.pop)
    if (cache := getattr(type(found[0]), "_cache", None)) is not None and all(cache is not each for each in _caches):
        _caches.append(cache)
    return found


# A fork empties fsspec's caches. What they held must not be collected in the child: s3fs would close its connections,
# whose end the parent's event loop never sees, so that the parent's next request waits for 15 seconds, or forever.
_caches = list[Any]()  # of the classes of filesystems that were opened
_inherited = list[list[Any]]()  # what they held at each fork above this process


def _keep_for_child() -> None:
    _inherited.append([list(cache.values()) for cache in _caches])  # copied at once: other threads open more


class ObjectBlob(ObjectClient):
    """One file that fsspec reads, by ranges."""

    def __init__(self, url: str, **storage_options: Any):
        super().__init__(url, storage_options)
        self._size = 0

    def fingerprint(self) -> tuple[int, str]:
        with self.open() as (filesystem, path):
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
        with self.open() as (filesystem, path):
            data = filesystem.cat_file(path, start=offset, end=offset + size)
        return _require_size(self.name, data, size)
