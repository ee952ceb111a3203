"""Bytes of files, local and remote, read in ranges.

What a blob is: one file whose bytes are read at any offset. Local files, and the right kind for a path or URL.

The kernel's page cache: drop files from it, and ask which of their pages it holds.

A second epoch over a folder reads memory, not the disk. A benchmark of the disk has to evict the files first, and then
check that they are gone: the kernel may ignore the request.

HTTP GET over connections that are kept open, with a bounded number of retries.

Object storage through fsspec: one filesystem per process, and errors that name the object but no secret.

Bytes at an offset of a remote file: on an HTTP server, or in object storage.
"""

import ctypes
import io
import logging
import mmap
import os
import re
import stat
import weakref
from base64 import b64encode
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable
from urllib.parse import unquote, urlsplit, urlunsplit

import numpy as np
import urllib3

from labkit.util.arguments import MAX_FILE_VARIABLE, max_file_bytes
from labkit.util.machine import install_command
from labkit.util.process import Lazy, PerProcess
from labkit.util.redact import contains_secret, redact, strip_credentials

_BUFFER_BYTES = 1 << 20  # one request fetches the headers of many small members


class Extent(NamedTuple):
    """A range of bytes that a read touches, and whether its file has to be opened first."""

    file: str
    offset: int
    size: int
    opens: bool = False


class Blob(Protocol):
    """One file that is read at offsets. `name` is safe to show: it holds no credentials."""

    name: str

    def fingerprint(self) -> tuple[int, str]:
        """Size in bytes, and a version that changes with the contents. Raises FileNotFoundError."""

    def read_at(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`; fewer only at the end of the file."""


@runtime_checkable
class HasConnections(Protocol):
    """A blob or a store whose client bounds its connections."""

    def allow_requests(self, n_at_once: int) -> None:
        """Keep at least so many connections, in each process. Call it before the first read."""


def allow_requests(source: Any, n_at_once: int) -> None:
    """Let a blob or a store answer so many requests at a time, if it bounds them at all."""
    if isinstance(source, HasConnections):
        source.allow_requests(n_at_once)


class LocalBlob:
    """A file on a disk, opened on first use. It is read with `pread`, so threads and forks can share it."""

    def __init__(self, path: str | os.PathLike):
        self.name = os.fspath(path)
        self._file = Lazy(partial(_OpenFile, self.name))

    def fingerprint(self) -> tuple[int, str]:
        status = os.stat(self.name)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(f"{self.name} is a folder, not a file: FolderStore reads folders")
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
    """A blob as a seekable file."""

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


def open_buffered(blob: Blob) -> io.BufferedReader:
    """A remote blob as a file that fetches one megabyte at a time."""
    return io.BufferedReader(BlobFile(blob), _BUFFER_BYTES)


def is_url(place: str | os.PathLike) -> bool:
    """Whether a place is a URL rather than a path; `file://` counts as a URL."""
    return "://" in os.fspath(place)


def is_http_url(place: str | os.PathLike) -> bool:
    """Whether a place is an HTTP or HTTPS URL."""
    return os.fspath(place).startswith(("http://", "https://"))


def refuse_storage_options(place: str | os.PathLike, storage_options: dict[str, Any]) -> None:
    """Raise TypeError for options, such as misspelt ones, of a place that takes none."""
    if storage_options and (is_http_url(place) or not is_url(place)):
        raise TypeError(f"unexpected {', '.join(storage_options)}: only object storage takes options")


def open_blob(place: str | os.PathLike, **storage_options: Any) -> Blob:
    """The blob at a path or URL: urllib3 reads HTTP, fsspec every other scheme."""
    if not is_url(place):
        return LocalBlob(Path(place))

    url = os.fspath(place)
    return HttpBlob(url) if is_http_url(url) else ObjectBlob(url, **storage_options)


def evict(paths: Iterable[os.PathLike]) -> int:
    """Ask the kernel to drop these files from the page cache.

    Dirty pages are written first, since only clean ones can be dropped.

    Returns:
        Total size of the files in bytes: what a cold reader has to fetch from the disk.

    Raises:
        OSError: this system cannot evict single files (macOS, Windows).

    Source: posix_fadvise(2), POSIX_FADV_DONTNEED. Taught in: notebooks/00_measure.ipynb
    """
    if not hasattr(os, "posix_fadvise"):
        raise OSError("this system has no posix_fadvise: cold reads cannot be measured here")
    total = 0
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            total += os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
    return total


def resident_fraction(paths: Iterable[os.PathLike]) -> float:
    """Share of the files' pages that are in the page cache, 0.0 to 1.0, by mincore(2)."""
    resident = pages = 0
    for path in paths:
        flags = _read_page_flags(path)
        pages += len(flags)
        resident += sum(flag & 1 for flag in flags)
    return resident / pages if pages else 0.0


def _read_page_flags(path: os.PathLike) -> bytes:
    size = os.path.getsize(path)
    if size == 0:
        return b""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) as view:
        flags = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        # NumPy gives the address of a read-only mapping; ctypes' from_buffer needs a writable one.
        address = np.frombuffer(view, np.uint8).ctypes.data
        if ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), flags):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), os.fspath(path))
    return bytes(flags)


_MAX_WAIT_S = 10  # between two attempts, whatever the server asks for
_TRANSIENT_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
_BLOCK_BYTES = 1 << 20


class Answer(NamedTuple):
    """A server's answer. url: Where the last redirect led."""

    status: int
    headers: Any
    data: bytes
    url: str


class _StripQueries(logging.Filter):
    """urllib3 logs URLs when it retries or is redirected; their queries may hold a signature."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = re.sub(r"\?[^\s'\"]*", "?...", record.getMessage()), ()
        return True


for _name in ("urllib3.connectionpool", "urllib3.poolmanager", "urllib3.util.retry"):
    logging.getLogger(_name).addFilter(_StripQueries())


class HttpClient:
    """A pool of connections in each process.

    Args:
        num_connections: Connections kept open; use as many as there are threads.
        retries: Attempts after the first, on refused connections, truncated or stalled bodies and statuses 408, 429,
            5xx.
        timeout_s: Longest wait for a connection, and for the next byte.
    """

    def __init__(self, num_connections: int = 8, retries: int = 5, timeout_s: float = 30.0):
        self.retries, self._num_connections, self._timeout_s = retries, num_connections, timeout_s
        self._pool = self._make_pool()

    def _make_pool(self) -> PerProcess[urllib3.PoolManager]:
        return PerProcess(
            partial(urllib3.PoolManager, maxsize=self._num_connections, block=True, timeout=self._timeout_s)
        )

    def allow_requests(self, n_at_once: int) -> None:
        """Keep at least so many connections. Those that are open by now are given up."""
        if n_at_once > self._num_connections:
            self._num_connections = n_at_once
            self._pool = self._make_pool()

    def get(self, url: str, start: int | None = None, end: int | None = None) -> Answer:
        """All of `url`, or bytes `start` to `end` (exclusive), read to the end. 404 and 416 are answers, not errors.

        The body may be `max_file_bytes()` long, or as long as the requested range if that is more. It is
        returned as it is stored: if a server compresses it unasked, it stays compressed.

        Raises:
            OSError: no complete answer after all attempts, one that is too long, or another error status; names the URL
                without credentials.
        """
        if start is None or end is None:
            return self._request(url, {}, max_file_bytes())
        limit = max(end - start, max_file_bytes())  # a server without range requests may send the whole file
        return self._request(url, {"Range": f"bytes={start}-{end - 1}"}, limit)

    def probe(self, url: str) -> Answer:
        """The answer to a request for the first byte, without its body: the server may send the whole file."""
        return self._request(url, {"Range": "bytes=0-0"}, None)

    def _request(self, url: str, headers: dict[str, str], limit: int | None) -> Answer:
        """urllib3 retries until an answer begins; an answer that breaks off is retried here."""
        plain_url, own_headers = split_credentials(url)
        retry = urllib3.Retry(
            self.retries, status_forcelist=_TRANSIENT_STATUSES, allowed_methods={"GET"}, backoff_factor=0.1,
            backoff_jitter=0.1, backoff_max=_MAX_WAIT_S, retry_after_max=_MAX_WAIT_S,
        )  # fmt: skip
        while True:
            answer = None
            try:
                answer = self._pool().request(
                    "GET", plain_url, headers={**own_headers, **headers}, retries=retry, preload_content=False
                )
                _check_status(url, answer)
                return Answer(answer.status, answer.headers, _read_body(url, answer, limit), answer.geturl() or "")
            except urllib3.exceptions.HTTPError as error:
                if answer is None or answer.retries is None or not answer.retries.total:
                    cause = getattr(error, "reason", None) or error
                    raise OSError(
                        f"{strip_credentials(url)} gave no complete answer in {self.retries + 1} tries "
                        f"({type(cause).__name__}): check the server and the network, then run again"
                    ) from None  # the chained text would hold the whole URL
                retry = answer.retries.increment("GET", "", error=error)
            finally:
                if answer is not None:
                    answer.close()  # ends the connection, unless a complete answer has released it
            retry.sleep()


def split_credentials(url: str) -> tuple[str, dict[str, str]]:
    """A URL without `user:password@`, and the headers that carry them instead (percent-encoding undone)."""
    parts = urlsplit(url)
    credentials, _, place = parts.netloc.rpartition("@")
    headers = {"Accept-Encoding": "identity"}  # a range counts the stored bytes, not compressed ones
    if credentials:
        headers["Authorization"] = f"Basic {b64encode(unquote(credentials).encode()).decode()}"
    return urlunsplit((parts.scheme, place, parts.path, parts.query, "")), headers


def _check_status(url: str, answer: urllib3.BaseHTTPResponse) -> None:
    if answer.status in (401, 403):
        raise OSError(f"{strip_credentials(url)}: access denied ({answer.status}); check the credentials in the URL")
    if answer.status not in (200, 206, 404, 416):
        raise OSError(f"{strip_credentials(url)} answered {answer.status} {answer.reason}")


def _read_body(url: str, answer: urllib3.BaseHTTPResponse, limit: int | None) -> bytes:
    """The body, of at most `limit` bytes; without a limit, nothing of it. Releases the connection if it can be reused.

    Nothing is decompressed: compressed bytes that nobody asked for may unpack to a thousand times as many.
    """
    if limit is None:
        if answer.status != 200 and len(answer.read(_BLOCK_BYTES, decode_content=False)) < _BLOCK_BYTES:
            answer.release_conn()
        return b""
    length = answer.headers.get("Content-Length", "")
    data = bytearray()
    if not length.isdecimal() or int(length) <= limit:
        while len(data) <= limit and (block := answer.read(_BLOCK_BYTES, decode_content=False)):
            data += block
        if len(data) <= limit:
            answer.release_conn()
            return bytes(data)
    raise OSError(
        f"{strip_credentials(url)} has {length or 'an unknown number of'} bytes, more than the limit of {limit}: "
        f"is it an image? {MAX_FILE_VARIABLE} sets the limit, in MB"
    )


_PASSED_ON = (FileNotFoundError, IsADirectoryError, ValueError, ImportError)  # callers tell these apart

_BOTOCORE_CONNECTIONS = 10  # botocore.endpoint.MAX_POOL_CONNECTIONS


class ObjectClient:
    """fsspec's filesystem for one URL, opened on first use in each process. `name` is the URL without credentials."""

    def __init__(self, url: str, storage_options: dict[str, Any]):
        self.name = strip_credentials(url)
        self._secrets = _find_secrets(storage_options)
        self._url, self._is_s3 = url, url.startswith(("s3://", "s3a://"))
        # With more, s3fs asks for the size of each object, by a request of its own, before it reads it.
        self._options = {**({"max_concurrency": 1} if self._is_s3 else {}), **storage_options}
        self._filesystem = PerProcess(partial(_open_filesystem, url, self._options))

    def allow_requests(self, n_at_once: int) -> None:
        """Let S3's client keep so many connections, unless its options say how many; botocore's default is 10.

        Other clients bound them otherwise, if at all: gcsfs by aiohttp's 100.
        """
        settings = {"max_pool_connections": n_at_once, **self._options.get("config_kwargs", {})}
        if n_at_once > _BOTOCORE_CONNECTIONS and self._is_s3:
            self._filesystem = PerProcess(
                partial(_open_filesystem, self._url, {**self._options, "config_kwargs": settings})
            )

    @contextmanager
    def open(self, key: str = "") -> Iterator[tuple[Any, str]]:
        """The filesystem, and the path in it of the URL, or of `key` below it.

        Every client has error classes of its own: inside the block they become OSError, which names the object and
        reveals no secret.
        """
        name = f"{self.name}/{key}" if key else self.name
        try:
            filesystem, path = self._filesystem()
            yield filesystem, f"{path}/{key}" if key else path
        except _PASSED_ON as error:
            if not contains_secret(error, self._secrets):
                raise
            kind = next(kind for kind in _PASSED_ON if isinstance(error, kind))
            raise kind(redact(str(error), self._secrets)) from None
        except PermissionError:
            raise PermissionError(f"{name}: access denied; check the credentials and what they allow") from None
        except Exception as error:
            cause = redact(str(getattr(error, "strerror", None) or type(error).__name__), self._secrets)
            raise OSError(
                f"{name} gave no complete answer ({cause}): check the server and the network, then run again"
            ) from None  # the chained text may hold a whole URL


def known_schemes() -> set[str]:
    """URL schemes that a store can be opened for; some need an extra package."""
    import fsspec

    return {"http", "https", *fsspec.available_protocols()}


def _open_filesystem(url: str, storage_options: dict[str, Any]) -> tuple[Any, str]:
    import fsspec

    try:
        return fsspec.core.url_to_fs(url, **storage_options)
    except ImportError as error:
        scheme = url.partition("://")[0]
        raise ImportError(f"{scheme}:// needs a package ({error}); for S3: {install_command('s3')}") from error


def _find_secrets(storage_options: dict[str, Any]) -> tuple[str, ...]:
    """Secret values in the options and the environment."""
    settings = [(name, value) for name, value in os.environ.items() if name.startswith("AWS_")]
    for name, value in storage_options.items():
        settings += value.items() if isinstance(value, dict) else [(name, value)]
    is_secret = re.compile("secret|token|pass", re.IGNORECASE).search
    return tuple(value for name, value in settings if isinstance(value, str) and value and is_secret(name))


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
