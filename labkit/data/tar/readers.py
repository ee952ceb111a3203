"""Three ways to read a member of a tar: by an index, by a `tarfile` opened once, by a `tarfile` opened each time."""

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
from labkit.data.tar.errors import TarError
from labkit.data.tar.headers import BoundedInfo
from labkit.data.tar.members import UNREADABLE, plain_name, scan, size_fault


class _IndexReader:
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
            raise _unknown_key(key, self._blob) from None
        offset, size = index.offsets[row].item(), index.sizes[row].item()
        if offset < 0:
            raise _dangling_link(key, self._blob)
        if row not in index.sparse:
            return self._read_at(key, offset, size)
        _check_sparse_size(key, size, self._blob)
        data = bytearray(size)
        for start, length in index.sparse[row]:
            data[start : start + length] = self._read_at(key, offset, length)
            offset += length
        return bytes(data)

    def _read_at(self, key: str, offset: int, size: int) -> bytes:
        data = self._blob.read_at(offset, size)
        if len(data) != size:
            raise _truncated_error(key, self._blob)
        return data


class _TarFileReader:
    """One `tarfile.TarFile` per process, opened on the first read: Marigold's way."""

    def __init__(self, blob: Blob, index: Lazy):
        self._open = PerProcess(partial(_open_tar, blob))

    def names(self) -> list[str]:
        return self._open().names()

    def read(self, key: str) -> bytes:
        return self._open().read(key)


class _ReopeningReader:
    """A new `tarfile.TarFile` for every read."""

    def __init__(self, blob: Blob, index: Lazy):
        self._blob = blob

    def names(self) -> list[str]:
        with closing(_open_tar(self._blob)) as tar:
            return tar.names()

    def read(self, key: str) -> bytes:
        with closing(_open_tar(self._blob)) as tar:
            return tar.read(key)


MODES = {"index": _IndexReader, "tarfile": _TarFileReader, "reopen": _ReopeningReader}


class _PlainNameTar:
    """A `tarfile.TarFile` whose members are found by their plain names."""

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
            file = self._extract(key, self._find(key))
            if (size := file.seek(0, os.SEEK_END)) > self._blob.fingerprint()[0]:
                _check_sparse_size(key, size, self._blob)
            file.seek(0)
            try:
                return file.read()
            except tarfile.TarError as error:
                raise _truncated_error(key, self._blob) from error

    def _find(self, key: str) -> tarfile.TarInfo:
        """One search by name, as in Marigold; by plain names if the tar spells them in more than one way."""
        name = plain_name(key)
        try:
            if self._prefix is not None and not name.endswith("/"):  # `getmember` ignores a final slash
                return self._tar.getmember(self._prefix + name)
            return next(info for info in reversed(self._tar.getmembers()) if plain_name(info.name) == name)
        except (KeyError, StopIteration):
            raise _unknown_key(key, self._blob) from None

    def _extract(self, key: str, member: tarfile.TarInfo) -> IO[bytes]:
        try:
            if member.issparse():
                _check_sparse_size(key, member.size, self._blob)
            file = self._tar.extractfile(member)
        except (KeyError, RecursionError):
            file = None
        if file is not None:
            return file
        raise _dangling_link(key, self._blob) if member.islnk() or member.issym() else _unknown_key(key, self._blob)


def _open_tar(blob: Blob) -> _PlainNameTar:
    """A tar whose headers are all read. A damaged one, where `tarfile` ends silently, is an error here."""
    with suppress(*UNREADABLE, OSError):  # OSError: a seek beyond what files can hold
        tar = tarfile.TarFile(blob.name, tarinfo=BoundedInfo, encoding="utf-8")
        with suppress(*UNREADABLE, OSError):
            tar.getmembers()
            tar.fileobj.seek(tar.offset)
            sparse = (member for member in tar.getmembers() if member.issparse())
            is_sound = not any(size_fault(member.size, member.sparse) for member in sparse)
            if is_sound and not tar.fileobj.read(tarfile.BLOCKSIZE).strip(b"\0"):
                return _PlainNameTar(tar, blob)
        tar.close()
    deque(scan(blob), maxlen=0)  # raises an error that names the last whole member
    raise TarError(f"{blob.name} is cut within the padding of its last member: copy or download it again")


def _check_sparse_size(key: str, size: int, blob: Blob) -> None:
    """A few bytes in a tar may state that a file has many zeros, which would take as much memory."""
    if size > max_file_bytes():
        raise TarError(
            f"{blob.name}: {key!r} has {size} bytes with its holes; the limit is {max_file_bytes()} "
            f"({MAX_FILE_VARIABLE}): unpack it by `tar -xf`"
        )


def _unknown_key(key: str, blob: Blob) -> KeyError:
    return KeyError(f"{key!r} is not a file in {blob.name}")


def _dangling_link(key: str, blob: Blob) -> KeyError:
    return KeyError(f"{key!r} is a link to a file that is not in {blob.name}")


def _truncated_error(key: str, blob: Blob) -> TarError:
    return TarError(f"{blob.name} was cut after its headers were read: {key!r} lacks its end")
