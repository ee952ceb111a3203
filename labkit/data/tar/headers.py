"""Headers of a tar, read by `tarfile` in bounded memory."""

import tarfile
from typing import Any

from labkit.core import MAX_TAR_HEADER_BYTES


class BoundedInfo(tarfile.TarInfo):
    """A member whose headers (long name, pax records, map of a sparse file) take at most `MAX_TAR_HEADER_BYTES`.

    `tarfile` reads each of them whole, whatever size it states: a few kilobytes of a compressed tar may stand for many
    gigabytes.

    Raises:
        tarfile.ReadError: the member's headers, or pax's global ones, are longer; or a size is negative, so that the
            next header would be this one again, for ever.
    """

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> "BoundedInfo":
        if isinstance(tar.fileobj, _BoundedFile):  # a header before a header: they share one limit
            return super().fromtarfile(tar)
        file, start = tar.fileobj, tar.fileobj.tell()
        tar.fileobj = _BoundedFile(file)
        try:
            info = super().fromtarfile(tar)
        finally:
            tar.fileobj = file
        if info.size < 0 or tar.offset <= start:
            raise tarfile.ReadError(f"{info.name!r} has a size below zero")
        if tar.pax_headers and sum(map(len, tar.pax_headers.values())) > MAX_TAR_HEADER_BYTES:
            raise _too_long_error()
        return info


class _BoundedFile:
    """A file from which no more can be read than the headers of one member may take."""

    def __init__(self, file: Any):
        self._file, self._bytes_left = file, MAX_TAR_HEADER_BYTES

    def read(self, size: int) -> bytes:
        self._bytes_left -= size
        if size < 0 or self._bytes_left < 0:  # a negative size would read the whole file
            raise _too_long_error()
        return self._file.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _too_long_error() -> tarfile.ReadError:
    return tarfile.ReadError(f"a header is longer than the limit of {MAX_TAR_HEADER_BYTES} bytes")
