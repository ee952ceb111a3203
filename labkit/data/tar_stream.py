"""Tars read from front to back, compressed or not, strict where `tarfile` takes damage for the end of the archive.

`convert_tar` unpacks a compressed one, so that its members can be read in any order.
"""

import io
import os
import tarfile
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from labkit.data.tar_members import (
    BLOCK_BYTES,
    TarWarning,
    check_end,
    damage_error,
    open_tar,
    open_unpacked,
    read_header,
    reading,
)
from labkit.errors import TarError
from labkit.util.files import atomic_path, file_lock, sibling_path
from labkit.util.process import progress_bar


class TarStream:
    """The members of a tar in their order, and the data of the one just given. It can be iterated over once.

    Args:
        source: The archive's path; or a buffered file, which is read without seeking and stays open.
        name: What errors call it, if not `source`.
        needs_end_mark: Whether an archive without an end mark is an error. It may be cut between two members.

    Raises, while opened or read:
        TarError: the archive is cut or damaged, or goes on after its end mark; names it and its last whole member.
        OSError, MemoryError: the disk, the network or memory fails; names the archive.

    Warns:
        TarWarning: there is no end mark, and none is needed; or it is followed by more zeros than fill a record.
    """

    def __init__(self, source: str | os.PathLike | io.BufferedReader, name: str = "", *, needs_end_mark: bool = False):
        self.name = name or str(source)
        self._needs_end_mark = needs_end_mark
        self._last_whole: str | None = ""
        with ExitStack() as stack, self._reading():
            is_path = not isinstance(source, io.BufferedReader)
            file: Any = stack.enter_context(open(source, "rb")) if is_path else source  # type: ignore[arg-type]
            unpacked = open_unpacked(file, self.name)
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
                    file.seek(end - 1)  # a file takes a seek beyond its end
                    if not file.read(1):
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
        return reading(self.name, lambda error: damage_error(self.name, error, self._last_whole))


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
    """Unpack a compressed tar (gzip, bzip2, xz; zstd from Python 3.14 on) to a plain one, with the same members.

    The plain tar is the very stream that was compressed. It is written whole or not at all; a rerun after a kill
    begins anew. Memory does not grow with what is unpacked; the disk must have room for it.

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

    Taught in: notebooks/09_marigold_storage.ipynb
    """
    source, target = Path(source), Path(target)
    name = str(source)

    def damage(error: Exception) -> TarError:
        return damage_error(name, error)

    with open(source, "rb") as file:
        with reading(name, damage):
            stream = open_unpacked(file, name)
        if stream is None:
            raise TarError(f"{name} is not compressed: use it as it is")
        with file_lock(sibling_path(target, ".lock", hidden=True)):
            if target.exists():
                raise FileExistsError(f"{target} exists: remove it, or choose another name")
            bar = progress_bar(show=progress, total=source.stat().st_size, unit="B", unit_scale=True, desc="convert")
            with atomic_path(target) as partial, bar:
                with open(partial, "wb") as plain:
                    while True:
                        with reading(name, damage):
                            block = stream.read(BLOCK_BYTES)
                        if not block:
                            break
                        plain.write(block)
                        bar.update(file.tell() - bar.n)
                with TarStream(partial, name) as tar:
                    deque(tar, maxlen=0)  # raises an error if it is cut or damaged
    return target
