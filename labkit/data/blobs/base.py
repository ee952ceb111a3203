"""What a blob is: one file whose bytes are read at any offset."""

import io
from typing import NamedTuple, Protocol

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


class BlobFile(io.RawIOBase):
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


def open_buffered(blob: Blob) -> io.BufferedReader:
    """A remote blob as a file that fetches one megabyte at a time."""
    return io.BufferedReader(BlobFile(blob), _BUFFER_BYTES)


def require_size(name: str, data: bytes, size: int) -> bytes:
    """`data` if it is `size` bytes long, else OSError: a server may send part of a range, or more than it."""
    if len(data) != size:
        raise OSError(f"{name}: the server sent {len(data)} bytes instead of the {size} requested: run again")
    return data
