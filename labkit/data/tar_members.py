"""What all readers of tars share: their errors, compressions, headers of bounded length, and the check of the end.

Damage is an error, never skipped: `tarfile` takes a header that it cannot read for the end of the archive.
"""

import bz2
import gzip
import io
import lzma
import re
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, BinaryIO, NamedTuple, Self

from labkit.errors import TarError
from labkit.util.arguments import MAX_TAR_HEADER_BYTES, MAX_XZ_DICTIONARY_BYTES

BLOCK_BYTES = 1 << 20
_DOTS = re.compile(r"(?:\./+)+")


class TarWarning(UserWarning):
    """A tar that can be read, but may not be whole."""


def damage_error(name: str, problem: object, last_whole: str | None = None) -> TarError:
    """The error for a tar that is cut or damaged.

    Args:
        name: The tar.
        problem: What was found, text or exception.
        last_whole: The last member known to be whole, "" if none is, None if that is unknown.
    """
    if last_whole is None:
        return TarError(f"{name} is cut or damaged ({problem}): copy or download it again")
    found = f"the last whole member is {last_whole!r}" if last_whole else "no member is whole"
    return TarError(f"{name} is cut or damaged ({problem}): {found}. Copy or download it again")


@contextmanager
def reading(name: str, damage: Callable[[Exception], TarError]) -> Iterator[None]:
    """Tell what fails while the tar `name` is read.

    An error of the disk, the network or memory is no damage: it stays what it is, and names the tar. Anything else
    that `tarfile` and the decompressors raise is damage (each compression has its own class of error), but for the
    limit on the memory of xz.

    Args:
        name: The tar.
        damage: Makes the error for damage from what was raised.
    """
    try:
        yield
    except TarError:
        raise
    except MemoryError as error:
        raise MemoryError(f"there is too little memory to read {name}") from error
    except Exception as error:
        if isinstance(error, lzma.LZMAError) and "Memory usage limit" in str(error):
            limit = f"the limit of {MAX_XZ_DICTIONARY_BYTES} bytes"
            raise TarError(f"{name} needs more memory than {limit}: unpack it by `xz -d {name}`") from error
        if not isinstance(error, OSError) or isinstance(error, gzip.BadGzipFile):
            raise damage(error) from error
        if error.errno is not None and error.filename is None:
            error.filename = name
        elif name not in str(error):
            error.add_note(f"while reading {name}")
        raise


def plain_name(name: str) -> str:
    """A member's name as a key: without the `./` in front that `tar -cf x.tar .` writes."""
    return _DOTS.sub("", name, count=1) if name.startswith("./") else name


# Compressions.


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
            try:
                data, self._packed = self._unpacker.decompress(self._packed, len(buffer)), b""
            except OSError as error:  # so bz2 tells of damage
                raise tarfile.ReadError(str(error)) from error
            if self._unpacker.eof:
                self._packed = self._unpacker.unused_data
                self._unpacker, self._is_within = self._start(), False
        buffer[: len(data)] = data
        return len(data)


def _open_bzip2(file: BinaryIO) -> io.BufferedReader:
    return io.BufferedReader(_UnpackedFile(file, bz2.BZ2Decompressor), BLOCK_BYTES)


def _open_xz(file: BinaryIO) -> io.BufferedReader:
    def start_stream() -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_XZ_DICTIONARY_BYTES)

    return io.BufferedReader(_UnpackedFile(file, start_stream), BLOCK_BYTES)


def _open_zstd(file: BinaryIO) -> io.BufferedIOBase:
    return import_module("compression.zstd").ZstdFile(file)


def _open_lz4(file: BinaryIO) -> io.BufferedIOBase:
    return import_module("compression.lz4").LZ4File(file)  # in no Python yet


COMPRESSIONS = (
    Compression("gzip", b"\x1f\x8b", (".tar.gz", ".tgz"), lambda file: gzip.GzipFile(fileobj=file)),
    Compression("bzip2", b"BZh", (".tar.bz2", ".tbz2"), _open_bzip2),
    Compression("xz", b"\xfd7zXZ\0", (".tar.xz", ".txz"), _open_xz),
    Compression("zstd", b"\x28\xb5\x2f\xfd", (".tar.zst",), _open_zstd),
    Compression("lz4", b"\x04\x22\x4d\x18", (), _open_lz4),
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


# Headers.


class BoundedInfo(tarfile.TarInfo):
    """A member whose headers (long name, pax records, map of a sparse file) take at most `MAX_TAR_HEADER_BYTES`.

    `tarfile` reads each of them whole, whatever size it states: a few kilobytes of a compressed tar may stand for many
    gigabytes.

    Raises:
        tarfile.ReadError: the member's headers, or pax's global ones, are longer; or a size is negative, so that the
            next header would be this one again, for ever.
    """

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Self:
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


def open_tar(file: Any, name: str) -> tarfile.TarFile:
    """A `tarfile.TarFile` that has read its first header, or TarError."""

    def damage(error: Exception) -> TarError:
        found = f"{name} is not a tar, or is cut or damaged ({error})"
        return TarError(f"{found}: no member is whole. Copy or download it again")

    with reading(name, damage):
        return tarfile.TarFile(fileobj=file, tarinfo=BoundedInfo, encoding="utf-8")


def read_header(tar: tarfile.TarFile, name: str, last: str) -> tarfile.TarInfo | None:
    """The member whose header begins here; None where there are zeros, or nothing.

    Raises:
        TarError: the header cannot be read; names `last`, the member before it, which is whole.
    """
    start = tar.fileobj.tell()

    def damage(error: Exception) -> TarError:
        return damage_error(name, f"the header at byte {start} cannot be read: {error}", last)

    with reading(name, damage):
        try:
            return BoundedInfo.fromtarfile(tar)
        except (tarfile.EOFHeaderError, tarfile.EmptyHeaderError):  # type: ignore[attr-defined]  # not in typeshed
            return None


def impossible_size(size: int, pieces: Any = ()) -> str:
    """What is impossible in a member's size or its stored pieces, "" if nothing is. Pieces are in order, and inside."""
    if not 0 <= size < 1 << 63:
        return f"says that it has {size} bytes"
    end = 0
    for start, length in pieces:
        if length and (start < end or length < 0 or start + length > size):  # GNU tar fills its list with zeros
            return f"has a piece of {length} bytes at {start}, where none can be"
        end = start + length
    return ""


# The end.

_MAX_RECORD_BYTES = 4 << 20  # the largest that bsdtar takes


def check_end(file: Any, name: str, last: str, end: int) -> str:
    """Read on to the end of a tar, after `read_header` has found none.

    Behind the last member lie a mark of zeros, more zeros up to the end of a record, and nothing else.

    Args:
        file: The tar, of which only zeros were read from `end` on.
        name: The tar.
        last: Its last member, "" if there is none.
        end: The byte at which that member and its padding end.

    Returns:
        Why members may be missing; "" if nothing says so.

    Raises:
        TarError: something else than zeros follows.
    """
    offset = file.tell()
    while block := file.read(BLOCK_BYTES):
        if data := block.lstrip(b"\0"):
            found = f"the last whole member before it is {last!r}" if last else "no member is before it"
            raise TarError(
                f"{name} goes on at byte {offset + len(block) - len(data)} after an end mark ({found}): the rest would "
                "not be read. If it is damaged, copy or download it again; if several tars were joined by `cat`, "
                "unpack it by `tar --ignore-zeros -xf`, or join them by `tar --concatenate`, one at a time"
            )
        offset += len(block)
    after = f"after {last!r}" if last else "before the first member"
    if offset - end < tarfile.BLOCKSIZE:
        return f"{name} has no end mark: it may be cut {after}"
    if offset - end >= 2 * tarfile.BLOCKSIZE + _padding_bytes(offset):
        return (
            f"{name} ends with {offset - end} zeros, more than fill a record: members {after} may be missing, as in a "
            "download that left a hole. Compare its size and checksum with those of its source"
        )
    return ""


def _padding_bytes(n_bytes: int) -> int:
    """The most zeros with which a writer fills up a tar that ends at `n_bytes`.

    Writers fill up to the end of a record: of 10,240 bytes where nobody asks for another size, and else of some
    multiple of a block that divides `n_bytes`. Of multiples above 64 KiB, only powers of two and 10,240 bytes times
    such a power are taken for one, since nearly every size of a tar has some large divisor.
    """
    small = range(tarfile.BLOCKSIZE, 1 << 16, tarfile.BLOCKSIZE)
    large = (unit << power for unit in (tarfile.BLOCKSIZE, tarfile.RECORDSIZE) for power in range(14))
    fitting = (size for size in (*small, *large) if size <= _MAX_RECORD_BYTES and n_bytes % size == 0)
    return max([2 * tarfile.RECORDSIZE, *fitting])  # two: `tar --concatenate` adds a record to that of the last tar
