"""One pass over a tar's headers: which members there are and where their data lie. Damage is said, never skipped."""

import posixpath
import re
import shlex
import tarfile
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO, NamedTuple

from labkit.data.blobs import Blob, LocalBlob, is_url, open_buffered
from labkit.data.tar.headers import BoundedInfo

_BLOCK = tarfile.BLOCKSIZE
_SEARCHED_BYTES = 1 << 20  # after the end mark
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
# Mode, owner, group, time and device as common writers put them there; of all else `tarfile` says what it means.
_PLAIN_NUMBER = rb"(?:[0-7]{7}[ \0]|[0-7]{6}[ \0]{2}|\0{8})"
_PLAIN_TIME = rb"(?:[0-7]{11}[ \0]|[0-7]{10}[ \0]{2}|\0{12})"
_PLAIN_NUMBERS = re.compile(rb"%b{3}.{12}%b.{181}%b{2}" % (_PLAIN_NUMBER, _PLAIN_TIME, _PLAIN_NUMBER), re.DOTALL)
UNREADABLE = (tarfile.TarError, ValueError, IndexError, OverflowError, MemoryError, RecursionError)
"""What `tarfile` raises for damaged headers."""


class TarError(OSError):
    """A file that is no whole, uncompressed tar; names the file and the remedy."""


class TarWarning(UserWarning):
    """A tar that can be read, but may not be whole."""


class Member(NamedTuple):
    """One member: its name without a leading `./`; where its data begin; their size in bytes.

    `kind` is "file", "hard" or "sym" (a link, whose data are those of `target`), or "other" (a folder, a device).
    `sparse` lists the (offset, size) of the pieces that are stored, where the rest is zeros.
    """

    name: str
    offset: int
    size: int
    kind: str = "file"
    target: str = ""
    sparse: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        """Where the stored data end."""
        return self.offset + (sum(size for _, size in self.sparse) if self.sparse else self.size)


def scan(blob: Blob) -> Iterator[Member]:
    """All members, in the order of the tar.

    Headers of ordinary files are read here; all others by `tarfile`, so that GNU long names, pax records, sparse
    files and the rest mean what they mean there.
    """
    size, last = blob.fingerprint()[0], ""
    with blob.open() if isinstance(blob, LocalBlob) else open_buffered(blob) as file:
        tar = _open_tar(file, blob.name)
        offset = 0
        while True:
            file.seek(offset)
            header = file.read(_BLOCK)
            if len(header) < _BLOCK or not (header[0] or header.strip(b"\0")):
                _check_end(file, header, blob.name, last)
                return
            member = None if tar.pax_headers else _plain_member(header, offset)
            if member is not None:
                offset = member.offset + -(-member.size // _BLOCK) * _BLOCK
            else:
                member, offset = _other_member(file, tar, offset, blob.name, last)
            if fault := size_fault(member.size, member.sparse):
                raise _cut(blob.name, f"{member.name!r} {fault}", last)
            if member.end > size:
                raise _cut(blob.name, f"{member.name!r} lacks its end", last)
            last = member.name
            yield member


def _plain_member(header: bytes, offset: int) -> Member | None:
    """The member of an ordinary file's header, or None where `tarfile` has to look at it."""
    try:
        size, checksum = int(header[124:136].rstrip(b"\0 ") or b"0", 8), int(header[148:156].rstrip(b"\0 "), 8)
    except ValueError:
        return None
    # The checksum is the sum of all bytes, its own field taken as spaces. Adler-32's lower half is such a sum, in C.
    total = checksum - 256 + sum(header[148:156])
    whole = zlib.adler32(header) & 0xFFFF == (1 + total) % 65521
    if not whole or size < 0 or header[156] not in b"0\0" or not _PLAIN_NUMBERS.match(header, 100):
        return None
    name = header[:100].split(b"\0", 1)[0]
    if header[345]:
        name = header[345:500].split(b"\0", 1)[0] + b"/" + name
    if name.endswith(b"/"):  # a folder, in the oldest format
        return None
    return Member(plain_name(name.decode("utf-8", "surrogateescape")), offset + _BLOCK, size)


def _other_member(file: BinaryIO, tar: tarfile.TarFile, offset: int, name: str, last: str) -> tuple[Member, int]:
    file.seek(offset)
    try:
        info = BoundedInfo.fromtarfile(tar)
    except UNREADABLE as error:
        raise _cut(name, f"the header at byte {offset} cannot be read ({error})", last) from error
    member = Member(plain_name(info.name), info.offset_data, 0)
    if info.islnk():
        member = member._replace(kind="hard", target=posixpath.normpath(info.linkname))
    elif info.issym():  # as `tarfile` does: an absolute target, too, is looked for below the link's folder
        target = "/".join(filter(None, (posixpath.dirname(info.name), info.linkname)))
        member = member._replace(kind="sym", target=posixpath.normpath(target))
    elif info.issparse():
        member = member._replace(size=info.size, sparse=tuple(info.sparse) or ((0, 0),))
    elif info.isreg() or info.type not in tarfile.SUPPORTED_TYPES:  # tarfile, too, reads unknown types as files
        member = member._replace(size=info.size)
    else:
        member = member._replace(kind="other")
    return member, tar.offset


def size_fault(size: int, pieces: Iterable[Sequence[int]] = ()) -> str:
    """What is impossible in a member's size, or in its stored pieces: they go one behind the other, inside its size."""
    if not 0 <= size < 1 << 63:
        return f"says that it has {size} bytes"
    end = 0
    for start, length in pieces:
        if length and (start < end or length < 0 or start + length > size):  # GNU tar fills its list with zeros
            return f"has a piece of {length} bytes at {start}, where none can be"
        end = start + length
    return ""


def plain_name(name: str) -> str:
    """A member's name as a key: without the `./` that `tar -cf x.tar .` puts before it."""
    while name.startswith("./"):
        name = name[2:].lstrip("/")
    return name


def _open_tar(file: BinaryIO, name: str) -> tarfile.TarFile:
    head = file.read(_BLOCK)
    for magic, method in _COMPRESSED.items():
        if head.startswith(magic):
            own = posixpath.basename(name) if is_url(name) else name
            raise TarError(
                f"{name} is compressed ({method}): no member can be read without unpacking all before it. "
                f"{'Download and convert' if is_url(name) else 'Convert'} it: "
                f"python -m labkit convert {shlex.quote(own)} {shlex.quote(own + '.tar')}"
            )
    if not head:
        raise TarError(f"{name} is empty: copy or download it again")
    file.seek(0)
    try:
        return tarfile.TarFile(fileobj=file, encoding="utf-8", errors="surrogateescape", tarinfo=BoundedInfo)
    except UNREADABLE as error:
        raise TarError(f"{name} is not a tar ({error})") from error


def _check_end(file: BinaryIO, header: bytes, name: str, last: str) -> None:
    """Where the headers end: in a mark of zeros, and nothing behind it."""
    if header.strip(b"\0"):
        raise _cut(name, "it ends within a header", last)
    if len(header) < _BLOCK:
        warnings.warn(f"{name} has no end mark: it may be cut after {last!r}", TarWarning, stacklevel=2)
    elif file.read(_SEARCHED_BYTES).strip(b"\0"):
        warnings.warn(
            f"{name} goes on behind its end mark, after {last!r}: what follows is not read. It is damaged, or several "
            "tars were joined by `cat`: `tar --ignore-zeros -xf` unpacks all of them",
            TarWarning,
            stacklevel=2,
        )


def _cut(name: str, what: str, last: str) -> TarError:
    whole = f"the last whole member is {last!r}" if last else "no member is whole"
    return TarError(f"{name} is cut or damaged: {what}; {whole}. Copy or download it again")
