"""Tars read from front to back, compressed or not, strict where `tarfile` takes damage for the end of the archive."""

import io
import os
import tarfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from labkit.data.tar.compressions import BLOCK_BYTES, is_source_fault, open_unpacked
from labkit.data.tar.errors import damage_error, missing_end_mark, not_a_tar_error
from labkit.data.tar.headers import BoundedInfo

_MAX_EMPTY_READS = 16  # in a row at the end; of a sound tar, tarfile tries twice


class TarStream:
    """The members of a tar in their order, and the data of the one just given.

    Args:
        source: The archive's path; or a buffered file, which is read without seeking and stays open.
        name: What errors call it, if not `source`.
        needs_end_mark: Whether an archive without an end mark is an error. It may be cut between two members.

    Raises, while opened or read:
        TarError: the archive is cut or damaged; names it and its last whole member.
        OSError: the disk or the network fails; a note names the archive.

    Warns:
        TarWarning: there is no end mark, and none is needed.
    """

    def __init__(self, source: str | os.PathLike | io.BufferedReader, name: str = "", *, needs_end_mark: bool = False):
        self._needs_end_mark = needs_end_mark
        self._last_whole, self._current = "", ""
        with ExitStack() as stack:
            if isinstance(source, io.BufferedReader):
                self.name = name
                self._tar = self._open(source, is_seekable=False)
            else:
                self.name = name or os.fspath(source)
                self._tar = self._open(stack.enter_context(open(source, "rb")), is_seekable=True)
            stack.callback(self._tar.close)
            self._resources = stack.pop_all()

    def __enter__(self) -> "TarStream":
        return self

    def __exit__(self, *exception: object) -> None:
        self._resources.close()

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        while (info := self._read_header()) is not None:
            self._tar.members.clear()  # tarfile would keep them all
            self._last_whole, self._current = self._current, info.name
            yield info
        if getattr(self._tar, "has_end_mark", False):
            return
        if self._needs_end_mark:
            raise damage_error(self.name, "it has no end mark", self._current)
        warnings.warn(missing_end_mark(self.name, self._current), stacklevel=2)

    def blocks(self, info: tarfile.TarInfo) -> Iterator[bytes]:
        """Data of the file that was given last."""
        file = self._tar.extractfile(info)
        while block := self._read_block(file):
            yield block
        self._last_whole = info.name

    def _open(self, file: io.BufferedReader, is_seekable: bool) -> tarfile.TarFile:
        unpacked = open_unpacked(file, self.name)
        try:
            if is_seekable and unpacked is None:
                return tarfile.TarFile(fileobj=file, tarinfo=_StrictInfo, encoding="utf-8")
            # "|": no seeking, not even back by the one byte for which tarfile would unpack all from the start.
            # read1: what was unpacked before a fault is not lost with it.
            source = _EndGuard(unpacked.read1 if unpacked else file.read)
            return tarfile.open(fileobj=source, mode="r|", tarinfo=_StrictInfo, encoding="utf-8")
        except Exception as error:  # each compression has its own class of error
            if is_source_fault(error):
                error.add_note(f"while opening {self.name}")
                raise
            raise not_a_tar_error(self.name, error) from error

    def _read_header(self) -> tarfile.TarInfo | None:
        with self._explained():
            return self._tar.next()

    def _read_block(self, file: io.BufferedIOBase) -> bytes:
        with self._explained():
            return file.read(BLOCK_BYTES)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what `tarfile` and the decompressors raise into a TarError."""
        try:
            yield
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


class _HeaderFault(Exception):
    pass


class _StrictInfo(BoundedInfo):
    """A member whose header is read strictly: `tarfile` takes one that it cannot read for the end of the archive."""

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
            if is_source_fault(error):
                raise
            raise _HeaderFault(f"the header at byte {tar.offset}: {error}") from error
