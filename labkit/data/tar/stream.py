"""Tars from front to back, compressed or not, strict where `tarfile` takes damage for the end of the archive."""

import bz2
import gzip
import io
import lzma
import os
import tarfile
import warnings
from collections.abc import Callable, Iterator
from typing import BinaryIO

from labkit.core import MAX_XZ_DICTIONARY_BYTES
from labkit.data.tar.headers import BoundedInfo
from labkit.data.tar.index import TarError, TarWarning

BLOCK_BYTES = 1 << 20
_EMPTY_READS = 16  # behind the end, one behind the other: where a tar ends as it should, tarfile tries twice


def _open_zstd(file: BinaryIO) -> BinaryIO:
    from compression import zstd  # Python 3.14

    return zstd.ZstdFile(file)


def _open_lz4(file: BinaryIO) -> BinaryIO:
    raise ImportError("Python has no lz4")


class _Xz(io.RawIOBase):
    """As `lzma.LZMAFile`, which gives a stream all the memory that its header asks for: up to 4 GiB."""

    def __init__(self, file: BinaryIO):
        self._file, self._packed = file, b""
        self._unpacker: lzma.LZMADecompressor | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        data = b""
        while not data:
            if self._unpacker is None or self._unpacker.eof:
                if not self._begin():
                    return 0
            elif self._unpacker.needs_input:
                self._packed = self._file.read(BLOCK_BYTES)
                if not self._packed:
                    raise EOFError("the compressed stream ends before its end mark")
            data = self._unpacker.decompress(self._packed, len(buffer))
            self._packed = b""
        buffer[: len(data)] = data
        return len(data)

    def _begin(self) -> bool:
        """The next of several streams, zeros between them; False at the end of the file."""
        packed = self._unpacker.unused_data if self._unpacker else b""
        while not (packed := packed.lstrip(b"\0")):
            if not (packed := self._file.read(BLOCK_BYTES)):
                return False
        self._packed = packed
        self._unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_XZ_DICTIONARY_BYTES)
        return True


# First bytes of a file -> the command that unpacks it, and how Python does.
_COMPRESSIONS: dict[bytes, tuple[str, Callable[[BinaryIO], BinaryIO]]] = {
    b"\x1f\x8b": ("gzip", lambda file: gzip.GzipFile(fileobj=file)),
    b"BZh": ("bzip2", bz2.BZ2File),
    b"\xfd7zXZ\0": ("xz", lambda file: io.BufferedReader(_Xz(file), BLOCK_BYTES)),
    b"\x28\xb5\x2f\xfd": ("zstd", _open_zstd),
    b"\x04\x22\x4d\x18": ("lz4", _open_lz4),
}


def unpacked(file: io.BufferedReader, name: str) -> BinaryIO | None:
    """Stream of what the opened `file` holds compressed; None if it is not compressed.

    Raises:
        TarError: this Python cannot unpack it; names the command that can.
    """
    head = file.peek(8)
    for magic, (command, open_with) in _COMPRESSIONS.items():
        if head.startswith(magic):
            try:
                return open_with(file)
            except ImportError as error:
                raise TarError(
                    f"{name} is compressed by {command}, which this Python does not read: "
                    f"unpack it by `{command} -d {name}`"
                ) from error
    return None


class Source:
    """What `tarfile` reads from front to back: to skip a member it goes on, 10 kB a time, long after the end."""

    def __init__(self, read: Callable[[int], bytes]):
        self._read, self._n_empty = read, 0

    def read(self, size: int) -> bytes:
        data = self._read(size)
        self._n_empty = 0 if data else self._n_empty + 1
        if self._n_empty > _EMPTY_READS:
            raise EOFError("unexpected end of data")
        return data


class TarStream:
    """The members of a tar in their order, and the data of the one just given.

    Raises TarError, while opened or read, where the archive is cut or damaged; it names the last whole member. An
    archive without an end mark, which may be cut between two members, is a TarWarning.

    Args:
        path: The archive.
        name: What errors call it, if not `path`.
    """

    def __init__(self, path: str | os.PathLike, name: str | os.PathLike | None = None):
        self.name = os.fspath(name or path)
        self._whole, self._current = "", ""
        self._file = open(path, "rb")  # noqa: SIM115
        try:
            self._tar = self._open()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "TarStream":
        return self

    def __exit__(self, *exception: object) -> None:
        self._tar.close()
        self._file.close()

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        while (info := self._next()) is not None:
            self._tar.members.clear()  # tarfile would keep them all
            yield info

    def blocks(self, info: tarfile.TarInfo) -> Iterator[bytes]:
        """Data of the file that was given last."""
        file = self._tar.extractfile(info)
        while block := self._read(file):
            yield block

    def _open(self) -> tarfile.TarFile:
        stream = unpacked(self._file, self.name)
        try:
            if stream is None:
                return tarfile.TarFile(fileobj=self._file, tarinfo=_StrictInfo, encoding="utf-8")
            # "|": never back, not even by the one byte for which tarfile would unpack all from the start.
            # read1: what was unpacked before a fault is not lost with it.
            return tarfile.open(fileobj=Source(stream.read1), mode="r|", tarinfo=_StrictInfo, encoding="utf-8")
        except Exception as error:  # each compression has its own class of error
            raise TarError(f"{self.name} is no whole tar ({error}): copy or download it again") from error

    def _next(self) -> tarfile.TarInfo | None:
        try:
            info = self._tar.next()
        except _HeaderFault as fault:  # the member before this header is whole
            raise self._cut(fault, self._current) from fault
        except Exception as error:
            raise self._cut(error, self._whole) from error
        if info is not None:
            self._whole, self._current = self._current, info.name
        elif not getattr(self._tar, "has_end_mark", False):
            text = f"{self.name} has no end mark: it may be cut after {self._current!r}"
            warnings.warn(text, TarWarning, stacklevel=3)
        return info

    def _read(self, file: io.BufferedIOBase) -> bytes:
        try:
            return file.read(BLOCK_BYTES)
        except Exception as error:
            raise self._cut(error, self._whole) from error

    def _cut(self, error: Exception, whole: str) -> TarError:
        found = f"the last whole member is {whole!r}" if whole else "no member is whole"
        return TarError(f"{self.name} is cut or damaged ({error}): {found}. Copy or download it again")


class _HeaderFault(Exception):
    pass


class _StrictInfo(BoundedInfo):
    """tarfile ends quietly at a header that it cannot read, as if it were the end mark."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> "_StrictInfo":
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:
            tar.has_end_mark = True
            raise
        except tarfile.EmptyHeaderError:
            raise
        except Exception as error:
            raise _HeaderFault(f"the header at byte {tar.offset}: {error}") from error
