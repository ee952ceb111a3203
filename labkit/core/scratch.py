"""Temporary folders that a killed process does not leave behind for good."""

import os
import re
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

from labkit.core.machine import labkit_home

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_PREFIX = "labkit-scratch-"
_NAME = re.compile(_PREFIX + r"[a-z0-9_]{8}")  # as mkdtemp names them


class ScratchFolder:
    """A temporary folder, removed by `cleanup()`, the end of `with`, or of the process.

    A process that is killed, as a notebook's kernel may be, cannot remove it: the next `ScratchFolder` in the same
    place does. Who uses one holds a lock on it; where the filesystem has no locks, nothing of others is removed.

    Args:
        folder: Where to make it; missing folders are made. Default: beside the photos, so on their disk.

    Attributes:
        path: The folder.

    Raises:
        OSError: it cannot be made there.

    Taught in: notebooks/08_shard_formats.ipynb
    """

    def __init__(self, folder: Path | str | None = None):
        parent = Path(folder or labkit_home() / "photos")
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent)
        self.path, lock = _made(parent)
        self._finalizer = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def cleanup(self) -> None:
        """Remove the folder; a second call does nothing."""
        self._finalizer()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exc_info) -> None:
        self.cleanup()

    def __repr__(self) -> str:
        return f"ScratchFolder({str(self.path)!r})"


def _made(parent: Path) -> tuple[Path, int | None]:
    """A new folder, and the descriptor that holds its lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent.absolute()))
        if fcntl is None:
            return path, None
        with suppress(FileNotFoundError):  # another process sweeps it, before it is locked
            lock = _open(path)
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
            os.close(lock)


def _sweep(parent: Path) -> None:
    if fcntl is None:
        return
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                _remove_unused(Path(entry.path))


def _remove_unused(path: Path) -> None:
    with suppress(OSError):  # in use; or no folder; or somebody else's
        lock = _open(path)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)


def _remove(path: Path, lock: int | None, owner: int) -> None:
    if os.getpid() != owner:  # a fork that ends; its owner goes on
        return
    shutil.rmtree(path, ignore_errors=True)
    if lock is not None:
        os.close(lock)
