"""Writing files so that a reader never meets half of one."""

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_PARTIAL = re.compile(r"\.\d+-[0-9a-f]{8}\.partial")
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # of a write, which does not know the file's name


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` under a temporary name, then rename: `path` is never half there. Makes missing folders."""
    with atomic_path(path) as partial:
        partial.write_bytes(data)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, renamed to it at the end, removed on an error. Makes missing folders.

    The first time that a process writes to a folder, it removes what killed ones were writing there. Where there is no
    room, the OSError names `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _swept(path.parent.absolute())
    # Not from `path.name`, which may be as long as names get; random, since containers that share a disk share pids.
    partial = path.with_name(f".{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        with _claimed(partial):
            yield partial
            partial.replace(path)
    except OSError as error:
        if error.errno in _NO_ROOM or error.filename == os.fspath(partial):
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise
    finally:
        partial.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes were writing in a folder. Who still writes, on any machine, holds a lock on it."""
    if fcntl is None:
        return
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _PARTIAL.fullmatch(entry.name):
                with suppress(OSError), open(entry.path, "ab") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(entry.path)


_swept = cache(remove_leftovers)


@contextmanager
def _claimed(partial: Path) -> Iterator[None]:
    """Hold a lock on the file that is to be written, as long as this process lives; the rename keeps it."""
    if fcntl is None:
        partial.open("x").close()
        yield
        return
    with _locked_file(partial):
        yield


def _locked_file(partial: Path) -> IO[bytes]:
    while True:
        file = open(partial, "xb")  # noqa: SIM115 - x: never through a link, or into a file of somebody else's
        with suppress(OSError):  # a filesystem without locks: there nobody removes anything
            fcntl.flock(file, fcntl.LOCK_EX)  # who holds it is removing it, and is waited for
        with suppress(FileNotFoundError):  # removed, before it was locked
            if os.path.samestat(os.fstat(file.fileno()), os.stat(partial)):
                return file
        file.close()
