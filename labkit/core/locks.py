"""One process at a time, for as long as it lives; and the names of what a file in the making needs beside it."""

import contextlib
import multiprocessing
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_LONGEST = 255  # bytes of a name, on almost every filesystem


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Wait until no other process holds `path`, then hold it; the file goes with the lock.

    A killed process holds nothing: the kernel lets go. Where the filesystem has no locks, nothing is held. Makes
    missing folders.

    Raises:
        RuntimeError: a worker process is importing the script that started it, and the script does this at once: it
            would wait for the lock that the script itself holds.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            'processes are started while the script is imported: call this under `if __name__ == "__main__":`'
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with _held(path):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _held(path: Path) -> TextIO:
    while True:
        file = open(path, "a", opener=_unlinked)  # noqa: SIM115
        with contextlib.suppress(OSError, AttributeError):
            fcntl.flock(file, fcntl.LOCK_EX)
        # Who held it before may have removed it meanwhile: then another may hold a new file of this name.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        file.close()


def _unlinked(path: str, flags: int) -> int:
    """Names of locks can be guessed: a link that somebody put there would have a file made elsewhere."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def sibling_path(path: Path, ending: str, *, hidden: bool = False) -> Path:
    """`path` with an ending to its name; of a name too long for that a checksum stands in its place."""
    before = "." if hidden else ""
    name = f"{before}{path.name}{ending}"
    if len(os.fsencode(name)) > _LONGEST:
        name = f"{before}{zlib.crc32(os.fsencode(path.name)):08x}{ending}"
    return path.with_name(name)
