"""File locks: one process at a time, until the file is closed or the process ends.

A killed process holds nothing: the kernel releases its locks. Windows and some filesystems have no such locks.
"""

import errno
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # a module that may be missing has no other spelling


def has_file_locks() -> bool:
    """Whether this system can lock files."""
    return fcntl is not None


def acquire_lock(file: int | IO, *, wait: bool = True) -> None:
    """Lock an open file for this process, until the file is closed.

    Args:
        file: A file object or descriptor.
        wait: Wait while another process holds the lock.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is False.
        OSError: the system or the filesystem has no locks.
    """
    if not has_file_locks():
        raise OSError(errno.ENOLCK, "this system has no file locks")
    fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def open_locked(path: Path, mode: str) -> IO:
    """Open a file and lock it, unless the filesystem has no locks; repeated if it is removed before it is locked."""
    while True:
        file = open(path, mode, opener=_open_without_links)  # noqa: SIM115
        with suppress(OSError):
            acquire_lock(file)
        with suppress(FileNotFoundError):  # the previous holder may have removed it: then this is another file
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        file.close()


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Wait until no other process holds `path`, then hold it; the file is removed with the lock.

    Without file locks nothing is held. Makes missing folders.

    Raises:
        RuntimeError: a worker process is importing the script that started it, and that script takes the lock while
            it is imported: the worker would wait for its own parent.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            'processes are started while the script is imported: call this under `if __name__ == "__main__":`'
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        if has_file_locks():
            held.enter_context(open_locked(path, "a"))
            held.callback(path.unlink, missing_ok=True)
        yield


def _open_without_links(path: str, flags: int) -> int:
    """Refuse symbolic links: the name of a lock can be guessed, and a link there would create a file elsewhere."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
