"""Tars read from front to back, plain or compressed, and what every reader of tars shares: errors and the end check.

Damage is an error, never skipped: `tarfile` takes a header that it cannot read for the end of the archive.
`convert_tar` unpacks a compressed tar, so that its members can be read in any order.
"""

import bz2
import errno
import gzip
import io
import lzma
import os
import re
import shlex
import tarfile
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from labkit.errors import TarError
from labkit.util.arguments import require_file, require_local_path
from labkit.util.files import atomic_path, file_lock, require_room, sibling_path
from labkit.util.process import progress_bar

BLOCK_BYTES = 1 << 20
MAX_HEADER_BYTES = 1 << 20
"""Long name of a member, or its attributes: what libarchive reads."""
TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
"""Endings of the names of tars that labkit reads, plain and compressed."""

_COMPRESSIONS = {
    b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"\x04\x22\x4d\x18": "lz4",
    b"LZIP": "lzip", b"\x1f\x9d": "compress", b"PK\x03\x04": "zip", b"7z\xbc\xaf\x27\x1c": "7-zip", b"Rar!": "rar",
}  # fmt: skip
# Of programs whose files labkit does not unpack itself: `{}` is the file, and `{}.tar` the tar that is made of it.
_COMMANDS = {
    "zstd": "zstd -d {} -o {}.tar", "lz4": "lz4 -d {} {}.tar", "lzip": "lzip -d -o {}.tar {}",
    "compress": "uncompress -c < {} > {}.tar", "zip": "unzip {} -d {}.folder", "7-zip": "7z x {} -o{}.folder",
    "rar": "unrar x {} {}.folder/",
}  # fmt: skip
_UNPACKERS: dict[str, Callable[[Any], Any]] = {
    "gzip": lambda file: gzip.GzipFile(fileobj=file),
    "bzip2": bz2.BZ2File,
    "xz": lzma.LZMAFile,
}
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
def reading(name: str, find_last_whole: Callable[[], str | None] = lambda: None) -> Iterator[None]:
    """Tell what fails while the tar `name` is read: damage becomes a TarError that names the last whole member.

    An error of the disk, the network or memory is no damage: it stays what it is, and names the tar. Anything else
    that `tarfile` and the decompressors raise is damage; each compression has its own class of error.
    """
    try:
        yield
    except MemoryError:
        raise
    except OSError as error:
        if isinstance(error, gzip.BadGzipFile) or (type(error) is OSError and error.errno is None):  # the latter: bz2
            raise damage_error(name, error, find_last_whole()) from error
        if error.errno is not None and error.filename is None:
            error.filename = name
        elif name not in str(error):
            error.add_note(f"while reading {name}")
        raise
    except Exception as error:
        raise damage_error(name, error, find_last_whole()) from error


def plain_name(name: str) -> str:
    """A member's name as a key: without the `./` in front that `tar -cf x.tar .` writes."""
    return _DOTS.sub("", name, count=1) if name.startswith("./") else name


def find_compression(head: bytes) -> str:
    """The program that compressed or archived a file that begins with `head`; "" if it is not compressed."""
    return next((program for magic, program in _COMPRESSIONS.items() if head.startswith(magic)), "")


def unpacking_command(program: str, name: str, place: str | None = None) -> str:
    """What to run where a file that `program` made is to become a plain tar, or a folder.

    Args:
        place: The file's path, if it is not `name`.
    """
    path = shlex.quote(name if place is None else place)
    if program in _UNPACKERS:
        return f"python -m labkit convert {path} {shlex.quote((name if place is None else place) + '.tar')}"
    return _COMMANDS[program].replace("{}.", path + ".").replace("{}", path)


def _open_unpacked(file: io.BufferedReader, name: str) -> Any:
    """The unpacked stream of an open file; None if it is not compressed. TarError if labkit cannot unpack it."""
    program = find_compression(file.peek(8))
    if program and program not in _UNPACKERS:
        raise TarError(f"{name} is compressed by {program}: unpack it by `{unpacking_command(program, name)}`")
    return _UNPACKERS[program](file) if program else None


_OF_THE_NEXT_MEMBER = {
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE,
}  # fmt: skip


class _Header(tarfile.TarInfo):
    """A member's header, which takes no memory for a long name or attributes of any size that it states."""

    def _proc_member(self, tar: tarfile.TarFile) -> Any:
        if self.type in _OF_THE_NEXT_MEMBER and self.size > MAX_HEADER_BYTES:
            raise tarfile.InvalidHeaderError(f"it states {self.size} bytes of name or attributes")  # type: ignore[attr-defined]
        member = super()._proc_member(tar)  # type: ignore[misc]  # not in typeshed
        if self.type in _OF_THE_NEXT_MEMBER and self._lacks_a_block(member, tar):
            raise tarfile.InvalidHeaderError(f"zeros stand in the long name or attributes of {member.name!r}")  # type: ignore[attr-defined]
        return member

    def _lacks_a_block(self, member: tarfile.TarInfo, tar: tarfile.TarFile) -> bool:
        """Whether zeros overwrite what this header says of the next `member`, which `tarfile` takes for its end."""
        if self.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
            return member.pax_headers == tar.pax_headers or "\0" * 2 in member.name + member.linkname
        if self.type == tarfile.XGLTYPE:
            return False
        text = member.name if self.type == tarfile.GNUTYPE_LONGNAME else member.linkname
        n_bytes = len(text.encode("utf-8", "surrogateescape"))
        # A hole in a file begins with a block. A folder's slash and the end of the text are no part of it.
        return n_bytes % tarfile.BLOCKSIZE == 0 and n_bytes + len("/\0") < self.size


def open_tar(file: Any, name: str) -> tarfile.TarFile:
    """A `tarfile.TarFile` that has read its first header, or TarError."""
    try:
        return tarfile.TarFile(fileobj=file, encoding="utf-8", tarinfo=_Header)
    except tarfile.TarError as error:
        raise TarError(
            f"{name} is not a tar, or is cut or damaged ({error}): no member is whole. Copy or download it again"
        ) from error


def read_header(tar: tarfile.TarFile, name: str, last: str) -> tarfile.TarInfo | None:
    """The member whose header begins here; None where there are zeros, or nothing.

    Raises:
        TarError: the header cannot be read; names `last`, the member before it, which is whole.
    """
    start: int = tar.fileobj.tell()
    try:
        info = _Header.fromtarfile(tar)
    except (tarfile.EOFHeaderError, tarfile.EmptyHeaderError):  # type: ignore[attr-defined]  # not in typeshed
        return None
    except (tarfile.TarError, ValueError) as error:
        raise damage_error(name, f"the header at byte {start} cannot be read: {error}", last) from error
    if info.size < 0 or tar.offset <= start:  # else the next header could be this one again, forever
        raise damage_error(name, f"{info.name!r} has a size below zero", last)
    return info


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
    if offset - end > 2 * tarfile.BLOCKSIZE + 2 * tarfile.RECORDSIZE:  # `tar --concatenate` adds a second record
        return (
            f"{name} ends with {offset - end} zeros, more than fill a record: members {after} may be missing, as in a "
            "download that left a hole. Compare its size and checksum with those of its source"
        )
    return ""


class TarStream:
    """The members of a tar in their order, and the data of the one just given. It can be iterated over once.

    Args:
        source: The archive's path; or a buffered file, which is read without seeking and stays open.
        name: What errors call it, if not `source`.
        needs_end_mark: Whether an archive without an end mark is an error: it may be cut between two members. A
            compressed one always needs it, since some decompressors take damage for the end of their file.

    Raises, while opened or read:
        TarError: the archive is cut or damaged, or goes on after its end mark; names it and its last whole member.
        OSError, MemoryError: the disk, the network or memory fails.

    Warns:
        TarWarning: there is no end mark, and none is needed; or it is followed by more zeros than fill a record.
    """

    def __init__(self, source: str | os.PathLike | io.BufferedReader, name: str = "", *, needs_end_mark: bool = False):
        self.name = name or str(source)
        self._last_whole: str | None = ""
        with ExitStack() as stack, self._reading():
            is_path = not isinstance(source, io.BufferedReader)
            file: Any = stack.enter_context(open(source, "rb")) if is_path else source  # type: ignore[arg-type]
            unpacked = _open_unpacked(file, self.name)
            self._needs_end_mark = needs_end_mark or unpacked is not None
            if unpacked is not None:  # read1: what was unpacked before a fault is not lost with it
                file = _ForwardFile(unpacked.read1)
            elif not is_path:
                file = _ForwardFile(file.read)
            self._tar = open_tar(file, self.name)
            self._resources = stack.pop_all()

    def __enter__(self) -> "TarStream":
        return self

    def __exit__(self, *exception: object) -> None:
        self._resources.close()

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        file: Any = self._tar.fileobj
        info, last = self._tar.firstmember, ""  # type: ignore[attr-defined]  # not in typeshed
        with self._reading():
            while info is not None:
                self._last_whole, last = last, info.name
                yield info
                if file.tell() != (end := self._tar.offset):
                    try:
                        file.seek(end - 1)  # a file takes a seek beyond its end, unless it is far beyond all disks
                        is_there = bool(file.read(1))
                    except OSError as error:
                        if error.errno != errno.EINVAL:
                            raise
                        is_there = False
                    if not is_there:
                        raise EOFError("unexpected end of data")
                info = read_header(self._tar, self.name, last)
            if self._needs_end_mark and file.tell() == self._tar.offset:
                raise damage_error(self.name, "it has no end mark", last)
            self._last_whole = None  # a checksum at the end of a compression is that of all members
            doubt = check_end(file, self.name, last, self._tar.offset)
        if doubt:
            warnings.warn(TarWarning(doubt), stacklevel=2)

    def blocks(self, info: tarfile.TarInfo) -> Iterator[bytes]:
        """Data of the file that was given last."""
        file: Any = self._tar.extractfile(info)  # of a file it is not None
        with self._reading():
            while block := file.read(BLOCK_BYTES):
                yield block
        self._last_whole = info.name

    def _reading(self) -> AbstractContextManager[None]:
        return reading(self.name, lambda: self._last_whole)


class _ForwardFile:
    """A stream as a file for `tarfile`, which is read and skipped over without going back."""

    def __init__(self, read: Callable[[int], bytes]):
        self._read, self._position = read, 0

    def read(self, size: int) -> bytes:
        data = self._read(size)
        while len(data) < size and (more := self._read(size - len(data))):
            data += more
        self._position += len(data)
        return data

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        while self._position < position and self.read(min(position - self._position, BLOCK_BYTES)):
            pass

    def seekable(self) -> bool:
        return False


def convert_tar(source: str | os.PathLike, target: str | os.PathLike, *, progress: bool = True) -> Path:
    """Unpack a compressed tar (gzip, bzip2, xz) to a plain one, with the same members.

    The plain tar is the very stream that was compressed. It is written whole or not at all. Memory does not grow with
    what is unpacked; the disk must have room for it.

    Args:
        source: The compressed tar.
        target: The plain tar to write; its folder is made if missing.
        progress: Show a live bar.

    Returns:
        `target` as a Path.

    Raises:
        FileNotFoundError: no such `source`.
        FileExistsError: `target` exists.
        TarError: `source` is not compressed, cut, damaged or not a tar; names the remedy.
        OSError: the disk has less room than `source` takes; says how much is needed and free.
    """
    source = require_file("source", source, "name the compressed tar")
    target = require_local_path("target", target)
    name = str(source)
    bar = progress_bar(show=progress, total=source.stat().st_size, unit="B", unit_scale=True, desc="convert")
    with open(source, "rb") as file, bar:
        with reading(name):
            stream = _open_unpacked(file, name)
        if stream is None:
            with TarStream(source) as tar:  # raises an error if it is none
                next(iter(tar), None)
            raise TarError(f"{name} is a tar that is not compressed: use it as it is")
        with file_lock(sibling_path(target, ".lock", hidden=True)):  # two at once: the second finds the target
            if target.exists():
                raise FileExistsError(f"{target} exists: choose another name, or move that file away")
            require_room(target.parent, source.stat().st_size)  # unpacked, it is no smaller
            with atomic_path(target) as partial:
                with open(partial, "wb") as plain:
                    while True:
                        with reading(name):
                            block = stream.read(BLOCK_BYTES)
                        if not block:
                            break
                        plain.write(block)
                        bar.update(file.tell() - bar.n)
                with TarStream(partial, name, needs_end_mark=True) as tar:
                    deque(tar, maxlen=0)  # raises an error if it is cut or damaged
    return target
