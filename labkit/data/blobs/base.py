"""What a blob is: one file whose bytes are read at any offset. Local files, and the right kind for a path or URL."""

import io
import os
import stat
import weakref
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from labkit.core import Lazy

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
    from labkit.data.blobs.remote import HttpBlob, ObjectBlob  # loads urllib3, which local files do not need

    url = os.fspath(place)
    return HttpBlob(url) if is_http_url(url) else ObjectBlob(url, **storage_options)
