"""Bytes at an offset of a local file."""

import io
import os
import stat
import weakref
from functools import partial

from labkit.core import Lazy


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
        descriptor = self._file().descriptor
        data = os.pread(descriptor, size, offset)
        while len(data) < size:  # one call reads at most 2 GB, and a network disk may return less than asked
            more = os.pread(descriptor, size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def open(self) -> io.RawIOBase:
        """The file from its beginning, for a sequential scan."""
        return open(self.name, "rb", buffering=0)


class _OpenFile:
    """A file descriptor that is closed when nothing refers to it any more."""

    def __init__(self, path: str):
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)
