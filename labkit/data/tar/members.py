"""Read a tar's headers in one pass: its members, and where their data lie. Damage is an error, never skipped."""

import posixpath
import re
import shlex
import tarfile
import zlib
from collections.abc import Generator, Iterable, Sequence
from typing import Any, BinaryIO, NamedTuple, Self

from labkit.core import MAX_TAR_HEADER_BYTES
from labkit.data.blobs import Blob, LocalBlob, is_url, open_buffered
from labkit.data.tar.compressions import find_compression
from labkit.data.tar.end import check_end
from labkit.data.tar.errors import TarError, damage_error, not_a_tar_error

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
