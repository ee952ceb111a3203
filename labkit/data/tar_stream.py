"""Tars read from front to back, compressed or not, strict where `tarfile` takes damage for the end of the archive.

`convert_tar` unpacks a compressed one, so that its members can be read in any order.
"""

import io
import os
import tarfile
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

from labkit.data.tar_members import (
    BLOCK_BYTES,
    BoundedInfo,
    TarError,
    TarWarning,
    check_end,
    damage_error,
    is_source_fault,
    not_a_tar_error,
    open_unpacked,
)
from labkit.util.files import atomic_path, file_lock, sibling_path
from labkit.util.process import progress_bar

_MAX_EMPTY_READS = 16  # in a row at the end; of a sound tar, tarfile tries twice


class TarStream:
    """The members of a tar in their order, and the data of the one just given.

    Args:
        source: The archive's path; or a buffered file, which is read without seeking and stays open.
        name: What errors call it, if not `source`.
        needs_end_mark: Whether an archive without an end mark is an error. It may be cut between two members.

    Raises, while opened or read:
        TarError: the archive is cut or damaged, or goes on after its end mark; names it and its last whole member.
        OSError: the disk or the network fails; a note names the archive.

    Warns:
        TarWarning: there is no end mark, and none is needed; or it is followed by more zeros than fill a record.
    """

    def __init__(self, source: str | os.PathLike | io.BufferedReader, name: str = "", *, needs_end_mark: bool = False):
        self._needs_end_mark = needs_end_mark
        self._last_whole: str | None = ""
        self._current = ""
        self.name = name or str(source)
        with ExitStack() as stack:
            if isinstance(source, io.BufferedReader):
                self._tar = self._open(source, is_seekable=False)
            else:
                self._tar = self._open(stack.enter_context(open(source, "rb")), is_seekable=True)
            stack.callback(self._tar.close)
            self._resources = stack.pop_all()

    def __enter__(self) -> "TarStream":
        return self

    def __exit__(self, *exception: object) -> None:
        self._resources.close()

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        while (info := self._raise_on_damage(self._tar.next)) is not None:
            self._tar.members.clear()  # tarfile would keep them all
            self._last_whole, self._current = self._current, info.name
            yield info
        self._check_end()

    def blocks(self, info: tarfile.TarInfo) -> Iterator[bytes]:
        """Data of the file that was given last."""
        file: Any = self._tar.extractfile(info)  # of a file it is not None
        while block := self._raise_on_damage(file.read, BLOCK_BYTES):
            yield block
        self._last_whole = info.name

    def _check_end(self) -> None:
        """Read on to the end of the source, so that what its compression checks there is checked, too."""
        if self._needs_end_mark and not self._tar.has_end_mark:
            raise damage_error(self.name, "it has no end mark", self._current)
        file = self._tar.fileobj
        self._last_whole = None  # a checksum at the end is that of all members
        read = partial(self._raise_on_damage, file.read)
        if doubt := check_end(read, self.name, self._current, self._tar.offset, file.tell()):
            warnings.warn(TarWarning(doubt), stacklevel=3)

    def _open(self, file: io.BufferedReader, is_seekable: bool) -> "_MarkedTar":
        unpacked = open_unpacked(file, self.name)
        try:
            if is_seekable and unpacked is None:
                return _MarkedTar(fileobj=file, tarinfo=_StrictInfo, encoding="utf-8")
            # "|": no seeking, not even back by the one byte for which tarfile would unpack all from the start.
            # read1: what was unpacked before a fault is not lost with it.
            source: Any = _EndGuard(unpacked.read1 if unpacked else file.read)
            return _MarkedTar.open(fileobj=source, mode="r|", tarinfo=_StrictInfo, encoding="utf-8")
        except Exception as error:  # each compression has its own class of error
            if is_source_fault(error):
                error.add_note(f"while opening {self.name}")
                raise
            raise not_a_tar_error(self.name, error) from error

    def _raise_on_damage(self, read: Callable[..., Any], *arguments: int) -> Any:
        """What `read` returns; a TarError for what `tarfile` and the decompressors raise."""
        try:
            return read(*arguments)
        except MemoryError:
            raise
        except _HeaderFault as fault:  # the member before this header is whole
            raise damage_error(self.name, fault, self._current) from fault
        except Exception as error:
            if is_source_fault(error):
                error.add_note(f"while reading {self.name}, after {self._last_whole!r}")
                raise
            raise damage_error(self.name, error, self._last_whole) from error


class _EndGuard:
    """A stream for `tarfile`, which skips a member by reads of 10 kB and goes on long after the end: EOFError then."""

    def __init__(self, read: Callable[[int], bytes]):
        self._read, self._n_empty = read, 0

    def read(self, size: int) -> bytes:
        data = self._read(size)
        self._n_empty = 0 if data else self._n_empty + 1
        if self._n_empty > _MAX_EMPTY_READS:
            raise EOFError("unexpected end of data")
        return data


class _MarkedTar(tarfile.TarFile):
    """A tar that knows whether its end mark was read."""

    members: list[tarfile.TarInfo]
    has_end_mark = False


class _HeaderFault(Exception):
    pass


class _StrictInfo(BoundedInfo):
    """A member whose header is read strictly: `tarfile` takes one that it cannot read for the end of the archive."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # missing in typeshed
            if isinstance(tar, _MarkedTar):
                tar.has_end_mark = True
            raise
        except tarfile.EmptyHeaderError:  # type: ignore[attr-defined]  # missing in typeshed
            raise
        except Exception as error:
            if is_source_fault(error):
                raise
            raise _HeaderFault(f"the header at byte {tar.offset}: {error}") from error


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
    with open(source, "rb") as file:
        stream = open_unpacked(file, str(source))
        if stream is None:
            raise TarError(f"{source} is not compressed: use it as it is")
        with file_lock(sibling_path(target, ".lock", hidden=True)):
            if target.exists():
                raise FileExistsError(f"{target} exists: remove it, or choose another name")
            bar = progress_bar(show=progress, total=source.stat().st_size, unit="B", unit_scale=True, desc="convert")
            with atomic_path(target) as partial, bar:
                with open(partial, "wb") as plain:
                    while block := _read_block(stream, source):
                        plain.write(block)
                        bar.update(file.tell() - bar.n)
                with TarStream(partial, str(source)) as tar:
                    deque(tar, maxlen=0)  # raises an error if it is cut or damaged
    return target


def _read_block(stream: io.BufferedIOBase, source: Path) -> bytes:
    try:
        return stream.read(BLOCK_BYTES)
    except Exception as error:  # each compression has its own class of error
        raise damage_error(str(source), error) from error
