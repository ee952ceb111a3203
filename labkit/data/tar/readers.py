"""Three ways to read a member of a tar: by an index, by `tarfile` opened once, by `tarfile` opened for each read."""

import os
import tarfile
import threading
import weakref
from collections import deque
from contextlib import closing, suppress
from functools import partial
from typing import IO

from labkit.core import MAX_FILE_VARIABLE, Lazy, PackedStrings, PerProcess, max_file_bytes
from labkit.data.blobs import Blob
from labkit.data.tar.headers import BoundedInfo
from labkit.data.tar.members import UNREADABLE, TarError, plain_name, scan, size_fault


class _Indexed:
    """Look up, then one `pread` (or one range request)."""

    def __init__(self, blob: Blob, index: Lazy):
        self._blob, self._index = blob, index

    def names(self) -> PackedStrings:
        return self._index().names

    def read(self, key: str) -> bytes:
        index = self._index()
        try:
            row = index.row(plain_name(key))
        except KeyError:
            raise _unknown(key, self._blob) from None
        offset, size = index.offsets[row].item(), index.sizes[row].item()
        if offset < 0:
            raise _dangling(key, self._blob)
        if row in index.sparse:
            _check_holes(key, size, self._blob)
            return self._with_holes(key, offset, size, index.sparse[row])
        return self._whole(key, offset, size)

    def _whole(self, key: str, offset: int, size: int) -> bytes:
        data = self._blob.read_at(offset, size)
        if len(data) != size:
            raise _cut_since(key, self._blob)
        return data

    def _with_holes(self, key: str, offset: int, size: int, pieces: list[list[int]]) -> bytes:
        _check_holes(key, size, self._blob)
        data = bytearray(size)
        for start, length in pieces:
            data[start : start + length] = self._whole(key, offset, length)
            offset += length
        return bytes(data)


class _OneTarFile:
    """One `tarfile.TarFile` a process, opened on the first read: Marigold's way."""

    def __init__(self, blob: Blob, index: Lazy):
        self._open = PerProcess(partial(_open_tar, blob))

    def names(self) -> list[str]:
        return self._open().names()

    def read(self, key: str) -> bytes:
        return self._open().read(key)


class _TarFileEachTime:
    """A `tarfile.TarFile` for every read."""

    def __init__(self, blob: Blob, index: Lazy):
        self._blob = blob

    def names(self) -> list[str]:
        with closing(_open_tar(self._blob)) as tar:
            return tar.names()

    def read(self, key: str) -> bytes:
        with closing(_open_tar(self._blob)) as tar:
            return tar.read(key)


MODES = {"index": _Indexed, "tarfile": _OneTarFile, "reopen": _TarFileEachTime}


class _Tar:
    """`tarfile`, asked by plain names."""

    def __init__(self, tar: tarfile.TarFile, blob: Blob):
        self._tar, self._blob, self._lock = tar, blob, threading.Lock()
        spellings = {member.name.removesuffix(plain_name(member.name)) for member in tar if not member.isdir()}
        self._prefix = spellings.pop() if len(spellings) == 1 else None
        self.close = weakref.finalize(self, tar.close)

    def names(self) -> list[str]:
        members = {plain_name(member.name): member for member in self._tar.getmembers()}
        return sorted(name for name, member in members.items() if not (member.isdir() or member.isdev()))

    def read(self, key: str) -> bytes:
        with self._lock:  # two threads would move each other's file position
            file = self._file(key, self._find(key))
            if (size := file.seek(0, os.SEEK_END)) > self._blob.fingerprint()[0]:
                _check_holes(key, size, self._blob)
            file.seek(0)
            try:
                return file.read()
            except tarfile.TarError as error:
                raise _cut_since(key, self._blob) from error

    def _find(self, key: str) -> tarfile.TarInfo:
        """One search by name, as Marigold asks; by plain names where the tar spells them in more than one way."""
        name = plain_name(key)
        try:
            if self._prefix is not None and not name.endswith("/"):  # which `getmember` would leave out
                return self._tar.getmember(self._prefix + name)
            return next(info for info in reversed(self._tar.getmembers()) if plain_name(info.name) == name)
        except (KeyError, StopIteration):
            raise _unknown(key, self._blob) from None

    def _file(self, key: str, member: tarfile.TarInfo) -> IO[bytes]:
        try:
            if member.issparse():
                _check_holes(key, member.size, self._blob)
            file = self._tar.extractfile(member)
        except (KeyError, RecursionError):
            file = None
        if file is not None:
            return file
        raise _dangling(key, self._blob) if member.islnk() or member.issym() else _unknown(key, self._blob)


def _open_tar(blob: Blob) -> _Tar:
    """A tar whose headers are all read. `tarfile` ends at a damaged one without a word: here it is an error."""
    with suppress(*UNREADABLE, OSError):  # OSError: of a seek to where no file reaches
        tar = tarfile.TarFile(blob.name, tarinfo=BoundedInfo, encoding="utf-8")
        with suppress(*UNREADABLE, OSError):
            tar.getmembers()
            tar.fileobj.seek(tar.offset)
            sparse = (member for member in tar.getmembers() if member.issparse())
            sound = not any(size_fault(member.size, member.sparse) for member in sparse)
            if sound and not tar.fileobj.read(tarfile.BLOCKSIZE).strip(b"\0"):
                return _Tar(tar, blob)
        tar.close()
    deque(scan(blob), maxlen=0)  # says what is wrong, and which member is the last whole one
    raise TarError(f"{blob.name} is cut within the padding of its last member: copy or download it again")


def _check_holes(key: str, size: int, blob: Blob) -> None:
    """Zeros that a few bytes state take memory all the same."""
    if size > max_file_bytes():
        raise TarError(
            f"{blob.name}: {key!r} has {size} bytes with its holes; more than {max_file_bytes()} are not unfolded "
            f"({MAX_FILE_VARIABLE}): unpack it by `tar -xf`"
        )


def _unknown(key: str, blob: Blob) -> KeyError:
    return KeyError(f"{key!r} is not a file in {blob.name}")


def _dangling(key: str, blob: Blob) -> KeyError:
    return KeyError(f"{key!r} is a link to a file that is not in {blob.name}")


def _cut_since(key: str, blob: Blob) -> TarError:
    return TarError(f"{blob.name} was cut after its headers were read: {key!r} lacks its end")
