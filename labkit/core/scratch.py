"""Temporary folders that are removed even if their process is killed."""

import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

from labkit.core.locks import acquire_lock, has_file_locks
from labkit.core.machine import labkit_home

_PREFIX = "labkit-scratch-"
_PATTERN = _PREFIX + 8 * "[a-z0-9_]"  # the names that mkdtemp makes


class ScratchFolder:
    """A temporary folder, removed by `cleanup()`, the end of `with`, or of the process.

    A process that is killed, as a notebook's kernel may be, cannot remove its folder: the next `ScratchFolder` in the
    same place does. A folder in use is locked; without file locks, only a process's own folders are removed.

    Args:
        folder: Where to make it; missing folders are made. Default: beside the photos, and so on the same disk.

    Attributes:
        path: The folder.

    Raises:
        OSError: the folder cannot be made there.

    Taught in: notebooks/08_shard_formats.ipynb
    """

    def __init__(self, folder: Path | str | None = None):
        parent = Path(folder or labkit_home() / "photos")
        parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(parent)
        self.path, lock = _make_locked(parent)
        self._finalizer = weakref.finalize(self, _remove_owned, self.path, lock, os.getpid())

    def cleanup(self) -> None:
        """Remove the folder; a second call does nothing."""
        self._finalizer()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exc_info: object) -> None:
        self.cleanup()

    def __repr__(self) -> str:
        return f"ScratchFolder({str(self.path)!r})"


def _make_locked(parent: Path) -> tuple[Path, int | None]:
    """A new folder, and the descriptor that holds its lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent.absolute()))
        if not has_file_locks():
            return path, None
        with suppress(FileNotFoundError):  # another process removed it before it was locked
            lock = _open_folder(path)
            with suppress(OSError):
                acquire_lock(lock)
            if path.exists():
                return path, lock
            os.close(lock)


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(_PATTERN) if has_file_locks() else ():
        with suppress(OSError):  # in use, not a folder, or owned by another user
            lock = _open_folder(path)
            try:
                acquire_lock(lock, wait=False)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _open_folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)


def _remove_owned(path: Path, lock: int | None, owner: int) -> None:
    if os.getpid() != owner:  # the end of a fork; the owner still needs it
        return
    shutil.rmtree(path, ignore_errors=True)
    if lock is not None:
        os.close(lock)
