"""The members of a tar file, and its end.

What goes wrong with a tar, said the same way everywhere.

The compressions of tars: how each is recognised, named and unpacked.

What follows the last member of a tar: a mark of zeros, more zeros up to the end of a record, and nothing else.

Read a tar's headers in one pass: its members, and where their data lie. Damage is an error, never skipped.
"""

import bz2
import gzip
import io
import lzma
import posixpath
import re
import shlex
import tarfile
import zlib
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, BinaryIO, NamedTuple, Self

from labkit.data.blobs import Blob, LocalBlob, is_url, open_buffered
from labkit.util.arguments import MAX_TAR_HEADER_BYTES, MAX_XZ_DICTIONARY_BYTES


class TarError(OSError):
    """A file that is not a whole tar, or not one that can be read this way; names the file and the remedy."""


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


def not_a_tar_error(name: str, problem: object) -> TarError:
    """The error for a file whose first header cannot be read."""
    return TarError(
        f"{name} is not a tar, or is cut or damaged ({problem}): no member is whole. Copy or download it again"
    )


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


_MAX_RECORD_BYTES = 4 << 20  # the largest that bsdtar takes


def check_end(read: Callable[[int], bytes], name: str, last: str, end: int, offset: int) -> str:
    """Read on to the end of the source.

    Args:
        read: Reads so many bytes, from `offset` on; b"" at the end.
        name: The tar.
        last: Its last member, "" if there is none.
        end: The byte at which that member and its padding end.
        offset: The byte up to which the source was read; from `end` on, only zeros.

    Returns:
        Why members may be missing; "" if nothing says so.

    Raises:
        TarError: something else than zeros follows.
    """
    while block := read(BLOCK_BYTES):
        if data := block.lstrip(b"\0"):
            raise _goes_on_error(name, last, offset + len(block) - len(data))
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


def _goes_on_error(name: str, last: str, offset: int) -> TarError:
    found = f"the last whole member before it is {last!r}" if last else "no member is before it"
    return TarError(
        f"{name} goes on at byte {offset} after an end mark ({found}): the rest would not be read. If it is damaged, "
        "copy or download it again; if several tars were joined by `cat`, unpack it by `tar --ignore-zeros -xf`, or "
        "join them by `tar --concatenate`, one at a time"
    )


_BLOCK = tarfile.BLOCKSIZE
_DOTS = re.compile(r"(?:\./+)+")
# Mode, owner, group, time and device as common writers write them; anything else is left to `tarfile`.
_PLAIN_NUMBER = rb"(?:[0-7]{7}[ \0]|[0-7]{6}[ \0]{2}|\0{8})"
_PLAIN_TIME = rb"(?:[0-7]{11}[ \0]|[0-7]{10}[ \0]{2}|\0{12})"
_PLAIN_NUMBERS = re.compile(rb"%b{3}.{12}%b.{181}%b{2}" % (_PLAIN_NUMBER, _PLAIN_TIME, _PLAIN_NUMBER), re.DOTALL)
UNREADABLE = (tarfile.TarError, ValueError, IndexError, OverflowError, MemoryError, RecursionError)
"""What `tarfile` raises for damaged headers."""


class Member(NamedTuple):
    """One member of a tar.

    Args:
        name: Without a leading `./`.
        offset: Where its data begin.
        size: Their bytes.
        kind: "file", "hard" or "sym" (a link, whose data are those of `target`), or "other" (a folder, a device).
        target: Name that a link leads to.
        sparse: Offset and size of each piece that is stored; the rest is zeros.
    """

    name: str
    offset: int
    size: int
    kind: str = "file"
    target: str = ""
    sparse: tuple[tuple[int, int], ...] = ()

    def fault(self, tar_bytes: int) -> str:
        """What is impossible in it, in a tar of `tar_bytes`; "" if nothing is."""
        end = self.offset + (sum(size for _, size in self.sparse) if self.sparse else self.size)
        return size_fault(self.size, self.sparse) or ("lacks its end" if end > tar_bytes else "")


def scan(blob: Blob) -> Generator[Member, None, str]:
    """All members, in the order of the tar.

    Headers of ordinary files are read here, all others by `tarfile`, which knows GNU long names, pax records, sparse
    files and the rest. The generator returns what `check_end` says at the end.
    """
    size, last = blob.fingerprint()[0], ""
    with open(blob.name, "rb", 0) if isinstance(blob, LocalBlob) else open_buffered(blob) as file:
        tar = _open_tar(file, blob.name)
        offset = 0
        while True:
            file.seek(offset)
            header = file.read(_BLOCK)
            if len(header) < _BLOCK or not (header[0] or header.strip(b"\0")):
                return _check_end(file, header, blob.name, last)
            member = None if tar.pax_headers else _parse_plain_header(header, offset)
            if member is not None:
                offset = member.offset + -(-member.size // _BLOCK) * _BLOCK
            else:
                file.seek(offset)
                try:
                    member = _member_from_info(BoundedInfo.fromtarfile(tar))
                except UNREADABLE as error:
                    problem = f"the header at byte {offset} cannot be read: {error}"
                    raise damage_error(blob.name, problem, last) from error
                offset = tar.offset
            if fault := member.fault(size):
                raise damage_error(blob.name, f"{member.name!r} {fault}", last)
            last = member.name
            yield member


def _check_end(file: BinaryIO, header: bytes, name: str, last: str) -> str:
    """What `check_end` says of a tar whose `header`, read last, begins no member."""
    if header.strip(b"\0"):
        raise damage_error(name, "it ends within a header", last)
    return check_end(file.read, name, last, file.tell() - len(header), file.tell())


def _parse_plain_header(header: bytes, offset: int) -> Member | None:
    """The member of an ordinary file's header; None if `tarfile` has to read it."""
    try:
        size, checksum = int(header[124:136].rstrip(b"\0 ") or b"0", 8), int(header[148:156].rstrip(b"\0 "), 8)
    except ValueError:
        return None
    # The checksum is the sum of all bytes, its own field taken as spaces. Adler-32's lower half is such a sum, in C.
    total = checksum - 256 + sum(header[148:156])
    is_intact = zlib.adler32(header) & 0xFFFF == (1 + total) % 65521
    if not is_intact or size < 0 or header[156] not in b"0\0" or not _PLAIN_NUMBERS.match(header, 100):
        return None
    name = header[:100].split(b"\0", 1)[0]
    if header[345]:
        name = header[345:500].split(b"\0", 1)[0] + b"/" + name
    if name.endswith(b"/"):  # a folder, in the oldest format
        return None
    return Member(plain_name(name.decode("utf-8", "surrogateescape")), offset + _BLOCK, size)


def _member_from_info(info: tarfile.TarInfo) -> Member:
    name, offset = plain_name(info.name), info.offset_data
    if info.islnk():
        return Member(name, offset, 0, "hard", posixpath.normpath(info.linkname))
    if info.issym():  # like `tarfile`, look for an absolute target, too, below the link's folder
        target = "/".join(filter(None, (posixpath.dirname(info.name), info.linkname)))
        return Member(name, offset, 0, "sym", posixpath.normpath(target))
    if info.issparse():
        return Member(name, offset, info.size, sparse=pieces_of(info) or ((0, 0),))
    if info.isreg() or info.type not in tarfile.SUPPORTED_TYPES:  # like `tarfile`, read unknown types as files
        return Member(name, offset, info.size)
    return Member(name, offset, 0, "other")


def pieces_of(info: tarfile.TarInfo) -> tuple[tuple[int, int], ...]:
    """(offset, size) of each stored piece of a sparse member."""
    return tuple(info.sparse or ())  # type: ignore[arg-type]  # typeshed takes the pairs for bytes


def size_fault(size: int, pieces: Iterable[Sequence[int]] = ()) -> str:
    """What is impossible in a member's size or its stored pieces, "" if nothing is. Pieces are in order, and inside."""
    if not 0 <= size < 1 << 63:
        return f"says that it has {size} bytes"
    end = 0
    for start, length in pieces:
        if length and (start < end or length < 0 or start + length > size):  # GNU tar fills its list with zeros
            return f"has a piece of {length} bytes at {start}, where none can be"
        end = start + length
    return ""


def plain_name(name: str) -> str:
    """A member's name as a key: without the `./` in front that `tar -cf x.tar .` writes."""
    return _DOTS.sub("", name, count=1) if name.startswith("./") else name


def _open_tar(file: BinaryIO, name: str) -> tarfile.TarFile:
    head = file.read(_BLOCK)
    if not head:
        raise TarError(f"{name} is empty: copy or download it again")
    if compression := find_compression(head):
        local_name = posixpath.basename(name) if is_url(name) else name
        raise TarError(
            f"{name} is compressed ({compression.command}): no member can be read without unpacking all before it. "
            f"{'Download and convert' if is_url(name) else 'Convert'} it: "
            f"python -m labkit convert {shlex.quote(local_name)} {shlex.quote(local_name + '.tar')}"
        )
    file.seek(0)
    try:
        return tarfile.TarFile(fileobj=file, encoding="utf-8", errors="surrogateescape", tarinfo=BoundedInfo)
    except UNREADABLE as error:
        raise not_a_tar_error(name, error) from error


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
