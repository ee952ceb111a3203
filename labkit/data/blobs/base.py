"""Bytes at an offset: of a local file, over HTTP, or from object storage."""

import io
import os
import stat
import weakref
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from labkit.core import Lazy

_REMOTE_BUFFER_BYTES = 1 << 20  # headers of small members come many to a request


class Extent(NamedTuple):
    """What a read touches: a range of a file, and whether the file has to be opened for it first."""

    file: str
    offset: int
    size: int
    opens: bool = False


class Blob(Protocol):
    """One file that is read at offsets. `name` is fit for messages: it holds no credentials."""

    name: str

    def fingerprint(self) -> tuple[int, str]:
        """Size in bytes, and what changes when the contents do. Raises FileNotFoundError."""

    def read_at(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`; fewer only at the end of the file."""


class LocalBlob:
    """A file on a disk, opened on first use; read by `pread`, so that threads and forks do not disturb each other."""

    def __init__(self, path: str | os.PathLike):
        self.name = os.fspath(path)
        self._file = Lazy(partial(_OpenFile, self.name))

    def fingerprint(self) -> tuple[int, str]:
        status = os.stat(self.name)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(f"{self.name} is a folder, not a file: FolderStore reads folders")
        return status.st_size, str(status.st_mtime_ns)

    def read_at(self, offset: int, size: int) -> bytes:
        descriptor = self._file().descriptor
        data = os.pread(descriptor, size, offset)
        while len(data) < size:  # one call gives at most 2 GB, and a network disk may give less than asked
            more = os.pread(descriptor, size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def open(self) -> io.RawIOBase:
        """The file from its beginning, for a sequential scan."""
        return open(self.name, "rb", buffering=0)


class _OpenFile:
    """A descriptor that is closed with the last reference to it."""

    def __init__(self, path: str):
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)


class RemoteFile(io.RawIOBase):
    """A blob as a seekable file."""

    def __init__(self, blob: Blob):
        self._blob, self._size, self._position = blob, blob.fingerprint()[0], 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: memoryview) -> int:
        size = max(0, min(len(buffer), self._size - self._position))
        data = self._blob.read_at(self._position, size) if size else b""
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def buffered(blob: Blob) -> io.BufferedReader:
    """A remote blob as a file that fetches a megabyte at a time."""
    return io.BufferedReader(RemoteFile(blob), _REMOTE_BUFFER_BYTES)


def is_url(place: str | os.PathLike) -> bool:
    """Whether a place is named by a URL rather than by a path; `file://` counts as a URL."""
    return "://" in os.fspath(place)


def check_options(place: str | os.PathLike, storage_options: dict[str, Any]) -> None:
    """Raises TypeError for options, misspelt ones say, of a place that takes none."""
    if storage_options and (not is_url(place) or os.fspath(place).startswith(("http://", "https://"))):
        raise TypeError(f"unexpected {', '.join(storage_options)}: only object storage takes options")


def open_blob(place: str | os.PathLike, **storage_options: Any) -> Blob:
    """The blob at a path or URL: http(s) by urllib3, anything else with a scheme by fsspec."""
    if not is_url(place):
        return LocalBlob(Path(place))
    from labkit.data.blobs import remote

    if os.fspath(place).startswith(("http://", "https://")):
        return remote.HttpBlob(os.fspath(place))
    return remote.ObjectBlob(os.fspath(place), **storage_options)
