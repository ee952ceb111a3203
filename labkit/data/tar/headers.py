"""A tar's headers read by `tarfile`, but not into more memory than a header has reason to take."""

import tarfile
from typing import Any

from labkit.core import MAX_TAR_HEADER_BYTES


class BoundedInfo(tarfile.TarInfo):
    """A member whose long name, pax records and map of a sparse file are at most `MAX_TAR_HEADER_BYTES` long.

    `tarfile` reads each whole, whatever size it states, before it looks at it: some kilobytes of a compressed tar may
    stand for many gigabytes of it.

    Raises:
        tarfile.ReadError: they are longer, or those of the whole archive (pax's global ones) are. Or a size is
            negative: the next header would be this one again, for ever.
    """

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> "BoundedInfo":
        if isinstance(tar.fileobj, _Header):  # a header before a header: they share one limit
            return super().fromtarfile(tar)
        whole, begin = tar.fileobj, tar.fileobj.tell()
        tar.fileobj = _Header(whole)
        try:
            info = super().fromtarfile(tar)
        finally:
            tar.fileobj = whole
        if info.size < 0 or tar.offset <= begin:
            raise tarfile.ReadError(f"{info.name!r} has a size below zero")
        if tar.pax_headers and sum(map(len, tar.pax_headers.values())) > MAX_TAR_HEADER_BYTES:
            raise _too_long()
        return info


class _Header:
    """A file of which so much may be read as a header may have."""

    def __init__(self, file: Any):
        self._file, self._left = file, MAX_TAR_HEADER_BYTES

    def read(self, size: int) -> bytes:
        self._left -= size
        if size < 0 or self._left < 0:  # below 0, a file gives all that it has
            raise _too_long()
        return self._file.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _too_long() -> tarfile.ReadError:
    return tarfile.ReadError(f"a header is longer than the limit of {MAX_TAR_HEADER_BYTES} bytes")
