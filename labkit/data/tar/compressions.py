"""The compressions of tars: how each is recognised, named and unpacked."""

import bz2
import gzip
import io
import lzma
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, BinaryIO, NamedTuple

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
    open: Callable[[BinaryIO], io.BufferedIOBase]


class _UnpackedFile(io.RawIOBase):
    """Compressed streams, one after the other, unpacked to the end of their file.

    `bz2.BZ2File` ends in silence where a later stream is damaged, and `lzma.LZMAFile` gives a stream all the memory
    that its header asks for: up to 4 GiB.

    Args:
        file: The compressed file.
        start_stream: Makes the decompressor of one stream.
    """

    def __init__(self, file: BinaryIO, start_stream: Callable[[], Any]):
        self._file, self._packed, self._start = file, b"", start_stream
        self._unpacker, self._is_within = start_stream(), False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            if not self._packed and self._unpacker.needs_input:
                self._packed = self._file.read(BLOCK_BYTES)
                if not self._packed and self._is_within:
                    raise EOFError("the compressed stream ends before its end mark")
                if not self._packed:
                    return 0
            if not self._is_within:
                self._packed = self._packed.lstrip(b"\0")  # zeros may lie between two streams
                self._is_within = bool(self._packed)
            data, self._packed = self._unpacker.decompress(self._packed, len(buffer)), b""
            if self._unpacker.eof:
                self._packed = self._unpacker.unused_data
                self._unpacker, self._is_within = self._start(), False
        buffer[: len(data)] = data
        return len(data)


def _open_streams(start_stream: Callable[[], Any], file: BinaryIO) -> io.BufferedReader:
    return io.BufferedReader(_UnpackedFile(file, start_stream), BLOCK_BYTES)


def _start_xz() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_XZ_DICTIONARY_BYTES)


COMPRESSIONS = (
    Compression("gzip", b"\x1f\x8b", (".tar.gz", ".tgz"), lambda file: gzip.GzipFile(fileobj=file)),
    Compression("bzip2", b"BZh", (".tar.bz2", ".tbz2"), partial(_open_streams, bz2.BZ2Decompressor)),
    Compression("xz", b"\xfd7zXZ\0", (".tar.xz", ".txz"), partial(_open_streams, _start_xz)),
    Compression(
        "zstd", b"\x28\xb5\x2f\xfd", (".tar.zst",), lambda file: import_module("compression.zstd").ZstdFile(file)
    ),
    Compression(  # in no Python yet
        "lz4", b"\x04\x22\x4d\x18", (), lambda file: import_module("compression.lz4").LZ4File(file)
    ),
)

TAR_SUFFIXES = (".tar", *(suffix for compression in COMPRESSIONS for suffix in compression.suffixes))
"""Endings of the names of tars that labkit reads, plain and compressed."""


def find_compression(head: bytes) -> Compression | None:
    """The compression of a file that begins with `head`; None if it is not compressed."""
    return next((each for each in COMPRESSIONS if head.startswith(each.magic)), None)


def open_unpacked(file: io.BufferedReader, name: str) -> io.BufferedIOBase | None:
    """The unpacked stream of an open file; None if it is not compressed.

    Raises:
        TarError: this Python cannot unpack it; names the command that can.
    """
    compression = find_compression(file.peek(8))
    if compression is None:
        return None
    try:
        return compression.open(file)
    except ImportError as error:
        raise TarError(
            f"{name} is compressed by {compression.command}, which this Python does not read: "
            f"unpack it by `{compression.command} -d {name}`"
        ) from error


def is_source_fault(error: Exception) -> bool:
    """Whether reading failed in the disk or the network, not in what was read: decompressors raise OSErrors, too."""
    is_of_decompressor = isinstance(error, gzip.BadGzipFile) or str(error) == "Invalid data stream"  # the words of bz2
    return isinstance(error, OSError) and not is_of_decompressor
