"""A folder that is filled by names and never left, even if another process puts links in its way."""

import errno
import os
import shutil
from contextlib import AbstractContextManager, suppress
from pathlib import Path

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Tree(AbstractContextManager):
    """The folder at `root`, made if missing. A context manager.

    Names are `/`-separated, and checked before. Each step down starts from an open folder and follows no link: where a
    folder was exchanged for a link, there is an OSError, and nothing is written behind the link.
    """

    def __init__(self, root: Path):
        root.mkdir(exist_ok=True)
        self.root = root
        self._top = os.open(root, _OPEN_FOLDER)
        self._folder, self._descriptor = "", os.dup(self._top)

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)
        os.close(self._top)

    def has(self, path: str) -> bool:
        """Whether something lies there, a link to nothing included."""
        folder, name = self._enter_parent(path)
        return os.access(name, os.F_OK, dir_fd=folder, follow_symlinks=False)

    def put(self, file: Path, path: str) -> None:
        """Rename `file`, from beside the root, to its place."""
        folder, name = self._enter_parent(path)
        os.rename(file, name, dst_dir_fd=folder)

    def link_to(self, path: str, file: Path) -> None:
        """Make `file` another name of what lies at `path`; a copy, where the filesystem has no hard links."""
        folder, name = self._enter_parent(path)
        try:
            os.link(name, file, src_dir_fd=folder, follow_symlinks=False)
        except OSError:
            shutil.copy2(self.root / path, file, follow_symlinks=False)

    def set_time(self, path: str, time_ns: int) -> None:
        folder, name = self._enter_parent(path)
        os.utime(name, ns=(time_ns, time_ns), dir_fd=folder, follow_symlinks=False)

    def _enter_parent(self, path: str) -> tuple[int, str]:
        """The folder that `path` lies in, open until the next call, and the last part of `path`."""
        folder, _, name = path.rpartition("/")
        return self.enter(folder), name or "."

    def enter(self, folder: str) -> int:
        """Make the folder if it is missing, and open it until the next call."""
        if folder != self._folder:
            descriptor = os.dup(self._top)
            for part in filter(None, folder.split("/")):
                descriptor = _open_subfolder(descriptor, part, self.root / folder)
            os.close(self._descriptor)
            self._folder, self._descriptor = folder, descriptor
        return self._descriptor


def _open_subfolder(parent: int, name: str, path: Path) -> int:
    """Open the folder `name`, made if missing, and close its parent."""
    try:
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=parent)
        return os.open(name, _OPEN_FOLDER, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            text = f"{path}: {name!r} is a link or a file where a folder was: another process writes here"
            raise OSError(text) from error
        raise
    finally:
        os.close(parent)
