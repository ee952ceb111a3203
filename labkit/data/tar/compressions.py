"""The compressions of tars: how each is recognised, named and unpacked."""

import bz2
import gzip
import io
import lzma
from collections.abc import Callable
from typing import BinaryIO, NamedTuple

from labkit.core import MAX_XZ_DICTIONARY_BYTES
from labkit.data.tar.errors import TarError

BLOCK_BYTES = 1 << 20


class Compression(NamedTuple):
    """One way to compress a tar.

    Args:
        command: The command that unpacks it.
        magic: The first bytes of a file.
        suffixes: Endings of the names of such tars.
        open: Opens the unpacked stream of a file; ImportError where this Python cannot.
    """

    command: str
    magic: bytes
    suffixes: tuple[str, ...]
    open: Callable[[BinaryIO], BinaryIO]


class _XzFile(io.RawIOBase):
    """An unpacked xz file. `lzma.LZMAFile` would give a stream all the memory that its header asks for: up to 4 GiB."""

    def __init__(self, file: BinaryIO):
        self._file, self._packed = file, b""
        self._decompressor: lzma.LZMADecompressor | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        data = b""
        while not data:
            if self._decompressor is None or self._decompressor.eof:
                if not self._begin_stream():
                    return 0
            elif self._decompressor.needs_input:
                self._packed = self._file.read(BLOCK_BYTES)
                if not self._packed:
                    raise EOFError("the compressed stream ends before its end mark")
            data = self._decompressor.decompress(self._packed, len(buffer))
            self._packed = b""
        buffer[: len(data)] = data
        return len(data)

    def _begin_stream(self) -> bool:
        """Go on to the next stream, after the zeros between two; False at the end of the file."""
        packed = self._decompressor.unused_data if self._decompressor else b""
        while not (packed := packed.lstrip(b"\0")):
            if not (packed := self._file.read(BLOCK_BYTES)):
                return False
        self._packed = packed
        self._decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_XZ_DICTIONARY_BYTES)
        return True


def _open_zstd(file: BinaryIO) -> BinaryIO:
    from compression import zstd  # Python 3.14

    return zstd.ZstdFile(file)


def _open_lz4(file: BinaryIO) -> BinaryIO:
    raise ImportError("Python has no lz4")


COMPRESSIONS = (
    Compression("gzip", b"\x1f\x8b", (".tar.gz", ".tgz"), lambda file: gzip.GzipFile(fileobj=file)),
    Compression("bzip2", b"BZh", (".tar.bz2", ".tbz2"), bz2.BZ2File),
    Compression("xz", b"\xfd7zXZ\0", (".tar.xz", ".txz"), lambda file: io.BufferedReader(_XzFile(file), BLOCK_BYTES)),
    Compression("zstd", b"\x28\xb5\x2f\xfd", (".tar.zst",), _open_zstd),
    Compression("lz4", b"\x04\x22\x4d\x18", (), _open_lz4),
)

TAR_SUFFIXES = (".tar", *(suffix for compression in COMPRESSIONS for suffix in compression.suffixes))
"""Endings of the names of tars that labkit reads, plain and compressed."""


def find_compression(head: bytes) -> Compression | None:
    """The compression of a file that begins with `head`; None if it is not compressed."""
    return next((each for each in COMPRESSIONS if head.startswith(each.magic)), None)


def open_unpacked(file: io.BufferedReader, name: str) -> BinaryIO | None:
    """The unpacked stream of an open file; None if it is not compressed.

    Raises:
        TarError: this Python cannot unpack it; names the command that can.
    """
    compression = find_compression(file.peek(8))
    try:
        return compression and compression.open(file)
    except ImportError as error:
        raise TarError(
            f"{name} is compressed by {compression.command}, which this Python does not read: "
            f"unpack it by `{compression.command} -d {name}`"
        ) from error


def is_source_fault(error: Exception) -> bool:
    """Whether reading failed in the disk or the network, not in what was read: decompressors raise OSErrors, too."""
    is_of_decompressor = isinstance(error, gzip.BadGzipFile) or str(error) == "Invalid data stream"  # the words of bz2
    return isinstance(error, OSError) and not is_of_decompressor
