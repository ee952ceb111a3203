"""Write files whole: a reader never sees half of one."""

import errno
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path

from labkit.core.locks import acquire_lock, has_file_locks, open_locked

_PARTIAL_NAME = re.compile(r"\.\d+-[0-9a-f]{8}\.partial")
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # errors of a write, which do not name the file


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` under a temporary name, then rename: `path` is whole or unchanged. Makes missing folders."""
    with atomic_path(path) as partial:
        partial.write_bytes(data)


def write_all_atomic(contents: Mapping[Path, bytes]) -> None:
    """Write several files under temporary names, and rename them only when all have been written."""
    with ExitStack() as stack:
        for path, data in contents.items():
            stack.enter_context(atomic_path(path)).write_bytes(data)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, renamed to it at the end and removed on an error. Makes missing folders.

    The first time that a process writes to a folder, it removes the partial files that killed processes left there.
    If the disk is full, the OSError names `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers_once(path.parent.absolute())
    # Without `path.name`, which may have the longest length allowed; random, as containers on one disk share pids.
    partial = path.with_name(f".{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        with _create_locked(partial):
            yield partial
            partial.replace(path)
    except OSError as error:
        if error.errno in _NO_SPACE or error.filename == os.fspath(partial):
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise
    finally:
        partial.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove the partial files of killed processes. A writer that lives, on any machine, holds a lock on its own."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _PARTIAL_NAME.fullmatch(entry.name):
                with suppress(OSError), open(entry.path, "ab") as file:
                    acquire_lock(file, wait=False)
                    os.unlink(entry.path)


_remove_leftovers_once = cache(remove_leftovers)


def _create_locked(partial: Path) -> AbstractContextManager:
    """Create the file, never through a link or over another, and lock it while it is written."""
    if has_file_locks():
        return open_locked(partial, "xb")
    partial.open("x").close()  # Windows renames no open file
    return nullcontext()
